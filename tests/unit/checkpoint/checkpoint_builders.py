"""Real gloo processes with a small training state whose right value at every step is known."""

import functools
import multiprocessing
import os
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist

from trainium_contract.trainer.checkpoint import CheckpointConfig
from trainium_contract.trainer.parallelism import DataParallelMode
from trainium_contract.wire.checkpoint_manifest import Manifest, ManifestFile
from trainium_trainer.checkpoint.durable.save_policy import Save, decode_votes
from trainium_trainer.checkpoint.format.writer import write_shard, write_tables
from trainium_trainer.checkpoint.interfaces import MeshCoordinates, Position
from trainium_trainer.checkpoint.manager import CheckpointManager
from trainium_trainer.checkpoint.root.owner import NOBODY, JobIdentity, RunStart
from trainium_trainer.checkpoint.root.survey import CommittedCheckpoint
from trainium_trainer.checkpoint.sharding import CheckpointLayout, WriteItem
from trainium_trainer.storage.posix import PosixStorage
from trainium_trainer.storage.protocol import Retry

ALPHA = JobIdentity("cluster-1", "team-a", "alpha", "uid-alpha")
BETA = JobIdentity("cluster-1", "team-b", "beta", "uid-beta")

SHAPES = {
    "model.wide": ((12, 10), 0),
    "model.tall": ((10, 12), 1),
    "model.norm": ((10,), None),
    "optimizer.wide": ((12, 10), 0),
    "optimizer.tall": ((10, 12), 1),
    "optimizer.norm": ((10,), None),
}


def committed(step: int, files: Iterable[ManifestFile] = (), folder: str = "", **fields: Any) -> CommittedCheckpoint:
    """Return a checkpoint with this manifest."""
    usual = {"generation": 1, "data_parallel": 1, "tensor_parallel": 1, "config_digest": "c", "created": 0.0}
    numbers = {"step": step, "samples": 8 * step, "tokens": 100 * step, "world_size": 1}
    manifest = Manifest(**usual | numbers | fields, files=tuple(files))
    return CommittedCheckpoint(step, folder or f"step-{step}/g1-a", manifest)


def write_checkpoint(
    root: Path, layout: CheckpointLayout, values: Callable[[int, WriteItem], torch.Tensor]
) -> CommittedCheckpoint:
    """Write a checkpoint with the files of all ranks; `values` returns the values that a rank writes of a tensor."""
    storage, folder, retry = PosixStorage(root), "step-1/a", Retry(())
    files = {}
    for rank in range(layout.grid.size):
        file = write_shard(storage, folder, rank, layout.plan_items(rank), functools.partial(values, rank), retry)
        if file is not None:
            files[rank] = file
    entries = write_tables(storage, folder, layout, files, retry)
    return committed(1, entries, folder, world_size=layout.grid.size, data_parallel=layout.grid.size)


def mesh_coordinates(
    rank: int, world_size: int, tp_size: int = 1, dp_mode: DataParallelMode = DataParallelMode.REPLICATED
) -> MeshCoordinates:
    dp_rank, tp_rank = divmod(rank, tp_size)
    return MeshCoordinates(
        rank=rank,
        world_size=world_size,
        dp_rank=dp_rank,
        dp_size=world_size // tp_size,
        tp_rank=tp_rank,
        tp_size=tp_size,
        dp_mode=dp_mode,
    )


SOLO = mesh_coordinates(0, 1)


def position(step: int) -> Position:
    return Position(step=step, samples=8 * step, tokens=1000 * step)


class State:
    """Tensors whose values are a function of the step, divided as the place requires."""

    def __init__(self, place: MeshCoordinates, scale: int = 1) -> None:
        self.place = place
        self.scale = scale
        self.mesh = None
        if place.world_size > 1 and (place.tp_size > 1 or place.dp_mode is DataParallelMode.FULLY_SHARDED):
            from torch.distributed.device_mesh import init_device_mesh

            self.mesh = init_device_mesh("cpu", (place.dp_size, place.tp_size), mesh_dim_names=("dp", "tp"))
        self.tensors = {name: self._shard(name, 0) for name in SHAPES}
        self.tensors["optimizer.step"] = torch.zeros((), dtype=torch.int64)

    def _full_tensor(self, name: str, step: int) -> torch.Tensor:
        shape = SHAPES[name][0]
        if self.scale > 1:
            shape = (shape[0] * self.scale, *shape[1:])
        number = list(SHAPES).index(name)
        numel = torch.Size(shape).numel()
        return torch.arange(numel, dtype=torch.float32).reshape(shape) * 0.5 + number + 1000.0 * step

    def _shard(self, name: str, step: int) -> Any:
        whole = self._full_tensor(name, step)
        if self.mesh is None:
            return whole
        from torch.distributed.tensor import DTensor, Replicate, Shard

        tp_dim = SHAPES[name][1]
        tp = Replicate() if tp_dim is None or self.place.tp_size == 1 else Shard(tp_dim)
        sharded = self.place.dp_mode is DataParallelMode.FULLY_SHARDED
        if not sharded and isinstance(tp, Replicate):
            return whole
        local, placements = whole, []
        if not isinstance(tp, Replicate):
            local = local.chunk(self.place.tp_size, tp_dim)[self.place.tp_rank]
        dp = Shard(1 if tp_dim == 0 else 0) if sharded else Replicate()
        if isinstance(dp, Shard):
            pieces = local.chunk(self.place.dp_size, dp.dim)
            local = pieces[self.place.dp_rank] if self.place.dp_rank < len(pieces) else local.narrow(dp.dim, 0, 0)
        placements = [dp, tp]
        return DTensor.from_local(
            local.contiguous(), self.mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
        )

    def state_dict(self) -> dict[str, Any]:
        return dict(self.tensors)

    def load_state_dict(self, state: Any) -> None:
        pass

    def local_tensors(self) -> dict[str, torch.Tensor]:
        return {name: t.to_local() if hasattr(t, "to_local") else t for name, t in self.tensors.items()}

    @torch.no_grad()
    def set_step(self, step: int) -> None:
        for name in SHAPES:
            fresh = self._shard(name, step)
            target, source = (t.to_local() if hasattr(t, "to_local") else t for t in (self.tensors[name], fresh))
            target.copy_(source)
        self.tensors["optimizer.step"].fill_(step)

    def wrong_tensors(self, step: int) -> list[str]:
        """Return the names of tensors that do not have the value of this step."""
        bad = [] if int(self.tensors["optimizer.step"]) == step else ["optimizer.step"]
        for name in SHAPES:
            have, want = self.tensors[name], self._shard(name, step)
            if hasattr(have, "to_local"):
                have, want = have.to_local(), want.to_local()
            if not torch.equal(have, want):
                bad.append(name)
        return bad


class Run:
    """A training loop around a manager, step by step."""

    def __init__(
        self,
        place: MeshCoordinates,
        root: Any,
        memory: Any = None,
        *,
        generation: int = 1,
        run: str = "",
        job: JobIdentity | None = None,
        take_over: str | None = None,
        storage: Any = None,
        retry: Any = None,
        scale: int = 1,
        **settings: Any,
    ) -> None:
        self.place = place
        self.state = State(place, scale)
        config = CheckpointConfig.model_validate(
            {
                "path": str(root),
                "recordsPath": None if (records := settings.pop("records", None)) is None else str(records),
                "memory": {"everySteps": settings.pop("memory_every", 1), "buddies": settings.pop("buddies", 1)},
                "durable": {"everySeconds": None, "everySteps": None, "keepLast": 3, "failureTolerance": 0}
                | settings.pop("durable", {}),
                "milestones": settings.pop("milestones", {}),
                "takeOver": take_over,
            }
        )
        self.manager = CheckpointManager(
            config,
            state=self.state,
            mesh=place,
            start=RunStart(generation, job or NOBODY, run),
            memory_directory=memory,
            settings={"model": settings.pop("settings", "one")},
            storage=storage,
            retry=retry or Retry(delays=()),
        )
        self.resumed = self.manager.resume()
        self.step = self.resumed.step if self.resumed else 0
        self.wrong = self.state.wrong_tensors(self.step) if self.resumed else []
        if not self.resumed:
            self.state.set_step(0)

    def advance(self, *, save: bool | None = None) -> Save:
        self.manager.before_update()
        votes = torch.tensor(self.manager.vote())
        if self.place.world_size > 1:
            dist.all_reduce(votes)
        self.step += 1
        self.state.set_step(self.step)
        total = int(votes) if save is None else int(save)
        self.manager.after_step(position(self.step), total)
        return decode_votes(total)

    def run_to(self, step: int, *, save_at: Any = ()) -> Self:
        while self.step < step:
            self.advance(save=self.step + 1 in save_at)
        return self

    def flush(self) -> Self:
        """Wait for background saves, which a real loop never does."""
        self.manager.before_update()
        self.manager._durable.wait()
        return self

    def report(self) -> dict[str, Any]:
        return {
            "step": self.resumed.step if self.resumed else None,
            "position": self.resumed,
            "wrong": self.wrong,
            "source": str(self.manager.resumed_from),
            "warnings": self.manager.warnings,
            "durable": self.manager.durable_step,
            "memory": self.manager.memory_step,
        }


def run_alone(root: Any, memory: Any = None, **settings: Any) -> Run:
    return Run(SOLO, root, memory, **settings)


class HookedStorage(PosixStorage):
    """A store that calls `hook("before write NAME")` and the like before and after it writes a file."""

    def __init__(self, root: Any, hook: Callable[[str], None]) -> None:
        super().__init__(Path(root))
        self.hook = hook

    def write_stream(self, name: str, pieces: Iterable[memoryview], size: int) -> None:
        self.hook(f"before write {name}")
        super().write_stream(name, pieces, size)
        self.hook(f"after write {name}")

    def write(self, name: str, data: bytes) -> None:
        self.hook(f"before write {name}")
        super().write(name, data)
        self.hook(f"after write {name}")

    def create(self, name: str, data: bytes) -> None:
        self.hook(f"before create {name}")
        super().create(name, data)
        self.hook(f"after create {name}")


class SlowStorage(HookedStorage):
    """A store that takes `seconds` for every file it writes."""

    def __init__(self, root: Any, seconds: float) -> None:
        super().__init__(root, lambda what: time.sleep(seconds if what.startswith("before") else 0))


def _child(
    function: Callable[..., Any], rank: int, size: int, tp: int, mode: str, store: str, arguments: Any, results: Any
) -> None:
    try:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        torch.set_num_threads(1)
        if size > 1:
            dist.init_process_group(
                "gloo", init_method=f"file://{store}/file", rank=rank, world_size=size, timeout=timedelta(seconds=30)
            )
        place = mesh_coordinates(rank, size, tp, DataParallelMode(mode))
        results.put((rank, function(place, *arguments), None))
        if size > 1:
            dist.barrier()
    except BaseException as error:  # noqa: BLE001 - the parent process raises it
        results.put((rank, None, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
    results.close()
    results.join_thread()
    os._exit(0)


def run_world(
    size: int,
    function: Callable[..., Any],
    *arguments: Any,
    tp: int = 1,
    mode: str = "Replicated",
    timeout: float = 40.0,
    killed: int = 0,
) -> list[Any]:
    """Return the results of `function(place, *arguments)` in gloo processes, by rank; raise when one failed.

    `killed`: so many of the last ranks do not live to give one.
    """
    context = multiprocessing.get_context("forkserver")
    results = context.Queue()
    store = tempfile.mkdtemp()
    processes = [
        context.Process(target=_child, args=(function, rank, size, tp, mode, store, arguments, results), daemon=True)
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    outcome = {}
    try:
        deadline = time.monotonic() + timeout
        while len(outcome) < size - killed:
            rank, value, error = results.get(timeout=max(0.1, deadline - time.monotonic()))
            assert error is None, f"rank {rank}: {error}"
            outcome[rank] = value
        for process in processes:
            process.join(10)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
            process.close()
        results.close()
        shutil.rmtree(store)
    return [outcome[rank] for rank in range(size - killed)]

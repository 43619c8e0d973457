"""Real gloo processes with a small training state whose right value at every step is known."""

from __future__ import annotations

import functools
import multiprocessing
import os
import shutil
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from trainium_contract.trainer.checkpoint import CheckpointConfig
from trainium_contract.trainer.parallelism import DataParallelMode
from trainium_contract.wire.checkpoint_manifest import Manifest
from trainium_trainer.checkpoint.durable.save_policy import Save, decided
from trainium_trainer.checkpoint.format.shards import write_shard, write_tables
from trainium_trainer.checkpoint.interfaces import MeshPlace, Position
from trainium_trainer.checkpoint.manager import CheckpointManager, Environment
from trainium_trainer.checkpoint.root.owner import NOBODY, JobIdentity, Start
from trainium_trainer.checkpoint.root.survey import Committed
from trainium_trainer.storage.posix import PosixStorage
from trainium_trainer.storage.protocol import Retry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from trainium_contract.wire.checkpoint_manifest import ManifestFile
    from trainium_trainer.checkpoint.dividing import Item, Scheme


SHAPES = {
    "model.wide": ((12, 10), 0),
    "model.tall": ((10, 12), 1),
    "model.norm": ((10,), None),
    "optimizer.wide": ((12, 10), 0),
    "optimizer.tall": ((10, 12), 1),
    "optimizer.norm": ((10,), None),
}


def committed(step: int, files: Iterable[ManifestFile] = (), folder: str = "", **fields: Any) -> Committed:
    """A checkpoint by its manifest."""
    usual = {"generation": 1, "data_parallel": 1, "tensor_parallel": 1, "config_digest": "c", "created": 0.0}
    numbers = {"step": step, "samples": 8 * step, "tokens": 100 * step, "world_size": 1}
    manifest = Manifest(**usual | numbers | fields, files=tuple(files))
    return Committed(step, folder or f"step-{step}/g1-a", manifest)


def written(root: Path, scheme: Scheme, values: Callable[[int, Item], torch.Tensor]) -> Committed:
    """A checkpoint whose files are those of all ranks; `values` returns what a rank writes of a tensor."""
    storage, folder, retry = PosixStorage(root), "step-1/a", Retry(())
    files = {}
    for rank in range(scheme.grid.size):
        file = write_shard(storage, folder, rank, scheme.file(rank), functools.partial(values, rank), retry)
        if file is not None:
            files[rank] = file
    entries = write_tables(storage, folder, scheme, files, retry)
    return committed(1, entries, folder, world_size=scheme.grid.size, data_parallel=scheme.grid.size)


def place_of(
    rank: int, world_size: int, tp_size: int = 1, dp_mode: DataParallelMode = DataParallelMode.REPLICATED
) -> MeshPlace:
    dp_rank, tp_rank = divmod(rank, tp_size)
    return MeshPlace(
        rank=rank,
        world_size=world_size,
        dp_rank=dp_rank,
        dp_size=world_size // tp_size,
        tp_rank=tp_rank,
        tp_size=tp_size,
        dp_mode=dp_mode,
    )


SOLO = place_of(0, 1)


def position(step: int) -> Position:
    return Position(step=step, samples=8 * step, tokens=1000 * step)


class State:
    """Tensors whose values are a function of the step, divided as the place requires."""

    def __init__(self, place: MeshPlace, scale: int = 1) -> None:
        self.place = place
        self.scale = scale
        self.mesh = None
        if place.world_size > 1 and (place.tp_size > 1 or place.dp_mode is DataParallelMode.FULLY_SHARDED):
            from torch.distributed.device_mesh import init_device_mesh

            self.mesh = init_device_mesh("cpu", (place.dp_size, place.tp_size), mesh_dim_names=("dp", "tp"))
        self.tensors = {name: self._make(name, 0) for name in SHAPES}
        self.tensors["optimizer.step"] = torch.zeros((), dtype=torch.int64)

    def _whole(self, name: str, step: int) -> torch.Tensor:
        shape = SHAPES[name][0]
        if self.scale > 1:
            shape = (shape[0] * self.scale, *shape[1:])
        number = list(SHAPES).index(name)
        numel = torch.Size(shape).numel()
        return torch.arange(numel, dtype=torch.float32).reshape(shape) * 0.5 + number + 1000.0 * step

    def _make(self, name: str, step: int) -> Any:
        whole = self._whole(name, step)
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
        dp = Replicate()
        if sharded:
            dp = Shard(1 if tp_dim == 0 else 0)
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
    def become(self, step: int) -> None:
        for name in SHAPES:
            fresh = self._make(name, step)
            target, source = (t.to_local() if hasattr(t, "to_local") else t for t in (self.tensors[name], fresh))
            target.copy_(source)
        self.tensors["optimizer.step"].fill_(step)

    def wrong(self, step: int) -> list[str]:
        """Names of tensors that do not have the value of this step."""
        bad = [] if int(self.tensors["optimizer.step"]) == step else ["optimizer.step"]
        for name in SHAPES:
            have, want = self.tensors[name], self._make(name, step)
            if hasattr(have, "to_local"):
                have, want = have.to_local(), want.to_local()
            if not torch.equal(have, want):
                bad.append(name)
        return bad


class Run:
    """A training loop around a manager, step by step."""

    def __init__(
        self,
        place: MeshPlace,
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
            start=Start(generation, job or NOBODY, run),
            memory_directory=memory,
            settings={"model": settings.pop("settings", "one")},
            outside=Environment(storage, retry or Retry(delays=())),
        )
        self.resumed = self.manager.resume()
        self.step = self.resumed.step if self.resumed else 0
        self.wrong = self.state.wrong(self.step) if self.resumed else []
        if not self.resumed:
            self.state.become(0)

    def advance(self, *, save: bool | None = None) -> Save:
        self.manager.before_update()
        votes = torch.tensor(self.manager.vote())
        if self.place.world_size > 1:
            dist.all_reduce(votes)
        self.step += 1
        self.state.become(self.step)
        total = int(votes) if save is None else int(save)
        self.manager.after_step(position(self.step), total)
        return decided(total)

    def to(self, step: int, *, save_at: Any = ()) -> Run:
        while self.step < step:
            self.advance(save=self.step + 1 in save_at)
        return self

    def settle(self) -> Run:
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


def solo(root: Any, memory: Any = None, **settings: Any) -> Run:
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
        place = place_of(rank, size, tp, DataParallelMode(mode))
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
    """Results of `function(place, *arguments)` in gloo processes, by rank; raises when one failed.

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

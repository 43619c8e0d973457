"""Real gloo processes with a small training state whose right value at every step is known."""

import functools
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

from tests.testing.trainer.fork_server import fork_context
from trainium_contract.trainer.checkpoint import CheckpointConfig
from trainium_contract.trainer.parallelism import DataParallelMode
from trainium_contract.wire.checkpoint_manifest import Manifest, ManifestFile
from trainium_trainer.checkpoint.durable.durable_tier import Save, decode_votes
from trainium_trainer.checkpoint.format.layout import CheckpointLayout, WriteItem
from trainium_trainer.checkpoint.format.live_state import to_local
from trainium_trainer.checkpoint.format.writer import write_shard, write_tables
from trainium_trainer.checkpoint.interfaces import MeshCoordinates, Position
from trainium_trainer.checkpoint.manager import CheckpointManager
from trainium_trainer.checkpoint.root.owner import NOBODY, JobIdentity, RunStart
from trainium_trainer.checkpoint.root.survey import CommittedCheckpoint
from trainium_trainer.checkpoint.sharding import Grid
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


def committed_checkpoint(
    step: int, files: Iterable[ManifestFile] = (), folder: str = "", **fields: Any
) -> CommittedCheckpoint:
    """Return a checkpoint whose manifest has these fields."""
    defaults = {"generation": 1, "data_parallel": 1, "tensor_parallel": 1, "config_digest": "c", "created": 0.0}
    numbers = {"step": step, "samples": 8 * step, "tokens": 100 * step, "world_size": 1}
    manifest = Manifest(**defaults | numbers | fields, files=tuple(files))
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
    return committed_checkpoint(1, entries, folder, world_size=layout.grid.size, data_parallel=layout.grid.size)


def mesh_coordinates(grid: Grid, rank: int, dp_mode: DataParallelMode = DataParallelMode.REPLICATED) -> MeshCoordinates:
    pp_rank, dp_rank, tp_rank = grid.find_coordinates(rank)
    return MeshCoordinates(
        rank=rank,
        world_size=grid.size,
        pp_rank=pp_rank,
        pp_size=grid.pipeline,
        dp_rank=dp_rank,
        dp_size=grid.data,
        tp_rank=tp_rank,
        tp_size=grid.tensor,
        dp_mode=dp_mode,
    )


SINGLE_RANK = mesh_coordinates(Grid(), 0)


def position(step: int) -> Position:
    return Position(step=step, samples=8 * step, tokens=1000 * step)


class State:
    """Tensors whose values are a function of the step; a rank has its part of each."""

    def __init__(self, coordinates: MeshCoordinates, scale: int = 1) -> None:
        self.coordinates = coordinates
        self.scale = scale
        self.mesh = None
        is_sharded = coordinates.dp_mode is DataParallelMode.FULLY_SHARDED
        if coordinates.world_size > 1 and (coordinates.tp_size > 1 or is_sharded):
            from torch.distributed.device_mesh import init_device_mesh

            self.mesh = init_device_mesh("cpu", (coordinates.dp_size, coordinates.tp_size), mesh_dim_names=("dp", "tp"))
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
        full = self._full_tensor(name, step)
        if self.mesh is None:
            return full
        from torch.distributed.tensor import DTensor, Replicate, Shard

        tp_dim = SHAPES[name][1]
        tp = Replicate() if tp_dim is None or self.coordinates.tp_size == 1 else Shard(tp_dim)
        sharded = self.coordinates.dp_mode is DataParallelMode.FULLY_SHARDED
        if not sharded and isinstance(tp, Replicate):
            return full
        local = full
        if not isinstance(tp, Replicate):
            local = local.chunk(self.coordinates.tp_size, tp_dim)[self.coordinates.tp_rank]
        dp = Shard(1 if tp_dim == 0 else 0) if sharded else Replicate()
        if isinstance(dp, Shard):
            pieces = local.chunk(self.coordinates.dp_size, dp.dim)
            local = (
                pieces[self.coordinates.dp_rank]
                if self.coordinates.dp_rank < len(pieces)
                else local.narrow(dp.dim, 0, 0)
            )
        return DTensor.from_local(
            local.contiguous(), self.mesh, [dp, tp], run_check=False, shape=full.shape, stride=full.stride()
        )

    def state_dict(self) -> dict[str, Any]:
        return dict(self.tensors)

    def load_state_dict(self, state: Any) -> None:
        pass

    def list_local_tensors(self) -> dict[str, torch.Tensor]:
        return {name: to_local(tensor) for name, tensor in self.tensors.items()}

    @torch.no_grad()
    def set_step(self, step: int) -> None:
        for name in SHAPES:
            to_local(self.tensors[name]).copy_(to_local(self._shard(name, step)))
        self.tensors["optimizer.step"].fill_(step)

    def wrong_tensors(self, step: int) -> list[str]:
        """Return the names of tensors that do not have the value of this step."""
        wrong = [] if int(self.tensors["optimizer.step"]) == step else ["optimizer.step"]
        local = self.list_local_tensors()
        return wrong + [name for name in SHAPES if not torch.equal(local[name], to_local(self._shard(name, step)))]


class Run:
    """A training loop around a manager, step by step."""

    def __init__(
        self,
        coordinates: MeshCoordinates,
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
        self.coordinates = coordinates
        self.state = State(coordinates, scale)
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
            mesh=coordinates,
            start=RunStart(generation, job or NOBODY, run),
            memory_directory=memory,
            settings={"model": settings.pop("settings", "one")},
            storage=storage,
            retry=retry or Retry(delays=()),
        )
        self.resumed = self.manager.position
        self.step = self.resumed.step if self.resumed else 0
        self.wrong_tensors = self.state.wrong_tensors(self.step) if self.resumed else []
        if not self.resumed:
            self.state.set_step(0)

    def advance(self, *, save: bool | None = None) -> Save:
        self.manager.finish_snapshot()
        votes = torch.tensor(self.manager.vote())
        if self.coordinates.world_size > 1:
            dist.all_reduce(votes)
        self.step += 1
        self.state.set_step(self.step)
        total = int(votes) if save is None else int(save)
        self.manager.save_step(position(self.step), total)
        return decode_votes(total)

    def run_to(self, step: int, *, save_at: Any = ()) -> Self:
        while self.step < step:
            self.advance(save=self.step + 1 in save_at)
        return self

    def save_steps(self, *steps: int) -> Self:
        """Advance to each of these steps and save it durably."""
        for step in steps:
            self.run_to(step, save_at=(step,)).flush()
        return self

    def close(self) -> Self:
        self.manager.close()
        return self

    def flush(self) -> Self:
        """Wait for background saves, which a real loop never does."""
        self.manager.finish_snapshot()
        self.manager._durable.wait()
        return self

    def report(self) -> dict[str, Any]:
        return {
            "resumed_step": self.resumed.step if self.resumed else None,
            "position": self.resumed,
            "wrong_tensors": self.wrong_tensors,
            "source": str(self.manager.resumed_from),
            "warnings": self.manager.warnings,
            "durable_step": self.manager.durable_step,
            "memory_step": self.manager.memory_step,
        }


def start_run(root: Any, memory: Any = None, **settings: Any) -> Run:
    """Start a run of a single rank."""
    return Run(SINGLE_RANK, root, memory, **settings)


def read_files(root: Path, excluded: str = "") -> dict[str, bytes]:
    """Read all files below a root except those with the excluded name."""
    files = (path for path in root.rglob("*") if path.is_file() and path.name != excluded)
    return {str(path.relative_to(root)): path.read_bytes() for path in files}


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
        super().__init__(root, lambda access: time.sleep(seconds if access.startswith("before") else 0))


def _run_rank(
    function: Callable[..., Any], rank: int, size: int, tp: int, mode: str, store: str, arguments: Any, results: Any
) -> None:
    try:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        torch.set_num_threads(1)
        if size > 1:
            dist.init_process_group(
                "gloo", init_method=f"file://{store}/file", rank=rank, world_size=size, timeout=timedelta(seconds=30)
            )
        coordinates = mesh_coordinates(Grid(data=size // tp, tensor=tp), rank, DataParallelMode(mode))
        results.put((rank, function(coordinates, *arguments), None))
        if size > 1:
            dist.barrier()
    except BaseException as error:  # noqa: BLE001 - the parent process raises it
        results.put((rank, None, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
    results.close()
    results.join_thread()
    os._exit(0)


def run_ranks(
    size: int,
    function: Callable[..., Any],
    *arguments: Any,
    tp: int = 1,
    mode: str = "Replicated",
    killed: int = 0,
) -> list[Any]:
    """Return the results of `function(coordinates, *arguments)` in gloo processes, by rank; raise when one failed.

    `killed`: the number of last ranks that are killed before they return.
    """
    context = fork_context()
    results = context.Queue()
    store = tempfile.mkdtemp()
    processes = [
        context.Process(target=_run_rank, args=(function, rank, size, tp, mode, store, arguments, results), daemon=True)
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    values = {}
    try:
        deadline = time.monotonic() + 40.0
        while len(values) < size - killed:
            rank, value, error = results.get(timeout=max(0.1, deadline - time.monotonic()))
            assert error is None, f"rank {rank}: {error}"
            values[rank] = value
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
    return [values[rank] for rank in range(size - killed)]

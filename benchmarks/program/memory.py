"""Saves of each step, and restarts, of one FSDP2 program: DCP to memory, DCP to storage, and the trainer's tier.

`python -m benchmarks.program.memory [--json FILE] [--quick]`. Ranks are processes on gloo, each on a simulated node.
All ways run in turn, in several rounds, so that whatever else the machine does hits all alike.

- blocked: what a save adds to a step in the training thread: the call, and the wait for the save before it, before the
  optimizer's update.
- complete: from the call to the moment when the save survives the loss of a node (memory) or of all (storage).
- load: after all ranks were killed, from the model as it is built to the state of the newest step.
- first step: from the start of the loading to the end of the first new step.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import shutil
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.fsdp import fully_shard

from benchmarks.fleet.operator_process import machine
from trainium_contract.trainer.checkpoint import CheckpointConfig
from trainium_contract.trainer.parallelism import DataParallelMode
from trainium_trainer.checkpoint.interfaces import MeshPlace, Position
from trainium_trainer.checkpoint.manager import CheckpointManager
from trainium_trainer.checkpoint.root.owner import NOBODY, Start
from trainium_worker.dcp import MemoryReader, MemoryWriter

if TYPE_CHECKING:
    from concurrent.futures import Future
    from multiprocessing.queues import Queue

import multiprocessing

RANKS = 2
LAYERS = 4


class Program:
    """A model with its optimizer, sharded over all ranks."""

    def __init__(self, width: int) -> None:
        torch.manual_seed(1)
        layers = [torch.nn.Linear(width, width, bias=False) for _ in range(LAYERS)]
        for layer in layers:
            fully_shard(layer)
        self.model: Any = torch.nn.Sequential(*layers)
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.step = 0
        self._batch = torch.randn(8, width)
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()  # so that the moments are there

    def backward(self) -> None:
        """Compute the gradients of the next step."""
        self.model(self._batch).pow(2).mean().backward()

    def update(self) -> None:
        """Complete the step."""
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1

    def state(self) -> dict[str, Any]:
        """Return what is saved."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": self.step}

    def load(self, state: dict[str, Any]) -> None:
        """Take over what was loaded into a `state()`."""
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.step = state["step"]

    def local_tensors(self) -> dict[str, torch.Tensor]:
        """Return this rank's live tensors, as the trainer's tier takes them."""
        found: dict[str, torch.Tensor] = {}
        for name, parameter in self.model.named_parameters():
            found[f"model.{name}"] = parameter.to_local()
            for part, value in self.optimizer.state[parameter].items():
                found[f"{part}.{name}"] = value.to_local() if hasattr(value, "to_local") else value
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return the same with the placement of each; for durable saves, of which there are none here."""
        return dict(self.local_tensors())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: the tensors were filled in place."""


class Saver(Protocol):
    """One way to keep the state of each step."""

    def load(self, program: Program) -> None:
        """Restore the newest state, if there is one."""

    def before_update(self) -> None:
        """Wait for the save before."""

    def after_step(self, program: Program) -> None:
        """Save."""


class Nothing:
    """No saves."""

    def __init__(self, root: Path) -> None:
        """Need no folder."""

    def load(self, program: Program) -> None:
        """Do nothing."""

    def before_update(self) -> None:
        """Do nothing."""

    def after_step(self, program: Program) -> None:
        """Do nothing."""


class DcpSaver:
    """`dcp.async_save` of each step."""

    def __init__(self) -> None:
        self.group = dist.new_group(backend="gloo")
        self.saving: Future[Any] | None = None
        self.began = 0.0
        self.complete: list[float] = []

    def before_update(self) -> None:
        """Wait for the save before."""
        if self.saving is not None:
            self.saving.result()

    def started(self, saving: Any, began: float) -> None:
        """Take in the save under way."""
        self.saving = saving
        saving.add_done_callback(lambda _: self.complete.append(time.perf_counter() - began))


class Memory(DcpSaver):
    """Into the memory of two nodes."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self._directory = root / f"node-{dist.get_rank()}"

    def load(self, program: Program) -> None:
        """Restore the newest state, if there is one."""
        reader = MemoryReader(directory=self._directory)
        if reader.step is not None:
            state = program.state()
            load(state, storage_reader=reader)
            program.load(state)

    def after_step(self, program: Program) -> None:
        """Save."""
        began = time.perf_counter()
        writer = MemoryWriter(program.step, directory=self._directory)
        self.started(async_save(program.state(), storage_writer=writer, process_group=self.group), began)


class Storage(DcpSaver):
    """Into a folder on a disk."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self._root = root / "storage"

    def load(self, program: Program) -> None:
        """Restore the newest state, if there is one."""
        steps = [int(path.parent.name) for path in self._root.glob("*/.metadata")]
        if steps:
            state = program.state()
            load(state, checkpoint_id=self._root / str(max(steps)), process_group=self.group)
            program.load(state)

    def after_step(self, program: Program) -> None:
        """Save, and remove what is older than the last complete one."""
        began = time.perf_counter()
        if dist.get_rank() == 0:
            shutil.rmtree(self._root / str(program.step - 2), ignore_errors=True)
        folder = self._root / str(program.step)
        self.started(async_save(program.state(), checkpoint_id=folder, process_group=self.group), began)


def _mesh() -> MeshPlace:
    """Return this rank in the mesh of a fully sharded run."""
    rank, size = dist.get_rank(), dist.get_world_size()
    return MeshPlace(
        rank=rank,
        world_size=size,
        dp_rank=rank,
        dp_size=size,
        tp_rank=0,
        tp_size=1,
        dp_mode=DataParallelMode.FULLY_SHARDED,
    )


class Tier:
    """The trainer's memory tier, with its copies on buddies."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._manager: CheckpointManager | None = None

    def load(self, program: Program) -> None:
        """Restore the newest state, if there is one."""
        config = CheckpointConfig.model_validate(
            {
                "path": str(self._root / "durable"),
                "memory": {"everySteps": 1, "buddies": 1},
                "durable": {"everySeconds": None, "everySteps": None},
            }
        )
        self._manager = CheckpointManager(
            config,
            state=program,
            mesh=_mesh(),
            start=Start(1, NOBODY, ""),
            memory_directory=self._root / f"node-{dist.get_rank()}",
            settings={},
        )
        position = self._manager.resume()
        program.step = 0 if position is None else position.step

    def before_update(self) -> None:
        """Wait for the snapshot before, and its copy."""
        if self._manager is not None:
            self._manager.before_update()

    def after_step(self, program: Program) -> None:
        """Take a snapshot."""
        if self._manager is not None:
            self._manager.after_step(Position(program.step, program.step, program.step), 0)


SAVERS: dict[str, Any] = {
    "no saves": Nothing,
    "trainium_worker.dcp": Memory,
    "dcp.async_save to storage": Storage,
    "the trainer's tier": Tier,
}


def train(name: str, root: Path, width: int, steps: int, results: Queue[Any] | None) -> None:
    """Load, make steps, report and die."""
    saver: Saver = SAVERS[name](root)
    program = Program(width)
    dist.barrier()
    began = time.perf_counter()
    saver.load(program)
    loaded, resumed = time.perf_counter() - began, program.step
    first = 0.0
    step_seconds, blocked = [], []
    for number in range(steps):
        start = time.perf_counter()
        program.backward()
        waits = time.perf_counter()
        saver.before_update()
        waited = time.perf_counter() - waits
        program.update()
        saves = time.perf_counter()
        saver.after_step(program)
        end = time.perf_counter()
        blocked.append(waited + end - saves)
        step_seconds.append(end - start)
        if number == 0:
            first = end - began
    saver.before_update()
    if results is not None:
        sizes = {f"{tensor.data_ptr()}": tensor.nbytes for tensor in program.local_tensors().values()}
        results.put(
            {
                "rank": dist.get_rank(),
                "resumed": resumed,
                "load": loaded,
                "firstStep": first,
                "step": statistics.median(step_seconds[2:] or step_seconds),
                "blocked": statistics.median(blocked[2:] or blocked),
                "complete": statistics.median(getattr(saver, "complete", []) or [0.0]),
                "bytes": sum(sizes.values()),
            }
        )
        results.close()
        results.join_thread()
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def _child(rank: int, store: str, arguments: tuple[Any, ...]) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    train(*arguments)


def attempt(name: str, root: Path, width: int, steps: int) -> dict[str, Any]:
    """Run one attempt to its death; what its slowest rank took."""
    context = multiprocessing.get_context("forkserver")
    results = context.Queue()
    store = tempfile.mktemp(dir=root)
    processes = [
        context.Process(target=_child, args=(rank, store, (name, root, width, steps, results))) for rank in range(RANKS)
    ]
    for process in processes:
        process.start()
    reports: list[dict[str, Any]] = []
    while len(reports) < RANKS:
        try:
            reports.append(results.get(timeout=1))
        except queue.Empty:
            if any(process.exitcode is not None for process in processes):
                for process in processes:
                    process.kill()
                sys.exit(f"{name}: a rank ended before it had reported")
    for process in processes:
        process.join()
    return {key: max(report[key] for report in reports) for key in reports[0] if key != "rank"}


def measure(name: str, memory: Path, disk: Path, width: int, steps: int) -> dict[str, float]:
    """Return the figures of one way: an attempt, a kill of all ranks, and another attempt."""
    parent = disk if name == "dcp.async_save to storage" else memory
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        before = attempt(name, Path(folder), width, steps)
        kept = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
        after = attempt(name, Path(folder), width, 3)
    if name != "no saves" and after["resumed"] != steps:
        sys.exit(f"{name}: resumed after step {after['resumed']} of {steps}")
    return {
        "step": before["step"],
        "blocked": before["blocked"],
        "complete": before["complete"],
        "state": before["bytes"] / 2**20,
        "kept": kept / RANKS / 2**20,
        "load": after["load"],
        "firstStep": after["firstStep"],
    }


def main() -> int:
    """Measure all ways in turn, print a table and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="a small state, one round: the figures mean nothing")
    parser.add_argument("--disk", type=Path, default=Path("out/bench"), help="where the storage of the comparison is")
    options = parser.parse_args()
    width, steps, rounds = (256, 4, 1) if options.quick else (2048, 12, 3)
    multiprocessing.get_context("forkserver").set_forkserver_preload(
        ["torch.distributed.fsdp", "trainium_worker.dcp", "trainium_trainer.checkpoint.manager"]
    )
    disk = options.disk.resolve()
    disk.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in SAVERS}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        for _ in range(rounds):
            for name in SAVERS:
                found[name].append(measure(name, Path(memory), disk, width, steps))
    rows = [
        {"name": name, **{key: statistics.median(each[key] for each in values) for key in values[0]}, "rounds": values}
        for name, values in found.items()
    ]
    report = {
        "benchmark": "program_memory",
        "date": time.strftime("%Y-%m-%d"),
        "quick": options.quick,
        "machine": {**machine(), "torch": torch.__version__},
        "settings": {"ranks": RANKS, "parameters": LAYERS * width * width, "steps": steps, "rounds": rounds},
        "rows": rows,
    }
    print(f"{'':28}{'step':>9}{'blocked':>9}{'complete':>10}{'kept':>10}{'load':>9}{'first step':>12}")
    for row in rows:
        print(
            f"{row['name']:28}{row['step']:8.3f}s{row['blocked']:8.3f}s{row['complete']:9.3f}s{row['kept']:7.0f}MiB"
            f"{row['load']:8.3f}s{row['firstStep']:11.3f}s"
        )
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Bandwidth of saving, loading and resharding durable checkpoints, against plain file copies in the same run.

Gloo ranks hold a fully sharded state. In turns: each rank copies a file of its shard's size (`cp`, with fsync); all
save the state (staging, hashing, writing, commit); all load it at the same size; other numbers of ranks load it
resharded. Caches of the files are dropped before each read, so that reads come from the device, and each figure is the
median over rounds. A ratio is what the checkpoint code reaches of the plain copy that was measured right before it.

    python -m benchmarks.training.checkpoint_bandwidth
        [--ranks 2] [--mebibytes 512] [--rounds 3] [--root DIR] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks.training.checkpoint_stall import Place
from trainium_contract.trainer.checkpoint import CheckpointConfig
from trainium_contract.trainer.parallelism import DataParallelMode
from trainium_trainer.checkpoint.interfaces import Position
from trainium_trainer.checkpoint.manager import CheckpointManager
from trainium_trainer.checkpoint.root.owner import Start
from trainium_trainer.warm import warm

if TYPE_CHECKING:
    from collections.abc import Callable

_TENSORS = 24
_WIDTH = 1024
_MEBIBYTE = 2**20
_GOAL_RATIO = 0.7


class Sharded:
    """Weights of some matrices, divided by rows, as DTensors."""

    def __init__(self, place: Place, mebibytes: int) -> None:
        rows = mebibytes * _MEBIBYTE // (4 * _WIDTH * _TENSORS)
        mesh = init_device_mesh("cpu", (place.world_size,))
        self._tensors: dict[str, Any] = {}
        for number in range(_TENSORS):
            sizes = [len(part) for part in torch.arange(rows).chunk(place.world_size)]
            local = torch.full((sizes[place.rank], _WIDTH), float(number))
            self._tensors[f"model.{number}"] = DTensor.from_local(
                local, mesh, [Shard(0)], run_check=False, shape=torch.Size((rows, _WIDTH)), stride=(_WIDTH, 1)
            )

    def state_dict(self) -> dict[str, Any]:
        """The live state."""
        return dict(self._tensors)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loaded in place."""

    def local_tensors(self) -> dict[str, torch.Tensor]:
        """This rank's rows."""
        return {name: tensor.to_local() for name, tensor in self._tensors.items()}

    def forget(self) -> None:
        """Other values, so that a load shows."""
        for tensor in self.local_tensors().values():
            tensor.fill_(-1.0)

    def is_whole(self) -> bool:
        """Whether every value is what was saved."""
        return all(bool((local == float(name.split(".")[1])).all()) for name, local in self.local_tensors().items())


def timed(work: Callable[[], Any]) -> float:
    """Seconds from the start of the first rank to the end of the last."""
    dist.barrier()
    began = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - began


def cool(folder: Path) -> None:
    """Drop the cached pages of all files in a folder."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def copy(source: Path, target: Path) -> None:
    """What `cp` does, synchronised."""
    shutil.copyfile(source, target)
    descriptor = os.open(target, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def manager_of(place: Place, state: Sharded, root: Path) -> CheckpointManager:
    """Without the memory tier."""
    config = CheckpointConfig.model_validate(
        {"path": str(root), "memory": {"everySteps": 0}, "durable": {"everySeconds": None, "keepLast": 1}}
    )
    return CheckpointManager(
        config, state=state, mesh=place, start=Start(0), memory_directory=None, settings={"of": "benchmark"}
    )


def writing(place: Place, options: argparse.Namespace, folder: Path) -> list[dict[str, float]]:
    """Copies, saves and loads at one size, in turns."""
    state = Sharded(place, options.mebibytes)
    share = sum(t.numel() * 4 for t in state.local_tensors().values())
    source = folder / f"plain-{place.rank}"
    source.write_bytes(os.urandom(_MEBIBYTE) * (share // _MEBIBYTE))
    manager = manager_of(place, state, folder / "root")
    manager.resume()
    rounds: list[dict[str, float]] = []
    for number in range(1, options.rounds + 1):
        target = folder / f"copy-{place.rank}"
        os.sync()
        cool(folder)
        seconds = {"copy": timed(lambda: copy(source, target))}  # noqa: B023 - called at once
        target.unlink()
        seconds["save"] = timed(lambda: manager.finish(Position(number, number, number)))  # noqa: B023
        rounds.append(seconds)
    manager.close()
    return rounds


def reading(place: Place, options: argparse.Namespace, folder: Path) -> list[dict[str, float]]:
    """Copies, and loads at this size of what `writing` has left."""
    rounds: list[dict[str, float]] = []
    # All bytes are copied by as many processes as load them.
    sources = sorted(folder.glob("plain-*"))[place.rank :: place.world_size]
    for _ in range(options.rounds):
        state = Sharded(place, options.mebibytes)
        state.forget()
        cool(folder)

        def copies() -> None:
            for source in sources:
                copy(source, folder / f"copied-{source.name}")

        seconds = {"copy": timed(copies)}
        for source in sources:
            (folder / f"copied-{source.name}").unlink()
        cool(folder)
        manager = manager_of(place, state, folder / "root")
        seconds["load"] = timed(manager.resume)
        if not state.is_whole():
            raise RuntimeError("the state that was loaded is not the one that was saved")
        manager.close()
        rounds.append(seconds)
    return rounds


def child(rank: int, ranks: int, phase: str, options: argparse.Namespace, folder: Path, results: Any) -> None:
    """One rank of one phase."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    warm()
    dist.init_process_group("gloo", init_method=f"file://{folder}/store-{phase}-{ranks}", rank=rank, world_size=ranks)
    work = writing if phase == "write" else reading
    rounds = work(Place(rank, ranks, dp_mode=DataParallelMode.FULLY_SHARDED), options, folder)
    if rank == 0:
        results.put(rounds)
    dist.barrier()
    dist.destroy_process_group()


def play(ranks: int, phase: str, options: argparse.Namespace, folder: Path) -> list[dict[str, float]]:
    """The rounds of one phase."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [
        context.Process(target=child, args=(rank, ranks, phase, options, folder, results), daemon=True)
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    rounds: list[dict[str, float]] = results.get(timeout=3600)
    for process in processes:
        process.join(60)
    return rounds


def figures(name: str, rounds: list[dict[str, float]], key: str, mebibytes: int) -> dict[str, Any]:
    """Medians: bandwidths in MiB/s and the ratio of those of each round."""
    return {
        "name": name,
        "checkpointMiBs": round(mebibytes / statistics.median(each[key] for each in rounds), 1),
        "copyMiBs": round(mebibytes / statistics.median(each["copy"] for each in rounds), 1),
        "ratio": round(statistics.median(each["copy"] / each[key] for each in rounds), 3),
    }


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mebibytes", type=int, default=512, help="of the whole state")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--root", type=Path, help="folder on the device to measure; by default the temporary one")
    options = parser.parse_args()
    size = options.mebibytes
    report: dict[str, Any] = {
        "benchmark": "checkpoint_bandwidth",
        "ranks": options.ranks,
        "rounds": options.rounds,
        "stateMiB": size,
        "goalRatio": _GOAL_RATIO,
        "loadAverage": round(os.getloadavg()[0], 1),
    }
    with tempfile.TemporaryDirectory(prefix="checkpoint-bandwidth-", dir=options.root) as name:
        folder = Path(name)
        rows = [figures("save", play(options.ranks, "write", options, folder), "save", size)]
        for ranks in (options.ranks, options.ranks + 1, 1):
            kind = "load" if ranks == options.ranks else f"load at {ranks} rank{'s' if ranks > 1 else ''} (reshard)"
            rows.append(figures(kind, play(ranks, "read", options, folder), "load", size))
    report["figures"] = rows
    for row in rows:
        print(f"{row['name']:26} {row['ratio']:5.2f} x of {row['copyMiBs']:,.0f} MiB/s", file=sys.stderr)
    text = json.dumps(report, indent=2)
    if options.json:
        options.json.write_text(text + "\n")
    else:
        print(text)


if __name__ == "__main__":
    main()

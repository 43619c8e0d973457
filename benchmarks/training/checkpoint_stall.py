"""How much a checkpoint adds to a training step, with a fast and with a slow store.

Several gloo ranks train the same small model. Four managers over the same state take turns in short blocks, so that
whatever else the machine does hits all of them alike: no saves at all; memory snapshots every step; these plus
back-to-back durable saves; the same with a store that is throttled so that a save lasts for many steps. All this with
a step of some 50 ms, and with a longer one for the same state.
Prints a table on stderr and JSON on stdout:

    python -m benchmarks.training.checkpoint_stall
        [--ranks 2] [--width 512] [--rounds 6] [--steps 12] [--mebibytes-per-second 8]
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from trainium_contract.trainer.checkpoint import CheckpointConfig
from trainium_contract.trainer.parallelism import DataParallelMode
from trainium_trainer.checkpoint.durable.save_policy import Save, decided
from trainium_trainer.checkpoint.interfaces import Position
from trainium_trainer.checkpoint.manager import CheckpointManager, Outside
from trainium_trainer.checkpoint.root.owner import Start
from trainium_trainer.checkpoint.storage.posix import PosixStorage
from trainium_trainer.warm import warm

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

MODES = ("off", "memory", "memory+durable", "memory+durable, slow store")


class ThrottledStorage(PosixStorage):
    """A store of a given speed, which takes its time without using the processor."""

    def __init__(self, root: Path, bytes_per_second: float) -> None:
        super().__init__(root)
        self._rate = bytes_per_second

    def write_stream(self, name: str, pieces: Iterable[memoryview], size: int) -> None:
        """A new file of a slow store."""

        def slowly() -> Iterator[memoryview]:
            for piece in pieces:
                time.sleep(len(piece) / self._rate)
                yield piece

        super().write_stream(name, slowly(), size)


@dataclass
class Place:
    """A rank's place in a mesh without tensor parallelism."""

    rank: int
    world_size: int
    pp_rank: int = 0
    pp_size: int = 1
    tp_rank: int = 0
    tp_size: int = 1
    dp_mode: DataParallelMode = DataParallelMode.REPLICATED
    dp_rank: int = field(init=False)
    dp_size: int = field(init=False)

    def __post_init__(self) -> None:
        self.dp_rank, self.dp_size = self.rank, self.world_size


class Training:
    """Six square layers, AdamW moments as flat buffers beside the weights, gradients summed over the ranks."""

    def __init__(self, width: int, samples: int) -> None:
        torch.manual_seed(0)
        layers = [layer for _ in range(6) for layer in (torch.nn.Linear(width, width), torch.nn.GELU())]
        self.model = torch.nn.Sequential(*layers)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), foreach=True)
        self.data = torch.randn(samples, width)
        self.step(0)

    def step(self, vote: int) -> int:
        """One optimizer step; the sum of the votes."""
        self.optimizer.zero_grad(set_to_none=False)
        self.model(self.data).square().mean().backward()
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        flat = torch.cat([*(g.reshape(-1) for g in gradients), torch.tensor([float(vote)])])
        if dist.is_initialized():
            dist.all_reduce(flat)
        self.optimizer.step()
        return round(flat[-1].item())

    def local_tensors(self) -> dict[str, torch.Tensor]:
        """The live state."""
        tensors: dict[str, torch.Tensor] = {}
        for name, parameter in self.model.named_parameters():
            tensors[name] = parameter.detach()
            for moment, value in self.optimizer.state[parameter].items():
                tensors[f"{name}.{moment}"] = value
        return tensors

    def state_dict(self) -> dict[str, Any]:
        """The live state."""
        return dict(self.local_tensors())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loaded in place."""


def memory_directory(folder: Path, number: int, rank: int) -> Path:
    """Each rank is a node of its own, the dearest case: on a shared node only one of the replicas writes."""
    shared = Path("/dev/shm")
    return (shared if shared.is_dir() else folder) / f"{folder.name}-{number}-{rank}"


def managers(training: Training, place: Place, folder: Path, rate: float) -> dict[str, CheckpointManager]:
    """One resumed manager per mode."""
    made: dict[str, CheckpointManager] = {}
    for number, mode in enumerate(MODES):
        root = folder / str(number)
        config = CheckpointConfig.model_validate(
            {
                "path": str(root),
                "memory": {"everySteps": 0 if mode == "off" else 1},
                "durable": {"everySeconds": None, "everySteps": 1 if "durable" in mode else None, "keepLast": 2},
            }
        )
        made[mode] = CheckpointManager(
            config,
            state=training,
            mesh=place,
            start=Start(0),
            memory_directory=memory_directory(folder, number, place.rank),
            settings={"of": "benchmark"},
            outside=Outside(ThrottledStorage(root, rate) if "slow" in mode else PosixStorage(root)),
        )
        made[mode].resume()
        made[mode].finish(Position(0, 0, 0))
    return made


def measure(rank: int, options: argparse.Namespace, folder: str, results: Any) -> None:
    """What one rank does."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    warm()
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=options.ranks)
    training = Training(options.width, options.samples)
    size = sum(t.numel() * t.element_size() for t in training.local_tensors().values())
    rate = options.mebibytes_per_second * 2**20
    all_managers = managers(training, Place(rank, options.ranks), Path(folder), rate)
    steps = dict.fromkeys(MODES, 0)
    times: dict[str, list[tuple[float, float, bool]]] = {mode: [] for mode in MODES}
    for number in range(options.rounds + 1):
        for mode, manager in all_managers.items():
            dist.barrier()
            for _ in range(options.steps):
                start = time.perf_counter()
                manager.before_update()
                vote = manager.vote()
                before = time.perf_counter() - start
                votes = training.step(vote)
                steps[mode] += 1
                start_after = time.perf_counter()
                manager.after_step(Position(steps[mode], steps[mode], 0), votes)
                end = time.perf_counter()
                if number:  # the first round warms up
                    times[mode].append((end - start, before + end - start_after, decided(votes) is not Save.NOTHING))
            # Between blocks, so that one mode's save does not run in another mode's block.
            manager.finish(Position(steps[mode], steps[mode], 0))
    for number, manager in enumerate(all_managers.values()):
        manager.close()
        shutil.rmtree(memory_directory(Path(folder), number, rank), ignore_errors=True)
    if rank == 0:
        results.put((size, times))
    dist.barrier()
    dist.destroy_process_group()


def summary(
    size: int, times: dict[str, list[tuple[float, float, bool]]], options: argparse.Namespace
) -> dict[str, Any]:
    """The figures, milliseconds."""
    report: dict[str, Any] = {
        "ranks": options.ranks,
        "samples": options.samples,
        "stateMiB": round(size / 2**20, 1),
        "modes": {},
    }
    for mode, rows in times.items():
        all_steps = [row[0] * 1e3 for row in rows]
        saves = [row[1] * 1e3 for row in rows if row[2]]
        report["modes"][mode] = {
            "steps": len(rows),
            "saves": len(saves),
            "medianStepMs": round(statistics.median(all_steps), 2),
            "p90StepMs": round(statistics.quantiles(all_steps, n=10)[-1], 2),
            "medianInManagerMs": round(statistics.median(row[1] * 1e3 for row in rows), 2),
            "medianInManagerAtSaveMs": round(statistics.median(saves), 2) if saves else None,
        }
    base = report["modes"]["memory"]["medianStepMs"]
    off = report["modes"]["off"]["medianStepMs"]
    report["loadAverage"] = round(os.getloadavg()[0], 1)
    report["memoryAddsMs"] = round(base - off, 2)
    report["memoryRatio"] = round(base / off, 4)
    allowed = max(20.0, 0.02 * off)
    report["allowedMs"] = round(allowed, 2)
    report["within"] = True
    for mode in MODES[2:]:
        entry = report["modes"][mode]
        # What a step pays while a save runs beside it, and what the step that starts one pays in the manager.
        running = entry["medianStepMs"] - base
        starting = (entry["medianInManagerAtSaveMs"] or 0.0) - report["modes"]["memory"]["medianInManagerMs"]
        entry["addsWhileRunningMs"] = round(running, 2)
        entry["addsAtStartMs"] = round(starting, 2)
        entry["ratio"] = round(entry["medianStepMs"] / off, 4)
        report["within"] = report["within"] and max(running, starting) <= allowed
    return report


def compared(options: argparse.Namespace) -> dict[str, Any]:
    """All modes at one length of a step."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory(prefix="checkpoint-stall-") as folder:
        ranks = [
            context.Process(target=measure, args=(rank, options, folder, results), daemon=True)
            for rank in range(options.ranks)
        ]
        for process in ranks:
            process.start()
        size, times = results.get(timeout=1800)
        for process in ranks:
            process.join(60)
    report = summary(size, times, options)
    for mode, entry in report["modes"].items():
        print(f"{mode:28} {entry['medianStepMs']:8.1f} ms/step  p90 {entry['p90StepMs']:8.1f}", file=sys.stderr)
    return report


def main() -> None:
    """Run the ranks and print what they measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--samples", type=int, default=256, help="of a step: more make it longer, the state stays")
    parser.add_argument("--long-samples", type=int, default=6144, help="of a second comparison; 0: none")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--mebibytes-per-second", type=float, default=8.0)
    options = parser.parse_args()
    report = compared(options)
    if options.long_samples:
        options.samples, options.rounds, options.steps = options.long_samples, options.rounds * 2 // 3, 4
        report["long"] = compared(options)
    text = json.dumps(report, indent=2)
    if options.json:
        options.json.write_text(text + "\n")
    else:
        print(text)


if __name__ == "__main__":
    main()

"""Compare a step of a run with MLflow tracking with a step without tracking.

    python -m benchmarks.training_speed.trackers [--rounds 5] [--ranks 1]      # in an interpreter that has mlflow

MLflow's server with SQLite runs on loopback; runs with and without it alternate. The processor time of a run includes
that of the sending process: if all processors are busy, a step can lose the difference.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.training_speed.__main__ import SHAPES
from benchmarks.training_speed.runs import WARM_STEPS, Task, run_trainer, write_text
from tests.testing.trainer.mlflow_server import run_mlflow_server

GOAL = 0.005
"""Largest acceptable additional time of a step, as a fraction of a step."""


@dataclass
class Measurement:
    """Steps and processor times of the runs of one kind."""

    seconds: list[float] = field(default_factory=list)
    """Seconds of each counted step."""
    processor_seconds: list[float] = field(default_factory=list)
    """Processor time of each run, with the process that sends it."""

    def to_json(self) -> dict[str, object]:
        """Return the median step, its quartiles, the best one and the processor time of a run, in seconds."""
        quartiles = [round(value, 4) for value in statistics.quantiles(self.seconds, n=4)]
        return {
            "median": quartiles[1],
            "quartiles": [quartiles[0], quartiles[2]],
            "best": round(min(self.seconds), 4),
            "processorSeconds": round(statistics.median(self.processor_seconds), 2),
        }


def main() -> int:
    """Run the benchmark, print the figures and write the file."""
    parser = argparse.ArgumentParser(prog="benchmarks.training_speed.trackers", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="runs of each kind")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--steps", type=int, default=WARM_STEPS + 20)
    parser.add_argument("--json", type=Path, default=Path("out/bench/trackers.json"))
    options = parser.parse_args()
    task = Task(
        ranks=options.ranks,
        device="cpu",
        model=SHAPES["cpu"],
        sequence_length=256,
        micro_batch_size=2,
        accumulation=1,
        steps=options.steps,
        half=False,
        sharded=False,
        recompute=False,
        compiled=False,
    )
    kinds: dict[str, tuple[str, ...]] = {"without": (), "MLflow": ("monitor.trackers=[MLflow]",)}
    measurements = {name: Measurement() for name in kinds}
    with tempfile.TemporaryDirectory(prefix="trackers-") as scratch, run_mlflow_server(Path(scratch)) as server:
        os.environ["MLFLOW_TRACKING_URI"] = server.address
        text = write_text(Path(scratch))
        for number in range(options.rounds):
            for name, overrides in kinds.items():
                folder = Path(scratch, f"{name}-{number}")
                folder.mkdir()
                before = children_seconds()
                measurements[name].seconds += run_trainer(task, folder, text, overrides).seconds
                measurements[name].processor_seconds.append(children_seconds() - before)
    tracked, plain = measurements["MLflow"].seconds, measurements["without"].seconds
    relative_increase = {
        "median": round(statistics.median(tracked) / statistics.median(plain) - 1, 4),
        "best": round(min(tracked) / min(plain) - 1, 4),
    }
    report = {
        "benchmark": "trackers",
        "date": time.strftime("%Y-%m-%d"),
        "load": os.getloadavg()[0],
        "settings": {"ranks": task.ranks, "steps": task.steps, "rounds": options.rounds},
        "goal": GOAL,
        **{name: measurement.to_json() for name, measurement in measurements.items()},
        "relativeIncrease": relative_increase,
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))
    return int(relative_increase["median"] > GOAL)


def children_seconds() -> float:
    """Return the processor time of the ranks so far, with the processes that they started, in seconds."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    sys.exit(main())

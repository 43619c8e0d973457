"""What a micro-batch without samples costs: two ranks do one pass, two full ones, and two of which one is masked.

At a size where the global batch does not come out even, the last micro-batch of some ranks is empty: the same shapes
and collectives, no weight in the loss (decision 0084). A step should last by its passes, full or not, so that the worth
of a size can be told beforehand: the masked pass costs a full one's time, and nothing more. Runs take turns in a mixed
order; a step's time is the median of those after the first ten.

    python -m benchmarks.training.masked --json out/bench/masked.json
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
from pathlib import Path

import yaml

from benchmarks.fleetlab.figures import Report
from benchmarks.parity.ours import run_trainer

RANKS = 2
MICRO = 2
CASES = {"one pass": RANKS * MICRO, "two passes": 2 * RANKS * MICRO, "two passes, one masked": (2 * RANKS - 1) * MICRO}
"""Samples of a step."""
WARM = 10
SETTINGS = {
    "model": {"preset": "Small"},
    "data": {"sequenceLength": 128},
    "batch": {"globalSize": RANKS * MICRO, "microSize": MICRO},
    "steps": 10,
    "checkpoint": {"memory": {"everySteps": 0}, "durable": {"everySeconds": None, "everySteps": None}},
}
"""A small model on the text that comes with Python, without checkpoints."""


def step_seconds(folder: Path, config: Path, batch: int, steps: int) -> float:
    """Median seconds of a step."""
    overrides = [f"batch.globalSize={batch}", f"steps={steps}"]
    run_trainer(config, overrides, ranks=RANKS, folder=folder)
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return float(statistics.median(line["seconds"] for line in lines if line.get("seconds") and line["step"] > WARM))


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    report, order = Report("masked", quick=False, of="ranks"), random.Random(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = folder / "train.yaml"
        config.write_text(yaml.safe_dump(SETTINGS))
        for number in range(options.rounds):
            took = {
                case: step_seconds(folder / f"{number}-{batch}", config, batch, options.steps)
                for case, batch in order.sample(sorted(CASES.items()), len(CASES))
            }
            for case, seconds in took.items():
                report.add(f"a step: {case}", RANKS, "ms", seconds * 1000)
            full, masked, one = took["two passes"], took["two passes, one masked"], took["one pass"]
            report.add("a step with a masked pass over one with full passes", RANKS, "x", masked / full, goal=1.02)
            report.add("a pass that is masked on one rank over a full pass", RANKS, "x", (masked - one) / (full - one))
    report.write(options.json)
    report.print()


if __name__ == "__main__":
    main()

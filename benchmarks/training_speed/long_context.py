"""Compare a divided sequence with tensor parallelism, and with one rank.

    python -m benchmarks.training_speed.long_context [--rounds 3] [--only speed] [--degree 4]

Speed: the median step of context 2 beside tensor 2, of one batch on two ranks; the runs alternate. Memory: the largest
resident set of a rank at 32,768 tokens, alone and with the sequence divided. Nothing is estimated.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.training_speed.__main__ import SHAPES
from benchmarks.training_speed.runs import WARM_STEPS, Result, Task, run_ours, text_file

SPEED_GOAL = 0.8
"""Goal for the tokens per second of context 2 over those of tensor 2."""
MEMORY_GOAL = 0.5
"""Goal for the memory of a rank over that of one that holds the whole sequence."""
LONG = 32_768
_SPEED = Task(
    ranks=2,
    device="cpu",
    model=SHAPES["cpu"],
    length=2048,
    micro=2,
    accumulation=1,
    steps=WARM_STEPS + 6,
    half=False,
    sharded=False,
    recompute=False,
    compiled=False,
)
_NARROW = {
    "hiddenSize": 64,
    "intermediateSize": 4096,
    "numLayers": 2,
    "numAttentionHeads": 1,
    "numKeyValueHeads": 1,
    "vocabSize": 4096,
    "maxPositions": LONG,
}
"""A model whose activations are most of its memory, and whose attention is quick."""


def main() -> int:
    """Run the benchmark, print the figures and write the file."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.training_speed.long_context",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=3, help="runs of each kind of parallelism")
    parser.add_argument("--degree", type=int, default=4, help="ranks that divide the sequence when memory is measured")
    parser.add_argument("--only", choices=("speed", "memory"))
    parser.add_argument("--json", type=Path, default=Path("out/bench/long_context.json"))
    options = parser.parse_args()
    report: dict[str, Any] = {"benchmark": "long_context", "date": time.strftime("%Y-%m-%d"), "load": os.getloadavg()}
    if options.only != "memory":
        report["speed"] = measure_speed(options.rounds)
    if options.only != "speed":
        report["memory"] = measure_memory(options.degree)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(report, indent=1) + "\n")
    reached = "speed" not in report or report["speed"]["ratio"] >= SPEED_GOAL
    return int(not (reached and ("memory" not in report or report["memory"]["ratio"] < MEMORY_GOAL)))


def measure_speed(rounds: int) -> dict[str, Any]:
    """Return the tokens per second of tensor 2 and context 2, and their ratio."""
    kinds = {"tensor": "parallelism.tensor=2", "context": "parallelism.context=2"}
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(rounds):
        for name, override in kinds.items():
            seconds[name] += _run(_SPEED, override).seconds
    tokens = _SPEED.micro * _SPEED.length
    found = {name: round(tokens / statistics.median(each), 1) for name, each in seconds.items()}
    ratio = round(found["context"] / found["tensor"], 3)
    print(f"context 2: {found['context']} tokens/s, tensor 2: {found['tensor']}: {ratio:.2f} x", flush=True)
    return found | {"ratio": ratio, "goal": SPEED_GOAL}


def measure_memory(degree: int) -> dict[str, Any]:
    """Return the bytes of a rank alone and of one of those that divide the sequence, and their ratio."""
    task = replace(_SPEED, model=_NARROW, length=LONG, micro=1, steps=1)
    alone = _run(replace(task, ranks=1), "parallelism.context=1").host_bytes
    divided = _run(replace(task, ranks=degree), f"parallelism.context={degree}").host_bytes
    ratio = round(divided / alone, 3)
    print(f"{LONG} tokens: {alone >> 20} MiB alone, {divided >> 20} MiB at context {degree}: {ratio:.2f} x", flush=True)
    return {"alone": alone, "divided": divided, "degree": degree, "ratio": ratio, "goal": MEMORY_GOAL}


def _run(task: Task, override: str) -> Result:
    """Run one batch on all ranks of the task."""
    with tempfile.TemporaryDirectory(prefix="long-") as scratch:
        text = text_file(Path(scratch))
        return run_ours(task, Path(scratch), text, [f"batch.globalSize={task.micro}", override])


if __name__ == "__main__":
    sys.exit(main())

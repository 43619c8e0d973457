"""LoRA beside full fine-tuning and beside peft with `transformers.Trainer`, in one run, on one process.

    python -m benchmarks.finetuning [--peer-python VENV/bin/python] [--rounds 3] [--quick]

All begin with one Hugging Face folder of random weights, wide enough that products of matrices are most of a step, and
train float32 with AdamW and clipping. What is compared is the processor time of a step: that of a run less that of a
run with three steps only, over the steps between, which whatever else the machine does disturbs little; seconds by the
clock are given beside it. Runs alternate, and a figure is the median of the rounds. Nothing is estimated; what misses
its goal is published as it is.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

GOALS = {"overFull": 1.4, "overPeer": 1.05, "memory": 1.0, "checkpoint": 1.1}
"""LoRA's samples per second over those of full fine-tuning and of the peer; its memory over the peer's; the files of a
checkpoint over the numbers in it."""
SHAPE = {
    "vocab_size": 4096,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
}
QUICK = SHAPE | {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
"""So small that the figures mean nothing: whether it all runs."""
ADAPTERS = {
    "q and v, rank 16": ("q_proj", "v_proj"),
    "all projections, rank 16": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
}
FULL = "full"


def main() -> int:
    """Run, print the table, write the file."""
    options = _options()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    from benchmarks.finetuning.runs import Task, make_base  # noqa: PLC0415 - processes take their threads from it
    from benchmarks.training_speed.peers import TRANSFORMERS, state_of_peers  # noqa: PLC0415
    from benchmarks.training_speed.runs import RunFailedError  # noqa: PLC0415

    shape = QUICK if options.quick else SHAPE
    peers = state_of_peers(options.peer_python, "cpu")[TRANSFORMERS]
    with tempfile.TemporaryDirectory(prefix="tuning-") as scratch:
        task = Task(
            base=make_base(Path(scratch, "base"), shape, options.length),
            vocabulary=shape["vocab_size"],
            length=options.length,
            samples=options.samples,
            steps=options.steps,
            rank=16,
            alpha=32.0,
            targets=(),
        )
        try:
            found, weighed = _measure(task, options, peer="missing" not in peers, scratch=Path(scratch))
        except RunFailedError as error:
            print(error, file=sys.stderr)
            return 1
    report = {
        "benchmark": "finetuning",
        "date": time.strftime("%Y-%m-%d"),
        "quick": options.quick,
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "load": os.getloadavg()[0],
            "threads": options.threads,
        },
        "peer": peers,
        "settings": {"model": shape, "length": options.length, "samples": options.samples, "rounds": options.rounds},
        "goals": GOALS,
        "runs": found,
        "rows": [_row(name, found, weighed.get(name)) for name in (*ADAPTERS, FULL)],
    }
    for row in report["rows"]:
        print(json.dumps(row), flush=True)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks.finetuning", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    peers = os.environ.get("PEER_PYTHON", sys.executable)
    parser.add_argument("--peer-python", default=peers, help="the interpreter that has peft (PEER_PYTHON)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each")
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps of a run, the first three not counted")
    parser.add_argument("--length", type=int, default=256, help="tokens of a sample")
    parser.add_argument("--samples", type=int, default=4, help="samples of a step")
    parser.add_argument("--threads", type=int, default=1, help="of the process; of several, some only wait")
    parser.add_argument("--quick", action="store_true", help="one short run of a tiny model: whether it works")
    parser.add_argument("--json", type=Path, default=Path("out/bench/finetuning.json"))
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.steps, options.length = 1, 6, 64
    return options


def _measure(
    task: Any, options: argparse.Namespace, *, peer: bool, scratch: Path
) -> tuple[dict[str, dict[str, Any]], dict[str, tuple[int, int]]]:
    """Figures of each kind of run, and bytes of a checkpoint's files and numbers by adapter. Raises RunFailedError."""
    from benchmarks.finetuning.runs import checkpoint_bytes, run_ours, run_peer  # noqa: PLC0415 - see `main`
    from benchmarks.training_speed.runs import WARM_STEPS, text_file  # noqa: PLC0415

    tasks = {FULL: task} | {name: replace(task, targets=targets) for name, targets in ADAPTERS.items()}
    (scratch / "text").mkdir()
    text = text_file(scratch / "text")
    found: dict[str, list[Any]] = {}
    weighed: dict[str, tuple[int, int]] = {}
    for number in range(options.rounds):
        for name, each in tasks.items():
            for who in ("ours", "peer") if peer else ("ours",):
                pair = []
                for steps in (WARM_STEPS, each.steps):
                    run = replace(each, steps=steps)
                    with tempfile.TemporaryDirectory(dir=scratch) as folder:
                        if who == "ours":
                            pair.append(run_ours(run, Path(folder), text))
                            if name != FULL:
                                weighed[name] = checkpoint_bytes(Path(folder))
                        else:
                            pair.append(run_peer(run, Path(folder), options.peer_python))
                found.setdefault(f"{name}: {who}", []).append(tuple(pair))
                speed = _speed(each, *pair)
                print(f"round {number + 1}, {name}, {who}: {speed:.3f} samples per processor second", flush=True)
    return {name: _figures(task, pairs) for name, pairs in found.items()}, weighed


def _speed(task: Any, short: Any, long: Any) -> float:
    """Samples per second of processor time, of the steps that the long run has more than the short one."""
    from benchmarks.training_speed.runs import WARM_STEPS  # noqa: PLC0415 - see `main`

    return float(task.samples * (task.steps - WARM_STEPS) / (long.processor_seconds - short.processor_seconds))


def _figures(task: Any, pairs: list[Any]) -> dict[str, Any]:
    speeds = [_speed(task, *pair) for pair in pairs]
    longs = [long for _, long in pairs]
    return {
        "samplesPerProcessorSecond": round(statistics.median(speeds), 4),
        "values": [round(speed, 4) for speed in speeds],
        "samplesPerSecond": round(statistics.median(task.samples / statistics.median(run.seconds) for run in longs), 4),
        "hostBytes": max(run.host_bytes for run in longs),
    }


def _row(name: str, found: dict[str, dict[str, Any]], weighed: tuple[int, int] | None) -> dict[str, Any]:
    """What the goals are about, for one choice of targets; for full fine-tuning what it is beside the peer's."""
    ours, full, peer = found[f"{name}: ours"], found[f"{FULL}: ours"], found.get(f"{name}: peer")
    row: dict[str, Any] = {"trained": name, "ours": ours["samplesPerProcessorSecond"]}
    if weighed is not None:
        files, numbers = weighed
        row |= {
            "overFull": _ratio(ours, full),
            "overFullByRound": _by_round(ours, full),
            "checkpointBytes": files,
            "checkpointRatio": round(files / numbers, 4),
        }
    if peer is not None:
        row |= {
            "peer": peer["samplesPerProcessorSecond"],
            "overPeer": _ratio(ours, peer),
            "overPeerByRound": _by_round(ours, peer),
            "peerOverItsFull": _ratio(peer, found[f"{FULL}: peer"]),
            "memoryRatio": round(ours["hostBytes"] / peer["hostBytes"], 3),
        }
    return row


def _ratio(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The median of the rounds' ratios."""
    return round(statistics.median(_by_round(one, other)), 3)


def _by_round(one: dict[str, Any], other: dict[str, Any]) -> list[float]:
    return [round(own / others, 3) for own, others in zip(one["values"], other["values"], strict=True)]


if __name__ == "__main__":
    sys.exit(main())

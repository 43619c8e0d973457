"""Compare speed and memory of the trainer with `transformers.Trainer`: `python -m benchmarks.training_speed`.

    python -m benchmarks.training_speed [--peer-python VENV/bin/python] [--modes plain,lora] [--ranks 1 2] [--quick]

Both train a Llama of one shape from random weights with AdamW, clipping and a cosine, on as many processes, with
torch's fused kernels; in the mode `lora` a LoRA adapter of rank 16 on all projections, by the peer with peft. The
second peer is the first with its `torch_compile`. Runs alternate, so that other load of the machine affects all
equally; a figure is the median of the runs' median steps. The peer needs transformers, accelerate and peft in the
interpreter of `--peer-python`; if they are missing there, this is reported and only our trainer is measured.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml

from benchmarks.harness.conditions import read_versions, write_report
from benchmarks.harness.figures import create_parser
from benchmarks.harness.ranks import THREAD_VARIABLES, RunFailedError
from benchmarks.training_speed.runs import (
    WARM_STEPS,
    Result,
    Task,
    create_base,
    run_peer,
    run_trainer,
    write_text,
)

if TYPE_CHECKING:
    import argparse

_PEER = "transformers.Trainer"
_REQUIRED_PACKAGES = ("transformers", "accelerate", "peft", "torch")
_TASKS: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("tasks.yaml").read_text())
MODES: dict[str, dict[str, Any]] = _TASKS["modes"]
MEMORY_GOAL = 1.0


def main() -> int:
    """Run the benchmark, print the table and write the file."""
    options = _parse_options()
    unknown = set(options.modes.split(",")) - set(MODES)
    if unknown:
        print(f"There is no mode {unknown.pop()!r}; there are {', '.join(MODES)}.", file=sys.stderr)
        return 64
    peer = read_versions(options.peer_python, *_REQUIRED_PACKAGES)
    if absent := [name for name in _REQUIRED_PACKAGES if name not in peer]:
        peer["missing"] = f"{' and '.join(absent)} not installed beside the peer"
        print(f"{_PEER} is not measured: {peer['missing']}", flush=True)
    peer_python = None if absent else options.peer_python
    base = Task(
        ranks=1,
        device=options.device,
        model=_TASKS["shapes"]["quick" if options.quick else options.device],
        sequence_length=options.length,
        micro_batch_size=options.micro,
        accumulation=1,
        steps=options.steps,
        half=options.half,
        sharded=False,
        recompute=False,
        compiled=False,
    )
    rows = [
        _run_mode(mode, replace(base, ranks=ranks, **MODES[mode]), options, peer_python)
        for ranks in options.ranks
        for mode in options.modes.split(",")
        if not (mode == "sharded" and ranks == 1)
    ]
    settings = {"model": base.model, "length": base.sequence_length, "micro": base.micro_batch_size, "half": base.half}
    write_report(
        options.json,
        "training_speed",
        quick=options.quick,
        device=options.device,
        software={"threads": THREAD_VARIABLES["OMP_NUM_THREADS"], "torch": torch.__version__},
        settings=settings | {"steps": base.steps, "rounds": options.rounds},
        goals={"speed": _TASKS["speed_goals"][options.device], "memory": MEMORY_GOAL},
        peers={_PEER: peer},
        rows=rows,
    )
    return int(any("error" in row for row in rows))


def _parse_options() -> argparse.Namespace:
    parser = create_parser("training_speed", __doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    peers = os.environ.get("PEER_PYTHON", sys.executable)
    parser.add_argument("--peer-python", default=peers, help="the interpreter that has the peers (PEER_PYTHON)")
    parser.add_argument("--modes", default=",".join(MODES), help=f"some of {','.join(MODES)}")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=3, help="runs of each trainer")
    parser.add_argument("--steps", type=int, default=15, help="optimizer steps of a run")
    parser.add_argument("--length", type=int, default=256, help="tokens of a sample")
    parser.add_argument("--micro", type=int, default=8, help="samples of a micro-batch")
    parser.add_argument("--half", action="store_true", help="bfloat16 in all modes, which is what devices train in")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="A.B=C", help="of our trainer")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.steps, options.length = 1, WARM_STEPS + 3, 64
    if options.steps <= WARM_STEPS:
        parser.error(f"--steps is {options.steps}: the first {WARM_STEPS} are not counted; give more")
    return options


def _run_mode(mode: str, task: Task, options: argparse.Namespace, peer_python: str | None) -> dict[str, Any]:
    """Run the trainers in turn and print a line."""
    row: dict[str, Any] = {"mode": mode, "ranks": task.ranks, "tokensPerStep": task.tokens}
    results: dict[str, list[Result]] = {"ours": [], "peer": [], "compiledPeer": []}
    try:
        for _ in range(options.rounds):
            with tempfile.TemporaryDirectory(prefix="speed-") as scratch:
                folders = {name: Path(scratch, name) for name in ("text", "base", *results)}
                for folder in folders.values():
                    folder.mkdir()
                text = write_text(folders["text"])
                round_task = replace(task, base=create_base(task, folders["base"], text)) if task.lora else task
                results["ours"].append(run_trainer(round_task, folders["ours"], text, options.overrides))
                if peer_python is None:
                    continue
                results["peer"].append(run_peer(round_task, folders["peer"], peer_python))
                if not task.compiled:
                    compiled = replace(round_task, compiled=True)
                    results["compiledPeer"].append(run_peer(compiled, folders["compiledPeer"], peer_python))
    except RunFailedError as error:
        print(f"{mode}, {task.ranks} ranks: {error}", file=sys.stderr, flush=True)
        return row | {"error": str(error)}
    row |= {name: _summarize(task, runs) for name, runs in results.items() if runs}
    ours = row["ours"]
    summary = f"{mode:12} {task.ranks} ranks: {ours['tokensPerSecond']:9.0f} tokens/s"
    for name, title in (("peer", _PEER), ("compiledPeer", "with torch_compile")):
        if name not in row:
            continue
        memory = "deviceBytes" if task.device == "cuda" else "hostBytes"
        row[name] |= {
            "speedRatio": round(ours["tokensPerSecond"] / row[name]["tokensPerSecond"], 3),
            "bestRatio": round(ours["best"] / row[name]["best"], 3),
            "memoryRatio": round(ours[memory] / row[name][memory], 3),
        }
        summary += (
            f", {title} {row[name]['tokensPerSecond']:9.0f}: {row[name]['speedRatio']:.2f} x "
            f"(best steps {row[name]['bestRatio']:.2f} x), memory {row[name]['memoryRatio']:.2f} x"
        )
    print(summary, flush=True)
    return row


def _summarize(task: Task, results: list[Result]) -> dict[str, Any]:
    speeds = [result.compute_speed(task.tokens) for result in results]
    return {
        "tokensPerSecond": round(statistics.median(speeds), 1),
        "values": [round(speed, 1) for speed in speeds],
        "best": round(task.tokens / min(min(result.seconds) for result in results), 1),
        "hostBytes": max(result.host_bytes for result in results),
        "deviceBytes": max(result.device_bytes for result in results),
    }


if __name__ == "__main__":
    sys.exit(main())

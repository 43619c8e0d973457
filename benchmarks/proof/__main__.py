"""`make proof`: kills real ranks at seeded points until so many were struck, and writes what became of them.

    python -m benchmarks.proof [--points 200] [--seed 0] [--json FILE] [--document FILE] [--folder DIR]

A point counts when a rank died there. A trial that fails leaves its folder (logs, metrics, checkpoints) where it is.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.proof.families import FAMILIES, GLOBAL_BATCH, SAVE_EVERY, STEPS, trial
from benchmarks.proof.stage import Stage, Verdict
from benchmarks.proof.strike import Point

ROOT = Path(__file__).parents[2]


def main() -> int:
    """Play, judge, write; 1 when a promise was broken."""
    parser = argparse.ArgumentParser(prog="benchmarks.proof", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--points", type=int, default=200, help="ranks that have to die where they should")
    parser.add_argument("--seed", type=int, default=0, help="of the first trial")
    parser.add_argument("--json", type=Path, default=ROOT / "out/bench/recovery_proof.json")
    parser.add_argument("--document", type=Path, help="write the table as markdown, too")
    parser.add_argument("--folder", type=Path, help="for the runs; a temporary one by default")
    options = parser.parse_args()
    began = time.time()
    verdicts: list[Verdict] = []
    folder = options.folder or Path(tempfile.mkdtemp(prefix="recovery-proof-"))
    with Stage(folder) as stage:
        seed = options.seed
        while sum(verdict.struck for verdict in verdicts) < options.points:
            verdicts.append(stage.play(trial(seed)))
            seed += 1
            _tell(verdicts[-1], sum(verdict.struck for verdict in verdicts), options.points)
    report = summary(verdicts, options.seed, time.time() - began)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(report, indent=2) + "\n")
    if options.document:
        options.document.write_text(document(report))
    print(document(report))
    return 1 if report["wrong"] else 0


def summary(verdicts: list[Verdict], seed: int, seconds: float) -> dict[str, Any]:
    """The figures by family and point, and every trial that broke a promise."""
    cells: list[dict[str, Any]] = []
    for family in FAMILIES:
        for point in Point:
            ours = [each for each in verdicts if (each.family, each.point) == (family.name, point.value)]
            lost = [steps for each in ours for steps in each.lost]
            cells.append(
                {
                    "family": family.name,
                    "point": point.value,
                    "trials": len(ours),
                    "struck": sum(each.struck for each in ours),
                    "mostLost": max(lost, default=None),
                    "meanLost": round(sum(lost) / len(lost), 2) if lost else None,
                    "wrong": sum(bool(each.wrong) for each in ours),
                }
            )
    return {
        "benchmark": "recovery_proof",
        "firstSeed": seed,
        "trials": len(verdicts),
        "points": sum(verdict.struck for verdict in verdicts),
        "seconds": round(seconds, 1),
        "steps": STEPS,
        "saveEvery": SAVE_EVERY,
        "globalBatch": GLOBAL_BATCH,
        "cells": cells,
        "wrong": [asdict(verdict) for verdict in verdicts if verdict.wrong],
    }


def document(report: dict[str, Any]) -> str:
    """The table for docs/recovery-proof.md."""
    lines = [
        "# Recovery proof",
        "",
        "Written by `make proof`; do not edit. Ranks of a small model are forked as an agent forks them, and",
        "one is killed (SIGKILL) at a seeded instant of its work; where the row says so its node's memory is lost too.",
        "The run is started again until it ends. Held to: at most the promised steps are lost; the losses are those of",
        "an undisturbed run, bit for bit at one size and within 1e-5 across sizes; every sample is recorded exactly",
        "once, in its step; every committed checkpoint is whole by its digests.",
        "",
        _head(report),
        "",
        "| layout | promised at most | " + " | ".join(point.value for point in Point) + " |",
        "|---|---|" + "---|" * len(Point),
    ]
    cells = {(cell["family"], cell["point"]): cell for cell in report["cells"]}
    for family in FAMILIES:
        sizes = " → ".join(layout.name for layout in family.lives)
        shown = [_cell(cells[family.name, point.value]) for point in Point]
        lines.append(f"| {family.what}: {sizes} | {family.promise} | " + " | ".join(shown) + " |")
    lines += [
        "",
        "A cell: kills there, and the steps that the worst and the average of them cost. Step: anywhere in a training",
        "step. Staging: while the state is copied, sealed, or passed on to a buddy. Writing: in a file of a durable",
        "checkpoint. Commit: around manifest, receipt and the removal of older checkpoints. Load: while a run that was",
        "killed in a step (counted too) restores its state. A second node that is lost then may have held the copy of",
        "the first one's part of a divided state: what is promised is then the newest commit.",
        "",
    ]
    return "\n".join(lines)


def _head(report: dict[str, Any]) -> str:
    return (
        f"{report['points']} kills in {report['trials']} runs of {report['steps']} steps (a durable save every "
        f"{report['saveEvery']}, a snapshot every step where there is a memory tier); "
        f"{len(report['wrong'])} runs in which anything was wrong."
    )


def _cell(cell: dict[str, Any]) -> str:
    if not cell["struck"]:
        return "-"
    lost = "" if cell["mostLost"] is None else f": {cell['mostLost']} / {cell['meanLost']}"
    wrong = f", **{cell['wrong']} wrong**" if cell["wrong"] else ""
    return f"{cell['struck']}{lost}{wrong}"


def _tell(verdict: Verdict, struck: int, wanted: int) -> None:
    lives = ", ".join(f"{life.layout} from {life.resumed} to {life.completed}" for life in verdict.lives)
    wrong = "".join(f"\n    WRONG: {text}" for text in verdict.wrong)
    line = f"{struck:>4}/{wanted} seed {verdict.seed} {verdict.family}, {verdict.point}: {lives}; lost {verdict.lost}"
    print(line + wrong, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())

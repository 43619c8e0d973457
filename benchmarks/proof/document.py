"""PURE. The figures of a suite by family and point, and its section of docs/recovery-proof.md."""

from __future__ import annotations

from dataclasses import asdict
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.proof.families import Suite
    from benchmarks.proof.judge import Verdict

_UNEVEN_HEAD = "## Where the batch does not come out even"
_TUNING_HEAD = "## Fine-tuning"
_HEAD = """# Recovery proof

Written by `make proof`; do not edit. Ranks of a small model are forked as an agent forks them, and
one is killed (SIGKILL) at a seeded instant of its work; where the row says so its node's memory is lost too.
The run is started again until it ends. Held to: at most the promised steps are lost; the losses are those of
an undisturbed run, bit for bit at one size and within 1e-5 across sizes; every sample is recorded exactly
once, in its step; every committed checkpoint is whole by its digests.
"""
_FOOT = """A cell: kills there, and the steps that the worst and the average of them cost. Step: anywhere in a training
step. Staging: while the state is copied, sealed, or passed on to a buddy. Writing: in a file of a durable
checkpoint. Commit: around manifest, receipt and the removal of older checkpoints. Load: while a run that was
killed in a step restores its state. A second node that is lost then may have held the copy of
the first one's part of a divided state: what is promised is then the newest commit.
"""
_UNEVEN_TEXT = f"""{_UNEVEN_HEAD}

Written by `make proof ARGS=--uneven`. A step has five samples, one a rank and pass, so at every size here the last
pass leaves ranks without a sample: at dp 2, 3 and 6 one, at dp 4 three; at dp 6 that rank has none in the whole step.
Held to the same.
"""
_UNEVEN_FOOT = "Cells and columns are those of the table above.\n"
_TUNING_TEXT = f"""{_TUNING_HEAD}

Written by `make proof ARGS=--tuning`. LoRA with dropout 0.1 on a small base that `transformers` made, over prompts and
answers of which only the answers count, in epochs whose last batch is filled up with masked samples; the checkpoints
hold the adapters alone. After the last step the ranks write adapter and merged model (in as many files as there are
ranks), and measure them beside the base. Held to all of the above, and besides: every example is recorded exactly once
an epoch; adapter, merged model and figures are those of an undisturbed run, bit for bit where all steps were made at
one size (whatever sizes wrote and measured) and within 1e-4 across sizes; a kill after the last step costs no step;
after every kill, what looks complete is whole, and what was whole is never written again; where there are milestones,
each has artifacts of its own numbers in the end.
"""
_TUNING_FOOT = """Export: in a data file of an artifact, around its plan, receipts, companions, manifest and commit, in
the merge of a weight, in a gather of the ranks. Evaluate: while a model is loaded or asked, in a gather, around the
result and the table in the model cards. Runs with several kills were first killed in a step in half of these cases.
Where there are milestones, an export may be one of theirs, while steps go on: then the newest commit is promised.
The other columns are those of the first table.
"""

_HEADS = {"pretraining": "# Recovery proof\n", "uneven": _UNEVEN_HEAD, "tuning": _TUNING_HEAD}
"""What the part of each suite begins with, in the order of the page."""
_TEXTS = {
    "pretraining": (_HEAD, _FOOT),
    "uneven": (_UNEVEN_TEXT, _UNEVEN_FOOT),
    "tuning": (_TUNING_TEXT, _TUNING_FOOT),
}


def summary(verdicts: Sequence[Verdict], suite: Suite, seed: int, seconds: float) -> dict[str, Any]:
    """The figures by family and point, and every trial that broke a promise."""
    cells: list[dict[str, Any]] = []
    for family in suite.families:
        for point in suite.points:
            ours = [verdict for verdict in verdicts if verdict.family == family.name]
            lost = [each.steps for verdict in ours for each in verdict.lost if each.point == point]
            lives = [life for verdict in ours for life in verdict.lives if life.point == point]
            cells.append(
                {
                    "family": family.name,
                    "point": point.value,
                    "lives": len(lives),
                    "struck": sum(life.struck for life in lives),
                    "mostLost": max(lost, default=None),
                    "meanLost": round(sum(lost) / len(lost), 2) if lost else None,
                }
            )
    return {
        "benchmark": "recovery_proof",
        "suite": suite.name,
        "firstSeed": seed,
        "trials": len(verdicts),
        "points": sum(verdict.struck for verdict in verdicts),
        "seconds": round(seconds, 1),
        "steps": suite.steps,
        "saveEvery": suite.save_every,
        "globalBatch": suite.global_batch,
        "cells": cells,
        "waited": sum(verdict.waited for verdict in verdicts),
        "wrong": [asdict(verdict) for verdict in verdicts if verdict.wrong],
    }


def section(report: dict[str, Any], suite: Suite) -> str:
    """The suite's part of the document."""
    head, foot = _TEXTS[suite.name]
    lines = [
        head,
        _figures(report),
        "",
        "| layout | promised at most | " + " | ".join(point.value for point in suite.points) + " |",
        "|---|---|" + "---|" * len(suite.points),
    ]
    cells = {(cell["family"], cell["point"]): cell for cell in report["cells"]}
    for family in suite.families:
        sizes = " → ".join(layout.name for layout in family.lives)
        shown = [_cell(cells[family.name, point.value]) for point in suite.points]
        lines.append(f"| {family.what}: {sizes} | {family.promise} | " + " | ".join(shown) + " |")
    return "\n".join([*lines, "", foot])


def placed(document: str, part: str, suite: Suite) -> str:
    """The document with a suite's part in place of the earlier one; those of the other suites stay as they are."""
    parts = dict.fromkeys(_HEADS, "")
    starts = sorted((at, name) for name, head in _HEADS.items() if (at := document.find(head)) >= 0)
    for (at, name), (end, _) in pairwise([*starts, (len(document), "")]):
        parts[name] = document[at:end]
    parts[suite.name] = part
    return "\n\n".join(each.strip() for each in parts.values() if each.strip()) + "\n"


def _figures(report: dict[str, Any]) -> str:
    count = report["waited"]
    waited = f" {count} ranks that waited for a dead one were ended after a minute, as agents do." if count else ""
    return (
        f"{report['points']} kills in {report['trials']} runs of {report['steps']} steps (a durable save every "
        f"{report['saveEvery']}, a snapshot every step where there is a memory tier); "
        f"{len(report['wrong'])} runs in which anything was wrong.{waited}"
    )


def _cell(cell: dict[str, Any]) -> str:
    if not cell["struck"]:
        return "-"
    lost = "" if cell["mostLost"] is None else f": {cell['mostLost']} / {cell['meanLost']}"
    return f"{cell['struck']}{lost}"

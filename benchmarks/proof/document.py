"""PURE. The figures of a suite by family and point, and its section of docs/recovery-proof.md."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.proof.families import Suite
    from benchmarks.proof.judge import Verdict

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
The other columns are those of the table above.
"""


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
    lines = [
        _TUNING_TEXT if suite.tunes else _HEAD,
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
    return "\n".join([*lines, "", _TUNING_FOOT if suite.tunes else _FOOT])


def placed(document: str, part: str, suite: Suite) -> str:
    """The document with a suite's part in place of the earlier one; the other suite's stays as it is."""
    at = document.find(_TUNING_HEAD)
    pretraining, tuning = (document, "") if at < 0 else (document[:at], document[at:])
    if suite.tunes:
        tuning = part
    else:
        pretraining = part
    return "\n\n".join(each.strip() for each in (pretraining, tuning) if each.strip()) + "\n"


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

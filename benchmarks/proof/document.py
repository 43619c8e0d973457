"""Summarize the results of a suite by family and point, and write its section of recovery-proof.md."""

from __future__ import annotations

from dataclasses import asdict
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.proof.checks import TrialResult
    from benchmarks.proof.suites import Suite

_UNEVEN_HEADING = "## Batches that are not divisible"
_TUNING_HEADING = "## Fine-tuning"
_PREFERENCES_HEADING = "## Preferences"
_INTRODUCTION = """# Recovery proof

Written by `make proof`; do not edit. Ranks of a small model are forked as an agent forks them. One of them is killed
(SIGKILL) at a seeded point of its work; in some rows the memory of its node is lost too. The run is started again
until it ends. Then these conditions must hold:

- at most the allowed steps are lost;
- the losses are those of an undisturbed run, bit for bit at one size and within 1e-5 across sizes;
- every sample is recorded exactly once, in its step;
- every committed checkpoint is complete by its digests.
"""
_NOTES = """A cell has the number of kills, and the maximum and mean number of steps that they cost.

- Step: anywhere in a training step.
- Staging: while the state is copied, committed in memory, or sent to a buddy.
- Writing: in a file of a durable checkpoint.
- Commit: around manifest, receipt and the removal of older checkpoints.
- Load: while a run that was killed in a step restores its state. If a second node fails then, it may have held the copy
  of the first one's shard; the newest commit is the allowed loss.
"""
_UNEVEN_INTRODUCTION = f"""{_UNEVEN_HEADING}

Written by `make proof ARGS=--uneven`. A step has five samples, one for each rank and pass. At every size here the last
pass leaves ranks without a sample: one at dp 2, 3 and 6, three at dp 4. At dp 6 that rank has none in the whole step.
The conditions are the same.
"""
_UNEVEN_NOTES = "Cells and columns are those of the table above.\n"
_TUNING_INTRODUCTION = f"""{_TUNING_HEADING}

Written by `make proof ARGS=--tuning`. LoRA with dropout 0.1 on a small base from `transformers`, over prompts and
answers of which only the answers count, in epochs whose last batch has masked samples. Checkpoints hold the adapters
alone. After the last step the ranks write adapter and merged model (in as many files as there are ranks), and evaluate
them beside the base. In addition to the conditions above:

- every example is recorded exactly once in an epoch;
- adapter, merged model and figures are those of an undisturbed run: bit for bit if all steps were made at one size,
  else within 1e-4;
- a kill after the last step costs no step;
- after every kill, what looks complete is complete, and no complete file is written again;
- each milestone has artifacts of its weights.
"""
_TUNING_NOTES = """- Export: in a data file of an artifact; around its plan, receipts, companions, manifest and
  commit; in the merge of a weight; in a gather. With milestones, an export may be one of theirs while steps continue;
  then the newest commit is the allowed loss.
- Evaluate: while a model is loaded or asked, in a gather, around the result and the table in the model cards.
- In half of the runs with several kills, the first kill is in a step.

The other columns are those of the first table.
"""

_PREFERENCES_INTRODUCTION = f"""{_PREFERENCES_HEADING}

Written by `make proof ARGS=--preferences`. DPO trains all weights of a small base from `transformers` on pairs of
answers, beside log-probabilities that the base gave before the first step. The conditions are those of the first table.
"""

_FIRST_LINES = {
    "pretraining": "# Recovery proof\n",
    "uneven": _UNEVEN_HEADING,
    "tuning": _TUNING_HEADING,
    "preferences": _PREFERENCES_HEADING,
}
"""First line of the section of each suite, in the order of the page."""
_TEXTS = {
    "pretraining": (_INTRODUCTION, _NOTES),
    "uneven": (_UNEVEN_INTRODUCTION, _UNEVEN_NOTES),
    "tuning": (_TUNING_INTRODUCTION, _TUNING_NOTES),
    "preferences": (_PREFERENCES_INTRODUCTION, "Cells and columns are those of the first table.\n"),
}


def summarize(results: Sequence[TrialResult], suite: Suite, seed: int, seconds: float) -> dict[str, Any]:
    """Summarize results by family and point, with every trial that failed."""
    cells: list[dict[str, Any]] = []
    for scenario in suite.scenarios:
        for point in suite.points:
            matching = [result for result in results if result.scenario == scenario.name]
            lost = [kill.steps for result in matching for kill in result.lost if kill.point == point]
            attempts = [attempt for result in matching for attempt in result.attempts if attempt.point == point]
            cells.append(
                {
                    "family": scenario.name,
                    "point": point.value,
                    "attempts": len(attempts),
                    "killed": sum(attempt.killed for attempt in attempts),
                    "mostLost": max(lost, default=None),
                    "meanLost": round(sum(lost) / len(lost), 2) if lost else None,
                }
            )
    return {
        "benchmark": "recovery_proof",
        "suite": suite.name,
        "firstSeed": seed,
        "trials": len(results),
        "points": sum(result.killed for result in results),
        "seconds": round(seconds, 1),
        "steps": suite.steps,
        "saveEvery": suite.save_every,
        "globalBatch": suite.global_batch,
        "cells": cells,
        "waited": sum(result.waited for result in results),
        "deviations": [asdict(result) for result in results if result.deviations],
    }


def render_section(report: dict[str, Any], suite: Suite) -> str:
    """Render the section of a suite."""
    introduction, notes = _TEXTS[suite.name]
    lines = [
        introduction,
        _summary(report),
        "",
        "| layout | allowed loss | " + " | ".join(point.value for point in suite.points) + " |",
        "|---|---|" + "---|" * len(suite.points),
    ]
    cells = {(cell["family"], cell["point"]): cell for cell in report["cells"]}
    for scenario in suite.scenarios:
        sizes = " → ".join(layout.name for layout in scenario.attempts)
        row = [_cell(cells[scenario.name, point.value]) for point in suite.points]
        lines.append(f"| {scenario.description}: {sizes} | {scenario.allowed_loss} | " + " | ".join(row) + " |")
    return "\n".join([*lines, "", notes])


def replace_section(document: str, section: str, suite: Suite) -> str:
    """Replace the section of a suite in the page."""
    sections = dict.fromkeys(_FIRST_LINES, "")
    starts = sorted((start, name) for name, line in _FIRST_LINES.items() if (start := document.find(line)) >= 0)
    for (start, name), (end, _) in pairwise([*starts, (len(document), "")]):
        sections[name] = document[start:end]
    sections[suite.name] = section
    return "\n\n".join(text.strip() for text in sections.values() if text.strip()) + "\n"


def _summary(report: dict[str, Any]) -> str:
    count = report["waited"]
    waited = f" {count} ranks that waited for a killed one were terminated after a minute." if count else ""
    return (
        f"{report['points']} kills in {report['trials']} runs of {report['steps']} steps (a durable save every "
        f"{report['saveEvery']}, a snapshot every step where there is a memory tier); "
        f"{len(report['deviations'])} runs with a deviation.{waited}"
    )


def _cell(cell: dict[str, Any]) -> str:
    if not cell["killed"]:
        return "-"
    lost = "" if cell["mostLost"] is None else f": {cell['mostLost']} / {cell['meanLost']}"
    return f"{cell['killed']}{lost}"

"""Summarize the results of a suite by family and point, and write its section of docs/recovery-proof.md."""

from __future__ import annotations

from dataclasses import asdict
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.proof.checks import TrialResult
    from benchmarks.proof.suites import Suite

_UNEVEN_HEAD = "## Batches that are not divisible"
_TUNING_HEAD = "## Fine-tuning"
_PREFERENCES_HEAD = "## Preferences"
_HEAD = """# Recovery proof

Written by `make proof`; do not edit. Ranks of a small model are forked as an agent forks them. One of them is killed
(SIGKILL) at a seeded point of its work; in some rows the memory of its node is lost too. The run is started again
until it ends. Then these conditions must hold:

- at most the allowed steps are lost;
- the losses are those of an undisturbed run, bit for bit at one size and within 1e-5 across sizes;
- every sample is recorded exactly once, in its step;
- every committed checkpoint is complete by its digests.
"""
_FOOT = """A cell has the number of kills, and the maximum and mean number of steps that they cost.

- Step: anywhere in a training step.
- Staging: while the state is copied, committed in memory, or sent to a buddy.
- Writing: in a file of a durable checkpoint.
- Commit: around manifest, receipt and the removal of older checkpoints.
- Load: while a run that was killed in a step restores its state. If a second node fails then, it may have held the copy
  of the first one's shard; the newest commit is the allowed loss.
"""
_UNEVEN_TEXT = f"""{_UNEVEN_HEAD}

Written by `make proof ARGS=--uneven`. A step has five samples, one for each rank and pass. At every size here the last
pass leaves ranks without a sample: one at dp 2, 3 and 6, three at dp 4. At dp 6 that rank has none in the whole step.
The conditions are the same.
"""
_UNEVEN_FOOT = "Cells and columns are those of the table above.\n"
_TUNING_TEXT = f"""{_TUNING_HEAD}

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
_TUNING_FOOT = """- Export: in a data file of an artifact; around its plan, receipts, companions, manifest and
  commit; in the merge of a weight; in a gather. With milestones, an export may be one of theirs while steps continue;
  then the newest commit is the allowed loss.
- Evaluate: while a model is loaded or asked, in a gather, around the result and the table in the model cards.
- In half of the runs with several kills, the first kill is in a step.

The other columns are those of the first table.
"""

_PREFERENCES_TEXT = f"""{_PREFERENCES_HEAD}

Written by `make proof ARGS=--preferences`. DPO trains all weights of a small base from `transformers` on pairs of
answers, beside log-probabilities that the base gave before the first step. The conditions are those of the first table.
"""

_HEADS = {
    "pretraining": "# Recovery proof\n",
    "uneven": _UNEVEN_HEAD,
    "tuning": _TUNING_HEAD,
    "preferences": _PREFERENCES_HEAD,
}
"""First line of the section of each suite, in the order of the page."""
_TEXTS = {
    "pretraining": (_HEAD, _FOOT),
    "uneven": (_UNEVEN_TEXT, _UNEVEN_FOOT),
    "tuning": (_TUNING_TEXT, _TUNING_FOOT),
    "preferences": (_PREFERENCES_TEXT, "Cells and columns are those of the first table.\n"),
}


def summarize(results: Sequence[TrialResult], suite: Suite, seed: int, seconds: float) -> dict[str, Any]:
    """Summarize results by family and point, with every trial that failed."""
    cells: list[dict[str, Any]] = []
    for scenario in suite.scenarios:
        for point in suite.points:
            ours = [result for result in results if result.scenario == scenario.name]
            lost = [each.steps for result in ours for each in result.lost if each.point == point]
            attempts = [attempt for result in ours for attempt in result.attempts if attempt.point == point]
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
    head, foot = _TEXTS[suite.name]
    lines = [
        head,
        _figures(report),
        "",
        "| layout | allowed loss | " + " | ".join(point.value for point in suite.points) + " |",
        "|---|---|" + "---|" * len(suite.points),
    ]
    cells = {(cell["family"], cell["point"]): cell for cell in report["cells"]}
    for scenario in suite.scenarios:
        sizes = " → ".join(layout.name for layout in scenario.attempts)
        shown = [_cell(cells[scenario.name, point.value]) for point in suite.points]
        lines.append(f"| {scenario.what}: {sizes} | {scenario.allowed_loss} | " + " | ".join(shown) + " |")
    return "\n".join([*lines, "", foot])


def replace_section(document: str, part: str, suite: Suite) -> str:
    """Replace the section of a suite in the page."""
    parts = dict.fromkeys(_HEADS, "")
    starts = sorted((at, name) for name, head in _HEADS.items() if (at := document.find(head)) >= 0)
    for (at, name), (end, _) in pairwise([*starts, (len(document), "")]):
        parts[name] = document[at:end]
    parts[suite.name] = part
    return "\n\n".join(each.strip() for each in parts.values() if each.strip()) + "\n"


def _figures(report: dict[str, Any]) -> str:
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

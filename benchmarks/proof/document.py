"""Summarize the results of a suite by family and point, and write its section of recovery-proof.md."""

from __future__ import annotations

from dataclasses import asdict
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from benchmarks.proof.suites import SUITES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.proof.checks import TrialResult
    from benchmarks.proof.suites import Suite


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
    lines = [
        suite.introduction,
        _format_summary(report),
        "",
        "| layout | allowed loss | " + " | ".join(point.value for point in suite.points) + " |",
        "|---|---|" + "---|" * len(suite.points),
    ]
    cells = {(cell["family"], cell["point"]): cell for cell in report["cells"]}
    for scenario in suite.scenarios:
        sizes = " → ".join(layout.name for layout in scenario.attempts)
        row = [_format_cell(cells[scenario.name, point.value]) for point in suite.points]
        lines.append(f"| {scenario.description}: {sizes} | {scenario.allowed_loss} | " + " | ".join(row) + " |")
    return "\n".join([*lines, "", suite.notes])


def replace_section(document: str, section: str, suite: Suite) -> str:
    """Replace the section of a suite in the page."""
    sections = dict.fromkeys(SUITES, "")
    headings = {name: f"{other.introduction.splitlines()[0]}\n" for name, other in SUITES.items()}
    starts = sorted((start, name) for name, line in headings.items() if (start := document.find(line)) >= 0)
    for (start, name), (end, _) in pairwise([*starts, (len(document), "")]):
        sections[name] = document[start:end]
    sections[suite.name] = section
    return "\n\n".join(text.strip() for text in sections.values() if text.strip()) + "\n"


def _format_summary(report: dict[str, Any]) -> str:
    count = report["waited"]
    waited = f" {count} ranks that waited for a killed one were terminated after a minute." if count else ""
    return (
        f"{report['points']} kills in {report['trials']} runs of {report['steps']} steps (a durable save every "
        f"{report['saveEvery']}, a snapshot every step where there is a memory tier); "
        f"{len(report['deviations'])} runs with a deviation.{waited}"
    )


def _format_cell(cell: dict[str, Any]) -> str:
    if not cell["killed"]:
        return "-"
    lost = "" if cell["mostLost"] is None else f": {cell['mostLost']} / {cell['meanLost']}"
    return f"{cell['killed']}{lost}"

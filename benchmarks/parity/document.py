"""Write docs/parity.md and its picture from the results."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

if TYPE_CHECKING:
    from pathlib import Path

_PAGE = """# Parity with the reference

Written by `make parity` from `benchmarks/parity/results.json`, which has a row for each layout; do not edit.

The same initial weights, samples and settings, once in a library in one process and once in this trainer, started as
its users start it, in every layout of the table. The library is `transformers` with torch's AdamW for pretraining,
`transformers.Trainer` with `peft` for fine-tuning and for the families, and trl's `DPOTrainer` for preferences.

A layout passes when the losses of all steps agree within {tolerance:g} relative in float32, all tuned parameters within
{adapterTolerance:g}, and the exported model gives `transformers` the logits that the trainer (pretraining, within
{logitsTolerance:g} of their standard deviation) or `peft`'s merged adapter (fine-tuning, within {mergedTolerance:g})
computes.

{passed} of {count} layouts passed. Model: 4 layers, 64 wide, 4 query and 2 key/value heads, 1,024 tokens, sequences of
64, 8 samples a step, {steps} steps (families {familySteps}). Text: the documentation that ships with Python. Made
{date} with {versions}, trl {trl}, torch {torch}.

![Greatest difference of a loss from the library's, by layout](images/parity.png)

| settings | what is trained | layouts | last loss | difference | parameters | logits | |
|---|---|---|---|---|---|---|---|
{table}

*Difference* is the greatest relative difference of a step's loss, *parameters* of a trained parameter, *logits* of the
model that the library trained from ours, in standard deviations: the worst layout of each. The row of a family has full
training and LoRA (rank 4 and alpha 8 on all projections); its last loss is that of full training. A run that begins
with the adapter that `peft` saved has `peft`'s first loss to {adapters:.0e}.

The learning rate is HLAT's. At 1e-3 two runs of `transformers` itself that differ only in the number of micro-batches
drift 4e-5 apart: embeddings that pass near zero make the first normalization very steep.
"""
_GROUPS = ("settings", "tunings", "preferences", "families")


def write_report(report: dict[str, Any], page: Path, picture: Path) -> None:
    """Write the page and the picture; a failed row is listed with its error."""
    page.parent.mkdir(parents=True, exist_ok=True)
    picture.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(_render_page(report))
    _draw(report, picture)


def _render_page(report: dict[str, Any]) -> str:
    dates = sorted(row["date"] for row in report["rows"])
    return _PAGE.format(
        **report
        | {
            "date": " to ".join(sorted({dates[0], dates[-1]})),
            "torch": " and ".join(sorted({row["torch"] for row in report["rows"]})),
            "versions": ", ".join(f"{name} {version}" for name, version in report["versions"].items()),
            "adapters": max(report["adaptersOfPeft"].values(), default=0.0),
            "passed": sum(row["passed"] for row in report["rows"]),
            "count": len(report["rows"]),
            "table": "\n".join(_render_settings(*group) for group in _join_families(report)),
        }
    )


def _group_rows_by_settings(report: dict[str, Any]) -> list[tuple[str, str, list[dict[str, Any]]]]:
    """Return name, description and rows of the settings that have rows."""
    described = [item for group in _GROUPS for item in report.get(group, {}).items()]
    grouped = [(name, text, [row for row in report["rows"] if row["settings"] == name]) for name, text in described]
    return [group for group in grouped if group[2]]


def _join_families(report: dict[str, Any]) -> list[tuple[str, str, list[dict[str, Any]]]]:
    """Return the settings that have rows, with one entry for full training and LoRA of a family."""
    joined: dict[str, tuple[str, str, list[dict[str, Any]]]] = {}
    for name, text, rows in _group_rows_by_settings(report):
        is_family = name in report.get("families", {})
        family = name.rpartition(", ")[0] if is_family else name
        described = text.partition("; all weights")[0] if is_family else text
        joined.setdefault(family, (family, described, []))[2].extend(rows)
    return list(joined.values())


def _render_settings(name: str, description: str, rows: list[dict[str, Any]]) -> str:
    """Return the line of the settings: the worst layout of each figure, and the rows that failed."""
    failed = [f"**failed**: {row['name']}, {row.get('problem', 'too different')}" for row in rows if not row["passed"]]
    losses = [row["loss"] for row in rows if "loss" in row]
    cells = [name, description, str(len(rows)), f"{losses[0]:.4f}" if losses else ""]
    for figure in ("greatestDifference", "trainedParameters", "trainedLogits"):
        values = [row[figure] for row in rows if figure in row]
        cells.append(f"{max(values):.1e}" if values else "")
    return f"| {' | '.join(cells)} | {'; '.join(failed) or 'passed'} |"


def _draw(report: dict[str, Any], picture: Path) -> None:
    """Draw a line for each settings with a point for each layout, and the allowed difference."""
    groups = [
        (name, [row["greatestDifference"] for row in rows if "loss" in row])
        for name, _, rows in _group_rows_by_settings(report)
    ]
    figure, axes = plt.subplots(figsize=(9, 1.2 + 0.3 * len(groups)), layout="constrained")
    for line, (_, values) in enumerate(groups):
        axes.plot([max(value, 1e-9) for value in values], [line] * len(values), "o", color="C0", alpha=0.6)
    axes.axvline(report["tolerance"], color="C3", label=f"allowed: {report['tolerance']:g}")
    axes.set_xscale("log")
    axes.set_xlabel(
        "greatest relative difference of a step's loss from the library's; a point is a layout", fontsize=11
    )
    axes.set_yticks(range(len(groups)), [name for name, _ in groups], fontsize=11)
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)
    axes.legend(loc="upper right", fontsize=11)
    figure.savefig(picture, dpi=110)
    plt.close(figure)

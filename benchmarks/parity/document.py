"""Write docs/parity.md and its picture from the results."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

if TYPE_CHECKING:
    from pathlib import Path

_INTRODUCTION = """# Parity with the reference

Written by `make parity`; do not edit.

Model: {model}. Text: the
documentation that ships with Python. Made {date} with
{versions}, torch {torch}.

![Loss curves and their differences](images/parity.png)
"""

_PRETRAINING = """## Pretraining

The same initial weights, samples and settings, once in `transformers`' LlamaForCausalLM with its own loss, torch's
AdamW and gradient clipping in one process, and once in this trainer, started as its users start it, in every layout. A
row passes when the losses of all {steps} steps agree within {tolerance:g} relative in float32, and when the last
checkpoint, exported to Hugging Face's form, gives `transformers` the logits that the trainer's own model computes from
it.
"""

_TUNING = """## Fine-tuning

A model that `transformers` trained for a while is tuned on, once by `transformers.Trainer` with `peft` where adapters
are trained, in one process, and once in this trainer, in every layout. Both get the same samples, the same adapter to
begin with, and divide the loss by the learned tokens of the whole batch. A row passes when the losses of all {steps}
steps agree within {tolerance:g} relative, all trained parameters within {adapterTolerance:g}, and when the exported
model gives `transformers` the logits of its adapter as `peft` loads and merges it within {mergedTolerance:g}
of their standard deviation. Examples are made from the docstrings of the standard
library.
"""


_PREFERENCES = """## Preference tuning

The same with pairs of answers, once by trl {trl} and once in this trainer: `DPOTrainer` on the whole batch. Rows have
{steps} steps, and pass by the tolerances of fine-tuning. Pairs are made from the docstrings of the standard library.
"""

_FAMILIES = """## Families

Fine-tuning of a model of each family with random weights, in the same way and with the same tolerances, in
{familySteps} steps of running text.
"""


def write_report(report: dict[str, Any], page: Path, picture: Path) -> None:
    """Write the page and the picture; a failed row is listed with its error."""
    page.parent.mkdir(parents=True, exist_ok=True)
    picture.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(_page(report))
    _draw(report, picture)


def _page(report: dict[str, Any]) -> str:
    dates = sorted(row["date"] for row in report["rows"])
    sections = [
        _INTRODUCTION.format(
            model="4 layers, 64 wide, 4 query and 2 key/value heads, 1,024 tokens, sequences of 64, 8 samples a step",
            date=" to ".join(sorted({dates[0], dates[-1]})),
            torch=" and ".join(sorted({row["torch"] for row in report["rows"]})),
            versions=", ".join(f"{name} {version}" for name, version in report["versions"].items()),
        )
    ]
    run_settings = {row["settings"] for row in report["rows"]}
    if run_settings & report["settings"].keys():
        sections += [_PRETRAINING.format(**report), *_tables(report, "settings"), _PRETRAINING_END]
    tunings = report.get("tunings", {})
    if run_settings & tunings.keys():
        sections += [_TUNING.format(**report), *_tables(report, "tunings"), _TUNING_END]
        differences = _format_differences(report["adaptersOfPeft"])
        sections.append(
            f"The first loss of a run that begins with the adapter that `peft` saved, from `peft`'s: {differences}.\n"
        )
    preferences = report.get("preferences", {})
    if run_settings & preferences.keys():
        sections += [_PREFERENCES.format(**report), *_tables(report, "preferences")]
    families = report.get("families", {})
    if run_settings & families.keys():
        sections += [_FAMILIES.format(**report), *_tables(report, "families")]
    return "\n".join(sections)


def _format_differences(adapters: dict[str, float]) -> str:
    return ", ".join(f"{name} {difference:.1e}" for name, difference in adapters.items()) or "not measured"


def _tables(report: dict[str, Any], group: str) -> list[str]:
    """Return a table for each setting that has rows."""
    tables = []
    for name, description in report[group].items():
        rows = [row for row in report["rows"] if row["settings"] == name]
        if rows:
            tables.append(_table(f"{name}: {description}", rows, _COLUMNS[group]))
    return tables


def _table(title: str, rows: list[dict[str, Any]], columns: dict[str, str]) -> str:
    figures = {heading: name for heading, name in columns.items() if any(name in row for row in rows)}
    fixed = ("data", "tensor", "pipeline", "accumulation", "layout", "last loss", "difference", "at step")
    lines = [
        f"### {title[0].upper()}{title[1:]}",
        "",
        f"| {' | '.join((*fixed, *figures))} | |",
        "|---" * (len(fixed) + len(figures) + 1) + "|",
    ]
    for row in rows:
        layout_names = [f"context {row['context']}"] if row.get("context", 1) > 1 else []
        layout_names += [_LAYOUT_NAMES.get(override, f"`{override}`") for override in row["overrides"]]
        layout = ", ".join(layout_names) or "replicated"
        cells = [*(str(row[name]) for name in fixed[:4]), layout]
        if "loss" not in row:
            lines.append(f"| {' | '.join(cells)} | {row['problem']} {'| ' * (len(figures) + 3)}**failed** |")
            continue
        cells += [f"{row['loss']:.4f}", f"{row['greatestDifference']:.1e}", str(row["step"])]
        cells += [f"{row[name]:.3f}" if name == "accuracy" else f"{row[name]:.1e}" for name in figures.values()]
        lines.append(f"| {' | '.join(cells)} | {'passed' if row['passed'] else '**failed**'} |")
    return "\n".join(lines) + "\n"


_TUNED_COLUMNS = {
    "parameters": "trainedParameters",
    "merged": "mergedLogits",
    "trained": "trainedLogits",
    "accuracy": "accuracy",
}
_COLUMNS = {
    "settings": {"export": "exportedLogits", "trained": "trainedLogits"},
    "tunings": _TUNED_COLUMNS,
    "preferences": _TUNED_COLUMNS,
    "families": _TUNED_COLUMNS,
}
"""Headings and fields of the comparisons; a column without a value is omitted."""

_PRETRAINING_END = """*Difference* is the greatest relative difference of a step's loss from the reference's, with the \
step at which it was found. *Export* is the greatest difference between a logit of our model and that of the exported \
model in `transformers`, *trained* between the exported model's and the model that the reference trained, both in \
standard deviations of the logits.

The learning rate is HLAT's. At 1e-3 two runs of `transformers` itself that differ only in the number of micro-batches \
drift 4e-5 apart, at HLAT's 1e-7: embeddings that pass near zero make the first normalization very steep, and faster \
training moves more of them there.
"""
_TUNING_END = """*Parameters* is the greatest difference between two trained parameters, *merged* between the logits \
of our merged model and those of our adapter in `peft`, *trained* between those of our model and of the one that the \
reference trained, both in standard deviations. *Accuracy* is the share of held-out examples whose label is the \
likeliest answer; the reference's must be the same.
"""

_LAYOUT_NAMES = {
    "dataParallel=FullySharded": "fully sharded",
    "dataParallel=ShardedOptimizer": "optimizer sharded",
    "parallelism.sequence=true": "sequence parallel",
    "recompute=Selective": "selective recompute",
    "recompute=Full": "full recompute",
}


def _draw(report: dict[str, Any], picture: Path) -> None:
    figure, (curves, differences) = plt.subplots(2, 1, figsize=(8, 6), sharex=True, layout="constrained")
    for number, (name, losses) in enumerate(report["references"].items()):
        rows = [row for row in report["rows"] if row["settings"] == name and "losses" in row]
        steps = range(1, len(losses) + 1)
        for row in rows:
            curves.plot(steps, row["losses"], color=f"C{number}", linewidth=0.8)
            relative = [max(abs(a - b) / b, 1e-9) for a, b in zip(row["losses"], losses, strict=True)]
            differences.plot(steps, relative, color=f"C{number}", linewidth=0.6)
        curves.plot(
            steps, losses, color="black", linestyle=":", linewidth=1.6, label="reference" if number == 0 else None
        )
        curves.plot([], [], color=f"C{number}", label=f"{name}: {len(rows)} layouts")
    differences.axhline(report["tolerance"], color="black", linewidth=0.8)
    differences.text(1, report["tolerance"] * 1.2, "bound", fontsize=8)
    curves.set_ylabel("training loss")
    curves.legend(ncols=2, fontsize=7)
    differences.set_yscale("log")
    differences.set_ylabel("relative difference")
    differences.set_xlabel("step")
    figure.savefig(picture, dpi=110)
    plt.close(figure)

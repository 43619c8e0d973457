"""docs/parity.md and its picture, from the results alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

if TYPE_CHECKING:
    from pathlib import Path

_HEAD = """# Parity with the reference

Written by `make parity`; do not edit.

The same initial weights, samples and settings, once in `transformers`' LlamaForCausalLM with its own loss, torch's
AdamW and gradient clipping in one process, and once in this trainer, started as its users start it, in every layout. A
row passes when the losses of all {steps} steps agree within {tolerance:g} relative in float32, and when the last
checkpoint, exported to Hugging Face's form, gives `transformers` the logits that the trainer's own model computes from
it.

Model: {model}. Text: the documentation that ships with Python. Made {date} with torch {torch} and transformers
{transformers} on {machine}.

![Loss curves and their differences](images/parity.png)

"""


def write(report: dict[str, Any], page: Path, picture: Path) -> None:
    """Write both; a row that failed is in them with its problem."""
    page.parent.mkdir(parents=True, exist_ok=True)
    picture.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(_page(report))
    _draw(report, picture)


def _page(report: dict[str, Any]) -> str:
    head = _HEAD.format(
        steps=report["steps"],
        tolerance=report["tolerance"],
        model="4 layers, 64 wide, 4 query and 2 key/value heads, 1,024 tokens, sequences of 64, 8 samples a step",
        date=report["date"],
        machine=report["machine"],
        **report["versions"],
    )
    parts = [head]
    for name, about in report["settings"].items():
        rows = [row for row in report["rows"] if row["settings"] == name]
        if rows:
            parts.append(_table(f"{name}: {about}", rows))
    parts.append(
        "*Difference* is the greatest relative difference of a step's loss from the reference's, with the step at "
        "which it was found. *Export* is the greatest difference between a logit of our model and that of the exported "
        "model in `transformers`, *trained* between the exported model's and the model that the reference "
        "trained, both in standard deviations of the logits.\n\n"
        "The learning rate is HLAT's. At 1e-3 two runs of `transformers` itself that differ only in the number of "
        "micro-batches drift 4e-5 apart, at HLAT's 1e-7: embeddings that pass near zero make the first normalisation "
        "very steep, and faster training brings more of them there.\n"
    )
    return "\n".join(parts)


def _table(title: str, rows: list[dict[str, Any]]) -> str:
    lines = [
        f"## {title[0].upper()}{title[1:]}",
        "",
        "| data | tensor | pipeline | accumulation | layout | last loss | difference | at step | export | trained | |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        layout = ", ".join(_WORDS.get(override, f"`{override}`") for override in row["overrides"]) or "replicated"
        start = f"| {row['data']} | {row['tensor']} | {row['pipeline']} | {row['accumulation']} | {layout} |"
        if "loss" not in row:
            lines.append(f"{start} {row['problem']} | | | | | **failed** |")
            continue
        verdict = "passed" if row["passed"] else "**failed**"
        lines.append(
            f"{start} {row['loss']:.4f} | {row['greatestDifference']:.1e} | {row['step']} | "
            f"{row['exportedLogits']:.1e} | {row['trainedLogits']:.1e} | {verdict} |"
        )
    return "\n".join(lines) + "\n"


_WORDS = {
    "dataParallel=FullySharded": "fully sharded",
    "dataParallel=ShardedOptimizer": "optimizer sharded",
    "parallelism.sequence=true": "sequence parallel",
    "recompute=Selective": "selective recompute",
    "recompute=Full": "full recompute",
}


def _draw(report: dict[str, Any], picture: Path) -> None:
    figure, (curves, differences) = plt.subplots(2, 1, figsize=(8, 6), sharex=True, layout="constrained")
    steps = range(1, report["steps"] + 1)
    for number, (name, losses) in enumerate(report["references"].items()):
        rows = [row for row in report["rows"] if row["settings"] == name and "losses" in row]
        for row in rows:
            curves.plot(steps, row["losses"], color=f"C{number}", linewidth=0.8)
            share = [max(abs(a - b) / b, 1e-9) for a, b in zip(row["losses"], losses, strict=True)]
            differences.plot(steps, share, color=f"C{number}", linewidth=0.6)
        curves.plot(
            steps, losses, color="black", linestyle=":", linewidth=1.6, label="transformers" if number == 0 else None
        )
        curves.plot([], [], color=f"C{number}", label=f"{name}: {len(rows)} layouts")
    differences.axhline(report["tolerance"], color="black", linewidth=0.8)
    differences.text(1, report["tolerance"] * 1.2, "bound", fontsize=8)
    curves.set_ylabel("training loss")
    curves.legend()
    differences.set_yscale("log")
    differences.set_ylabel("relative difference")
    differences.set_xlabel("step")
    figure.savefig(picture, dpi=110)
    plt.close(figure)

"""Write docs/learning.md and its picture from the results."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

if TYPE_CHECKING:
    from pathlib import Path

_NAMES = {"1": "unigrams", "2": "bigrams", "3": "trigrams", "5": "5-grams"}
_FIGURES = ("parameters", "steps", "ranks", "date", "machine", "seconds", "processorSeconds")
_HEAD = """# It learns

Written by `make learn`; do not edit.

A Llama model from random weights, trained for {minutes:.0f} minutes on the documentation that ships with Python,
against interpolated Kneser-Ney n-gram models of the same {training:,} training tokens, all measured on the same
{validation:,} tokens of documents that no model was trained on; only the {vocabSize:,}-piece BPE was made from all of
the text. The model sees at most {sequenceLength} tokens back.

{sentence}

![Validation loss over time](images/learning.png)

| | loss, nats per token | perplexity |
|---|---|---|
"""
_SETTINGS = """
{parameters:,} parameters ({numLayers} layers, {hiddenSize} wide, {numAttentionHeads} heads, tied embeddings), {steps:,}
steps of {batch:,} tokens, {trained:,} tokens in all ({epochs:.1f} epochs); AdamW at {rate:g} after a short warm-up, the
last two fifths of the steps down to {final:.0%} of it; float32, {ranks} process(es). {date}, {machine}, torch {torch},
Python {python}: another build has other documentation, and so other figures. {seconds:.0f} s with {measurements}
validations, {processorSeconds:.0f} s of the processors' time.

| step | seconds | tokens | learning rate | training loss | validation loss | perplexity |
|---|---|---|---|---|---|---|
"""


def write(report: dict[str, Any], page: Path, picture: Path) -> None:
    """Write the page and the picture."""
    picture.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(_page(report))
    _draw(report, picture)


def sentence(report: dict[str, Any]) -> str:
    """Return a sentence about the result."""
    last, before = report["curve"][-1]["validation"], report["curve"][-2]["validation"]
    order = str(report["yardstick"])
    found = (
        f"Its validation loss ends at {last:.3f}, against {report['nGrams'][order]:.3f} for {_NAMES[order]}, "
        f"{before - last:.3f} lower than at the measurement before that."
    )
    return found if report["passed"] else f"NOT REACHED. {found}"


def _page(report: dict[str, Any]) -> str:
    tokens, settings, curve = report["tokens"], report["settings"], report["curve"]
    text = _HEAD.format(
        minutes=report["seconds"] / 60,
        sentence=sentence(report),
        sequenceLength=settings["data"]["sequenceLength"],
        vocabSize=settings["data"]["tokenizer"]["vocabSize"],
        **tokens,
    )
    rows = [(f"Kneser-Ney {_NAMES[order]}", loss) for order, loss in report["nGrams"].items()]
    rows.append(("**this model**", curve[-1]["validation"]))
    for name, loss in sorted(rows, key=lambda row: -row[1]):
        text += f"| {name} | {loss:.3f} | {math.exp(loss):.1f} |\n"
    text += _SETTINGS.format(
        epochs=tokens["trained"] / tokens["training"],
        rate=settings["optimizer"]["learningRate"],
        final=settings["schedule"]["finalRatio"],
        measurements=len(curve),
        **settings["model"],
        **tokens,
        **report["versions"],
        **{name: report[name] for name in _FIGURES},
    )
    for point in curve:
        text += (
            f"| {point['step']:,} | {point['seconds']:.0f} | {point['tokens']:,} | {point['learningRate']:.2g} "
            f"| {point['training']:.3f} | {point['validation']:.3f} | {math.exp(point['validation']):.1f} |\n"
        )
    return text


def _draw(report: dict[str, Any], path: Path) -> None:
    curve = report["curve"]
    minutes = [point["seconds"] / 60 for point in curve]
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    axes.plot(minutes, [point["training"] for point in curve], color="#1f77b4", alpha=0.5, label="training")
    axes.plot(minutes, [point["validation"] for point in curve], color="#1f77b4", marker="o", label="validation")
    for order, loss in report["nGrams"].items():
        marked = order == str(report["yardstick"])
        axes.axhline(loss, color="#d62728" if marked else "0.5", linestyle="--", linewidth=1.4 if marked else 0.9)
        axes.annotate(
            f"{_NAMES[order]} {loss:.2f}", (0.01, loss), xycoords=("axes fraction", "data"), va="bottom", fontsize=8
        )
    axes.set_xlabel("minutes")
    axes.set_ylabel("loss, nats per token")
    axes.set_title("Validation loss against Kneser-Ney n-grams", loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)

"""Show figures and answers before and after, as tables and as a picture."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich.table import Table

from trainium_devcluster.demos.curves import plot_curves

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes

    from trainium_devcluster.demos.curves import Curves

_FIGURE_NAMES = {"perplexity": "perplexity of the answers", "exactMatch": "exact match", "rougeL": "ROUGE-L"}
_PAIR_FIGURE_NAMES = {"rewardAccuracy": "accuracy of the rewards", "rewardMargin": "margin of the rewards"}
_MIN_DEVIATIONS = 3
"""Standard deviations of a random guess by which the accuracy of the rewards must exceed one half."""
_MAX_PERPLEXITY_RATIO = 0.5
"""Largest ratio of the tuned model's perplexity to the base's; runs end near a sixth."""
_MIN_GAINS = {"rougeL": 0.12, "exactMatch": 0.1}
"""Smallest gains of these metrics (0 to 1); runs gain twice as much, and the error of 120 examples is about 0.04."""
_FRACTION_FIGURES = frozenset(
    {_FIGURE_NAMES["exactMatch"], _FIGURE_NAMES["rougeL"], _PAIR_FIGURE_NAMES["rewardAccuracy"]}
)
_PRINTED_ANSWERS = 6


@dataclass(frozen=True, slots=True)
class Figure:
    """A metric of the held-out examples."""

    name: str
    before: float
    after: float


@dataclass(frozen=True, slots=True)
class Answer:
    """A held-out question and the answers of the models."""

    prompt: str
    expected: str
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The trainer's evaluation of base and tuned model."""

    examples: int
    figures: tuple[Figure, ...]
    answers: tuple[Answer, ...]

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Evaluation:
        """Parse an evaluation.json, without figures of only one model."""
        return cls(
            examples=int(document["examples"]),
            figures=tuple(
                Figure(figure["name"], float(figure["before"]), float(figure["after"]))
                for figure in document["figures"]
                if figure.get("before") is not None and figure.get("after") is not None
            ),
            answers=tuple(
                Answer(answer["prompt"], answer["expected"], answer.get("before") or "", answer.get("after") or "")
                for answer in document.get("answers") or ()
            ),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the part of report.json about the models."""
        return {
            "heldOutExamples": self.examples,
            "figures": [asdict(figure) for figure in self.figures],
            "answers": [asdict(answer) for answer in self.answers],
        }

    @property
    def is_clearly_better(self) -> bool:
        """Whether each figure improved by more than random variation."""
        figures = {figure.name: figure for figure in self.figures}
        if set(_PAIR_FIGURE_NAMES) <= set(figures):
            threshold = 0.5 + _MIN_DEVIATIONS * 0.5 / math.sqrt(self.examples)
            return figures["rewardAccuracy"].after >= threshold and figures["rewardMargin"].after > 0
        if not set(_FIGURE_NAMES) <= set(figures):
            return False
        perplexity = figures["perplexity"]
        has_gained = all(figures[name].after - figures[name].before >= gain for name, gain in _MIN_GAINS.items())
        return has_gained and perplexity.after <= _MAX_PERPLEXITY_RATIO * perplexity.before


def format_figures(evaluation: Evaluation) -> Table:
    """Return a table of the figures."""
    table = Table(title=f"Before and after, on {evaluation.examples} held-out examples")
    for heading in ("figure", "before", "after"):
        table.add_column(heading, justify="left" if heading == "figure" else "right")
    for figure in evaluation.figures:
        table.add_row(
            (_FIGURE_NAMES | _PAIR_FIGURE_NAMES).get(figure.name, figure.name),
            f"{figure.before:.3f}",
            f"{figure.after:.3f}",
        )
    return table


def build_answer_table(evaluation: Evaluation) -> Table:
    """Return a table of the first answers."""
    table = Table(title="Answers to questions about held-out modules", show_lines=True)
    for heading in ("question", "expected", "before", "after"):
        table.add_column(heading, ratio=3 if heading == "question" else 2, overflow="fold")
    for answer in evaluation.answers[:_PRINTED_ANSWERS]:
        table.add_row(
            _drop_headings(answer.prompt),
            *(_shorten(text) for text in (answer.expected, answer.before, answer.after)),
        )
    return table


def _drop_headings(prompt: str) -> str:
    """Return a prompt without the headings of the template."""
    return "\n".join(line for line in prompt.splitlines() if line and not line.startswith("###"))


def _shorten(text: str, limit: int = 80) -> str:
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 3] + "..."


def draw_picture(curves: Curves, evaluation: Evaluation, path: Path) -> None:
    """Draw both loss curves, and each figure before and after."""
    import matplotlib as mpl  # noqa: PLC0415 - slow to import, needed only here

    mpl.use("Agg")
    import matplotlib.pyplot as plt  # noqa: PLC0415

    figure = plt.figure(figsize=(12, 5.6), constrained_layout=True)
    grid = figure.add_gridspec(6, 4, height_ratios=(1,) * 6)
    top = figure.add_subplot(grid[:4, :3])
    bottom = figure.add_subplot(grid[4:, :3], sharex=top)
    top.tick_params(labelbottom=False)
    plot_curves(curves, top, bottom)
    top.set_title("LoRA through faults: the curve of a run that nothing disturbed")
    names = _FIGURE_NAMES | _PAIR_FIGURE_NAMES
    metrics = [metric for metric in evaluation.figures if metric.name in names]
    for row, metric in enumerate(metrics):
        _draw_bars(figure.add_subplot(grid[2 * row : 2 * row + 2, 3]), names[metric.name], metric.before, metric.after)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _draw_bars(axis: Axes, name: str, before: float, after: float) -> None:
    bars = axis.barh(["after", "before"], [after, before], color=["#1f4e9c", "#b8c4d6"])
    axis.bar_label(bars, fmt="%.2f", padding=3, fontsize=8)
    axis.set_title(name, fontsize=9)
    axis.set_xlim(0, 1.25 * (1.0 if name in _FRACTION_FIGURES else max(before, after)))
    axis.set_xticks([])
    axis.spines[["top", "right", "bottom"]].set_visible(False)

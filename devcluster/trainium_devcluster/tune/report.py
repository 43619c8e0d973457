"""Report the result: figures and answers before and after, `report.json`, and a plot."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich.table import Table

from trainium_devcluster.demos.curves import plot_curves

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes

    from trainium_devcluster.demos.curves import Curves

_NAMES = {"perplexity": "perplexity of the answers", "exactMatch": "exact match", "rougeL": "ROUGE-L"}
_PAIR_NAMES = {"rewardAccuracy": "accuracy of the rewards", "rewardMargin": "margin of the rewards"}
_DEVIATIONS = 3
"""Standard deviations of a random guess by which the accuracy of the rewards must exceed one half."""
_PERPLEXITY = 0.5
"""Largest ratio of the tuned model's perplexity to the base's; runs end near a sixth."""
_GAINS = {"rougeL": 0.12, "exactMatch": 0.1}
"""Smallest gains of these metrics (0 to 1); runs gain twice as much, and the error of 120 examples is about 0.04."""
_SHARES = frozenset({_NAMES["exactMatch"], _NAMES["rougeL"], _PAIR_NAMES["rewardAccuracy"]})
_SHOWN = 6
"""Number of printed answers."""


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
                Figure(each["name"], float(each["before"]), float(each["after"]))
                for each in document["figures"]
                if each.get("before") is not None and each.get("after") is not None
            ),
            answers=tuple(
                Answer(each["prompt"], each["expected"], each.get("before") or "", each.get("after") or "")
                for each in document.get("answers") or ()
            ),
        )

    @property
    def clearly_better(self) -> bool:
        """Whether each figure improved clearly: by more than random variation."""
        figures = {figure.name: figure for figure in self.figures}
        if set(_PAIR_NAMES) <= set(figures):
            least = 0.5 + _DEVIATIONS * 0.5 / math.sqrt(self.examples)
            return figures["rewardAccuracy"].after >= least and figures["rewardMargin"].after > 0
        if not set(_NAMES) <= set(figures):
            return False
        perplexity = figures["perplexity"]
        gained = all(figures[name].after - figures[name].before >= least for name, least in _GAINS.items())
        return gained and perplexity.after <= _PERPLEXITY * perplexity.before


@dataclass(frozen=True, slots=True)
class TuneResult:
    """The result of the demo."""

    completed: bool
    curves: Curves
    every_sample_once: bool
    """Whether each epoch used every sample exactly once."""
    evaluation: Evaluation
    model: Path
    """Folder of the merged model."""
    adapter: Path
    goodput: float
    seconds: float

    @property
    def problems(self) -> list[str]:
        """The deviations from the expected result, in sentences."""
        found = {
            "The job did not complete.": not self.completed,
            "The curve with faults is not the undisturbed one.": not self.curves.is_identical,
            "A sample was not seen exactly once an epoch.": not self.every_sample_once,
            "The tuned model is not clearly better on held-out examples.": not self.evaluation.clearly_better,
        }
        return [sentence for sentence, holds in found.items() if holds]

    def to_json(self) -> dict[str, Any]:
        """Return the contents of report.json."""
        return {
            "completed": self.completed,
            **self.curves.to_json(),
            "everySampleSeenOnceAnEpoch": self.every_sample_once,
            "heldOutExamples": self.evaluation.examples,
            "figures": [asdict(figure) for figure in self.evaluation.figures],
            "clearlyBetter": self.evaluation.clearly_better,
            "answers": [asdict(answer) for answer in self.evaluation.answers],
            "model": str(self.model),
            "adapter": str(self.adapter),
            "goodput": self.goodput,
            "seconds": round(self.seconds, 1),
        }


def figure_table(evaluation: Evaluation) -> Table:
    """Return a table of the figures."""
    shown = Table(title=f"Before and after, on {evaluation.examples} held-out examples")
    for heading in ("figure", "before", "after"):
        shown.add_column(heading, justify="left" if heading == "figure" else "right")
    for figure in evaluation.figures:
        shown.add_row(
            (_NAMES | _PAIR_NAMES).get(figure.name, figure.name), f"{figure.before:.3f}", f"{figure.after:.3f}"
        )
    return shown


def answer_table(evaluation: Evaluation) -> Table:
    """Return a table of the first answers."""
    shown = Table(title="Answers to questions about modules that neither model has seen", show_lines=True)
    for heading in ("question", "expected", "before", "after"):
        shown.add_column(heading, ratio=3 if heading == "question" else 2, overflow="fold")
    for answer in evaluation.answers[:_SHOWN]:
        shown.add_row(
            _question(answer.prompt), *(_line(text) for text in (answer.expected, answer.before, answer.after))
        )
    return shown


def _question(prompt: str) -> str:
    """Return a prompt without the headings of the template."""
    return "\n".join(line for line in prompt.splitlines() if line and not line.startswith("###"))


def _line(text: str, most: int = 80) -> str:
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 3] + "..."


def write(result: TuneResult, folder: Path) -> None:
    """Write report.json and tune.png."""
    (folder / "report.json").write_text(json.dumps(result.to_json(), indent=1) + "\n")
    _picture(result, folder / "tune.png")


def _picture(result: TuneResult, path: Path) -> None:
    import matplotlib as mpl  # noqa: PLC0415 - slow to import, needed only here

    mpl.use("Agg")
    import matplotlib.pyplot as plt  # noqa: PLC0415

    figure = plt.figure(figsize=(12, 5.6), constrained_layout=True)
    grid = figure.add_gridspec(6, 4, height_ratios=(1,) * 6)
    top = figure.add_subplot(grid[:4, :3])
    bottom = figure.add_subplot(grid[4:, :3], sharex=top)
    top.tick_params(labelbottom=False)
    plot_curves(result.curves, top, bottom)
    top.set_title("LoRA through faults: the curve of a run that nothing disturbed")
    names = _NAMES | _PAIR_NAMES
    for number, one in enumerate(each for each in result.evaluation.figures if each.name in names):
        _bars(figure.add_subplot(grid[2 * number : 2 * number + 2, 3]), names[one.name], one.before, one.after)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _bars(axis: Axes, name: str, before: float, after: float) -> None:
    bars = axis.barh(["after", "before"], [after, before], color=["#1f4e9c", "#b8c4d6"])
    axis.bar_label(bars, fmt="%.2f", padding=3, fontsize=8)
    axis.set_title(name, fontsize=9)
    axis.set_xlim(0, 1.25 * (1.0 if name in _SHARES else max(before, after)))
    axis.set_xticks([])
    axis.spines[["top", "right", "bottom"]].set_visible(False)

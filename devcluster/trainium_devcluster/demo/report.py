"""The result: `report.json`, a table, and a picture of both loss curves."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich.table import Table

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class Fault:
    """One disturbance and what it cost; seconds from the disturbance, by the demo's own clock where it can tell."""

    kind: str
    step: int
    """Newest step when it happened."""
    detected_seconds: float | None
    recovered_seconds: float | None
    """To the end of the first new step."""
    pause_seconds: float | None
    """Between the last step before and the first new step after."""
    steps_lost: int
    pods_replaced: int


@dataclass(frozen=True, slots=True)
class Result:
    """Everything that the demo found out."""

    completed: bool
    steps: int
    faults: tuple[Fault, ...]
    loss: dict[int, float]
    reference: dict[int, float]
    every_sample_once: bool
    goodput: float
    seconds: float
    first_resize_step: int | None

    @property
    def max_difference(self) -> float:
        """Largest relative difference of the two loss curves."""
        return max((self.difference(step) for step in self.loss if step in self.reference), default=float("nan"))

    @property
    def identical_before_resize(self) -> bool:
        """Whether the curves agree bit for bit while the size is the reference's."""
        last = self.first_resize_step or self.steps
        return all(self.loss.get(step) == self.reference.get(step) for step in range(1, last + 1))

    def difference(self, step: int) -> float:
        """Relative difference of the two losses at `step`."""
        return abs(self.loss[step] - self.reference[step]) / abs(self.reference[step])

    def to_json(self) -> dict[str, Any]:
        """The contents of report.json."""
        camel = {
            "detected_seconds": "detectedSeconds",
            "recovered_seconds": "recoveredSeconds",
            "pause_seconds": "pauseSeconds",
            "steps_lost": "stepsLost",
            "pods_replaced": "podsReplaced",
        }
        return {
            "completed": self.completed,
            "steps": self.steps,
            "finalLoss": self.loss.get(self.steps),
            "faults": [{camel.get(key, key): value for key, value in asdict(fault).items()} for fault in self.faults],
            "lossCurve": [self.loss[step] for step in sorted(self.loss)],
            "referenceLossCurve": [self.reference[step] for step in sorted(self.reference)],
            "maxLossDifference": self.max_difference,
            "identicalBeforeResize": self.identical_before_resize,
            "everySampleSeenOnce": self.every_sample_once,
            "goodput": self.goodput,
            "seconds": round(self.seconds, 1),
        }


def table(result: Result) -> Table:
    """The faults, one a row."""
    shown = Table(title="What was done to the job, and what it cost")
    for heading in ("fault", "at step", "detected", "first new step", "pause", "steps lost", "pods replaced"):
        shown.add_column(heading, justify="left" if heading == "fault" else "right")
    for fault in result.faults:
        shown.add_row(
            fault.kind,
            str(fault.step),
            _seconds(fault.detected_seconds),
            _seconds(fault.recovered_seconds),
            _seconds(fault.pause_seconds),
            str(fault.steps_lost),
            str(fault.pods_replaced),
        )
    return shown


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"


def write(result: Result, folder: Path) -> None:
    """Write report.json and loss.png."""
    (folder / "report.json").write_text(json.dumps(result.to_json(), indent=1) + "\n")
    _picture(result, folder / "loss.png")


def _picture(result: Result, path: Path) -> None:
    import matplotlib as mpl  # noqa: PLC0415 - slow to import, needed only here

    mpl.use("Agg")
    import matplotlib.pyplot as plt  # noqa: PLC0415

    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(9, 5.6), sharex=True, height_ratios=(3, 1), constrained_layout=True
    )
    steps = sorted(result.reference)
    top.plot(steps, [result.reference[step] for step in steps], color="#b8c4d6", linewidth=6, label="undisturbed run")
    steps = sorted(result.loss)
    top.plot(steps, [result.loss[step] for step in steps], color="#1f4e9c", linewidth=1.4, label="run with faults")
    for number, fault in enumerate(result.faults):
        for axis in (top, bottom):
            axis.axvline(fault.step, color="#c0392b", linewidth=0.8, linestyle=":")
        cost = "" if fault.recovered_seconds is None else f"\n{fault.recovered_seconds:.1f} s, {fault.steps_lost} lost"
        top.annotate(
            fault.kind + cost,
            (fault.step, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(3, -4 - 26 * (number % 2)),
            textcoords="offset points",
            fontsize=8,
            color="#c0392b",
            va="top",
        )
    top.set_ylabel("training loss")
    top.legend(loc="lower left", frameon=False)
    top.set_title("Same loss curve, whatever fails")
    both = [step for step in steps if step in result.reference]
    bottom.plot(both, [result.difference(step) for step in both], color="#1f4e9c", linewidth=1.2)
    bottom.set_yscale("symlog", linthresh=1e-8)
    bottom.set_ylim(bottom=0)
    bottom.set_ylabel("relative\ndifference")
    bottom.set_xlabel("optimizer step")
    for axis in (top, bottom):
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    plt.close(figure)

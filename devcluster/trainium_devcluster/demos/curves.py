"""Compare the loss curve of a job with faults with that of an undisturbed run."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich.table import Table

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes

RESIZE_TOLERANCE = 1e-5
"""Largest relative difference of two runs at different sizes, which sum in another order."""
_RESIZE = "resize"


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault and its cost; seconds count from the fault, by the clock of the demo if possible."""

    kind: str
    step: int
    """Newest step at the time of the fault."""
    detected_seconds: float | None
    recovered_seconds: float | None
    """Seconds to the end of the first new step."""
    pause_seconds: float | None
    """Seconds between the last step before the fault and the first new step after it."""
    steps_lost: int
    pods_replaced: int


@dataclass(frozen=True, slots=True)
class Curves:
    """The losses of both runs by step, and the faults of the first run."""

    steps: int
    loss: dict[int, float]
    reference: dict[int, float]
    faults: tuple[Fault, ...]
    unplanned_resizes: tuple[int, ...] = ()
    """Last steps before the job changed its size by itself, as when it starts before all workers are there."""

    @property
    def first_resize_step(self) -> int | None:
        """The last step at the size of the reference; None if all steps are."""
        planned = (fault.step for fault in self.faults if fault.kind.startswith(_RESIZE))
        return min((*planned, *self.unplanned_resizes), default=None)

    @property
    def max_difference(self) -> float:
        """Largest relative difference of the two loss curves."""
        return max(
            (self.compute_difference(step) for step in self.loss if step in self.reference), default=float("nan")
        )

    @property
    def is_identical_before_resize(self) -> bool:
        """Whether the curves are identical bit for bit up to the first resize."""
        last = self.first_resize_step or self.steps
        return all(self.loss.get(step) == self.reference.get(step) for step in range(1, last + 1))

    @property
    def is_equal_within_rounding(self) -> bool:
        """Whether both curves are complete, and equal except for rounding."""
        every = set(range(1, self.steps + 1))
        whole = self.steps > 0 and set(self.loss) == every == set(self.reference)
        return whole and self.max_difference <= RESIZE_TOLERANCE

    @property
    def is_identical(self) -> bool:
        """Whether both curves are complete, identical before a resize, and equal except for rounding after it."""
        return self.is_equal_within_rounding and self.is_identical_before_resize

    def compute_difference(self, step: int) -> float:
        """Return the relative difference of the two losses at `step`."""
        return abs(self.loss[step] - self.reference[step]) / abs(self.reference[step])

    def to_json(self) -> dict[str, Any]:
        """Return the part of report.json about the curves."""
        return {
            "steps": self.steps,
            "finalLoss": self.loss.get(self.steps),
            "faults": [
                {_convert_to_camel_case(name): value for name, value in asdict(fault).items()} for fault in self.faults
            ],
            "lossCurve": [self.loss[step] for step in sorted(self.loss)],
            "referenceLossCurve": [self.reference[step] for step in sorted(self.reference)],
            "maxLossDifference": self.max_difference,
            "identicalBeforeResize": self.is_identical_before_resize,
        }


def _convert_to_camel_case(name: str) -> str:
    first, *others = name.split("_")
    return first + "".join(part.capitalize() for part in others)


def format_fault_table(faults: tuple[Fault, ...]) -> Table:
    """Return a table of the faults."""
    shown = Table(title="What was done to the job, and what it cost")
    for heading in ("fault", "at step", "detected", "first new step", "pause", "steps lost", "pods replaced"):
        shown.add_column(heading, justify="left" if heading == "fault" else "right")
    for fault in faults:
        shown.add_row(
            fault.kind,
            str(fault.step),
            _format_seconds(fault.detected_seconds),
            _format_seconds(fault.recovered_seconds),
            _format_seconds(fault.pause_seconds),
            str(fault.steps_lost),
            str(fault.pods_replaced),
        )
    return shown


def _format_seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"


def draw_curves(curves: Curves, path: Path, title: str) -> None:
    """Draw a picture of both curves."""
    import matplotlib as mpl  # noqa: PLC0415 - slow to import, needed only here

    mpl.use("Agg")
    import matplotlib.pyplot as plt  # noqa: PLC0415

    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(9, 5.6), sharex=True, height_ratios=(3, 1), constrained_layout=True
    )
    plot_curves(curves, top, bottom)
    top.set_title(title)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def plot_curves(curves: Curves, top: Axes, bottom: Axes) -> None:
    """Draw both curves with the faults into `top`, their difference into `bottom`."""
    steps = sorted(curves.reference)
    losses = [curves.reference[step] for step in steps]
    top.plot(steps, losses, color="#b8c4d6", linewidth=6, label="undisturbed run")
    steps = sorted(curves.loss)
    top.plot(steps, [curves.loss[step] for step in steps], color="#1f4e9c", linewidth=1.4, label="run with faults")
    for number, fault in enumerate(curves.faults):
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
    both = [step for step in steps if step in curves.reference]
    bottom.plot(both, [curves.compute_difference(step) for step in both], color="#1f4e9c", linewidth=1.2)
    bottom.set_yscale("symlog", linthresh=1e-8)
    bottom.set_ylim(bottom=0)
    bottom.set_ylabel("relative\ndifference")
    bottom.set_xlabel("optimizer step")
    for axis in (top, bottom):
        axis.spines[["top", "right"]].set_visible(False)

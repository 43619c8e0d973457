"""Draw the history of one run, or of several beside each other: `trainium-trainer plot`.

Guarantees:
- What is drawn is the content of metrics.jsonl.
- A line that is cut off (the run goes on) is left out.
- Matplotlib is imported only here, since a worker has no use for it.
"""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainium_trainer.exits import UserError
from trainium_trainer.monitor.writers import METRICS_NAME

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes

_SMOOTHED_OVER = 50
"""The thick line is a mean over this part of the run."""
_FEWEST_TO_SMOOTH = 100
_COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#e377c2")
_DPI = 110


@dataclass(frozen=True, slots=True)
class PlottedRun:
    """One run's lines."""

    name: str
    lines: tuple[dict[str, Any], ...]
    """In order of their steps, at least one."""

    def values(self, field: str) -> tuple[list[int], list[float]]:
        """Return steps in which a field was measured, and its values."""
        found = [(line["step"], line[field]) for line in self.lines if line.get(field) is not None]
        return [step for step, _ in found], [float(value) for _, value in found]

    @property
    def restarts(self) -> list[int]:
        """First steps after a restart."""
        return [line["step"] for line in self.lines if line.get("resumed")]


def read_history(run: Path) -> PlottedRun:
    """Return the history of a run by its folder or its metrics.jsonl. Raises UserError for what is neither."""
    file = run / METRICS_NAME if run.is_dir() else run
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"{file}: cannot be read ({getattr(error, 'strerror', None) or 'not text'}): name a run's folder "
            "(checkpoint.path), which holds metrics.jsonl"
        ) from error
    lines = [_parsed(file, number, line) for number, line in enumerate(text.split("\n")[:-1], start=1)]
    if not lines:
        raise UserError(f"{file}: no step is recorded yet: wait for the first one")
    return PlottedRun(run.parent.name if run.name == METRICS_NAME else run.name, tuple(lines))


def _parsed(file: Path, number: int, line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
        int(found["step"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file}: line {number} is not a step's line: name the metrics.jsonl of a run") from error
    return dict(found)


def draw(runs: Sequence[PlottedRun], output: Path) -> None:
    """Draw the runs' histories into one picture. Raises UserError without matplotlib or for an unknown file type."""
    try:
        import matplotlib as mpl  # noqa: PLC0415 - see the module
        from matplotlib.figure import Figure  # noqa: PLC0415 - see the module
    except ImportError as error:
        raise UserError(
            "drawing needs matplotlib, which is not installed here: pip install matplotlib, "
            "or copy metrics.jsonl to a machine that has it"
        ) from error
    with mpl.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(11, 7.5), layout="constrained")
        loss, rate, norm, speed = figure.subplots(2, 2, sharex=True).flat
        for colour, run in zip(itertools.cycle(_COLOURS), runs, strict=False):
            _draw_losses(loss, run, colour, alone=len(runs) == 1)
            _line(rate, run, "learningRate", colour)
            _line(norm, run, "gradNorm", colour, smooth=True)
            _line(speed, run, "tokensPerSecond", colour)
            for axes in (loss, rate, norm, speed):
                for step in run.restarts:
                    axes.axvline(step, color=colour if len(runs) > 1 else "0.5", linestyle=":", linewidth=0.9)
        _titled(loss, "loss", _caption(runs))
        _titled(rate, "learning rate", "")
        _titled(norm, "gradient norm", "")
        _titled(speed, "tokens/s", "")
        norm.set_yscale("log")
        norm.yaxis.set_major_formatter("{x:g}")
        norm.yaxis.set_minor_formatter("{x:g}")
        speed.set_ylim(0, 1.1 * speed.get_ylim()[1])
        for axes in (norm, speed):
            axes.set_xlabel("step")
        loss.legend(frameon=False, fontsize=8)
        try:
            figure.savefig(output, dpi=_DPI)
        except ValueError as error:
            raise UserError(f"--output {output}: {error}") from error
        except OSError as error:
            raise UserError(f"--output {output}: cannot be written ({error.strerror}): name another place") from error


def _draw_losses(axes: Axes, run: PlottedRun, colour: str, *, alone: bool) -> None:
    """Training loss as it is and smoothed, validation loss as dots."""
    _line(axes, run, "loss", colour, smooth=True, label="training" if alone else run.name)
    steps, values = run.values("validationLoss")
    if steps:
        axes.plot(
            steps,
            values,
            color="black" if alone else colour,
            marker="o",
            markersize=3.5,
            linewidth=1.2,
            linestyle="--",
            label=f"validation, {values[-1]:.3f} at the end" if alone else f"{run.name}, validation",
        )


def _line(
    axes: Axes, run: PlottedRun, field: str, colour: str, *, smooth: bool = False, label: str | None = None
) -> None:
    steps, values = run.values(field)
    if not smooth or len(steps) < _FEWEST_TO_SMOOTH:
        axes.plot(steps, values, color=colour, linewidth=1.2, label=label)
        return
    axes.plot(steps, values, color=colour, linewidth=0.5, alpha=0.3)
    axes.plot(steps, running_mean(values, len(values) // _SMOOTHED_OVER), color=colour, linewidth=1.5, label=label)


def running_mean(values: Sequence[float], width: int) -> list[float]:
    """Means of the `width` values up to each one, of fewer at the beginning."""
    total, means = 0.0, []
    for place, value in enumerate(values):
        total += value - (values[place - width] if place >= width else 0.0)
        means.append(total / min(place + 1, width))
    return means


def _titled(axes: Axes, title: str, right: str) -> None:
    axes.set_title(title, loc="left", fontweight="bold")
    axes.set_title(right, loc="right", fontsize=8)
    axes.grid(visible=True, alpha=0.25)


def _caption(runs: Sequence[PlottedRun]) -> str:
    """Return the result of a single run."""
    if len(runs) > 1:
        return ""
    last = runs[0].lines[-1]
    parts = [f"step {last['step']:,}", f"{last.get('tokens', 0):,} tokens"]
    if last.get("goodput") is not None:
        parts.append(f"goodput {last['goodput']:.1%}")
    if last.get("mfu") is not None and math.isfinite(last["mfu"]):
        parts.append(f"MFU {last['mfu']:.1%}")
    count = len(runs[0].restarts)
    if count:
        parts.append(f"{count} restart{'s' * (count > 1)} (dotted)")
    return ", ".join(parts)


def plot(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Folders of runs (checkpoint.path), or their metrics.jsonl.")
    ],
    output: Annotated[Path, typer.Option(help="The picture: .png, .svg or .pdf.")] = Path("run.png"),
) -> None:
    """Draw loss, learning rate, gradient norm and speed of a run, or compare several."""
    draw([read_history(run) for run in runs], output)
    typer.echo(output)

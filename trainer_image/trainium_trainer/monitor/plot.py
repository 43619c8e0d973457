"""Plot the history of one or several runs: `trainium-trainer plot`.

Guarantees:
- The plot shows the contents of metrics.jsonl.
- An incomplete line of a running job is left out.
- Matplotlib is imported only here, because workers do not need it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainium_contract.base import MessageModel
from trainium_contract.status.results import EvaluationFigure  # noqa: TC001 - pydantic reads annotations
from trainium_contract.wire.checkpoint_manifest import parse_step
from trainium_trainer.exits import UserError
from trainium_trainer.monitor.scaling import SizeSpeed, format_scaling, measure_sizes
from trainium_trainer.monitor.writers import METRICS_NAME

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SMOOTHED_OVER = 50
"""The thick line is a mean over the steps of the run divided by this."""
_FEWEST_TO_SMOOTH = 100
_COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#e377c2")
_MARKERS = "osv^D"
RESULT_NAMES = ("milestone.json", "evaluation.json")
"""The names of the results next to the models of a run, of its milestones and of its last stage."""
_DPI = 110
_PANELS: list[Any] = [["loss", "rate"], ["norm", "parameters"], ["speed", "spikes"]]
_MAX_BARS = 30
_COMPARED = 2
"""The number of runs for which the difference of their losses is drawn too."""


class EvaluationFigures(MessageModel):
    """The part of an evaluation result that is drawn."""

    figures: tuple[EvaluationFigure, ...]


class XAxis(StrEnum):
    """Field of a line that is the horizontal axis."""

    STEP = "step"
    TOKENS = "tokens"


@dataclass(frozen=True, slots=True)
class PlottedRun:
    """One run's lines."""

    name: str
    lines: tuple[dict[str, Any], ...]
    """The lines in order of their steps, at least one."""
    by: XAxis = XAxis.STEP
    evaluations: dict[str, dict[int, EvaluationFigure]] = field(default_factory=dict)
    """Figures of models that the run wrote, by name and step."""

    def list_values(self, name: str) -> tuple[list[int], list[float]]:
        """Return the x values at which a field was measured, and its values."""
        points = [(line[self.by], line[name]) for line in self.lines if line.get(name) is not None]
        return [x for x, _ in points], [float(value) for _, value in points]

    def list_figures(self, name: str) -> tuple[list[int], list[float], list[float]]:
        """Return the x values of models, the values of one figure, and its standard errors."""
        steps = {line["step"]: line[self.by] for line in self.lines}
        figures = sorted((step, item) for step, item in self.evaluations[name].items() if step in steps)
        measured = [
            (steps[step], item.after, item.standard_error or 0.0) for step, item in figures if item.after is not None
        ]
        return [x for x, _, _ in measured], [value for _, value, _ in measured], [error for _, _, error in measured]

    @property
    def restarts(self) -> list[int]:
        """Return the x values of the first steps after a restart."""
        return [line[self.by] for line in self.lines if line.get("resumed")]

    @property
    def spike_lengths(self) -> list[int]:
        """Return the length in steps of each spike of the gradient norm that has ended and was above the noise."""
        return [
            line["spikeSteps"]
            for line, after in itertools.pairwise(self.lines)
            if line.get("spikeCounted") and line["spikeSteps"] > after.get("spikeSteps", 0)
        ]


def read_history(run: Path, by: XAxis = XAxis.STEP) -> PlottedRun:
    """Read the history of a run from its folder or its metrics.jsonl. Raises UserError for other files."""
    file = run / METRICS_NAME if run.is_dir() else run
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"{file}: cannot be read ({getattr(error, 'strerror', None) or 'not text'}): name a run's folder "
            "(checkpoint.path), which holds metrics.jsonl"
        ) from error
    lines = [_parse_line(file, number, line, by) for number, line in enumerate(text.split("\n")[:-1], start=1)]
    if not lines:
        raise UserError(f"{file}: no step is recorded yet: wait for the first one")
    name = run.parent.name if run.name == METRICS_NAME else run.name
    return PlottedRun(name, tuple(lines), by, _read_evaluations(file.parent))


def _read_evaluations(run: Path) -> dict[str, dict[int, EvaluationFigure]]:
    """Return the evaluation figures of a run's models; the last stage's take precedence over a milestone's."""
    by_name: dict[str, dict[int, EvaluationFigure]] = {}
    for file in [file for name in RESULT_NAMES for file in run.glob(f"artifacts/step-*/{name}")]:
        with contextlib.suppress(OSError, ValueError):
            step, result = parse_step(file.parent.name), EvaluationFigures.model_validate_json(file.read_bytes())
            for figure in result.figures:
                if step is not None and figure.name != "perplexity":
                    by_name.setdefault(figure.name, {})[step] = figure
    return by_name


def _parse_line(file: Path, number: int, line: str, by: XAxis) -> dict[str, Any]:
    try:
        document = json.loads(line)
        int(document["step"]), int(document[by])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file}: line {number} is not a step's line: name the metrics.jsonl of a run") from error
    return dict(document)


def compute_loss_difference(first: PlottedRun, second: PlottedRun) -> tuple[list[int], list[float]]:
    """Return the x values at which the second run has a loss within the range of the first, and the difference there.

    The loss of the first run is interpolated between its steps: runs that are compared by tokens share none.
    """
    import numpy as np  # noqa: PLC0415 - ranks import this module, and do not need it before they have data

    (positions, losses), (other_positions, other_losses) = first.list_values("loss"), second.list_values("loss")
    if not positions or not other_positions:
        return [], []
    shared = [index for index, position in enumerate(other_positions) if positions[0] <= position <= positions[-1]]
    x = [other_positions[index] for index in shared]
    return x, (np.array([other_losses[index] for index in shared]) - np.interp(x, positions, losses)).tolist()


def draw(runs: Sequence[PlottedRun], output: Path) -> None:
    """Draw the runs' histories into one picture. Raises UserError without matplotlib or for an unknown file type."""
    compared = len(runs) == _COMPARED
    measured = any(run.evaluations for run in runs)
    rows: list[Any] = [["difference", "difference"]] * compared + [["evaluation", "evaluation"]] * measured
    with _open_figure(output, height=10.0 + 2.5 * len(rows)) as figure:
        panels = figure.subplot_mosaic([*_PANELS, *rows])
        spikes = panels.pop("spikes")
        for panel in panels.values():
            panel.sharex(panels["loss"])
        _draw_lines(panels, runs)
        if measured:
            _draw_evaluations(panels["evaluation"], runs)
        longest = max((length for run in runs for length in run.spike_lengths), default=1)
        spikes.hist(
            [run.spike_lengths for run in runs],
            bins=[edge + 0.5 for edge in range(0, longest + 1, longest // _MAX_BARS + 1)] + [longest + 0.5],
            color=[colour for colour, _ in _assign_colours(runs)],
        )
        spikes.locator_params("x", integer=True)
        spikes.set_xlabel("steps")
        _set_titles(spikes, "length of spikes of the gradient norm", "")
        if compared:
            panels["difference"].plot(*compute_loss_difference(*runs), color="black", linewidth=0.8)
            panels["difference"].axhline(0.0, color="0.5", linewidth=0.9)
            _set_titles(panels["difference"], f"loss of {runs[1].name} - loss of {runs[0].name}", "")


def _draw_lines(panels: dict[str, Axes], runs: Sequence[PlottedRun]) -> None:
    """Draw all plots over the progress of the runs."""
    for colour, run in _assign_colours(runs):
        _draw_losses(panels["loss"], run, colour, alone=len(runs) == 1)
        _draw_line(panels["rate"], run, "learningRate", colour)
        _draw_line(panels["norm"], run, "gradNorm", colour, smooth=True)
        _draw_line(panels["parameters"], run, "parameterNorm", colour)
        _draw_line(panels["speed"], run, "tokensPerSecond", colour)
        for axes in panels.values():
            for step in run.restarts:
                axes.axvline(step, color=colour if len(runs) > 1 else "0.5", linestyle=":", linewidth=0.9)
    _set_titles(panels["loss"], "loss", _format_caption(runs))
    _set_titles(panels["rate"], "learning rate", "")
    _set_titles(panels["norm"], "gradient norm", "")
    _set_titles(panels["parameters"], "parameter norm", "")
    _set_titles(panels["speed"], "tokens/s", "")
    panels["norm"].set_yscale("log")
    panels["norm"].yaxis.set_major_formatter("{x:g}")
    panels["norm"].yaxis.set_minor_formatter("{x:g}")
    panels["speed"].set_ylim(0, 1.1 * panels["speed"].get_ylim()[1])
    panels["speed"].set_xlabel(runs[0].by)
    panels["loss"].legend(frameon=False, fontsize=8)


def _draw_evaluations(axes: Axes, runs: Sequence[PlottedRun]) -> None:
    """Draw the figures of models with their standard errors: a run has a marker, a figure has a colour."""
    names = list(dict.fromkeys(name for run in runs for name in run.evaluations))
    for marker, run in zip(itertools.cycle(_MARKERS), runs, strict=False):
        for colour, name in zip(itertools.cycle(_COLOURS), names, strict=False):
            if name in run.evaluations:
                positions, values, errors = run.list_figures(name)
                label = name if len(runs) == 1 else f"{run.name}: {name}"
                axes.errorbar(positions, values, yerr=errors, color=colour, marker=marker, label=label, capsize=3)
    axes.set_xlabel(runs[0].by)
    axes.legend(frameon=False, fontsize=8)
    _set_titles(axes, "evaluation of models, with standard errors", "")


def _assign_colours(runs: Sequence[PlottedRun]) -> Iterator[tuple[str, PlottedRun]]:
    return zip(itertools.cycle(_COLOURS), runs, strict=False)


@contextlib.contextmanager
def _open_figure(output: Path, *, height: float) -> Iterator[Figure]:
    """Yield a figure that is written to `output` at the end."""
    try:
        import matplotlib as mpl  # noqa: PLC0415 - see the module
        from matplotlib.figure import Figure  # noqa: PLC0415 - see the module
    except ImportError as error:
        raise UserError(
            "drawing needs matplotlib, which is not installed here: pip install matplotlib, "
            "or copy metrics.jsonl to a machine that has it"
        ) from error
    with mpl.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(11, height), layout="constrained")
        yield figure
        try:
            figure.savefig(output, dpi=_DPI)
        except ValueError as error:
            raise UserError(f"--output {output}: {error}") from error
        except OSError as error:
            raise UserError(f"--output {output}: cannot be written ({error.strerror}): name another place") from error


def _draw_losses(axes: Axes, run: PlottedRun, colour: str, *, alone: bool) -> None:
    """Draw the training loss, raw and smoothed, and the validation loss as dots."""
    _draw_line(axes, run, "loss", colour, smooth=True, label="training" if alone else run.name)
    steps, values = run.list_values("validationLoss")
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


def _draw_line(
    axes: Axes, run: PlottedRun, field: str, colour: str, *, smooth: bool = False, label: str | None = None
) -> None:
    steps, values = run.list_values(field)
    if not smooth or len(steps) < _FEWEST_TO_SMOOTH:
        axes.plot(steps, values, color=colour, linewidth=1.2, label=label)
        return
    axes.plot(steps, values, color=colour, linewidth=0.5, alpha=0.3)
    axes.plot(
        steps, compute_running_mean(values, len(values) // _SMOOTHED_OVER), color=colour, linewidth=1.5, label=label
    )


def compute_running_mean(values: Sequence[float], width: int) -> list[float]:
    """Return means over the `width` values up to each one, over fewer at the beginning."""
    total, means = 0.0, []
    for index, value in enumerate(values):
        total += value - (values[index - width] if index >= width else 0.0)
        means.append(total / min(index + 1, width))
    return means


def _set_titles(axes: Axes, title: str, right: str) -> None:
    axes.set_title(title, loc="left", fontweight="bold")
    axes.set_title(right, loc="right", fontsize=8)
    axes.grid(visible=True, alpha=0.25)


def _format_caption(runs: Sequence[PlottedRun]) -> str:
    """Return the result of a single run."""
    if len(runs) > 1:
        return ""
    last = runs[0].lines[-1]
    parts = [f"step {last['step']:,}", f"{last.get('tokens', 0):,} tokens"]
    if last.get("timeInSteps") is not None:
        parts.append(f"{last['timeInSteps']:.1%} of the time in steps")
    if last.get("mfu") is not None and math.isfinite(last["mfu"]):
        parts.append(f"MFU {last['mfu']:.1%}")
    count = len(runs[0].restarts)
    if count:
        parts.append(f"{count} restart{'s' * (count > 1)} (dotted)")
    return ", ".join(parts)


def _draw_scaling(sizes: Sequence[SizeSpeed], output: Path) -> None:
    """Draw the throughput by number of nodes, and that of an efficiency of 100 %."""
    nodes = [size.nodes for size in sizes]
    with _open_figure(output, height=4.5) as figure:
        axes = figure.subplots()
        axes.plot(nodes, [size.samples_per_second for size in sizes], marker="o", color=_COLOURS[0], label="measured")
        ideal = [sizes[0].samples_per_second * count / nodes[0] for count in nodes]
        axes.plot(nodes, ideal, color="0.5", linestyle="--", linewidth=0.9, label="efficiency 100 %")
        for size in sizes:
            point = (size.nodes, size.samples_per_second)
            axes.annotate(f"{size.efficiency:.0%}", point, xytext=(4, -12), textcoords="offset points", fontsize=8)
        axes.set_xticks(nodes)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("nodes")
        axes.legend(frameon=False)
        _set_titles(axes, "samples/s", "")


def plot(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Folders of runs (checkpoint.path), or their metrics.jsonl.")
    ],
    output: Annotated[Path, typer.Option(help="The picture: .png, .svg or .pdf.")] = Path("run.png"),
    by: Annotated[XAxis, typer.Option(help="Horizontal axis.")] = XAxis.STEP,
    scaling: Annotated[
        bool, typer.Option("--scaling", help="Speed by number of nodes instead, over all runs, also as a table.")
    ] = False,
) -> None:
    """Draw loss, learning rate, norms, speed and spikes of a run, or compare several."""
    histories = [read_history(run, by) for run in runs]
    if scaling:
        sizes = measure_sizes([line for history in histories for line in history.lines])
        for line in format_scaling(sizes):
            typer.echo(line)
        _draw_scaling(sizes, output)
    else:
        draw(histories, output)
    typer.echo(output)

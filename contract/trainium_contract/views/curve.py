"""Read the loss curve from `metrics.jsonl`, thinned for a picture.

Invariant: at most `MAX_POINTS`; each represents the steps of its part of the curve, so that a spike stays visible.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from trainium_contract.views.raw import read_integer, read_number

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from trainium_contract.status.results import StepFigures
    from trainium_contract.views.job_view import JobView

MAX_POINTS = 1500


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """One or more steps."""

    step: int
    """The newest of them."""
    loss: float
    """Mean of them."""
    lowest: float
    highest: float
    validation: float | None
    tokens_per_second: float | None
    learning_rate: float | None = None
    grad_norm: float | None = None


def read_curve(lines: Iterable[str], max_points: int = MAX_POINTS) -> tuple[CurvePoint, ...]:
    """Parse the curve without truncated lines and lines that are not a step."""
    points: list[CurvePoint] = []
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        loss, step = read_number(record, "loss"), read_integer(record, "step", -1)
        if loss is None or step < 0:
            continue
        while points and points[-1].step >= step:  # a run that resumes computes its last steps again
            points.pop()
        names = ("validationLoss", "tokensPerSecond", "learningRate", "gradNorm")
        points.append(CurvePoint(step, loss, loss, loss, *(read_number(record, name) for name in names)))
    return _downsample(points, max_points)


class LiveCurve:
    """The curve of a watched run: a point for each sample, thinned once there are `max_points`.

    Invariant: steps ascend. When a run goes back, later points are dropped, as in its own record.
    """

    __slots__ = ("_max_points", "_points")

    def __init__(self, max_points: int = MAX_POINTS, points: Sequence[CurvePoint] = ()) -> None:
        """`points`: the known part of the curve."""
        self._max_points = max(2, max_points)
        self._points: list[CurvePoint] = list(points)

    def add(
        self,
        step: int,
        loss: float | None,
        tokens_per_second: float | None = None,
        learning_rate: float | None = None,
        grad_norm: float | None = None,
    ) -> None:
        """Add a point; the same step again changes nothing."""
        points = self._points
        if loss is None or (points and points[-1].step == step):
            return
        while points and points[-1].step >= step:
            points.pop()
        points.append(CurvePoint(step, loss, loss, loss, None, tokens_per_second, learning_rate, grad_norm))
        if len(points) > self._max_points:
            self._points = list(_downsample(points, self._max_points // 2))

    def add_current(self, figures: StepFigures | JobView) -> None:
        """Add the newest step of a status or of a view."""
        self.add(figures.step, figures.loss, figures.tokens_per_second, figures.learning_rate, figures.grad_norm)

    @property
    def points(self) -> tuple[CurvePoint, ...]:
        """Return the points to draw."""
        return tuple(self._points)


def _downsample(points: Sequence[CurvePoint], max_points: int) -> tuple[CurvePoint, ...]:
    if len(points) <= max_points:
        return tuple(points)
    edges = [len(points) * at // max_points for at in range(max_points + 1)]
    return tuple(_merge_points(points[begin:end]) for begin, end in pairwise(edges) if end > begin)


def _merge_points(part: Sequence[CurvePoint]) -> CurvePoint:
    validations = [point.validation for point in part if point.validation is not None]
    norms = [point.grad_norm for point in part if point.grad_norm is not None]
    return CurvePoint(
        step=part[-1].step,
        loss=sum(point.loss for point in part) / len(part),
        lowest=min(point.lowest for point in part),
        highest=max(point.highest for point in part),
        validation=validations[-1] if validations else None,
        tokens_per_second=part[-1].tokens_per_second,
        learning_rate=part[-1].learning_rate,
        grad_norm=sum(norms) / len(norms) if norms else None,
    )

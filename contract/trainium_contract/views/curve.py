"""The loss curve from `metrics.jsonl`, thinned to what a picture can show.

Invariant: at most `MOST_POINTS`; each stands for the steps of its part of the curve, so that a spike stays visible.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from trainium_contract.views.raw import number, whole

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

MOST_POINTS = 1500


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


def read_curve(lines: Iterable[str], most: int = MOST_POINTS) -> tuple[CurvePoint, ...]:
    """Parse the curve; lines that are not a step, or cut off, are left out."""
    points = []
    for line in lines:
        try:
            found = json.loads(line)
        except ValueError:
            continue
        loss, step = number(found, "loss"), whole(found, "step", -1)
        if loss is None or step < 0:
            continue
        points.append(
            CurvePoint(step, loss, loss, loss, number(found, "validationLoss"), number(found, "tokensPerSecond"))
        )
    return _thinned(points, most)


class LiveCurve:
    """The curve of a run that is watched: a point for each look at it, thinned once there are `most`.

    Invariant: steps ascend; where a run went back, what came after that step is forgotten, as in its own record.
    """

    __slots__ = ("_most", "_points")

    def __init__(self, most: int = MOST_POINTS, points: Sequence[CurvePoint] = ()) -> None:
        """`points`: what is known of it already."""
        self._most = max(2, most)
        self._points: list[CurvePoint] = list(points)

    def add(self, step: int, loss: float | None, tokens_per_second: float | None = None) -> None:
        """Add a point; the same step again changes nothing."""
        points = self._points
        if loss is None or (points and points[-1].step == step):
            return
        while points and points[-1].step >= step:
            points.pop()
        points.append(CurvePoint(step, loss, loss, loss, None, tokens_per_second))
        if len(points) > self._most:
            self._points = list(_thinned(points, self._most // 2))

    @property
    def points(self) -> tuple[CurvePoint, ...]:
        """The points to draw."""
        return tuple(self._points)


def _thinned(points: Sequence[CurvePoint], most: int) -> tuple[CurvePoint, ...]:
    if len(points) <= most:
        return tuple(points)
    edges = [len(points) * at // most for at in range(most + 1)]
    return tuple(_joined(points[begin:end]) for begin, end in pairwise(edges) if end > begin)


def _joined(part: Sequence[CurvePoint]) -> CurvePoint:
    validations = [each.validation for each in part if each.validation is not None]
    return CurvePoint(
        step=part[-1].step,
        loss=sum(each.loss for each in part) / len(part),
        lowest=min(each.lowest for each in part),
        highest=max(each.highest for each in part),
        validation=validations[-1] if validations else None,
        tokens_per_second=part[-1].tokens_per_second,
    )

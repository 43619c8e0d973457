"""Draw the pictures of a report as inline SVG. Pure; all text is escaped here."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from itertools import pairwise
from typing import TYPE_CHECKING

from trainium_contract.pages.formatting import format_large_number, shorten

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from trainium_contract.views.curve import CurvePoint

_TOP, _BOTTOM = 8, 26
"""Space above and below the area of a chart, in pixels."""
_AREA_WIDTH = 1000
"""Width of the coordinates in which curves are drawn; the browser stretches them to the width of the page."""
_WIDE_PIXELS, _NARROW_PIXELS, _LABEL_GAP_PIXELS, _CHARACTER_PIXELS = 780, 190, 10, 6.6
"""Width of a chart on a screen and on a phone, and of what is in a row of labels."""
_GAP_FACTOR = 8
"""A curve is interrupted where points are this many times as far apart as usual."""
_SQUARES_WIDTH = 960
_MAX_NAME_CHARACTERS = 20
_ROUNDING = 1e-9
_MAX_VALUE = 1e100
"""Largest value on an axis; beyond it differences are not finite."""
COLOURS = ("#2f9e63", "#c2453d", "#d08a1d", "#3f77c4", "#8a5bc0", "#5f6b76", "#b0497f", "#2a9aa5")
"""The first means good, the second bad; in a page they are the classes c0, c1, …"""
GOOD, BAD, WAITING, OTHER = 0, 1, 2, 5
_SQUARE, _GAP = 14, 2
_ROW_HEIGHT = 24
"""Height of a row of a timeline, in pixels."""
_DAY_SECONDS = 86_400
_TICK_SECONDS = (
    1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1_800, 3_600, 7_200, 10_800, 21_600, 43_200,
    *(days * _DAY_SECONDS for days in (1, 2, 7, 14, 28)),
)  # fmt: skip
"""Seconds between two ticks of a time axis."""
_MAX_TICKS = 7


@dataclass(frozen=True, slots=True)
class Span:
    """A time in a row of a timeline, Unix seconds; `colour` is an index of `COLOURS`."""

    since: float
    until: float
    colour: int
    title: str


@dataclass(frozen=True, slots=True)
class Square:
    """One item as a square; `colour` is an index of `COLOURS`."""

    colour: int
    title: str


class LinearScale:
    """Maps a range of values to positions on a line."""

    def __init__(self, low: float, high: float, begin: float, end: float) -> None:
        low, high = (min(max(bound, -_MAX_VALUE), _MAX_VALUE) for bound in (low, high))
        size = max(abs(low), abs(high))
        margin = max(0.5, size / 1000) if high - low <= _ROUNDING * size else 0.0
        self.low, self.high = low - margin, high + margin
        self._begin, self._end = begin, end

    def project(self, value: float) -> float:
        """Return the position of a value; values outside of the range are at the edge."""
        share = (min(max(value, self.low), self.high) - self.low) / (self.high - self.low)
        return round(self._begin + share * (self._end - self._begin), 2)

    def choose_ticks(self, count: int) -> list[float]:
        """Return about this many round values, evenly spaced."""
        raw = (self.high - self.low) / count
        power = 10.0 ** math.floor(math.log10(raw))
        step = power * min((factor for factor in (1, 2, 5, 10) if factor * power >= raw * 0.7), default=10)
        first = math.ceil(self.low / step - _ROUNDING)
        return [index * step for index in range(first, math.floor(self.high / step + _ROUNDING) + 1)]


def draw_loss_chart(curve: Sequence[CurvePoint], marks: Sequence[tuple[int, str]]) -> str:
    """Draw the loss by step with its spread, validation loss as dots, and a line at each of `marks` (step, title)."""
    validations = [(point.step, point.validation) for point in curve if point.validation is not None]
    spread = [(point.step, point.lowest, point.highest) for point in curve]
    return draw_line_chart([(p.step, p.loss) for p in curve], marks, "Loss", spread=spread, dots=validations)


def draw_line_chart(
    points: Sequence[tuple[int, float]],
    marks: Sequence[tuple[int, str]],
    label: str,
    *,
    spread: Sequence[tuple[int, float, float]] = (),
    dots: Sequence[tuple[int, float]] = (),
    height: int = 300,
) -> str:
    """Draw values by step, interrupted where steps are missing; empty without values.

    Positions are shares of the width and texts keep their size, so that the chart fits any screen.
    """
    if not points:
        return ""
    bottom = height - _BOTTOM
    values = [value for _, value in (*points, *dots)]
    x_scale = LinearScale(points[0][0], points[-1][0], 0, 100)
    y_scale = LinearScale(min(values), max(values), bottom, _TOP)
    y_ticks, x_ticks = y_scale.choose_ticks(4 if height > 200 else 2), x_scale.choose_ticks(6)
    parts = [f'<line x1="0" y1="{y}" x2="100%" y2="{y}" class="grid"/>' for y in map(y_scale.project, y_ticks)]
    parts += [
        f'<text x="-6" y="{y_scale.project(value) + 4}" text-anchor="end">{text}</text>'
        for value, text in zip(y_ticks, _format_ticks(y_ticks), strict=True)
    ]
    labels = zip(map(x_scale.project, x_ticks), map(format_large_number, x_ticks), strict=True)
    parts += _place_labels(list(labels), height - 8)
    parts.append(_draw_area(points, spread, (x_scale, y_scale), bottom))
    parts += [
        f'<circle cx="{x_scale.project(step)}%" cy="{y_scale.project(value)}" r="3" class="validation"/>'
        for step, value in dots
    ]
    parts += [
        f'<line x1="{x}%" y1="{_TOP}" x2="{x}%" y2="{bottom}" class="mark">{_render_title(title)}</line>'
        for x, title in (
            (x_scale.project(step), title) for step, title in marks if points[0][0] <= step <= points[-1][0]
        )
    ]
    return f'<div class="plot">{_render_svg(height, parts, f"{label} by step")}</div>'


def _draw_area(
    points: Sequence[tuple[int, float]],
    spread: Sequence[tuple[int, float, float]],
    scales: tuple[LinearScale, LinearScale],
    height: int,
) -> str:
    """Draw the lines of a curve and of its spread, in coordinates that the browser stretches."""
    x_scale, y_scale = scales

    def place(step: int, value: float) -> str:
        return f"{x_scale.project(step) * _AREA_WIDTH / 100:.0f},{y_scale.project(value)}"

    parts = []
    for first, last in find_runs([step for step, _ in points]):
        ranges = spread[first:last]
        if any(lowest < highest for _, lowest, highest in ranges):
            above = " ".join(place(step, highest) for step, _, highest in ranges)
            below = " ".join(place(step, lowest) for step, lowest, _ in reversed(ranges))
            parts.append(f'<polygon points="{above} {below}" class="spread"/>')
        run = points[first:last] if last > first + 1 else [points[first]] * 2
        line = " ".join(place(*point) for point in run)
        parts.append(f'<polyline points="{line}" class="curve" vector-effect="non-scaling-stroke"/>')
    box = f'viewBox="0 0 {_AREA_WIDTH} {height}" preserveAspectRatio="none" width="100%" height="{height}"'
    return f"<svg {box}>{''.join(parts)}</svg>"


def find_runs(steps: Sequence[int]) -> list[tuple[int, int]]:
    """Return the ranges of indexes without a gap: a distance far above the usual one."""
    distances = [later - earlier for earlier, later in pairwise(steps)]
    if not distances:
        return [(0, len(steps))]
    widest = _GAP_FACTOR * statistics.median(distances)
    ends = [index for index, distance in enumerate(distances, start=1) if distance > widest]
    return list(zip([0, *ends], [*ends, len(steps)], strict=True))


def _format_ticks(values: Sequence[float]) -> list[str]:
    """Format the values of an axis with the digits that distinguish them."""
    texts = [format_large_number(value) if abs(value) >= 1000 else f"{value:.3g}" for value in values]
    digits = 4
    while len(set(texts)) < len(texts) and digits < 16:
        texts = [f"{value:.{digits}g}" for value in values]
        digits += 1
    return texts


def _place_labels(labels: Sequence[tuple[float, str]], y: float) -> list[str]:
    """Return the labels below positions in per cent; those that would overlap are left out, on a phone more of them."""
    wide, narrow = ({*_find_separate(labels, pixels)} for pixels in (_WIDE_PIXELS, _NARROW_PIXELS))
    return [
        f'<text x="{x}%" y="{y}" text-anchor="{_choose_text_anchor(x)}"{"" if index in narrow else " class=wide"}>'
        f"{escape(text)}</text>"
        for index, (x, text) in enumerate(labels)
        if index in wide
    ]


def _find_separate(labels: Sequence[tuple[float, str]], pixels: float) -> Iterator[int]:
    """Yield the indexes of labels that do not overlap on a chart of this width."""
    free = 0.0
    for index, (x, text) in enumerate(labels):
        width = len(text) * _CHARACTER_PIXELS
        share = {"start": 0.0, "middle": 0.5, "end": 1.0}[_choose_text_anchor(x)]
        start = x / 100 * pixels - share * width
        if free <= start <= pixels - width + _LABEL_GAP_PIXELS:
            yield index
            free = start + width + _LABEL_GAP_PIXELS


def _choose_text_anchor(x: float) -> str:
    """Return the anchor of a label at a position in per cent; near an edge the label stays inside."""
    return "start" if x < 4 else "end" if x > 96 else "middle"


def draw_share_bar(parts: Sequence[tuple[str, float]], *, first: int = 0) -> str:
    """Draw shares of a whole as one bar with a legend; `first` is the colour of the first part."""
    total = sum(value for _, value in parts)
    if total <= 0:
        return ""
    x, drawn, legend = 0.0, [], []
    for index, (name, value) in enumerate(parts):
        width = 100 * value / total
        colour = f"c{first + index % (len(COLOURS) - first)}"
        title = f"{name}: {value:.1f} s, {width:.1f} %"
        drawn.append(
            f'<rect x="{x:.2f}%" y="0" width="{width:.2f}%" height="28" class="{colour}">{_render_title(title)}</rect>'
        )
        legend.append(f'<span class="key"><i class="{colour}"></i>{escape(title)}</span>')
        x += width
    return f'{_render_svg(28, drawn, "Where the time went")}<p class="legend">{"".join(legend)}</p>'


def draw_timeline(begin: float, end: float, rows: Sequence[tuple[str, Sequence[Span]]], label: str) -> str:
    """Draw named rows of spans between two Unix times, above an axis in UTC."""
    if not rows or end <= begin:
        return ""
    x_scale, bottom = LinearScale(begin, end, 0, 100), _ROW_HEIGHT * len(rows) + 8
    ticks = [(x_scale.project(time), text) for time, text in choose_time_ticks(begin, end)]
    parts = [f'<line x1="{x}%" y1="0" x2="{x}%" y2="{bottom}" class="grid"/>' for x, _ in ticks]
    parts += [
        *_place_labels(ticks, bottom + 16),
        f'<text x="-6" y="{bottom + 16}" text-anchor="end" class="wide">UTC</text>',
    ]
    for index, (name, spans) in enumerate(rows):
        y = _ROW_HEIGHT * index + 4
        text = escape(shorten(name, _MAX_NAME_CHARACTERS))
        parts.append(f'<text x="-6" y="{y + 14}" text-anchor="end">{text}</text>')
        parts.append(f'<line x1="0" y1="{y + 10}" x2="100%" y2="{y + 10}" class="grid"/>')
        for span in sorted(spans, key=lambda span: span.colour == BAD):  # on top: they are short
            x = x_scale.project(span.since)
            width = max(0.4, x_scale.project(span.until) - x)
            attributes = f'x="{x}%" y="{y + 2}" width="{width:.2f}%" height="16" rx="2" class="c{span.colour}"'
            parts.append(f"<rect {attributes}>{_render_title(span.title)}</rect>")
    return f'<div class="plot named">{_render_svg(bottom + 24, parts, label)}</div>'


def choose_time_ticks(begin: float, end: float) -> list[tuple[float, str]]:
    """Return round times between two Unix times, at most nine, with their labels in UTC; each day is named once."""
    step = next((candidate for candidate in _TICK_SECONDS if (end - begin) / candidate <= _MAX_TICKS), None)
    if step is None:  # longer than any job
        step = math.ceil((end - begin) / _MAX_TICKS / _DAY_SECONDS) * _DAY_SECONDS
    ticks, day = [], ""
    for number in range(math.ceil(begin / step), math.floor(end / step) + 1):
        moment = datetime.fromtimestamp(number * step, UTC)
        date, hour = moment.strftime("%b %d").replace(" 0", " "), moment.strftime("%H:%M:%S" if step < 60 else "%H:%M")
        label = date if step >= _DAY_SECONDS else hour if date == day else f"{date} {hour}"
        day = date
        ticks.append((float(number * step), label))
    return ticks


def draw_squares(items: Sequence[Square], label: str) -> str:
    """Draw the squares in rows."""
    per_row = _SQUARES_WIDTH // (_SQUARE + _GAP)
    drawn = []
    for index, square in enumerate(items):
        x, y = (_SQUARE + _GAP) * (index % per_row), (_SQUARE + _GAP) * (index // per_row)
        attributes = f'x="{x}" y="{y}" width="{_SQUARE}" height="{_SQUARE}" rx="2"'
        drawn.append(f'<rect {attributes} class="c{square.colour}">{_render_title(square.title)}</rect>')
    if not items:
        return ""
    height = (_SQUARE + _GAP) * -(-len(items) // per_row)
    content = "".join(drawn)
    return f'<svg viewBox="0 0 {_SQUARES_WIDTH} {height}" role="img" aria-label="{escape(label)}">{content}</svg>'


def _render_svg(height: int, parts: Sequence[str], label: str) -> str:
    """Return an image as wide as the page, whose positions are shares of its width."""
    attributes = f'class="fluid" width="100%" height="{height}" role="img" aria-label="{escape(label)}"'
    return f"<svg {attributes}>{''.join(parts)}</svg>"


def _render_title(label: str) -> str:
    return f"<title>{escape(label)}</title>"

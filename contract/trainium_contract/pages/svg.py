"""Draw the pictures of a report as inline SVG. Pure; all text is escaped here."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from typing import TYPE_CHECKING

from trainium_contract.pages.formatting import shorten

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainium_contract.views.curve import CurvePoint

WIDTH, HEIGHT = 960, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 12, 12, 30
_MAX_NAME_CHARACTERS = 20
_ROUNDING = 1e-9
_MAX_VALUE = 1e100
"""Largest value on an axis; beyond it differences are not finite."""
COLOURS = ("#2f9e63", "#c2453d", "#d08a1d", "#3f77c4", "#8a5bc0", "#5f6b76", "#b0497f", "#2a9aa5")
"""The first means good, the second bad; in a page they are the classes c0, c1, …"""
GOOD, BAD, WAITING, OTHER = 0, 1, 2, 5
_SQUARE, _GAP = 14, 2
_ROW_HEIGHT, _NAME_WIDTH = 24, 150
"""Height of a row of a timeline, and where the names end."""
_DAY_SECONDS = 86_400
_TICK_SECONDS = (
    1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1_800, 3_600, 7_200, 10_800, 21_600, 43_200,
    *(days * _DAY_SECONDS for days in (1, 2, 7, 14, 28)),
)  # fmt: skip
"""Seconds between two ticks of a time axis."""
_MAX_TICKS = 7
_HALF_LABEL = 40


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

    def position(self, value: float) -> float:
        """Return the position of a value; values outside of the range are at the edge."""
        share = (min(max(value, self.low), self.high) - self.low) / (self.high - self.low)
        return round(self._begin + share * (self._end - self._begin), 1)

    def ticks(self, count: int) -> list[float]:
        """Return about this many round values, evenly spaced."""
        raw = (self.high - self.low) / count
        power = 10.0 ** math.floor(math.log10(raw))
        step = power * min((factor for factor in (1, 2, 5, 10) if factor * power >= raw * 0.7), default=10)
        first = math.ceil(self.low / step - _ROUNDING)
        return [index * step for index in range(first, math.floor(self.high / step + _ROUNDING) + 1)]


def draw_loss_chart(curve: Sequence[CurvePoint], marks: Sequence[tuple[int, str]]) -> str:
    """Draw the loss by step with its spread, validation loss as dots, and a line at each of `marks` (step, title)."""
    if not curve:
        return ""
    values = [point.loss for point in curve] + [point.validation for point in curve if point.validation is not None]
    x_scale = LinearScale(curve[0].step, curve[-1].step, _LEFT, WIDTH - _RIGHT)
    y_scale = LinearScale(min(values), max(values), HEIGHT - _BOTTOM, _TOP)
    line = " ".join(f"{x_scale.position(point.step)},{y_scale.position(point.loss)}" for point in curve)
    above = " ".join(f"{x_scale.position(point.step)},{y_scale.position(point.highest)}" for point in curve)
    below = " ".join(f"{x_scale.position(point.step)},{y_scale.position(point.lowest)}" for point in reversed(curve))
    parts = [
        *(_text(_LEFT - 6, y_scale.position(value) + 4, f"{value:.3g}", "end") for value in y_scale.ticks(4)),
        *(
            _line(_LEFT, y_scale.position(value), WIDTH - _RIGHT, y_scale.position(value), "grid")
            for value in y_scale.ticks(4)
        ),
        *(_text(x_scale.position(value), HEIGHT - 10, f"{value:.0f}", "middle") for value in x_scale.ticks(6)),
        f'<polygon points="{above} {below}" class="spread"/>',
        f'<polyline points="{line}" class="curve"/>',
        *(
            f'<circle cx="{x_scale.position(point.step)}" cy="{y_scale.position(point.validation)}" r="3" '
            'class="validation"/>'
            for point in curve
            if point.validation is not None
        ),
        *(
            _line(x_scale.position(step), _TOP, x_scale.position(step), HEIGHT - _BOTTOM, "mark", title)
            for step, title in marks
            if curve[0].step <= step <= curve[-1].step
        ),
    ]
    return _svg(HEIGHT, parts, "Loss by step")


def draw_share_bar(parts: Sequence[tuple[str, float]], *, first: int = 0) -> str:
    """Draw shares of a whole as one bar with a legend; `first` is the colour of the first part."""
    total = sum(value for _, value in parts)
    if total <= 0:
        return ""
    x, drawn, legend = 0.0, [], []
    for index, (name, value) in enumerate(parts):
        width = WIDTH * value / total
        colour = f"c{first + index % (len(COLOURS) - first)}"
        title = f"{name}: {value:.1f} s, {100 * value / total:.1f} %"
        drawn.append(f'<rect x="{x:.1f}" y="0" width="{width:.1f}" height="28" class="{colour}">{_title(title)}</rect>')
        legend.append(f'<span class="key"><i class="{colour}"></i>{escape(title)}</span>')
        x += width
    return f'{_svg(28, drawn, "Where the time went")}<p class="legend">{"".join(legend)}</p>'


def draw_timeline(begin: float, end: float, rows: Sequence[tuple[str, Sequence[Span]]], label: str) -> str:
    """Draw named rows of spans between two Unix times, above an axis in UTC."""
    if not rows or end <= begin:
        return ""
    x_scale, bottom = LinearScale(begin, end, _NAME_WIDTH, WIDTH - _RIGHT), _ROW_HEIGHT * len(rows) + 8
    parts = []
    for time, tick_label in time_ticks(begin, end):
        x = x_scale.position(time)
        parts += [_line(x, 0, x, bottom, "grid"), _text(x, bottom + 16, tick_label, _text_anchor(x))]
    parts.append(_text(_NAME_WIDTH - 6, bottom + 16, "UTC", "end"))
    for index, (name, spans) in enumerate(rows):
        y = _ROW_HEIGHT * index + 4
        parts += [
            _text(_NAME_WIDTH - 6, y + 14, shorten(name, _MAX_NAME_CHARACTERS), "end"),
            _line(_NAME_WIDTH, y + 10, WIDTH - _RIGHT, y + 10, "grid"),
        ]
        for span in sorted(spans, key=lambda span: span.colour == BAD):  # on top: they are short
            x = x_scale.position(span.since)
            width = max(3.0, x_scale.position(span.until) - x)
            attributes = f'x="{x}" y="{y + 2}" width="{width:.1f}" height="16" rx="2" class="c{span.colour}"'
            parts.append(f"<rect {attributes}>{_title(span.title)}</rect>")
    return f"<div class=scroll>{_svg(bottom + 24, parts, label)}</div>"


def time_ticks(begin: float, end: float) -> list[tuple[float, str]]:
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


def _text_anchor(x: float) -> str:
    """Return the anchor of a label below a mark.

    Near an edge the label stays inside, and on the left clear of the axis name.
    """
    if x < _NAME_WIDTH + _HALF_LABEL:
        return "start"
    return "end" if x > WIDTH - _RIGHT - _HALF_LABEL else "middle"


def draw_squares(items: Sequence[Square], label: str) -> str:
    """Draw the squares in rows."""
    per_row = WIDTH // (_SQUARE + _GAP)
    drawn = []
    for index, square in enumerate(items):
        x, y = (_SQUARE + _GAP) * (index % per_row), (_SQUARE + _GAP) * (index // per_row)
        attributes = f'x="{x}" y="{y}" width="{_SQUARE}" height="{_SQUARE}" rx="2"'
        drawn.append(f'<rect {attributes} class="c{square.colour}">{_title(square.title)}</rect>')
    return _svg((_SQUARE + _GAP) * -(-len(items) // per_row), drawn, label) if items else ""


def _svg(height: int, parts: Sequence[str], label: str) -> str:
    content = "".join(parts)
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(label)}">{content}</svg>'


def _text(x: float, y: float, label: str, anchor: str) -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}">{escape(label)}</text>'


def _line(x: float, y: float, x2: float, y2: float, kind: str, title: str = "") -> str:
    return f'<line x1="{x}" y1="{y}" x2="{x2}" y2="{y2}" class="{kind}">{_title(title) if title else ""}</line>'


def _title(label: str) -> str:
    return f"<title>{escape(label)}</title>"

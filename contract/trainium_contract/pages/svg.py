"""Draw the pictures of a report as inline SVG. Pure; all text is escaped here."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from html import escape
from typing import TYPE_CHECKING

from trainium_contract.pages.formatting import shortened

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainium_contract.views.curve import CurvePoint

WIDTH, HEIGHT = 960, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 12, 12, 30
_LONGEST_NAME = 20
_ROUNDING = 1e-9
_MOST = 1e100
"""Largest value on an axis; beyond it differences are not finite."""
COLOURS = ("#2f9e63", "#c2453d", "#d08a1d", "#3f77c4", "#8a5bc0", "#5f6b76", "#b0497f", "#2a9aa5")
"""The first means good, the second bad; in a page they are the classes c0, c1, …"""
GOOD, BAD, WAITS, OTHER = 0, 1, 2, 5
_SQUARE, _GAP = 14, 2
_ROW, _NAMES = 24, 150
"""Height of a row of a timeline, and where the names end."""
_DAY = 86_400
_STEPS = (
    1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1_800, 3_600, 7_200, 10_800, 21_600, 43_200, _DAY, 2 * _DAY, 7 * _DAY,
    14 * _DAY, 28 * _DAY,
)  # fmt: skip
"""Seconds between two marks of time."""
_MOST_MARKS = 7
_HALF_WORDS = 40


class LinearScale:
    """Maps a range of values to positions on a line."""

    def __init__(self, low: float, high: float, begin: float, end: float) -> None:
        low, high = (min(max(bound, -_MOST), _MOST) for bound in (low, high))
        size = max(abs(low), abs(high))
        margin = max(0.5, size / 1000) if high - low <= _ROUNDING * size else 0.0
        self.low, self.high = low - margin, high + margin
        self._begin, self._end = begin, end

    def at(self, value: float) -> float:
        """Return the position of a value; values outside of the range are at the edge."""
        share = (min(max(value, self.low), self.high) - self.low) / (self.high - self.low)
        return round(self._begin + share * (self._end - self._begin), 1)

    def marks(self, count: int) -> list[float]:
        """Return about this many round values, evenly spaced."""
        raw = (self.high - self.low) / count
        power = 10.0 ** math.floor(math.log10(raw))
        step = power * min((factor for factor in (1, 2, 5, 10) if factor * power >= raw * 0.7), default=10)
        first = math.ceil(self.low / step - _ROUNDING)
        return [at * step for at in range(first, math.floor(self.high / step + _ROUNDING) + 1)]


def loss_chart(curve: Sequence[CurvePoint], marks: Sequence[tuple[int, str]]) -> str:
    """Loss by step with its spread, validation loss as dots, interruptions (step, what) as lines."""
    if not curve:
        return ""
    values = [point.loss for point in curve] + [point.validation for point in curve if point.validation is not None]
    across = LinearScale(curve[0].step, curve[-1].step, _LEFT, WIDTH - _RIGHT)
    up = LinearScale(min(values), max(values), HEIGHT - _BOTTOM, _TOP)
    line = " ".join(f"{across.at(point.step)},{up.at(point.loss)}" for point in curve)
    above = " ".join(f"{across.at(point.step)},{up.at(point.highest)}" for point in curve)
    below = " ".join(f"{across.at(point.step)},{up.at(point.lowest)}" for point in reversed(curve))
    parts = [
        *(_text(_LEFT - 6, up.at(value) + 4, f"{value:.3g}", "end") for value in up.marks(4)),
        *(_line(_LEFT, up.at(value), WIDTH - _RIGHT, up.at(value), "grid") for value in up.marks(4)),
        *(_text(across.at(value), HEIGHT - 10, f"{value:.0f}", "middle") for value in across.marks(6)),
        f'<polygon points="{above} {below}" class="spread"/>',
        f'<polyline points="{line}" class="curve"/>',
        *(
            f'<circle cx="{across.at(point.step)}" cy="{up.at(point.validation)}" r="3" class="validation"/>'
            for point in curve
            if point.validation is not None
        ),
        *(
            _line(across.at(step), _TOP, across.at(step), HEIGHT - _BOTTOM, "mark", title)
            for step, title in marks
            if curve[0].step <= step <= curve[-1].step
        ),
    ]
    return _svg(HEIGHT, parts, "Loss by step")


def share_bar(parts: Sequence[tuple[str, float]], *, first: int = 0) -> str:
    """Draw shares of a whole as one bar with a legend; `first` is the colour of the first part."""
    total = sum(value for _, value in parts)
    if total <= 0:
        return ""
    x, drawn, legend = 0.0, [], []
    for at, (name, value) in enumerate(parts):
        width = WIDTH * value / total
        colour = f"c{first + at % (len(COLOURS) - first)}"
        title = f"{name}: {value:.1f} s, {100 * value / total:.1f} %"
        drawn.append(f'<rect x="{x:.1f}" y="0" width="{width:.1f}" height="28" class="{colour}">{_title(title)}</rect>')
        legend.append(f'<span class="key"><i class="{colour}"></i>{escape(title)}</span>')
        x += width
    return f'{_svg(28, drawn, "Where the time went")}<p class="legend">{"".join(legend)}</p>'


def timeline(
    begin: float, end: float, rows: Sequence[tuple[str, Sequence[tuple[float, float, int, str]]]], label: str
) -> str:
    """Draw rows of spans (from, to, colour, what) between two times, above an axis in UTC."""
    if not rows or end <= begin:
        return ""
    across, bottom = LinearScale(begin, end, _NAMES, WIDTH - _RIGHT), _ROW * len(rows) + 8
    parts = []
    for at, words in time_marks(begin, end):
        x = across.at(at)
        parts += [_line(x, 0, x, bottom, "grid"), _text(x, bottom + 16, words, _anchor(x))]
    parts.append(_text(_NAMES - 6, bottom + 16, "UTC", "end"))
    for at, (row, spans) in enumerate(rows):
        y = _ROW * at + 4
        parts += [
            _text(_NAMES - 6, y + 14, shortened(row, _LONGEST_NAME), "end"),
            _line(_NAMES, y + 10, WIDTH - _RIGHT, y + 10, "grid"),
        ]
        for since, until, colour, title in sorted(spans, key=lambda span: span[2] == BAD):  # on top: they are short
            x = across.at(since)
            width = max(3.0, across.at(until) - x)
            place = f'x="{x}" y="{y + 2}" width="{width:.1f}" height="16" rx="2" class="c{colour}"'
            parts.append(f"<rect {place}>{_title(title)}</rect>")
    return f"<div class=scroll>{_svg(bottom + 24, parts, label)}</div>"


def time_marks(begin: float, end: float) -> list[tuple[float, str]]:
    """Return round times between two Unix times, at most nine, with their labels in UTC; each day is named once."""
    step = next((candidate for candidate in _STEPS if (end - begin) / candidate <= _MOST_MARKS), None)
    if step is None:  # longer than any job
        step = math.ceil((end - begin) / _MOST_MARKS / _DAY) * _DAY
    marks, day = [], ""
    for number in range(math.ceil(begin / step), math.floor(end / step) + 1):
        moment = datetime.fromtimestamp(number * step, UTC)
        date, hour = moment.strftime("%b %d").replace(" 0", " "), moment.strftime("%H:%M:%S" if step < 60 else "%H:%M")
        words = date if step >= _DAY else hour if date == day else f"{date} {hour}"
        day = date
        marks.append((float(number * step), words))
    return marks


def _anchor(x: float) -> str:
    """Return the anchor of a label below a mark.

    Near an edge the label stays inside, and on the left clear of the axis name.
    """
    if x < _NAMES + _HALF_WORDS:
        return "start"
    return "end" if x > WIDTH - _RIGHT - _HALF_WORDS else "middle"


def squares(cells: Sequence[tuple[int, str]], label: str) -> str:
    """Draw a square for each item, in rows: its colour and its title."""
    per_row = WIDTH // (_SQUARE + _GAP)
    drawn = []
    for at, (colour, title) in enumerate(cells):
        x, y = (_SQUARE + _GAP) * (at % per_row), (_SQUARE + _GAP) * (at // per_row)
        place = f'x="{x}" y="{y}" width="{_SQUARE}" height="{_SQUARE}" rx="2"'
        drawn.append(f'<rect {place} class="c{colour}">{_title(title)}</rect>')
    return _svg((_SQUARE + _GAP) * -(-len(cells) // per_row), drawn, label) if cells else ""


def _svg(height: int, parts: Sequence[str], label: str) -> str:
    inside = "".join(parts)
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(label)}">{inside}</svg>'


def _text(x: float, y: float, words: str, anchor: str) -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}">{escape(words)}</text>'


def _line(x: float, y: float, x2: float, y2: float, kind: str, title: str = "") -> str:
    return f'<line x1="{x}" y1="{y}" x2="{x2}" y2="{y2}" class="{kind}">{_title(title) if title else ""}</line>'


def _title(words: str) -> str:
    return f"<title>{escape(words)}</title>"

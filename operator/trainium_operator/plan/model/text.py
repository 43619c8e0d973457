"""Format text for status, conditions and events: bounded, on one line, without secrets."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from trainium_contract.program_output import LINE_BREAK
from trainium_contract.redaction import redact_secrets

if TYPE_CHECKING:
    from trainium_contract.status.results import EvaluationFigure

_MAX_INDENTATION = 8
_MAX_NAMES = 3
_MAX_PARTIAL_LINE = 120
"""Longest part of a line of output that is left out with what is cut, so that only full lines remain."""
SENTENCE_LIMIT = 1000
"""Longest sentence: status fields hold 1,024 characters, and an event note less."""


@lru_cache(maxsize=256)
def format_sentence(text: str, limit: int = SENTENCE_LIMIT) -> str:
    """Return the text on one line, cut in the middle if longer than `limit`, because cause and advice are at its ends.

    Lines of a program's output are joined with a separator and keep their indentation, so that a reader can restore
    them.
    """
    lines = (f"{_measure_indentation(line)}{' '.join(line.split())}" for line in text.splitlines() if line.strip())
    line = redact_secrets(LINE_BREAK.join(lines).strip())
    if len(line) <= limit:
        return line
    tail = limit // 2
    head, end = line[: limit - tail - 5], line[-tail:]
    last_break, first_break = head.rfind(LINE_BREAK), end.find(LINE_BREAK)
    if len(head) - last_break < _MAX_PARTIAL_LINE and 0 <= first_break < _MAX_PARTIAL_LINE:
        return f"{head[:last_break]}{LINE_BREAK}...{end[first_break:]}"
    return f"{head} ... {end}"


def _measure_indentation(line: str) -> str:
    return " " * min(_MAX_INDENTATION, len(line) - len(line.lstrip()))


def format_names(names: tuple[str, ...]) -> str:
    """Format names as `a, b, c and 4 more`."""
    shown = ", ".join(names[:_MAX_NAMES])
    return shown if len(names) <= _MAX_NAMES else f"{shown} and {len(names) - _MAX_NAMES} more"


def format_figure(figure: EvaluationFigure) -> str:
    """Return the name with the value, and with the one before if both were measured."""
    value = "none" if figure.after is None else f"{figure.after:.4g}"
    value += "" if figure.standard_error is None else f" ± {figure.standard_error:.2g}"
    return f"{figure.name} {value}" if figure.before is None else f"{figure.name} {figure.before:.4g} -> {value}"

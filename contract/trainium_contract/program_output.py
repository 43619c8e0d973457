"""Select the lines of a program's output that explain its end: the agent keeps them, and people see them.

Invariant: only the form of a line counts, so agent and client agree. Noise is dropped only if something else is left.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

LINE_BREAK = " | "
"""Between two lines of output in a sentence of the operator."""
_STEP_LINE = re.compile(r"\bstep \d+/\d+: loss |: validation loss |\bINFO start-up: data ")
_NATIVE_FRAME = re.compile(
    r"""\s*(?:
        frame\ \#\d+:\                                       # of c10::Error, as torch prints it
        | Exception\ raised\ from\ .*most\ recent\ call\ first
        | (?:PC:\ )?@\ +0x[0-9a-f]+\b                        # of glog and absl
        | \*\*\*\ (?:Begin|End)\ stack\ trace\ \*\*\*        # of torch_xla, and below each frame after a tab
        | (?<=\t)(?:.*::|_\w+$)
    )""",
    re.VERBOSE,
)
_RULER = re.compile(r"[\s=\-_*#~^+|]+(?:\d+[\s\-]+)?")
"""A line between parts of a report or of an exception group, or below a line of code."""
_MARGIN = re.compile(r"(?:\[\w+\]: ?)*(?: *[|+] )?")
"""Names of ranks, as torch and its launchers write them, and the margin of an exception group."""
_FRAME = re.compile(r"\s+File \".*\", line \d+(?:, in .*)?$")
_RAISED = re.compile(r"(?:[A-Za-z_]\w*\.)*([A-Za-z_]\w*)(?:: |:?$)")
_NAMED_ERROR = re.compile(r"\w+(?:Error|Exception|Interrupt|ExceptionGroup)")
_IGNORED = "Exception ignored "
_REPORT_STARTS = ("Traceback (most recent", "Exception Group Traceback", _IGNORED)
_LAUNCHER_ERRORS = frozenset(
    {"ChildFailedError", "CalledProcessError", "ProcessExitedException", "ProcessRaisedException"}
)
"""Errors of launchers, which report the end of a process whose own reason precedes it."""
_NEXT_SENTENCE = re.compile(r"\. (?=[A-Z])")
_ELLIPSIS = "…"


def is_native_frame(line: str) -> bool:
    """Return whether a line is a frame of a C++ stack, which is redundant beside Python's traceback."""
    return _NATIVE_FRAME.match(line) is not None


def explains_exit(line: str) -> bool:
    """Return whether a line may explain the end; not a start, a successful step, a frame of C++ or a ruler."""
    return not (_STEP_LINE.search(line) or is_native_frame(line) or _RULER.fullmatch(line))


def strip_margin(line: str) -> str:
    """Return a line without the names of ranks and without the margin of an exception group."""
    return line[_measure_margin(line) :]


def find_error(lines: Sequence[str]) -> int | None:
    """Return the index of the last line that names a raised exception; None if there is none.

    After the frames of a traceback it may have any name. Launchers' errors and ignored exceptions do not count.
    """
    summary_index, has_frames, is_ignored = None, False, False
    for index, line in enumerate(map(strip_margin, lines)):
        if line[:1].isspace() or not line:
            has_frames = has_frames or _FRAME.match(line) is not None
            continue
        is_ignored = is_ignored or line.startswith(_IGNORED)
        name = _parse_exception(line, has_frames=has_frames)
        has_frames = False
        if name and name not in _LAUNCHER_ERRORS:
            summary_index, is_ignored = (summary_index if is_ignored else index), False
    return summary_index


def starts_report(line: str) -> bool:
    """Return whether a line starts the report of another exception."""
    text = strip_margin(line)
    return text.startswith(_REPORT_STARTS) or _parse_exception(text, has_frames=False) in _LAUNCHER_ERRORS


def _measure_margin(line: str) -> int:
    match = _MARGIN.match(line)
    return match.end() if match is not None else 0


def _parse_exception(line: str, *, has_frames: bool) -> str:
    """Return the name of the exception that a line reports; log levels are no exceptions."""
    match = _RAISED.match(line)
    if match is None or match[1].isupper() or not (has_frames or _NAMED_ERROR.fullmatch(match[1])):
        return ""
    return match[1]


def restore_lines(sentence: str) -> str:
    """Return a sentence of the operator with the lines of output in it as they were printed."""
    return sentence.replace(LINE_BREAK, "\n")


def drop_noise(sentence: str) -> str:
    """Remove the lines of output that explain nothing from a sentence of the operator, never its ends."""
    first, *lines = sentence.split(LINE_BREAK)
    kept = [first]
    for line in lines:
        if explains_exit(line):
            kept.append(line)
            continue
        if kept[-1] != _ELLIPSIS:
            kept.append(_ELLIPSIS)
        # The remedy follows the last line, in separate sentences.
        advice = _NEXT_SENTENCE.search(line)
        if advice is not None:
            kept[-1] = f"{_ELLIPSIS} {line[advice.end() :]}"
    return LINE_BREAK.join(kept)

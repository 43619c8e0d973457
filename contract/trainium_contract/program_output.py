"""Select the lines of a program's output that explain its end: the agent keeps them, and people see them.

Invariant: only the form of a line counts, so agent and client agree. Noise is dropped only if something else is left.
"""

from __future__ import annotations

import re

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
_RULER = re.compile(r"[\s=\-_*#~^+|]+")
"""A line between parts of a report, or below a line of code."""
_ERROR = re.compile(r"(?:\[rank\d+\]: *| *\| )?(?:[A-Za-z_]\w*\.)*([A-Z]\w*(?:Error|Exception|Interrupt))(?:: |:?$)")
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


def reports_error(line: str) -> bool:
    """Return whether a line is the last one of a Python traceback, other than that of a launcher."""
    match = _ERROR.match(line)
    return match is not None and match[1] not in _LAUNCHER_ERRORS


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

"""Parse a line of a worker's log, in both forms, and find the rank that wrote it.

Lines of the contract's schema have the rank; in a text log it is a prefix.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

_MARK = re.compile(r"\[rank (\d{1,7})\] ")


@dataclass(frozen=True, slots=True)
class PodLogLine:
    """One line of the log; `text` has several if a traceback belongs to it."""

    rank: int | None
    """None for the agent's own, and for other programs of the pod."""
    text: str
    """The text without the rank's prefix."""
    shown: str
    """The line as in a text log."""
    record: dict[str, Any] | None = None
    """The line itself, if it is of the schema."""


def parse_log_line(words: str) -> PodLogLine:
    """Parse a line of a pod's log; `words` are without the time stamp of the kubelet."""
    return (_parse_json(words) if words.startswith("{") else None) or _parse_text(words)


def _parse_text(words: str) -> PodLogLine:
    mark = _MARK.match(words)
    return PodLogLine(None, words, words) if mark is None else PodLogLine(int(mark[1]), words[mark.end() :], words)


def _parse_json(words: str) -> PodLogLine | None:
    from trainium_contract.wire.log_line import PROGRAM, LogSource, read_log_line  # noqa: PLC0415 - a slow import

    read = read_log_line(words)
    if read is None:
        return None
    text = read.as_text()
    label = f"rank {read.rank}" if read.rank is not None else read.logger
    marked = read.source is LogSource.TRAINER or (read.source is LogSource.OUTPUT and label != PROGRAM)
    shown = "\n".join(f"[{label}] {line}" for line in text.split("\n")) if marked else text
    return PodLogLine(read.rank, text, shown, json.loads(words))

"""Parse a line of a worker's log, in both forms, and find the rank that wrote it.

Lines of the contract's schema have the rank; in a text log it is a prefix.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

_RANK_PREFIX = re.compile(r"\[rank (\d{1,7})\] ")


@dataclass(frozen=True, slots=True)
class PodLogLine:
    """One line of the log; `text` has several if a traceback belongs to it."""

    rank: int | None
    """None for lines of the agent and of other programs."""
    text: str
    """The text without the rank's prefix."""
    shown: str
    """The line as in a text log."""
    record: dict[str, Any] | None = None
    """The line itself, if it is a JSON log record."""


def parse_log_line(line: str) -> PodLogLine:
    """Parse a line of a pod's log; `line` is without the time stamp of the kubelet."""
    return (_parse_json(line) if line.startswith("{") else None) or _parse_text(line)


def _parse_text(line: str) -> PodLogLine:
    prefix = _RANK_PREFIX.match(line)
    return PodLogLine(None, line, line) if prefix is None else PodLogLine(int(prefix[1]), line[prefix.end() :], line)


def _parse_json(line: str) -> PodLogLine | None:
    from trainium_contract.wire.log_line import PROGRAM, LogSource, read_log_line  # noqa: PLC0415 - a slow import

    entry = read_log_line(line)
    if entry is None:
        return None
    text = entry.as_text()
    label = f"rank {entry.rank}" if entry.rank is not None else entry.logger
    has_label = entry.source is LogSource.TRAINER or (entry.source is LogSource.OUTPUT and label != PROGRAM)
    shown = "\n".join(f"[{label}] {part}" for part in text.split("\n")) if has_label else text
    return PodLogLine(entry.rank, text, shown, json.loads(line))

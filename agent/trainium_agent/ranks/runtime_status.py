"""Find the Neuron runtime's status in the output of a training process, because no exit code contains it.

Statuses appear as names (`Failure: NRT_RESOURCE in nrt_load()`), as numbers (`nrt_execute: status=1004`, `nrt status
code 5`, `NMGR:... err: 4`) and as sentences of the runtime's log, which are more specific than the status after them.

Guarantees:
- Bounded work per line and no exception for any bytes.
- A number counts only if the text names the runtime and the table has the number. Of the messages shortly before the
  end the most specific counts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from trainium_contract.faults.classify import find_runtime_status
from trainium_contract.faults.signs import RUNTIME_STATUSES

_SHORTLY_SECONDS = 180.0
_MAX_LINE_CHARACTERS = 4096
_NAMES = {sign.key: sign.number for sign in RUNTIME_STATUSES}
_ORDER = {sign.number: index for index, sign in enumerate(RUNTIME_STATUSES)}
_SENTENCES: tuple[tuple[re.Pattern[str], int], ...] = (
    (re.compile(r"Uncorrectable HBM memory error.*reload the neuron driver", re.IGNORECASE), 1205),
    (re.compile(r"Uncorrectable HBM memory error", re.IGNORECASE), 1201),
    (re.compile(r"\[N[CD] \d+\].*Uncorrectable memory error", re.IGNORECASE), 1202),
    (re.compile(r"DMA [TR]X engine \d+ is in an abort state", re.IGNORECASE), 1203),
    (re.compile(r"missing collectives status|suspected hang in collectives", re.IGNORECASE), 1200),
    (re.compile(r"FATAL-RT.*execution timeout", re.IGNORECASE), 5),
)
_HINTS = (b"nrt", b"NRT", b"NMGR:", b"TDRV:", b"FATAL-RT", b"ncorrectable", b"abort state", b"ollectives")
_NAME = re.compile(r"\bNRT_[A-Z_]{3,40}\b")
_NUMBER = re.compile(
    r"(?:\b[Nn][Rr][Tt][\w:]{0,40}|\b(?:NMGR|TDRV):\w{0,60})\b[^\n]{0,400}?"
    r"\b(?:status(?:[ _]code)?|error(?:[ _]code)?|err|code)\b[^\w\n]{0,4}(\d{1,4})\b"
)
_HARMLESS = re.compile(r"\s(?:INFO|DEBUG|TRACE|WARN)\s+\w{2,8}:")
"""A line of the runtime's own log below the level of an error."""


@dataclass(frozen=True, slots=True)
class RuntimeMessage:
    """One message of the runtime."""

    status: int
    line: str
    at: float
    """Unix seconds."""


def find_status(line: str) -> int | None:
    """Return the most specific runtime status in a line of output; None if it has none."""
    text = line[:_MAX_LINE_CHARACTERS]
    if _HARMLESS.search(text):
        return None
    statuses = [status for pattern, status in _SENTENCES if pattern.search(text)][:1]
    statuses += [_NAMES[name] for name in _NAME.findall(text) if name in _NAMES]
    statuses += [int(number) for number in _NUMBER.findall(text)]
    return min((status for status in statuses if status in _ORDER), key=_ORDER.__getitem__, default=None)


class RuntimeMessages:
    """Collects the runtime's messages in one process's output."""

    def __init__(self) -> None:
        self._newest: dict[int, RuntimeMessage] = {}

    def read(self, line: bytes, at: float) -> None:
        """Read one line of output, received at `at` (Unix seconds)."""
        if not any(hint in line for hint in _HINTS):
            return
        text = line[:_MAX_LINE_CHARACTERS].decode(errors="replace").strip()
        status = find_status(text)
        if status is not None:
            self._newest[status] = RuntimeMessage(status, text, at)

    def find_last(self, at: float) -> RuntimeMessage | None:
        """Return the most specific message shortly before a process ended at `at` (Unix seconds)."""
        recent = [message for message in self._newest.values() if message.at >= at - _SHORTLY_SECONDS]
        return min(recent, key=lambda message: _ORDER[message.status], default=None)


def format_message(message: RuntimeMessage) -> str:
    """Format a message as `NRT_TIMEOUT (5): <the line>`."""
    sign = find_runtime_status(message.status)
    assert sign is not None
    return f"{sign.key} ({sign.number}): {message.line}"

"""How lines of a process's output become lines of the pod's log.

Invariants: a line says whose it is, by what the agent knows and never by what the line claims; what is remembered of
it for the diagnosis is the same in both forms; what a program printed is neither changed nor lost, however long.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainium_contract.wire.log_format import moment
from trainium_contract.wire.log_line import (
    LINE_BYTES,
    MESSAGE_CHARACTERS,
    PROGRAM,
    LogFormat,
    LogLevel,
    LogSource,
    log_line,
    read_log_line,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from trainium_contract.wire.log_line import LogLine
    from trainium_trainer.agent.settings import AgentSettings

_ATTRIBUTION = ("namespace", "job", "pod", "node", "generation", "attempt", "rank")
_MESSAGE_BYTES = LINE_BYTES - 1_600
"""What all else in a line leaves: four names of 253 characters, and the keys."""


@dataclass(frozen=True, slots=True)
class Speaker:
    """Whose output it is."""

    label: str
    """`rank 3`, or what else the process is for."""
    rank: int | None = None
    generation: int | None = None
    attempt: int | None = None

    @property
    def prefix(self) -> str:
        """What begins each of its lines in a log for people."""
        return f"[{self.label}] "


@dataclass(frozen=True, slots=True)
class ShownLine:
    """What becomes of one line of output."""

    words: bytes
    """What is remembered of it: as the process would say it to people, maybe several lines."""
    log: bytes
    """What the log gets, with the end of each line."""


Form = Callable[[bytes], ShownLine]


def prefixed(prefix: str) -> Form:
    """For people: the line, with its speaker in front."""
    mark = prefix.encode()
    return lambda line: ShownLine(line, mark + line + b"\n")


def form_of(settings: AgentSettings, speaker: Speaker) -> Form:
    """How the log shows what this process writes."""
    if settings.log_format is LogFormat.TEXT:
        return prefixed(speaker.prefix)
    blank = _output_of(settings, speaker)
    attribution = {field: getattr(blank, field) for field in _ATTRIBUTION}

    def show(line: bytes) -> ShownLine:
        read = read_log_line(line)
        if read is not None and read.source is LogSource.TRAINER:
            ours = read.replaced(**attribution)
            return ShownLine(ours.as_text().encode(), _ended([ours]))
        if not line.strip():
            return ShownLine(line, b"")
        text, now = line.decode(errors="backslashreplace").rstrip("\r"), moment(time.time())
        return ShownLine(line, _ended(blank.replaced(time=now, message=piece) for piece in _pieces(text)))

    return show


def _output_of(settings: AgentSettings, speaker: Speaker) -> LogLine:
    """A line of this process, without words."""
    return log_line(
        "",
        time=moment(0),
        level=LogLevel.INFO,
        source=LogSource.OUTPUT,
        logger=PROGRAM if speaker.rank is not None else speaker.label,
        namespace=settings.namespace,
        job=settings.job,
        pod=settings.pod_name,
        node=settings.node_name,
        generation=speaker.generation,
        attempt=speaker.attempt,
        rank=speaker.rank,
    )


def _pieces(text: str) -> Iterator[str]:
    """The text in parts that fit into a line each; escaped characters take up to twelve times their place."""
    for at in range(0, len(text), MESSAGE_CHARACTERS):
        part = text[at : at + MESSAGE_CHARACTERS]
        size = len(part) if len(json.dumps(part)) <= _MESSAGE_BYTES else _MESSAGE_BYTES // 12
        yield from (part[begin : begin + size] for begin in range(0, len(part), size))


def _ended(lines: Iterable[LogLine]) -> bytes:
    return b"".join(line.to_line().encode() + b"\n" for line in lines)

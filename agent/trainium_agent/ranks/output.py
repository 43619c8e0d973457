"""The ranks' output: every line goes to the pod's log with its rank, and the last ones are remembered.

Invariant: one thread copies the output of all ranks, so neither a chatty rank nor a slow log delays heartbeats.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import selectors
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainium_agent.ranks.runtime_status import RuntimeMessages
from trainium_contract.faults.classify import match_output_line
from trainium_contract.program_output import is_native_frame, reports_error
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

    from trainium_agent.ranks.runtime_status import RuntimeMessage
    from trainium_agent.settings import AgentSettings
    from trainium_contract.wire.log_line import LogLine

_LINES = 60
"""More than the summary that torchrun prints after the reason of its ranks."""
_CHUNK = 1 << 16
_LONGEST_LINE = 1 << 14
_LINE_ENDS = re.compile(rb"[\r\n]+")


class Tail:
    """The last lines of one rank's output, without frames of C++: one thread feeds it, any may ask."""

    def __init__(self, prefix: str, form: Form | None = None, on_line: Callable[[bytes], None] | None = None) -> None:
        """`form` formats a line of the log; without it the prefix precedes each.

        `on_line` gets each line too, and what a progress bar overwrites.
        """
        self._form = form or prefixed(prefix)
        self._on_line = on_line
        self._lock = threading.Lock()
        self._lines: deque[str] = deque(maxlen=_LINES)
        self._runtime = RuntimeMessages()
        self._partial = self._unfinished = b""
        self.complete = threading.Event()
        """Set when everything that the rank wrote has been read."""

    def text(self, limit: int) -> str:
        """Return the last lines, cut at the front to at most `limit` characters."""
        with self._lock:
            text = "\n".join(self._lines)
        return text[-limit:] if limit > 0 else ""

    def last_message(self, at: float) -> RuntimeMessage | None:
        """Return the most specific message of the runtime shortly before `at` (Unix seconds)."""
        with self._lock:
            return self._runtime.last(at)

    def last_output_line(self) -> str:
        """Return the name of the row of the table of faults that the newest error matches; empty for none."""
        with self._lock:
            lines = tuple(self._lines)
        for line in reversed(lines):
            sign = match_output_line(line)
            if sign is not None or reports_error(line):
                return sign.key if sign is not None else ""
        return ""

    def feed(self, data: bytes) -> bytes:
        """Take in a chunk; what the log should show for it."""
        self._pass_on(data)
        *complete, self._partial = (self._partial + data).split(b"\n")
        if len(self._partial) > _LONGEST_LINE:
            complete.append(self._partial)
            self._partial = b""
        return b"".join(self._line(line) for line in complete)

    def close(self) -> bytes:
        """Return the rest of the output for the log."""
        self._pass_on(b"\n")
        rest, self._partial = self._partial, b""
        shown = self._line(rest) if rest else b""
        self.complete.set()
        return shown

    def _pass_on(self, data: bytes) -> None:
        if self._on_line is None:
            return
        *complete, rest = _LINE_ENDS.split(self._unfinished + data)
        self._unfinished = rest[-_LONGEST_LINE:]
        for line in filter(None, complete):
            self._on_line(line)

    def _line(self, line: bytes) -> bytes:
        shown = self._form(line)
        for sentence in shown.words.split(b"\n"):
            if sentence.strip():
                text = sentence.decode(errors="replace").rstrip()
                with self._lock:
                    # A stack of them would displace the program's messages.
                    if not is_native_frame(text):
                        self._lines.append(text)
                    self._runtime.read(sentence, time.time())
        return shown.log


class OutputPump:
    """Copies the output of all ranks to this process's standard output."""

    def __init__(self, settings: AgentSettings) -> None:
        self._settings = settings
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._lock = threading.Lock()
        self._new: list[tuple[int, Tail]] = []
        self._thread = threading.Thread(target=self._run, name="output", daemon=True)
        self._thread.start()

    def open(self, speaker: Speaker, on_line: Callable[[bytes], None] | None = None) -> tuple[int, Tail]:
        """Return a pipe for a rank: the end that it writes to, which the caller closes, and its tail."""
        read_end, write_end = os.pipe()
        os.set_blocking(read_end, False)
        tail = Tail(speaker.prefix, form_of(self._settings, speaker), on_line)
        with self._lock:
            self._new.append((read_end, tail))
        os.write(self._wake_write, b"x")
        return write_end, tail

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fd == self._wake_read:
                    self._take_new()
                else:
                    self._copy(key.fd, key.data)

    def _take_new(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, _CHUNK)
        with self._lock:
            new, self._new = self._new, []
        for descriptor, tail in new:
            self._selector.register(descriptor, selectors.EVENT_READ, tail)

    def _copy(self, descriptor: int, tail: Tail) -> None:
        try:
            data = os.read(descriptor, _CHUNK)
        except BlockingIOError:
            return
        if data:
            _write(tail.feed(data))
            return
        _write(tail.close())
        self._selector.unregister(descriptor)
        os.close(descriptor)


def _write(data: bytes) -> None:
    """Write all of it, or drop it when the log is closed: training goes on without a log."""
    with contextlib.suppress(OSError):
        descriptor = sys.stdout.fileno()
        while data:
            data = data[os.write(descriptor, data) :]


_ATTRIBUTION = ("namespace", "job", "pod", "node", "generation", "attempt", "rank")
_MESSAGE_BYTES = LINE_BYTES - 1_600
"""Bytes of a line beside four names of 253 characters and the keys."""


@dataclass(frozen=True, slots=True)
class Speaker:
    """Process that an output is from."""

    label: str
    """`rank 3`, or what else the process is for."""
    rank: int | None = None
    generation: int | None = None
    attempt: int | None = None

    @property
    def prefix(self) -> str:
        """Prefix of each of its lines in a log for people."""
        return f"[{self.label}] "


@dataclass(frozen=True, slots=True)
class ShownLine:
    """One line of output, formatted."""

    words: bytes
    """The text that is remembered, maybe several lines."""
    log: bytes
    """Text for the log, with the end of each line."""


Form = Callable[[bytes], ShownLine]


def prefixed(prefix: str) -> Form:
    """For people: the line, with its speaker in front."""
    mark = prefix.encode()
    return lambda line: ShownLine(line, mark + line + b"\n")


def form_of(settings: AgentSettings, speaker: Speaker) -> Form:
    """Return how the log formats this process's output."""
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
    """Write bytes to this process's output."""
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
    """Return the text in parts that each fit into a line; escaped characters take up to twelve times their size."""
    for at in range(0, len(text), MESSAGE_CHARACTERS):
        part = text[at : at + MESSAGE_CHARACTERS]
        size = len(part) if len(json.dumps(part)) <= _MESSAGE_BYTES else _MESSAGE_BYTES // 12
        yield from (part[begin : begin + size] for begin in range(0, len(part), size))


def _ended(lines: Iterable[LogLine]) -> bytes:
    return b"".join(line.to_line().encode() + b"\n" for line in lines)

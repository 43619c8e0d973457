"""Copy the ranks' output, line by line and with the rank, to the pod's log, and keep the last lines.

One thread copies the output of all ranks, so neither a verbose rank nor a slow log delays heartbeats.
"""

from __future__ import annotations

import contextlib
import json
import math
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
from trainium_contract.program_output import find_error, is_native_frame
from trainium_contract.wire.log_format import format_time
from trainium_contract.wire.log_line import (
    LINE_BYTES,
    MESSAGE_CHARACTERS,
    PROGRAM,
    LogFormat,
    LogLevel,
    LogSource,
    build_log_line,
    read_log_line,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from trainium_agent.ranks.runtime_status import RuntimeMessage
    from trainium_agent.settings import AgentSettings
    from trainium_contract.wire.log_line import LogLine

_LINES = 60
"""More than the summary that torchrun prints after the errors of its ranks."""
_CHUNK = 1 << 16
_MAX_LINE_BYTES = 1 << 14
_LINE_ENDS = re.compile(rb"[\r\n]+")
_BAR_SECONDS = 5.0
"""Interval at which a line that a program overwrites, such as a progress bar, is logged."""
_ESCAPES = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\\\)|[@-Z\\\\^_])")


def strip_escapes(line: bytes) -> bytes:
    """Return a line without the control sequences of terminals, such as colours."""
    return _ESCAPES.sub(b"", line) if b"\x1b" in line else line


class OutputTail:
    """Keeps the last lines of one rank's output, without C++ frames; one thread feeds it, any may read it."""

    def __init__(
        self, prefix: str, formatter: LineFormatter | None = None, on_line: Callable[[bytes], None] | None = None
    ) -> None:
        """`formatter` formats a line for the log; by default the prefix precedes it.

        `on_line` gets each line, and the text that a progress bar overwrites.
        """
        self._formatter = formatter or create_prefix_formatter(prefix)
        self._on_line = on_line
        self._lock = threading.Lock()
        self._lines: deque[str] = deque(maxlen=_LINES)
        self._runtime = RuntimeMessages()
        self._partial = self._unfinished = self._bar = b""
        self._bar_at = -math.inf
        self.complete = threading.Event()
        """Set when everything that the rank wrote has been read."""

    def read_text(self, limit: int) -> str:
        """Return the last lines, cut at the front to at most `limit` characters."""
        with self._lock:
            text = "\n".join(self._lines)
        return text[-limit:] if limit > 0 else ""

    def find_last_message(self, at: float) -> RuntimeMessage | None:
        """Return the most specific message of the runtime shortly before `at` (Unix seconds)."""
        with self._lock:
            return self._runtime.find_last(at)

    def find_last_error_sign(self) -> str:
        """Return the name of the fault table's row that the newest error matches; empty for none."""
        with self._lock:
            lines = tuple(self._lines)
        error = find_error(lines)
        for index in reversed(range(len(lines))):
            sign = match_output_line(lines[index])
            if sign is not None or index == error:
                return sign.key if sign is not None else ""
        return ""

    def feed(self, data: bytes) -> bytes:
        """Add a chunk of output and return its text for the log."""
        self._call_on_line(data)
        *complete, self._partial = (self._partial + data).split(b"\n")
        if len(self._partial) > _MAX_LINE_BYTES:
            complete.append(self._partial)
            self._partial = b""
        return b"".join(map(self._add_line, complete)) + self._log_bar()

    def _log_bar(self) -> bytes:
        """Return the newest text of a line that is overwritten, at intervals."""
        bar, now = _find_visible_text(self._partial), time.monotonic()
        if b"\r" not in self._partial or now < self._bar_at + _BAR_SECONDS:
            return b""
        self._bar, self._bar_at = bar, now
        return self._formatter(bar).log if bar else b""

    def close(self) -> bytes:
        """End the output and return the rest of it for the log."""
        self._call_on_line(b"\n")
        rest, self._partial = self._partial, b""
        shown = self._add_line(rest) if rest else b""
        self.complete.set()
        return shown

    def _call_on_line(self, data: bytes) -> None:
        if self._on_line is None:
            return
        *complete, rest = _LINE_ENDS.split(self._unfinished + data)
        self._unfinished = rest[-_MAX_LINE_BYTES:]
        for line in filter(None, complete):
            self._on_line(line)

    def _add_line(self, line: bytes) -> bytes:
        shown = self._formatter(_find_visible_text(line))
        for sentence in strip_escapes(shown.text).split(b"\n"):
            if sentence.strip():
                text = sentence.decode(errors="replace").rstrip()
                with self._lock:
                    # A C++ stack would displace the program's messages.
                    if not is_native_frame(text):
                        self._lines.append(text)
                    self._runtime.read(sentence, time.time())
        is_logged, self._bar = self._bar == shown.text != b"", b""
        return b"" if is_logged else shown.log


def _find_visible_text(line: bytes) -> bytes:
    """Return what a terminal shows of a line: the text after the last carriage return."""
    return next((text for text in reversed(line.split(b"\r")) if text.strip()), b"")


class OutputPump:
    """Copies the output of all ranks to this process's standard output."""

    def __init__(self, settings: AgentSettings) -> None:
        self._settings = settings
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._lock = threading.Lock()
        self._new: list[tuple[int, OutputTail]] = []
        self._thread = threading.Thread(target=self._run, name="output", daemon=True)
        self._thread.start()

    def open(self, source: OutputSource, on_line: Callable[[bytes], None] | None = None) -> tuple[int, OutputTail]:
        """Return a pipe for a rank: its write end, which the caller closes, and its tail."""
        read_end, write_end = os.pipe()
        os.set_blocking(read_end, False)
        tail = OutputTail(source.prefix, create_line_formatter(self._settings, source), on_line)
        with self._lock:
            self._new.append((read_end, tail))
        os.write(self._wake_write, b"x")
        return write_end, tail

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fd == self._wake_read:
                    self._register_new()
                else:
                    self._copy(key.fd, key.data)

    def _register_new(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, _CHUNK)
        with self._lock:
            new, self._new = self._new, []
        for descriptor, tail in new:
            self._selector.register(descriptor, selectors.EVENT_READ, tail)

    def _copy(self, descriptor: int, tail: OutputTail) -> None:
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
    """Write all bytes, or drop them when the log is closed: training continues without a log."""
    with contextlib.suppress(OSError):
        descriptor = sys.stdout.fileno()
        while data:
            data = data[os.write(descriptor, data) :]


_ATTRIBUTION = ("namespace", "job", "pod", "node", "generation", "attempt", "rank")
_MESSAGE_BYTES = LINE_BYTES - 1_600
"""Bytes of a line that remain beside four names of 253 characters and the keys."""


@dataclass(frozen=True, slots=True)
class OutputSource:
    """The process that writes an output."""

    label: str
    """`rank 3`, or another purpose of the process."""
    rank: int | None = None
    generation: int | None = None
    attempt: int | None = None

    @property
    def prefix(self) -> str:
        """Prefix of each line in a log of text."""
        return f"[{self.label}] "


@dataclass(frozen=True, slots=True)
class FormattedLine:
    """One line of output, formatted."""

    text: bytes
    """The text that the tail keeps; may have several lines."""
    log: bytes
    """The text for the log, with line ends."""


LineFormatter = Callable[[bytes], FormattedLine]


def create_prefix_formatter(prefix: str) -> LineFormatter:
    """Return a formatter that puts a prefix in front of each line."""
    mark = prefix.encode()
    return lambda line: FormattedLine(line, mark + line + b"\n")


def create_line_formatter(settings: AgentSettings, source: OutputSource) -> LineFormatter:
    """Return the formatter for this process's output."""
    if settings.log_format is LogFormat.TEXT:
        return create_prefix_formatter(source.prefix)
    blank = _create_log_line(settings, source)
    attribution = {field: getattr(blank, field) for field in _ATTRIBUTION}

    def format_line(line: bytes) -> FormattedLine:
        parsed = read_log_line(line)
        if parsed is not None and parsed.source is LogSource.TRAINER:
            attributed = parsed.replaced(**attribution)
            return FormattedLine(attributed.as_text().encode(), _encode_lines([attributed]))
        if not line.strip():
            return FormattedLine(line, b"")
        text, now = line.decode(errors="backslashreplace").rstrip("\r"), format_time(time.time())
        return FormattedLine(
            line, _encode_lines(blank.replaced(time=now, message=piece) for piece in _split_long(text))
        )

    return format_line


def _create_log_line(settings: AgentSettings, source: OutputSource) -> LogLine:
    """Return an empty log line of this process's output."""
    return build_log_line(
        "",
        time=format_time(0),
        level=LogLevel.INFO,
        source=LogSource.OUTPUT,
        logger=PROGRAM if source.rank is not None else source.label,
        namespace=settings.namespace,
        job=settings.job,
        pod=settings.pod_name,
        node=settings.node_name,
        generation=source.generation,
        attempt=source.attempt,
        rank=source.rank,
    )


def _split_long(text: str) -> Iterator[str]:
    """Split the text into parts that each fit into a line; escaping enlarges a character up to twelve times."""
    for start in range(0, len(text), MESSAGE_CHARACTERS):
        part = text[start : start + MESSAGE_CHARACTERS]
        size = len(part) if len(json.dumps(part)) <= _MESSAGE_BYTES else _MESSAGE_BYTES // 12
        yield from (part[begin : begin + size] for begin in range(0, len(part), size))


def _encode_lines(lines: Iterable[LogLine]) -> bytes:
    return b"".join(line.to_line().encode() + b"\n" for line in lines)

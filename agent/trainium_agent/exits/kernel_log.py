"""Follow kernel lines that report a device or host fault, if the pod may read them.

/dev/kmsg needs a privilege that few pods have; without it nothing is reported. Any file or FIFO works too, for tests
and for nodes that copy the kernel's lines elsewhere.

Guarantees:
- Lines written before the agent's start are skipped.
- Work and memory are bounded in a flood of lines. A line never displaces one of another kind or a more specific one.
- The thread never raises, and stops on request.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import select
import stat
import threading
import time
from typing import TYPE_CHECKING

from trainium_contract.faults.classify import classify_sign, match_kernel_line
from trainium_contract.faults.signs import KERNEL_LINES
from trainium_contract.redaction import redact_secrets
from trainium_contract.wire.messages import KernelEvent

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_log = logging.getLogger(__name__)
_KEPT = 8
_LINE_CHARACTERS = 1024
_CHUNK = 1 << 13
"""A record of /dev/kmsg has at most 8 KiB, and a read into a smaller buffer fails."""
_MAX_PARTIAL_BYTES = 1 << 14
_SAME_SECONDS = 10.0
"""Each kind of line is recorded at most once in this time."""
_POLL_SECONDS = 0.25
_ABSENT_SECONDS = 1.0
_LINES_PER_POLL = 2000
_PREFIX = re.compile(rb"^\d+,\d+,\d+,[^;]{0,64};")
_IMPORTANCE = {sign.key: index for index, sign in enumerate(KERNEL_LINES)}


class KernelEvents:
    """Holds the newest fault lines, at most one of each kind; thread-safe."""

    def __init__(self, on_event: Callable[[], None]) -> None:
        self._on_event = on_event
        self._lock = threading.Lock()
        self._events: list[tuple[str, KernelEvent]] = []
        self._last: dict[str, float] = {}
        self._next = 0

    def add(self, line: str, at: float) -> bool:
        """Record a line if it reports a fault and is no repetition; return whether it was recorded.

        `at`: Unix seconds.
        """
        sign = match_kernel_line(line)
        if sign is None:
            return False
        with self._lock:
            if abs(at - self._last.get(sign.key, float("-inf"))) < _SAME_SECONDS:
                return False
            self._last[sign.key] = at
            event = KernelEvent(sequence=self._next, line=redact_secrets(line)[:_LINE_CHARACTERS], at=at)
            self._next += 1
            events = [entry for entry in self._events if entry[0] != sign.key]
            events.append((sign.key, event))
            if len(events) > _KEPT:
                events.remove(max(events, key=lambda entry: _IMPORTANCE[entry[0]]))
            self._events = events
        _log.error("kernel message (%s): %s", classify_sign(sign).sentence, event.line)
        self._on_event()
        return True

    @property
    def newest(self) -> tuple[KernelEvent, ...]:
        """The lines, ordered by sequence."""
        with self._lock:
            return tuple(event for _, event in self._events)


class KernelLog:
    """Follows a source of kernel lines in a separate thread."""

    def __init__(self, path: Path, events: KernelEvents) -> None:
        self._path = path
        self._events = events
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="kernel log", daemon=True)
        self._partial = b""
        self._skips = True
        self._refused = False

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread, within a second."""
        self._stop.set()
        self._thread.join(1.0)

    def _follow(self) -> None:
        while not self._stop.is_set():
            descriptor = self._open()
            if descriptor is None:
                if self._refused:
                    return
                self._skips = False  # a file created after the start has no old lines
                self._stop.wait(_ABSENT_SECONDS)
                continue
            try:
                self._read(descriptor)
            except OSError as error:
                _log.info("the kernel's lines in %s can no longer be read (%s)", self._path, error.strerror)
                self._stop.wait(_ABSENT_SECONDS)
            finally:
                os.close(descriptor)

    def _open(self) -> int | None:
        try:
            mode = self._path.stat().st_mode
            # A FIFO that is also open for writing has no end of file while nobody writes.
            flags = os.O_RDWR if stat.S_ISFIFO(mode) else os.O_RDONLY
            descriptor = os.open(self._path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError as error:
            _log.info("the kernel's lines in %s cannot be read (%s); going without", self._path, error.strerror)
            self._refused = True
            return None
        if self._skips:
            with contextlib.suppress(OSError):  # a FIFO cannot seek to its end
                os.lseek(descriptor, 0, os.SEEK_END)
        self._skips = False
        return descriptor

    def _read(self, descriptor: int) -> None:
        """Follow the file until the stop is requested or the file was replaced."""
        regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        while not self._stop.is_set():
            if not regular:
                poll.poll(int(_POLL_SECONDS * 1000))
            for _ in range(_LINES_PER_POLL):
                try:
                    data = os.read(descriptor, _CHUNK)
                except BlockingIOError:
                    break
                except BrokenPipeError:
                    continue  # lines were overwritten before they could be read; the next read continues after them
                if not data:
                    break
                self._handle(data)
            else:
                self._stop.wait(_POLL_SECONDS)  # a flood of lines; the rest can wait
            if regular:
                if self._was_replaced(descriptor):
                    return
                self._stop.wait(_POLL_SECONDS)

    def _was_replaced(self, descriptor: int) -> bool:
        """Return whether the path now names another file, or the file was truncated."""
        opened = os.fstat(descriptor)
        if opened.st_size < os.lseek(descriptor, 0, os.SEEK_CUR):
            os.lseek(descriptor, 0, os.SEEK_SET)
            self._partial = b""
        try:
            current = self._path.stat()
        except OSError:
            return True
        return (current.st_dev, current.st_ino) != (opened.st_dev, opened.st_ino)

    def _handle(self, data: bytes) -> None:
        *lines, self._partial = (self._partial + data).split(b"\n")
        if len(self._partial) > _MAX_PARTIAL_BYTES:
            lines.append(self._partial)
            self._partial = b""
        for line in lines:
            if line and not line.startswith(b" "):  # continuation lines of a record describe its device
                text = _PREFIX.sub(b"", line).decode(errors="replace").strip()
                self._events.add(text, time.time())

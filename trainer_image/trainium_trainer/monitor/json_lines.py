"""Write and read files of JSON lines; a file that cannot be written does not stop the writer.

Guarantees:
- Lines in the file are complete and in the order of their steps, including late ones of a node that was unreachable.
- Lines that cannot be written are kept aside, at most `FALLBACK_BYTES` of the newest ones, in memory and, if there is a
  folder, in a file on the node for the next process. They are written as soon as the file can be written again.
- The writer never raises OSError.
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from trainium_contract.worker_process.write_access import FORBIDDEN, FULL, explain_forbidden
from trainium_trainer.exits import StorageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

FALLBACK_BYTES = 4 << 20
"""The maximum size of lines kept aside: some ten thousand steps."""
_PAUSE_SECONDS = 5.0
"""The time between two attempts to write a failing file."""


def create_write_error(path: Path, error: OSError) -> StorageError:
    """Return the error for a file of records that cannot be written."""
    if error.errno in FORBIDDEN:
        advice = explain_forbidden(error.errno)
    else:
        advice = "free space" if error.errno in FULL else "make it writable"
    return StorageError(f"{path}: cannot be written ({error.strerror}): {advice}")


def read_step(line: bytes) -> int | None:
    """Return the step of a line; None for an incomplete line."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return None
    return step if isinstance(step, int) else None


def read_fallback_lines(path: Path, fallback: Path | None, *, last: int | None = None) -> list[bytes]:
    """Return complete lines that an earlier process could not write to `path`, up to step `last`."""
    if fallback is None:
        return []
    try:
        lines = (fallback / path.name).read_bytes().splitlines(keepends=True)
    except OSError:
        return []
    steps = ((read_step(line), line) for line in lines if line.endswith(b"\n"))
    return [line for step, line in steps if step is not None and (last is None or step <= last)]


def truncate_after(path: Path, step: int) -> None:
    """Drop the lines of steps after `step` and an incomplete last line, by one truncation. Raises StorageError."""
    try:
        _truncate(path, step)
    except OSError as error:
        raise create_write_error(path, error) from error


def _truncate(path: Path, step: int) -> None:
    with contextlib.suppress(FileNotFoundError), path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        keep = _end_of_step(file.fileno(), step) if size else 0
        if keep < size:
            file.truncate(keep)


def _end_of_step(descriptor: int, step: int) -> int:
    """Return the offset after the last complete line of a step <= `step`; searches from the end of the file."""
    with mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) as data:
        end = data.rfind(b"\n") + 1
        while end > 0:
            begin = data.rfind(b"\n", 0, end - 1) + 1
            number = read_step(data[begin:end])
            if number is not None and number <= step:
                break
            end = begin
        return end


def read_newest_lines(path: Path, count: int) -> list[dict[str, Any]]:
    """Return the last `count` lines, oldest first, of a file after `truncate_after`. Raises StorageError."""
    try:
        return [json.loads(line) for line in _read_newest(path, count)]
    except OSError as error:
        raise create_write_error(path, error) from error


def _read_newest(path: Path, count: int) -> list[bytes]:
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        if not size:
            return []
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            begin = size
            for _ in range(count):
                begin = data.rfind(b"\n", 0, max(begin - 1, 0)) + 1
            return data[begin:].splitlines(keepends=True)
    return []


def read_first_line(path: Path) -> dict[str, Any] | None:
    """Return the first line of a file after `truncate_after`; None if it is empty. Raises StorageError."""
    try:
        with path.open("rb") as file:
            line = file.readline()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise create_write_error(path, error) from error
    record: dict[str, Any] | None = json.loads(line) if line else None
    return record


class LineWriter:
    """Appends one JSON object per line; a line is in the file when `write` returns, unless the write fails."""

    def __init__(
        self,
        path: Path,
        *,
        fallback: Path | None = None,
        last: int | None = None,
        earlier: Sequence[bytes] | None = None,
        notify: Callable[[str], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Open the file; `last` is the newest step of the history: later lines are dropped.

        `fallback` is on the node; `earlier` are its lines still to be written, by default all. `notify` gets a
        message when writes begin to fail and when they succeed again.
        """
        self._path = path
        self._notify = notify
        self._clock = clock
        self._fallback_file = None if fallback is None else fallback / path.name
        self._waiting: deque[bytes] = deque()
        self._bytes = 0
        self._lost = 0
        self._late = 0
        self._notified = False
        self._again_at = 0.0
        self._descriptor: int | None = None
        self._last = last
        for line in read_fallback_lines(path, fallback, last=last) if earlier is None else earlier:
            self._enqueue(line)
        self._rewrite_fallback()
        self._flush()

    @property
    def dropped_lines(self) -> int:
        """The number of lines that were dropped because there was no space."""
        return self._lost

    @property
    def waiting(self) -> int:
        """The lines that are not yet written."""
        return len(self._waiting)

    def write(self, record: dict[str, Any]) -> None:
        """Append one line with one system call, or keep it aside."""
        line = (json.dumps(record, separators=(",", ":")) + "\n").encode()
        behind = bool(self._waiting)
        self._enqueue(line)
        if behind and self._clock() < self._again_at:
            self._append_fallback(line)
        else:
            self._flush()

    def close(self) -> None:
        """Try once more to write the waiting lines, and close the file."""
        self._flush()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _enqueue(self, line: bytes) -> None:
        self._waiting.append(line)
        self._bytes += len(line)
        while self._bytes > FALLBACK_BYTES and len(self._waiting) > 1:
            self._bytes -= len(self._waiting.popleft())
            self._lost += 1

    def _flush(self) -> None:
        """Write the waiting lines, complete lines only."""
        try:
            self._open()
            while self._waiting:
                self._write_one()
        except OSError as error:
            self._again_at = self._clock() + _PAUSE_SECONDS
            if not self._notified:
                self._notified = True
                self._notify(
                    f"{create_write_error(self._path, error)}; training continues, its newest lines are kept aside and "
                    "written when the file takes them"
                )
            self._rewrite_fallback()
            return
        if self._notified:
            dropped_lines = f", {self._lost} were too many to keep" if self._lost else ""
            self._notify(f"{self._path} can be written again: {self._late} lines were written late{dropped_lines}")
            self._notified, self._late = False, 0
        if self._fallback_file is not None:
            with contextlib.suppress(OSError):
                self._fallback_file.unlink(missing_ok=True)

    def _open(self) -> None:
        if self._descriptor is not None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._last is not None:
            _truncate(self._path, self._last)
        # A process that ended before it recorded them may have written some of the waiting lines.
        written = set(_read_newest(self._path, len(self._waiting)))
        self._waiting = deque(line for line in self._waiting if line not in written)
        self._bytes = sum(map(len, self._waiting))
        if self._waiting:
            self._insert_earlier()
        self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def _insert_earlier(self) -> None:
        """Insert waiting lines of steps that another node has passed at their positions, by one rename."""

        def step(line: bytes) -> int:
            return read_step(line) or 0

        newest = max(map(step, _read_newest(self._path, 1)), default=0)
        earlier = [line for line in self._waiting if step(line) < newest]
        if not earlier:
            return
        lines = [*self._path.read_bytes().splitlines(keepends=True), *earlier]
        draft = self._path.with_name(f".{self._path.name}.draft")
        lines.sort(key=step)
        try:
            draft.write_bytes(b"".join(lines))
            draft.replace(self._path)
        finally:
            draft.unlink(missing_ok=True)
        self._waiting = deque(line for line in self._waiting if line not in earlier)
        self._bytes = sum(map(len, self._waiting))

    def _write_one(self) -> None:
        line, descriptor = self._waiting[0], self._descriptor
        assert descriptor is not None, "opened before"
        written = os.write(descriptor, line)
        if written < len(line):
            # A partial line would merge with the next one.
            os.ftruncate(descriptor, os.fstat(descriptor).st_size - written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._waiting.popleft()
        self._bytes -= len(line)
        self._late += self._notified

    def _append_fallback(self, line: bytes) -> None:
        """Keep a line on the node for the next process; if that fails too, only in memory."""
        if self._fallback_file is None:
            return
        with contextlib.suppress(OSError), self._fallback_file.open("ab") as file:
            file.write(line)
            exceeds_limit = file.tell() > 2 * FALLBACK_BYTES
            if not exceeds_limit:
                return
        self._rewrite_fallback()

    def _rewrite_fallback(self) -> None:
        if self._fallback_file is None:
            return
        with contextlib.suppress(OSError):
            if not self._waiting:
                self._fallback_file.unlink(missing_ok=True)
                return
            self._fallback_file.parent.mkdir(parents=True, exist_ok=True)
            draft = self._fallback_file.with_suffix(".draft")
            draft.write_bytes(b"".join(self._waiting))
            draft.replace(self._fallback_file)

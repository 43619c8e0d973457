"""Write and read files of JSON lines; a file that takes no lines does not stop the writer.

Guarantees:
- Lines are in the file in the order of their steps and whole, also those that come late because a node was away.
- What the file does not take is kept aside, at most `ASIDE_BYTES` of the newest lines, in memory and, where there is a
  folder for it, in a file on the node that the next process finds, and it is written as soon as the file takes lines
  again.
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

from trainium_agent.linux.write_access import FORBIDDEN, FULL, explain_forbidden
from trainium_trainer.exits import StorageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

ASIDE_BYTES = 4 << 20
"""What is kept aside: some ten thousand steps."""
_PAUSE_SECONDS = 5.0
"""Between two tries of a file that took nothing."""


def unwritable_error(path: Path, error: OSError) -> StorageError:
    """Return the sentence for a file of records that cannot be used."""
    if error.errno in FORBIDDEN:
        advice = explain_forbidden(error.errno)
    else:
        advice = "free space" if error.errno in FULL else "make it writable"
    return StorageError(f"{path}: cannot be written ({error.strerror}): {advice}")


def read_step(line: bytes) -> int | None:
    """Return the step of a line; None for a line that is not whole."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return None
    return step if isinstance(step, int) else None


def read_aside(path: Path, aside: Path | None, *, last: int | None = None) -> list[bytes]:
    """Whole lines that an earlier process could not write to `path`; `last`: none of later steps."""
    if aside is None:
        return []
    try:
        lines = (aside / path.name).read_bytes().splitlines(keepends=True)
    except OSError:
        return []
    steps = ((read_step(line), line) for line in lines if line.endswith(b"\n"))
    return [line for step, line in steps if step is not None and (last is None or step <= last)]


def truncate_after(path: Path, step: int) -> None:
    """Drop the lines of steps after `step`, and an unfinished last line; one truncation, so readers see it whole.

    Raises StorageError.
    """
    try:
        _forget_after(path, step)
    except OSError as error:
        raise unwritable_error(path, error) from error


def _forget_after(path: Path, step: int) -> None:
    with contextlib.suppress(FileNotFoundError), path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        keep = _end_of_step(file.fileno(), step) if size else 0
        if keep < size:
            file.truncate(keep)


def _end_of_step(descriptor: int, step: int) -> int:
    """Offset after the last whole line of a step <= `step`; looks from the end, where the resume step is near."""
    with mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) as data:
        end = data.rfind(b"\n") + 1
        while end > 0:
            begin = data.rfind(b"\n", 0, end - 1) + 1
            number = read_step(data[begin:end])
            if number is not None and number <= step:
                break
            end = begin
        return end


def newest_lines(path: Path, count: int) -> list[dict[str, Any]]:
    """Return the last lines, at most `count`, oldest first, of a file that `truncate_after` has left whole.

    Raises StorageError.
    """
    try:
        return [json.loads(line) for line in _newest(path, count)]
    except OSError as error:
        raise unwritable_error(path, error) from error


def _newest(path: Path, count: int) -> list[bytes]:
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


def first_line(path: Path) -> dict[str, Any] | None:
    """Return the first line of such a file; None when there is none. Raises StorageError."""
    try:
        with path.open("rb") as file:
            line = file.readline()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise unwritable_error(path, error) from error
    found: dict[str, Any] | None = json.loads(line) if line else None
    return found


def _silent(_: str) -> None:
    """Ignore a sentence."""


class LineWriter:
    """Appends one JSON object per line; a line is in the file when `write` returns, unless the file takes none."""

    def __init__(
        self,
        path: Path,
        *,
        aside: Path | None = None,
        last: int | None = None,
        earlier: Sequence[bytes] | None = None,
        notify: Callable[[str], None] = _silent,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`aside`: a folder on the node; `last`: the newest step of the history, later lines are dropped in both.

        `earlier`: the lines in `aside` that are still to be written; by default all.
        `notify` gets a sentence when the file begins to take no lines, and when it takes them again.
        """
        self._path = path
        self._notify = notify
        self._clock = clock
        self._aside = None if aside is None else aside / path.name
        self._waiting: deque[bytes] = deque()
        self._bytes = 0
        self._lost = 0
        self._late = 0
        self._notified = False
        self._again_at = 0.0
        self._descriptor: int | None = None
        self._last = last
        for line in read_aside(path, aside, last=last) if earlier is None else earlier:
            self._keep(line)
        self._keep_file()
        self._flush()

    @property
    def lost(self) -> int:
        """Lines for which there was no room aside."""
        return self._lost

    @property
    def waiting(self) -> int:
        """Lines that the file has not taken yet."""
        return len(self._waiting)

    def write(self, record: dict[str, Any]) -> None:
        """Append one line with one system call, or keep it aside."""
        line = (json.dumps(record, separators=(",", ":")) + "\n").encode()
        behind = bool(self._waiting)
        self._keep(line)
        if behind and self._clock() < self._again_at:
            self._keep_line(line)
        else:
            self._flush()

    def close(self) -> None:
        """Try once more to write what waits, and close the file."""
        self._flush()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _keep(self, line: bytes) -> None:
        self._waiting.append(line)
        self._bytes += len(line)
        while self._bytes > ASIDE_BYTES and len(self._waiting) > 1:
            self._bytes -= len(self._waiting.popleft())
            self._lost += 1

    def _flush(self) -> None:
        """Write what waits, whole lines only."""
        try:
            self._open()
            while self._waiting:
                self._write_one()
        except OSError as error:
            self._again_at = self._clock() + _PAUSE_SECONDS
            if not self._notified:
                self._notified = True
                self._notify(
                    f"{unwritable_error(self._path, error)}; training goes on, its newest lines are kept aside and "
                    "written when the file takes them"
                )
            self._keep_file()
            return
        if self._notified:
            lost = f", {self._lost} were too many to keep" if self._lost else ""
            self._notify(f"{self._path} can be written again: {self._late} lines were written late{lost}")
            self._notified, self._late = False, 0
        if self._aside is not None:
            with contextlib.suppress(OSError):
                self._aside.unlink(missing_ok=True)

    def _open(self) -> None:
        if self._descriptor is not None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._last is not None:
            _forget_after(self._path, self._last)
        # Of those that waited, some were written by a process that ended before it noted that.
        written = set(_newest(self._path, len(self._waiting)))
        self._waiting = deque(line for line in self._waiting if line not in written)
        self._bytes = sum(map(len, self._waiting))
        if self._waiting:
            self._insert_earlier()
        self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def _insert_earlier(self) -> None:
        """Put waiting lines of steps that another node has gone past into their places, by one rename."""

        def step(line: bytes) -> int:
            return read_step(line) or 0

        newest = max(map(step, _newest(self._path, 1)), default=0)
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
            # Half a line would make one with the next.
            os.ftruncate(descriptor, os.fstat(descriptor).st_size - written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._waiting.popleft()
        self._bytes -= len(line)
        self._late += self._notified

    def _keep_line(self, line: bytes) -> None:
        """On the node, for the next process; where that fails too, this process has it in memory."""
        if self._aside is None:
            return
        with contextlib.suppress(OSError), self._aside.open("ab") as file:
            file.write(line)
            crowded = file.tell() > 2 * ASIDE_BYTES
            if not crowded:
                return
        self._keep_file()

    def _keep_file(self) -> None:
        if self._aside is None:
            return
        with contextlib.suppress(OSError):
            if not self._waiting:
                self._aside.unlink(missing_ok=True)
                return
            self._aside.parent.mkdir(parents=True, exist_ok=True)
            draft = self._aside.with_suffix(".draft")
            draft.write_bytes(b"".join(self._waiting))
            draft.replace(self._aside)

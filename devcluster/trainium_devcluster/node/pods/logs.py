"""Write container logs, and read them for `kubectl logs`.

A log is a file of lines `TIME STREAM TAG TEXT` as container runtimes write them; TAG is P for a piece of a line and F
for its end. Standard output and error use two pipes, so their order is not kept, as with a container runtime.

Guarantees:
- A line is in the file as soon as it was read from the pipe.
- A file beyond its limit is rotated once, so a log takes at most twice the limit.
"""

import asyncio
import contextlib
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from trainium_devcluster.node.api.objects import parse_time
from trainium_devcluster.node.api.waiting import with_timeout

_CHUNK = 65536
_MAX_PIECE = 16384  # bytes of one line that are kept together
_LIMIT = 10 * 1024 * 1024  # bytes per file
_MAX_MESSAGE_BYTES = 2048
_FOLLOW_POLL_SECONDS = 0.05  # between two reads of a followed log


def _format_now() -> str:
    seconds, nanos = divmod(time.time_ns(), 10**9)
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S") + f".{nanos:09d}Z"


class LogWriter:
    """Reads the two pipes of one container into its log file."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o640)
        self._size = os.fstat(self._fd).st_size
        self._pending: dict[str, bytes] = {}
        self._open: dict[str, int] = {}
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def open_pipe(self, stream: str) -> int:
        """Return the write end of a new pipe for `stream` (stdout or stderr), which the caller closes."""
        read, write = os.pipe()
        os.set_blocking(read, False)
        self._open[stream] = read
        self._pending[stream] = b""
        asyncio.get_running_loop().add_reader(read, self._read, stream, read)
        return write

    def _read(self, stream: str, fd: int) -> None:
        try:
            data = os.read(fd, _CHUNK)
        except BlockingIOError:
            return
        if not data:
            self._close_stream(stream)
            return
        *lines, rest = (self._pending[stream] + data).split(b"\n")
        entries = [(line, b"F") for line in lines]
        while len(rest) >= _MAX_PIECE:
            entries.append((rest[:_MAX_PIECE], b"P"))
            rest = rest[_MAX_PIECE:]
        self._pending[stream] = rest
        self._write(stream, entries)

    def _write(self, stream: str, entries: list[tuple[bytes, bytes]]) -> None:
        if not entries:
            return
        head = f"{_format_now()} {stream} ".encode()
        data = b"".join(head + tag + b" " + line + b"\n" for line, tag in entries)
        os.write(self._fd, data)
        self._size += len(data)
        if self._size > _LIMIT:
            os.close(self._fd)
            self.path.replace(self.path.with_suffix(".old"))
            self._fd = os.open(self.path, os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o640)
            self._size = 0

    def _close_stream(self, stream: str) -> None:
        fd = self._open.pop(stream)
        asyncio.get_running_loop().remove_reader(fd)
        os.close(fd)
        if self._pending[stream]:
            self._write(stream, [(self._pending[stream], b"P")])
        if not self._open:
            os.close(self._fd)
            if not self.finished.done():
                self.finished.set_result(None)

    async def close(self, timeout: float = 1.0) -> None:
        """Read the rest of the pipes; a process that escaped its container delays this by at most `timeout` s."""
        with contextlib.suppress(TimeoutError):
            await with_timeout(asyncio.shield(self.finished), timeout)
        for stream in list(self._open):
            self._close_stream(stream)


@dataclass(frozen=True, slots=True)
class LogOptions:
    """The requested part of a log; `since` in seconds since the epoch."""

    follow: bool = False
    timestamps: bool = False
    tail: int | None = None
    since: float | None = None
    limit: int | None = None
    stream: str = "All"


async def read(path: Path, query: LogOptions, ended: Callable[[], bool]) -> AsyncIterator[bytes]:
    """Yield pieces of the log at `path`; with `follow` until `ended` is set."""
    remaining = query.limit
    async for entry in _read_entries(path, query, ended):
        text = _render(entry, query)
        if text is None:
            continue
        if remaining is not None:
            text = text[:remaining]
            remaining -= len(text)
        yield text
        if remaining == 0:
            return


async def _read_entries(path: Path, query: LogOptions, ended: Callable[[], bool]) -> AsyncIterator[bytes]:
    source = _LogTail(path)
    try:
        backlog = deque((line for line in source.read_lines() if _matches(line, query)), maxlen=query.tail)
        while backlog:
            yield backlog.popleft()
        while query.follow:
            is_last_read = ended()  # checked before the read, so that no line before the end is missed
            new_lines = source.read_lines()
            for line in new_lines:
                if _matches(line, query):
                    yield line
            if is_last_read and not new_lines:
                return
            if not new_lines:
                await asyncio.sleep(_FOLLOW_POLL_SECONDS)
    finally:
        source.close()


class _LogTail:
    """Reads complete lines of a growing log, across its rotation."""

    def __init__(self, path: Path) -> None:
        self._path = path
        old = path.with_suffix(".old")
        self._before = old.read_bytes() if old.exists() else b""
        self._file = path.open("rb")
        self._rest = b""

    def read_lines(self) -> list[bytes]:
        """Return the lines since the last call."""
        data, self._before = self._before, b""
        data += self._rest + self._file.read()
        if not data and self._path.stat().st_ino != os.fstat(self._file.fileno()).st_ino:
            self._file.close()
            self._file = self._path.open("rb")
            data = self._file.read()
        *complete, self._rest = data.split(b"\n")
        return complete

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _matches(line: bytes, query: LogOptions) -> bool:
    parts = line.split(b" ", 3)
    if len(parts) < 4:
        return False
    if query.stream != "All" and parts[1].decode() != query.stream.lower():
        return False
    return query.since is None or parse_time(parts[0].decode()) >= query.since


def _render(line: bytes, query: LogOptions) -> bytes | None:
    time_text, _, tag, text = line.split(b" ", 3)
    if tag == b"F":
        text += b"\n"
    return time_text + b" " + text if query.timestamps else text


def read_last_lines(path: Path, max_lines: int = 80) -> str:
    """Return the end of a log for a status with FallbackToLogsOnError."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 4 * _MAX_MESSAGE_BYTES - 100 * max_lines))
            raw = file.read().splitlines()
    except OSError:
        return ""
    entries = [parts for parts in (line.split(b" ", 3) for line in raw) if len(parts) == 4]
    text = b"".join(parts[3] + (b"\n" if parts[2] == b"F" else b"") for parts in entries[-max_lines:])
    return text[-_MAX_MESSAGE_BYTES:].decode(errors="replace")

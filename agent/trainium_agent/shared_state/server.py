"""Serve the store of a generation: keys and values over TCP, in a thread of the agent of node rank 0.

A request is a JSON list, an answer one JSON value; both are prefixed with their length. `get` waits until the key
exists, so an agent that waits for the others sends no messages.

Guarantees:
- It binds one address only, and a request is at most `MAX_FRAME_BYTES` bytes.
- A connection that breaks or sends anything else is closed; the others are not affected.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_FRAME_BYTES = 5 << 20
_LENGTH = struct.Struct(">I")
_BACKLOG = 1024
_MAX_KEYS = 1 << 20
_POLL_SECONDS = 0.1

Answer = bool | int | str | None


def encode_frame(message: object) -> bytes:
    """Return a message with its length in front."""
    body = json.dumps(message).encode()
    return _LENGTH.pack(len(body)) + body


def parse_frame_length(head: bytes) -> int:
    """Return the length of the message after this header. Raises ConnectionError for one that is too long."""
    (length,) = _LENGTH.unpack(head)
    if length > MAX_FRAME_BYTES:
        raise ConnectionError(f"a message of {length} bytes is longer than any that agents send")
    return int(length)


HEAD_BYTES = _LENGTH.size


class StoreServer:
    """Serves one store from its construction until `close`."""

    def __init__(self, address: str) -> None:
        """Listen on a free port of an address. Raises OSError when the address cannot be bound."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._listener.bind((address, 0))
            self._listener.listen(_BACKLOG)
        except OSError:
            self._listener.close()
            raise
        self.port: int = self._listener.getsockname()[1]
        self._values: dict[str, str] = {}
        self._waiting: dict[str, set[asyncio.Future[str]]] = {}
        self._connections: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._closed = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="store", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close the port and all connections."""
        self._loop.call_soon_threadsafe(self._closed.set)
        self._thread.join()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._handle_connection, sock=self._listener, limit=MAX_FRAME_BYTES)
        await self._closed.wait()
        server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections)

    async def _handle_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None, "the server runs it as a task"
        self._connections.add(task)
        try:
            while True:
                body = await reader.readexactly(parse_frame_length(await reader.readexactly(HEAD_BYTES)))
                answer = await self._answer(*json.loads(body))
                writer.write(encode_frame(answer))
                await writer.drain()
        except (OSError, EOFError, ValueError, TypeError, asyncio.CancelledError):
            pass
        finally:
            self._connections.discard(task)
            writer.close()
            await asyncio.sleep(0)  # the event loop closes it in its next iteration

    async def _answer(self, operation: str, key: str, *arguments: str | float) -> Answer:
        values = self._values
        match operation, arguments:
            case "has", keys:
                return all(required in values for required in (key, *keys))
            case "set", (str(value),):
                self._set(key, value)
                return None
            case "get", (int() | float() as seconds,):
                return values[key] if key in values else await self._wait(key, seconds)
            case "add", (int(amount),):
                total = int(values.get(key, "0")) + amount
                if amount:
                    self._set(key, str(total))
                return total
            case "delete", ():
                return values.pop(key, None) is not None
            case "swap", (str(expected), str(new_value)):
                if values.get(key, "") == expected:
                    self._set(key, new_value)
                return values.get(key, expected)
            case _:
                raise ValueError(f"{operation!r} is no operation of the store")

    def _set(self, key: str, value: str) -> None:
        if key not in self._values and len(self._values) >= _MAX_KEYS:
            raise ValueError("the store is full")
        self._values[key] = value
        for future in self._waiting.pop(key, ()):
            if not future.done():
                future.set_result(value)

    async def _wait(self, key: str, seconds: float) -> str | None:
        future: asyncio.Future[str] = self._loop.create_future()
        waiting = self._waiting.setdefault(key, set())
        waiting.add(future)
        try:
            return await asyncio.wait_for(future, seconds)
        except TimeoutError:
            return None
        finally:
            waiting.discard(future)
            if not waiting and self._waiting.get(key) is waiting:
                del self._waiting[key]


class StoreClient:
    """A connection to a store; only one thread may use it at a time."""

    def __init__(self, connection: socket.socket) -> None:
        """Take ownership of a connection."""
        self._socket = connection
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, request: tuple[str | float, ...], remaining: Callable[[], float]) -> Answer:
        """Send a request and return its answer; `remaining()` returns the seconds left for it. Raises OSError."""
        self._socket.settimeout(max(remaining(), _POLL_SECONDS))
        self._socket.sendall(encode_frame(request))
        length = parse_frame_length(self._read(HEAD_BYTES, remaining))
        answer: Answer = json.loads(self._read(length, remaining))
        return answer

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def __del__(self) -> None:
        self._socket.close()

    def _read(self, length: int, remaining: Callable[[], float]) -> bytes:
        data = bytearray()
        while len(data) < length:
            seconds = remaining()
            if seconds <= 0:
                raise TimeoutError("the host of the generation's store does not answer")
            # In short waits, because the remaining time shrinks when something else is urgent.
            self._socket.settimeout(min(seconds, _POLL_SECONDS))
            try:
                part = self._socket.recv(length - len(data))
            except TimeoutError:
                continue
            if not part:
                raise ConnectionError("the host of the generation's store closed the connection")
            data += part
        return bytes(data)

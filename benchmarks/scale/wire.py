"""Counts what goes between clients and one server: a forwarder in a process of its own."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import selectors
import signal
import socket
import struct
from dataclasses import dataclass

_LAYOUT = "QQQQ"


@dataclass(frozen=True, slots=True)
class Traffic:
    """Since the beginning."""

    up: int
    """Bytes from clients."""
    down: int
    """Bytes to clients."""
    turns: int
    """Requests: a client spoke after it had connected or was answered; what it sends without an answer in between is
    one."""
    connections: int


class Counter:
    """Stands before one server on this machine."""

    def __init__(self) -> None:
        self._numbers = mmap.mmap(-1, mmap.PAGESIZE)  # shared with the forwarder
        self._pid = 0

    def listen(self, port: int) -> int:
        """Forward to a port; returns the port to connect to. To be called before this process has threads."""
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        listener.listen(4096)
        chosen: int = listener.getsockname()[1]
        self._pid = os.fork()
        if self._pid == 0:
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)
            _forward(listener, port, self._numbers)
        listener.close()
        return chosen

    def read(self) -> Traffic:
        """What has gone through."""
        return Traffic(*struct.unpack(_LAYOUT, self._numbers[: struct.calcsize(_LAYOUT)]))

    def end(self) -> None:
        """Stop forwarding."""
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
            self._pid = 0


@dataclass(slots=True)
class _Side:
    other: socket.socket
    is_client: bool
    pair: list[bool]
    """Whether the client has the word."""


def _forward(listener: socket.socket, port: int, numbers: mmap.mmap) -> None:
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    up = down = turns = connections = 0
    while True:
        for key, _ in selector.select():
            source = key.fileobj
            assert isinstance(source, socket.socket)
            if key.data is None:
                client, _ = listener.accept()
                try:
                    server = socket.create_connection(("127.0.0.1", port))
                except OSError:
                    client.close()
                    continue
                pair = [False]
                for end in (client, server):
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                selector.register(client, selectors.EVENT_READ, _Side(server, True, pair))
                selector.register(server, selectors.EVENT_READ, _Side(client, False, pair))
                connections += 1
            else:
                side: _Side = key.data
                data = b""
                with contextlib.suppress(OSError):
                    data = source.recv(1 << 20)
                if not data:
                    for end in (source, side.other):
                        with contextlib.suppress(KeyError, ValueError):
                            selector.unregister(end)
                        end.close()
                    continue
                if side.is_client:
                    up, turns = up + len(data), turns + (not side.pair[0])
                else:
                    down += len(data)
                side.pair[0] = side.is_client
                with contextlib.suppress(OSError):
                    side.other.sendall(data)
            numbers[: struct.calcsize(_LAYOUT)] = struct.pack(_LAYOUT, up, down, turns, connections)

"""Let the ports of a machine without power not answer, where loopback alone would refuse connections.

A refused connection is a sign of life of the other machine, and software distinguishes the two. So before a node is
killed the ports that its processes listen on are noted, and afterwards they are held open by sockets that accept
nothing: their queues are full, so the kernel drops whatever else arrives.

Invariant: best effort; a port that cannot be held refuses connections, as it would without this.
"""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from trainium_devcluster.processes.process_families import marked, sockets_of

if TYPE_CHECKING:
    from collections.abc import Iterable

_LISTEN = "0A"
_KNOCKS = 2
"""Connections that fill a queue of length 0: the kernel queues one more."""

Address = tuple[str, int]


class Silence:
    """Held ports of one node."""

    def __init__(self, addresses: Iterable[Address]) -> None:
        self._sockets: list[socket.socket] = []
        self.missing = [address for address in addresses if not self._hold(address)]
        """Return ports that could not be held, because a former listener may still end."""

    def try_again(self) -> None:
        """Hold what is missing, where that is possible by now."""
        self.missing = [address for address in self.missing if not self._hold(address)]

    def end(self) -> None:
        """Let go of the ports."""
        for one in self._sockets:
            one.close()
        self._sockets = []

    def _hold(self, address: Address) -> bool:
        listener = socket.socket()
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(0)
        except OSError:
            listener.close()
            return False
        self._sockets.append(listener)
        for _ in range(_KNOCKS):
            knock = socket.socket()
            knock.setblocking(False)
            self._sockets.append(knock)
            with contextlib.suppress(OSError):
                knock.connect(address)
        return True


def listening(variable: str, value: str) -> list[Address]:
    """Addresses that the processes which carry this environment variable listen on; IPv4 only."""
    inodes = {inode for pid in marked(variable, value) for _, inode in sockets_of(pid)}
    found = []
    for line in _rows():
        fields = line.split()
        if fields[3] == _LISTEN and fields[9] in inodes:
            address, port = fields[1].split(":")
            packed = bytes.fromhex(address)[::-1]  # the kernel writes the number of a little-endian machine
            found.append((socket.inet_ntoa(packed), int(port, 16)))
    return found


def _rows() -> list[str]:
    try:
        return Path("/proc/self/net/tcp").read_text().splitlines()[1:]
    except OSError:
        return []

"""Make the ports of a machine without power silent, because loopback would refuse connections.

A refused connection shows that the other machine is alive, and software distinguishes it from silence. The ports on
which a node's processes listen are recorded before it is killed. Afterwards sockets with full queues hold them, so that
the kernel drops further connections.

Guarantees:
- A port that cannot be held refuses connections, as without this module.
"""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from trainium_devcluster.processes.process_tree import find_marked, list_sockets

if TYPE_CHECKING:
    from collections.abc import Iterable

_LISTEN = "0A"
_QUEUED_CONNECTIONS = 2
"""Number of connections that fill a queue of length 0, because the kernel queues one more."""

Address = tuple[str, int]


class UnresponsivePorts:
    """Holds the ports of one node."""

    def __init__(self, addresses: Iterable[Address]) -> None:
        self._sockets: list[socket.socket] = []
        self.missing = [address for address in addresses if not self._hold(address)]
        """Ports that could not be held yet, because the previous listener may still be ending."""

    def retry(self) -> None:
        """Try again to hold the missing ports."""
        self.missing = [address for address in self.missing if not self._hold(address)]

    def release(self) -> None:
        """Release the ports."""
        for listener in self._sockets:
            listener.close()
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
        for _ in range(_QUEUED_CONNECTIONS):
            connection = socket.socket()
            connection.setblocking(False)
            self._sockets.append(connection)
            with contextlib.suppress(OSError):
                connection.connect(address)
        return True


def find_listening_addresses(variable: str, value: str) -> list[Address]:
    """Return the IPv4 addresses on which processes with this environment variable listen."""
    inodes = {inode for pid in find_marked(variable, value) for _, inode in list_sockets(pid)}
    endpoints = []
    for line in _read_tcp_table():
        fields = line.split()
        if fields[3] == _LISTEN and fields[9] in inodes:
            address, port = fields[1].split(":")
            packed = bytes.fromhex(address)[::-1]  # the kernel writes a little-endian number
            endpoints.append((socket.inet_ntoa(packed), int(port, 16)))
    return endpoints


def _read_tcp_table() -> list[str]:
    try:
        return Path("/proc/self/net/tcp").read_text().splitlines()[1:]
    except OSError:
        return []

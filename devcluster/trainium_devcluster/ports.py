"""Reserve ports for processes that listen later, so that no other process on this machine gets them."""

from __future__ import annotations

import atexit
import socket
from collections import deque

_HELD: deque[socket.socket] = deque()
"""Bound sockets that never listen: with SO_REUSEADDR a listener can bind the port too, but no other process gets it."""


def reserve_port() -> int:
    """Return a port that is free on all addresses of this machine, reserved until 64 more are requested."""
    if len(_HELD) == 64:
        _HELD.popleft().close()
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("0.0.0.0", 0))  # noqa: S104 - never listens; who listens on all addresses is refused for one
    _HELD.append(held)
    port: int = held.getsockname()[1]
    return port


@atexit.register
def release_ports() -> None:
    """Close the sockets of this process; in a forked child those of the parent stay open."""
    while _HELD:
        _HELD.pop().close()

"""Ports for processes that listen later: nobody else on this machine is given them meanwhile."""

from __future__ import annotations

import atexit
import socket
from collections import deque

_HELD: deque[socket.socket] = deque()
"""Bound and never listening: as these have SO_REUSEADDR, so may who listens, and the system hands them to no other."""


def reserved_port() -> int:
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
def let_go() -> None:
    """Close those of this process; in a forked child, the parent's stay."""
    while _HELD:
        _HELD.pop().close()

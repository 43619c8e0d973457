"""Serve torch's store at a socket that listens already, in a process that is forked from the standby.

The module also runs in the interpreter of a program's image, so it imports only the standard library, and needs Python
3.10.
"""

from __future__ import annotations

import signal
import sys
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

ENTRY = f"{__name__}:serve"
_SECONDS = 300.0


def can_serve() -> bool:
    """Return whether this process has imported a torch whose store takes a listening socket."""
    store = getattr(sys.modules.get("torch.distributed"), "TCPStore", None)
    return store is not None and "master_listen_fd" in (store.__init__.__doc__ or "")


def serve(arguments: Sequence[str]) -> int:
    """Serve until the process is killed, given the address, the port and the descriptor of the socket."""
    address, port, descriptor = arguments
    store = sys.modules["torch.distributed"].TCPStore(
        address,
        int(port),
        None,
        True,
        timedelta(seconds=_SECONDS),
        wait_for_workers=False,
        master_listen_fd=int(descriptor),
    )
    while store is not None:
        signal.pause()
    return 0

"""Stop torch from looking up the names of peers, which takes seconds if DNS does not answer."""

from __future__ import annotations

import contextlib
import ctypes
import socket
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.distributed import TCPStore

_STORE_SECONDS = 300.0
_NSCOUNT_OFFSET = 16
"""Offset in `struct __res_state` (resolv.h): two ints and an unsigned long are before it, on every 64-bit Linux."""
NAMELESS = "127.83.82.81"
"""An address of this host that is in no hosts file."""


def stop_reverse_lookups() -> None:
    """Open a store whose address has no name, while this thread has no name server.

    torch looks up the name of each address once per process; forks of this one inherit that it has.
    """
    with contextlib.suppress(OSError, AttributeError, RuntimeError), _disable_name_servers():
        open_store(NAMELESS)


def open_store(address: str) -> TCPStore:
    """Open one of torch's stores at a free port of one address. Raises OSError."""
    from torch.distributed import TCPStore  # noqa: PLC0415 - slow

    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind((address, 0))
        listener.listen()
        port = listener.getsockname()[1]
        timeout = timedelta(seconds=_STORE_SECONDS)
        listening = listener.detach()
        return TCPStore(address, port, None, True, timeout, wait_for_workers=False, master_listen_fd=listening)


@contextlib.contextmanager
def _disable_name_servers() -> Iterator[None]:
    """Remove the name servers of this thread. Raises AttributeError without glibc's resolver."""
    libc = ctypes.CDLL(None)
    state, read_configuration = libc["__res_state"], libc["__res_init"]
    state.restype = ctypes.c_void_p
    read_configuration()
    count = ctypes.c_int.from_address(state() + _NSCOUNT_OFFSET)
    count.value = 0
    try:
        yield
    finally:
        read_configuration()

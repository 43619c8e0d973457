"""Has torch write addresses into its logs, not names, so that no recovery waits for a name server.

For its log's sake, at any log level, torch's store asks DNS for the name of each peer that it meets
(`torch/csrc/distributed/c10d/socket.cpp`, `formatSockAddr`). A name server that does not answer holds a process for
10 s there, twice as long as the store waits. After one failure torch asks no more (pytorch issue 159007), and processes
that are forked later have learned of it. So one look-up is made to fail, at once and without a packet: resolver(3) lets
a thread change its list of name servers, and with none in it glibc refuses.

Invariants: the thread's own look-ups are as before afterwards; where the C library is another, nothing is done. It
never raises: what fails here costs time later, and only where DNS is out.
"""

from __future__ import annotations

import contextlib
import ctypes
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_NSCOUNT_OFFSET = 16
"""Of `struct __res_state` (resolv.h): two ints and an unsigned long are before it, on every 64-bit Linux."""
NAMELESS = "127.83.82.81"
"""An address of this host that no hosts file names."""


def stop_reverse_lookups(serve: Callable[[str], object]) -> None:
    """`serve(address)` opens one of torch's stores there, which asks for the address's name in this thread."""
    with contextlib.suppress(OSError, AttributeError, RuntimeError), _no_name_server():
        serve(NAMELESS)


@contextlib.contextmanager
def _no_name_server() -> Iterator[None]:
    """For this thread. Raises AttributeError where the C library does not have glibc's resolver."""
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

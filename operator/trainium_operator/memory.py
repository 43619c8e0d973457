"""Tune memory and garbage collection: an operator of 1,000 agents holds 1,000 TLS connections.

asyncio allocates a receive buffer of 256 KiB for each TLS connection. A socket is read into it and TLS consumes it at
once, so one buffer serves all connections of a thread. Objects that were loaded at the start are never garbage, so
collections skip them. Memory that lists, faults of a thousand pods and closed connections leave is returned to the
system; otherwise the process would keep its largest size.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import threading
from asyncio import sslproto
from typing import Any

TLS_BUFFER = 16 * 1024
"""Bytes; a record of TLS has no more."""
_YOUNG, _MIDDLE, _OLD = 10_000, 20, 20
"""Objects between two collections, and how many of those lead to a collection of the next generation."""
TRIM_SECONDS = 60.0
LARGE_BLOCK = 256 * 1024
"""Bytes from which on a block is the system's own again as soon as it is freed: bodies of lists are as large."""
_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8  # of mallopt(3)
_shared = threading.local()
_OwnProtocol = sslproto.SSLProtocol


class _SharedBufferProtocol(_OwnProtocol):
    """asyncio's TLS, reading into the buffer of its thread.

    asyncio sets up to 37 attributes, and Python keeps the names of at most 29 once for all instances: with these in
    slots a connection needs 1.3 kB less. An attribute that a later asyncio calls otherwise is kept as any other.
    """

    __slots__ = (
        "_extra",
        "_server_hostname",
        "_server_side",
        "_ssl_buffer",
        "_ssl_buffer_view",
        "_ssl_handshake_timeout",
        "_ssl_shutdown_timeout",
        "_waiter",
        "_write_backlog",
    )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not hasattr(_shared, "view"):
            _shared.view = memoryview(bytearray(TLS_BUFFER))
        self._ssl_buffer_view = _shared.view

    @property
    def max_size(self) -> int:  # type: ignore[override]  # a class variable there
        """Bytes to read at once; asyncio's own initialiser allocates as many, for a buffer that is not used."""
        return TLS_BUFFER if hasattr(self, "_ssl_buffer_view") else 1

    def get_buffer(self, _n: int) -> memoryview:
        """See asyncio.BufferedProtocol."""
        view: memoryview = self._ssl_buffer_view
        return view


def use_little_memory_per_connection() -> None:
    """Let TLS connections that are opened from now on share their receive buffer."""
    setattr(sslproto, "SSLProtocol", _SharedBufferProtocol)  # noqa: B010 - a type is not assigned to otherwise


def freeze_gc() -> None:
    """Exclude existing objects from collections; call when everything is loaded and before the work starts."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, _MIDDLE, _OLD)


def use_one_heap() -> None:
    """Have the C library keep one heap for all threads, without large blocks; before the first thread.

    Left to itself it counts ever larger blocks as small ones once it has seen them freed, and they tear holes.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(_M_ARENA_MAX, 1)
        library.mallopt(_M_MMAP_THRESHOLD, LARGE_BLOCK)


async def trim_periodically() -> None:
    """Collect garbage and trim the heap periodically; never returns."""
    while True:
        await asyncio.sleep(TRIM_SECONDS)
        trim_heap()


def trim_heap() -> None:
    """Return free memory to the system; takes some ten milliseconds with 1,000 agents."""
    gc.collect()
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):  # not every C library has it
        library.malloc_trim(0)

"""Tune memory and garbage collection for an operator with 1,000 agents, so 1,000 TLS connections.

asyncio allocates a receive buffer of 256 KiB for each TLS connection. TLS consumes the bytes as soon as a socket is
read, so one buffer serves all connections of a thread. Objects that were loaded at the start are never garbage, so
collections skip them. Free memory after lists, faults of a thousand pods and closed connections is returned to the
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
"""Bytes; a TLS record is no larger."""
_YOUNG, _MIDDLE, _OLD = 10_000, 20, 20
"""Objects between two collections, and the collections after which the next generation is collected."""
TRIM_SECONDS = 60.0
LARGE_BLOCK = 256 * 1024
"""Bytes from which a freed block returns to the system at once; bodies of lists are as large."""
_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8  # of mallopt(3)
_shared = threading.local()
_OwnProtocol = sslproto.SSLProtocol


class _SharedBufferProtocol(_OwnProtocol):
    """asyncio's TLS protocol, reading into the buffer of its thread.

    asyncio sets up to 37 attributes, and Python shares the names of at most 29 between instances. With these in slots a
    connection needs 1.3 kB less. An attribute that a later asyncio renames is stored as any other.
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
        """Return the bytes to read at once; asyncio's initializer allocates as many for a buffer that is not used."""
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
    """Let the C library use one heap for all threads, and map large blocks; call before the first thread.

    By default it raises its limit for small blocks once larger ones were freed, and these fragment the heap.
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

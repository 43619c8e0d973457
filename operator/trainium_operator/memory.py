"""How this process uses memory and the garbage collector: an operator of 1,000 agents holds 2,000 TLS connections.

asyncio gives each TLS connection a receive buffer of 256 KiB, of which an agent's messages use one. And what was loaded
at the start is never garbage, so collections need not look at it again and again.
"""

from __future__ import annotations

import gc
from asyncio import sslproto

TLS_BUFFER = 8 * 1024
"""Bytes; longer messages take several reads."""
_YOUNG, _MIDDLE, _OLD = 10_000, 20, 20
"""Objects between two collections, and how many of those lead to a collection of the next generation."""


def use_little_memory_per_connection() -> None:
    """Make the receive buffers of TLS connections that are opened from now on small."""
    sslproto.SSLProtocol.max_size = TLS_BUFFER


def settle() -> None:
    """What exists now stays: call when everything is loaded and before the work begins."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, _MIDDLE, _OLD)

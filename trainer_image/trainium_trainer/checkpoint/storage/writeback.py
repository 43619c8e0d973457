"""Ask the kernel to write a part of a file to its device now, without waiting for that.

Guarantees:
- A hint. Where it cannot be given (another system, another C library, another kind of file) nothing happens, and
  `fsync` at the end is what makes the bytes last.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_WRITE = 2
"""SYNC_FILE_RANGE_WRITE of <fcntl.h>: begin to write what is dirty, wait for nothing."""


def send_to_device(descriptor: int, start: int, length: int) -> None:
    """Begin to write these bytes of an open file."""
    function = _function()
    if function is not None:
        function(descriptor, start, length, _WRITE)


@cache
def _function() -> Callable[..., Any] | None:
    """sync_file_range(2); None where there is none."""
    if sys.platform != "linux":
        return None
    try:
        function = ctypes.CDLL(None, use_errno=True).sync_file_range
    except (OSError, AttributeError):
        return None
    function.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    function.restype = ctypes.c_int
    return function

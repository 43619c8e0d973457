"""End a rank that stopped on request without unloading its modules: for a program of TRL that takes 0.4 s.

`finally` blocks and exit handlers run, and open files are closed, as at any end. Objects of modules are not destroyed.
At other ends open files are flushed: in a fork, data of a program that leaves by `sys.exit` would be lost.
The module also runs in the interpreter of a program's image, so it imports only the standard library, and needs Python
3.10.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import logging
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_STOPPED = 75
"""`ExitCode.YIELDING`: the rank has saved."""
_stopped = False


def register() -> None:
    """Register the last exit handler of this process and its forks: call it before anything is imported ahead."""
    atexit.register(_leave)


@contextlib.contextmanager
def record_exit() -> Iterator[None]:
    """Record the exit code with which the block ends the process."""
    global _stopped  # noqa: PLW0603 - the exit handler has no other access
    try:
        yield
    except SystemExit as leave:
        _stopped = leave.code == _STOPPED
        raise


def _leave() -> None:
    logging.shutdown()
    # What was opened before the fork is frozen, so it is none of the objects. A file in a cycle of references, as that
    # of an exception, may be destroyed after the one to which it writes.
    files = [file for file in gc.get_objects() if isinstance(file, io.IOBase)]
    for file in sorted(files, key=_find_layer):
        with contextlib.suppress(Exception):  # as the interpreter does
            if _stopped and file not in (sys.stdout, sys.stderr):
                file.close()
            else:
                file.flush()
    if _stopped:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(_STOPPED)


def _find_layer(file: io.IOBase) -> int:
    """Return 0 for text, 1 for a compressed or other file, 2 for a buffer and 3 for the file below it."""
    layers = ((io.TextIOBase, 0), ((io.BufferedWriter, io.BufferedRandom, io.BufferedReader), 2), (io.RawIOBase, 3))
    return next((layer for kind, layer in layers if isinstance(file, kind)), 1)

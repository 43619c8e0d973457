"""Ask a training process to save what only its memory has, before it is killed: a socket beside its progress record.

Guarantees:
- A process that does not listen, that is stopped, or that does not answer is not waited for.
- The request is answered by a thread, so the process may be inside a collective that will never end.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

_RECEIVED, _SAVED, _NOT_SAVED = b"r", b"s", b"n"
_ANSWER_SECONDS = 1.0
_BACKLOG = 4


def listen(record: Path, save: Callable[[], bool]) -> socket.socket:
    """Call `save` in a thread at each request, until the returned socket is closed. Raises OSError.

    record: the progress record of this process. save: returns whether it has saved, and raises nothing.
    """
    path = request_path(record)
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with _short_path(path) as address:
        listener.bind(address)
    path.chmod(0o600)
    listener.listen(_BACKLOG)
    threading.Thread(target=_serve, args=(listener, save), name="save-requests", daemon=True).start()
    return listener


def _serve(listener: socket.socket, save: Callable[[], bool]) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:  # closed
            return
        with connection, contextlib.suppress(OSError):  # the agent has not waited
            connection.sendall(_RECEIVED)
            connection.sendall(_SAVED if save() else _NOT_SAVED)


def request_save(record: Path, seconds: float) -> bool:
    """Ask the process of a progress record to save, and wait until it has. Called by the agent.

    Returns False if it does not listen, has ended or cannot save, and after `seconds`.
    """
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_ANSWER_SECONDS)
        with _short_path(request_path(record)) as address:
            connection.connect(address)
        if connection.recv(1) == _RECEIVED:
            connection.settimeout(seconds)
            return connection.recv(1) == _SAVED
    return False


def request_path(record: Path) -> Path:
    """Return the path of the socket beside a progress record."""
    return record.with_name(f"{record.name}.save")


@contextlib.contextmanager
def _short_path(path: Path) -> Iterator[str]:
    """Yield an address of a path of any length; that of a socket has at most 107 bytes."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)

"""Work for another process: take calls from a socket and send results back until it closes.

Started as `python -m trainium_trainer.data.workers.worker FD`.

Guarantees:
- It never outlives its parent by more than the call that it is at.
- Signals are for the parent, which decides what becomes of the work.
"""

from __future__ import annotations

import pickle
import signal
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any


def serve(connection: Connection) -> None:
    """Answer calls in order; each answer is ("done", result) or ("failed", exception or None, traceback)."""
    while True:
        try:
            function, arguments = connection.recv()
        except (EOFError, ConnectionResetError):
            return
        try:
            answer: tuple[Any, ...] = ("done", function(*arguments))
        except Exception as error:  # noqa: BLE001 - it is the parent's to judge
            answer = ("failed", _portable(error), traceback.format_exc())
        try:
            connection.send(answer)
        except (BrokenPipeError, ConnectionResetError):
            return


def _portable(error: Exception) -> Exception | None:
    """Return an error that can be pickled; else None."""
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 - our own
    except Exception:  # noqa: BLE001 - whatever a foreign exception does
        return None
    return error


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    serve(Connection(int(sys.argv[1])))

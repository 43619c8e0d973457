"""Tokenizing processes that are forked from one that has imported what they need, in place of clean starts.

A start costs 0.4 processor seconds, most of them imports, and the tests of data have hundreds. What a process does from
there on is its own code; tests of how processes start, end and are killed take `pool.start_process` as it is.
"""

import contextlib
import os
import signal
import socket
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess

from tests.testing.trainer.fork_server import fork_context
from trainium_trainer.data.workers import pool

CLEAN_START = pool.start_process


class ForkedProcess:
    """A process as the pool uses it."""

    def __init__(self, process: ForkServerProcess) -> None:
        """`process` has been started."""
        self._process = process

    def poll(self) -> int | None:
        """Return the exit code; None while it runs."""
        return self._process.exitcode

    def wait(self) -> int:
        """Wait for its end and return the exit code; minus the signal that killed it."""
        self._process.join()
        assert self._process.exitcode is not None
        return self._process.exitcode

    def kill(self) -> None:
        """Kill it."""
        self._process.kill()


def work(connection: Connection, environment: dict[str, str]) -> None:
    """Do what `python -m trainium_trainer.data.workers.pool` does."""
    os.setpgid(0, 0)
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pool.serve(connection)


@contextlib.contextmanager
def forked_workers() -> Iterator[None]:
    """Let pools fork their processes."""
    context = fork_context()

    def start(theirs: socket.socket, environment: dict[str, str]) -> ForkedProcess:
        connection = Connection(os.dup(theirs.fileno()))
        with connection:
            process = context.Process(target=work, args=(connection, environment))
            process.start()
        return ForkedProcess(process)

    pool.start_process = start  # type: ignore[assignment]
    try:
        yield
    finally:
        pool.start_process = CLEAN_START

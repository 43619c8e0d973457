"""Fork tokenizing processes from a process that has imported their modules, in place of clean starts.

A clean start costs 0.4 processor seconds, mostly for imports, and the tests of data have hundreds. Tests of how
processes start, end and are killed use the real `pool.start_process`.
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
    """The interface of a process that the pool uses."""

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
        """Kill the process."""
        self._process.kill()


def run_worker(connection: Connection, environment: dict[str, str]) -> None:
    """Run the worker process, like `python -m trainium_trainer.data.workers.pool`."""
    os.setpgid(0, 0)
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pool.serve(connection)


@contextlib.contextmanager
def forked_workers() -> Iterator[None]:
    """Replace the start of worker processes by forks."""
    context = fork_context()

    def start(worker_socket: socket.socket, environment: dict[str, str]) -> ForkedProcess:
        connection = Connection(os.dup(worker_socket.fileno()))
        with connection:
            process = context.Process(target=run_worker, args=(connection, environment))
            process.start()
        return ForkedProcess(process)

    pool.start_process = start  # type: ignore[assignment]
    try:
        yield
    finally:
        pool.start_process = CLEAN_START

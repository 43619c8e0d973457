"""Run worker processes that are started without a fork, so that they do not inherit the state of this process.

A process is `python -m trainium_trainer.data.workers.pool FD`: it receives calls from a socket and sends results back.

Guarantees:
- Results are in the order of the calls.
- An error of a call is raised here with its original traceback.
- The death of a process raises an error and never hangs.
- No process outlives the pool; one whose parent is killed ends after the current call.
- The parent handles signals and decides what happens to the work.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import traceback
from collections import deque
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any, Self, TypeVar

from trainium_trainer.exits import TrainerError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

T = TypeVar("T")
_AHEAD = 2  # calls queued at each process, including the current one


class WorkerError(RuntimeError):
    """A worker process failed unexpectedly; the text has its traceback."""


def start_process(child_socket: socket.socket, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start a new process that serves the other end of the socket."""
    return subprocess.Popen(
        [sys.executable, "-m", "trainium_trainer.data.workers.pool", str(child_socket.fileno())],
        pass_fds=[child_socket.fileno()],
        stdin=subprocess.DEVNULL,
        env=environment,
        process_group=0,  # so that signals to the parent's process group do not reach it
    )


class HelperProcess:
    """A process and its socket."""

    def __init__(self) -> None:
        parent_socket, child_socket = socket.socketpair()
        with child_socket:
            environment = os.environ | {
                "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
                "TOKENIZERS_PARALLELISM": "false",
                "OMP_NUM_THREADS": "1",
            }
            self._process = start_process(child_socket, environment)
        self.connection = Connection(parent_socket.detach())

    def send(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        """Send a call to the process."""
        try:
            self.connection.send((function, arguments))
        except (BrokenPipeError, ConnectionResetError):
            raise self._exit_error() from None

    def receive(self) -> Any:
        """Return the result of the oldest call. Raises the call's error, or WorkerError."""
        try:
            kind, result, *more = self.connection.recv()
        except (EOFError, ConnectionResetError):
            raise self._exit_error() from None
        if kind == "done":
            return result
        if isinstance(result, TrainerError):
            raise result
        raise WorkerError(f"a tokenizing process failed:\n{more[0]}")

    def _exit_error(self) -> WorkerError:
        code = self._process.wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        hint = " (the kernel does that to processes when memory is short)" if code == -signal.SIGKILL else ""
        return WorkerError(f"a tokenizing process {how}{hint}: look at its last lines above")

    def close(self) -> None:
        """End the process and wait for it."""
        self.connection.close()
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()


class Workers:
    """A pool of processes, all prepared by the same call."""

    def __init__(self, count: int, prepare: tuple[Callable[..., Any], tuple[Any, ...]] | None = None) -> None:
        """Start the processes; `prepare` is called in each, and `prepared` is its result."""
        self._workers: list[HelperProcess] = []
        self._prepare = prepare
        self.prepared: Any = None
        self.grow(count)

    def grow(self, count: int) -> None:
        """Grow the pool to at least `count` processes."""
        new: list[HelperProcess] = []
        try:
            while len(self._workers) < count:
                new.append(HelperProcess())
                self._workers.append(new[-1])
                if self._prepare is not None:
                    new[-1].send(*self._prepare)
            for worker in new if self._prepare is not None else ():
                self.prepared = worker.receive()
        except BaseException:
            self.close()
            raise

    def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run one call in one of the processes."""
        self._workers[0].send(function, arguments)
        result: T = self._workers[0].receive()
        return result

    def send(self, number: int, function: Callable[..., Any], *arguments: Any) -> None:
        """Send a call to one process."""
        self._workers[number].send(function, arguments)

    def broadcast(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Send a call to every process."""
        for worker in self._workers:
            worker.send(function, arguments)

    def gather(self) -> list[Any]:
        """Return the result of the oldest call of every process."""
        return [worker.receive() for worker in self._workers]

    def map(self, function: Callable[..., T], calls: Iterable[tuple[Any, ...]]) -> Iterator[T]:
        """Yield the results of many calls in order; a few calls run ahead."""
        todo = iter(calls)
        idle = deque(self._workers * _AHEAD)
        order: deque[int] = deque()
        results: dict[int, T] = {}
        working: dict[HelperProcess, deque[int]] = {worker: deque() for worker in self._workers}
        number = 0
        # Results that wait for their turn count as outstanding, so that a slow call bounds the ones after it.
        limit = len(self._workers) * _AHEAD * 2
        while True:
            while idle and len(order) < limit and (arguments := next(todo, None)) is not None:
                worker = idle.popleft()
                worker.send(function, arguments)
                working[worker].append(number)
                order.append(number)
                number += 1
            if not order:
                return
            if order[0] in results:
                yield results.pop(order.popleft())
                continue
            busy = {worker.connection: worker for worker, numbers in working.items() if numbers}
            for ready in wait(list(busy)):
                worker = busy[ready]  # type: ignore[index]
                results[working[worker].popleft()] = worker.receive()
                idle.append(worker)

    def close(self) -> None:
        """End all processes."""
        for worker in self._workers:
            with contextlib.suppress(OSError):
                worker.close()
        self._workers = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# ---- in a worker process ---------------------------------------------------------------------------------------------


def serve(connection: Connection) -> None:
    """Serve calls in order; each answer is ("done", result) or ("failed", exception or None, traceback)."""
    while True:
        try:
            function, arguments = connection.recv()
        except (EOFError, ConnectionResetError):
            return
        try:
            reply: tuple[Any, ...] = ("done", function(*arguments))
        except Exception as error:  # noqa: BLE001 - it is the parent's to judge
            reply = ("failed", _check_picklable(error), traceback.format_exc())
        try:
            connection.send(reply)
        except (BrokenPipeError, ConnectionResetError):
            return


def _check_picklable(error: Exception) -> Exception | None:
    """Return the error if it can be pickled, else None."""
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 - our own
    except Exception:  # noqa: BLE001 - whatever a foreign exception does
        return None
    return error


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    serve(Connection(int(sys.argv[1])))

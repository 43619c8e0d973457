"""Run worker processes that are started clean, without a fork of this process and what it has loaded.

Guarantees:
- Results come in the order of the calls, whichever process is quicker.
- An error of a call is raised here, with the traceback of where it happened.
- A process that dies is an error, never a wait.
- No process outlives the pool, nor a parent that is killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any, Self, TypeVar

from trainium_trainer.exits import TrainerError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

T = TypeVar("T")
_AHEAD = 2  # calls that each process has, with the one it is at


class WorkerError(RuntimeError):
    """A worker process failed in a way that nobody foresaw; the text has its traceback."""


def start_process(theirs: socket.socket, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start a clean process that works for the holder of the other end of the socket."""
    return subprocess.Popen(
        [sys.executable, "-m", "trainium_trainer.data.workers.worker", str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        env=environment,
        process_group=0,  # a signal to the parent's group is for the parent
    )


class HelperProcess:
    """One process and its socket."""

    def __init__(self) -> None:
        mine, theirs = socket.socketpair()
        with theirs:
            environment = os.environ | {
                "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
                "TOKENIZERS_PARALLELISM": "false",
                "OMP_NUM_THREADS": "1",
            }
            self._process = start_process(theirs, environment)
        self.connection = Connection(mine.detach())

    def send(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        """Give the process a call to work on."""
        try:
            self.connection.send((function, arguments))
        except (BrokenPipeError, ConnectionResetError):
            raise self._death() from None

    def receive(self) -> Any:
        """Return the result of the oldest call. Raises the call's error, or WorkerError."""
        try:
            kind, result, *more = self.connection.recv()
        except (EOFError, ConnectionResetError):
            raise self._death() from None
        if kind == "done":
            return result
        if isinstance(result, TrainerError):
            raise result
        raise WorkerError(f"a tokenising process failed:\n{more[0]}")

    def _death(self) -> WorkerError:
        code = self._process.wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        hint = " (the kernel does that to processes when memory is short)" if code == -signal.SIGKILL else ""
        return WorkerError(f"a tokenising process {how}{hint}: look at its last lines above")

    def close(self) -> None:
        """Let the process end, and see that it does."""
        self.connection.close()
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()


class Workers:
    """Some processes, all prepared by the same call."""

    def __init__(self, count: int, prepare: tuple[Callable[..., Any], tuple[Any, ...]] | None = None) -> None:
        """Start the processes; `prepare` is called in each, and its result is `prepared`."""
        self._workers: list[HelperProcess] = []
        self._prepare = prepare
        self.prepared: Any = None
        self.grow(count)

    def grow(self, count: int) -> None:
        """Have at least `count` processes."""
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
        """One call in one of the processes."""
        self._workers[0].send(function, arguments)
        result: T = self._workers[0].receive()
        return result

    def send(self, number: int, function: Callable[..., Any], *arguments: Any) -> None:
        """Give one process a call to work on."""
        self._workers[number].send(function, arguments)

    def broadcast(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Give every process the same call."""
        for worker in self._workers:
            worker.send(function, arguments)

    def gather(self) -> list[Any]:
        """Return the result of the oldest call of every process."""
        return [worker.receive() for worker in self._workers]

    def map(self, function: Callable[..., T], calls: Iterable[tuple[Any, ...]]) -> Iterator[T]:
        """Yield the results of many calls in their order; a few calls run ahead of the one that is asked for."""
        todo = iter(calls)
        idle = deque(self._workers * _AHEAD)
        order: deque[int] = deque()
        results: dict[int, T] = {}
        working: dict[HelperProcess, deque[int]] = {worker: deque() for worker in self._workers}
        number = 0
        # A result that waits for its turn counts as work, so that a slow one does not let the others run away.
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

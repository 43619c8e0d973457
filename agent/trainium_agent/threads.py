"""Run functions in the two threads of the agent that do its work: the event loop and the worker thread."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import traceback
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class EventLoop:
    """Runs functions in the agent's event loop; one that raises ends the pod, which must not stay idle."""

    def __init__(self, fail: Callable[[str], None]) -> None:
        """Use the running loop; `fail` ends the pod for a reason."""
        self._loop = asyncio.get_running_loop()
        self.fail = fail

    def post(self, function: Callable[[], None]) -> None:
        """Run a function in the loop, from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self.run, function)

    def call_at(self, deadline: float, function: Callable[[], None]) -> asyncio.TimerHandle:
        """Run a function at a time of `time.monotonic`."""
        return self._loop.call_at(deadline, self.run, function)

    def run(self, function: Callable[[], None]) -> None:
        """Run a function now."""
        try:
            function()
        except Exception:  # noqa: BLE001 - the loop would only log it
            self.fail(traceback.format_exc())


class BlockingWorker:
    """Runs tasks one after another in one thread, for the life of the pod."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="worker", daemon=True).start()

    def submit(self, task: Callable[[], None]) -> None:
        """Queue a task, which must not raise."""
        self._tasks.put(task)

    def _run(self) -> None:
        while True:
            self._tasks.get()()

"""Stop requests: a signal sets a flag, which the loop shares with the other ranks at the next step.

SIGTERM requests to save and exit. SIGUSR1 requests the same and also means that the pod ends and its memory is lost, so
that a snapshot in memory is not enough.

A process that waits for a peer inside a collective cannot see the flag, and after a silent failure of the peer it would
wait for half an hour. So a separate thread receives the signal too: it ends the process at once while there is nothing
to save, and with the exit code for a lost peer when the wait lasts much longer than a step.

Guarantees:
- The thread acts only after a signal and only until the ranks have agreed to stop.
- The thread never ends a process that computes, unless the process has nothing to save.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import TYPE_CHECKING, NoReturn

from trainium_contract.exit_codes import ExitCode
from trainium_contract.wire.log_line import LogLevel
from trainium_contract.worker_process import log_lines
from trainium_trainer import exits
from trainium_worker.pulse import Activity, Pulse, PulseReading, Waiting

if TYPE_CHECKING:
    from types import FrameType


_MIN_WAIT_SECONDS = 10.0
_WAIT_STEPS = 3.0
_POLL_SECONDS = 0.1
_DONE_LATER = "asked to leave after the last step: the work after it continues at the next start"
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopRequest:
    """The request to this process to save and exit."""

    def __init__(self) -> None:
        self.requested = False
        self.memory_ends = False
        self._wakeup: int | None = None
        self._agreed = threading.Event()
        self._nothing_to_save = threading.Event()

    def listen(self) -> None:
        """Install the signal handlers; outside the main thread (in tests) only the flags can be set."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in _SIGNALS:
            signal.signal(number, self._handle_signal)
        self._wakeup, write_end = os.pipe()
        os.set_blocking(write_end, False)
        # The interpreter writes the signal's number there at once, also while the main thread waits in C code.
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)

    def guard(self, pulse: Pulse) -> None:
        """Start the thread that ends this process if it waits for a lost peer after a stop request."""
        if self._wakeup is not None:
            threading.Thread(target=self._guard, args=(self._wakeup, pulse), name="stop", daemon=True).start()

    def record_agreement(self) -> None:
        """Record that all ranks stop together or have finished: no wait can fail from now on."""
        self._agreed.set()

    def exit_on_request(self) -> None:
        """Exit at once on a request, also on one already received: everything is on storage."""
        self._nothing_to_save.set()
        if self.requested:
            _leave(ExitCode.YIELDING, _DONE_LATER)

    def _handle_signal(self, number: int, _frame: FrameType | None) -> None:
        self.requested = True
        self.memory_ends = self.memory_ends or number == signal.SIGUSR1

    def _guard(self, wakeup: int, pulse: Pulse) -> None:
        memory_ends = False
        while not memory_ends:
            numbers = os.read(wakeup, 64)
            memory_ends = signal.SIGUSR1 in numbers
            if memory_ends or signal.SIGTERM in numbers:
                break
        if self._nothing_to_save.is_set():
            _leave(ExitCode.YIELDING, _DONE_LATER)
        seen, since = pulse.read(), time.monotonic()
        while not self._agreed.wait(_POLL_SECONDS):
            newest = pulse.read()
            if newest is None or seen is None or newest.beats != seen.beats:
                seen, since = newest, time.monotonic()
            if newest is not None and not memory_ends and newest.activity in (Activity.INIT, Activity.LOAD):
                _leave(ExitCode.YIELDING, "asked to leave before the first step: nothing to save")
            if newest is not None and time.monotonic() - since > compute_max_wait(newest):
                _leave(ExitCode.PEER_LOST, "asked to leave, and a peer that this process waits for does not come")


def compute_max_wait(reading: PulseReading) -> float:
    """Return the seconds that a stopping process may wait for its peers; infinite while it does not wait."""
    if reading.waiting is Waiting.NO:
        return float("inf")
    slowest = max([reading.first_step_seconds, *(length for length, _ in reading.steps)])
    return max(_MIN_WAIT_SECONDS, _WAIT_STEPS * slowest)


def _leave(code: ExitCode, message: str) -> NoReturn:
    log_lines.report_exit(message, level=LogLevel.INFO if code is ExitCode.YIELDING else LogLevel.ERROR)
    exits.leave(code)

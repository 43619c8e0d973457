"""The request to leave: a signal sets a flag, and the loop brings it up with the other ranks at the next step.

SIGTERM asks to save and leave. SIGUSR1 asks the same and says that this node's memory goes too (its pod ends), so that
a snapshot in memory is not enough.
"""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import FrameType


class StopRequest:
    """Whether this process was asked to save and leave."""

    def __init__(self) -> None:
        self.requested = False
        self.memory_ends = False

    def listen(self) -> None:
        """Take the signals from now on; outside the main thread (in tests) only the flags can be set."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._on_signal)
            signal.signal(signal.SIGUSR1, self._on_signal)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self.requested = True
        self.memory_ends = self.memory_ends or number == signal.SIGUSR1

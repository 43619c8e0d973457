"""The request to leave: SIGTERM sets a flag, and the loop brings it up with the other ranks at the next step."""

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

    def listen(self) -> None:
        """Take SIGTERM from now on; outside the main thread (in tests) only `requested` can be set."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._on_signal)

    def _on_signal(self, _signal: int, _frame: FrameType | None) -> None:
        self.requested = True

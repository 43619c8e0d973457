"""Raise Ctrl-C and SIGTERM as KeyboardInterrupt, but never between a process's start and its registration."""

from __future__ import annotations

import contextlib
import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _Interrupts:
    """The interrupts of this process."""

    def __init__(self) -> None:
        self.deferred = False
        self.pending = False

    def handle(self, _number: int, _frame: FrameType | None) -> None:
        for number in _SIGNALS:  # a second signal must not interrupt the cleanup of the first
            signal.signal(number, signal.SIG_IGN)
        self.pending = True
        self.raise_pending()

    def raise_pending(self) -> None:
        if self.pending and not self.deferred:
            self.pending = False
            raise KeyboardInterrupt


_interrupts = _Interrupts()


@contextlib.contextmanager
def catch_interrupts() -> Iterator[None]:
    """Raise KeyboardInterrupt at the first such signal within the block; for the main thread."""
    before = {number: signal.signal(number, _interrupts.handle) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def defer_interrupts() -> Iterator[None]:
    """Delay a caught interrupt to the end of the block, which must be short."""
    _interrupts.deferred = True
    try:
        yield
    finally:
        _interrupts.deferred = False
    _interrupts.raise_pending()

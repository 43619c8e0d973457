"""Ctrl-C and SIGTERM as KeyboardInterrupt, but never between the start of a process and the owner that would end it."""

from __future__ import annotations

import contextlib
import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _Interrupts:
    """State of the interrupts of this process."""

    def __init__(self) -> None:
        self.held = False
        self.came = False

    def handle(self, _number: int, _frame: FrameType | None) -> None:
        for number in _SIGNALS:  # a second one must not cut short what the first one ends
            signal.signal(number, signal.SIG_IGN)
        self.came = True
        self.answer()

    def answer(self) -> None:
        if self.came and not self.held:
            self.came = False
            raise KeyboardInterrupt


_interrupts = _Interrupts()


@contextlib.contextmanager
def catch_interrupts() -> Iterator[None]:
    """Within it the first such signal raises KeyboardInterrupt; for the main thread."""
    before = {number: signal.signal(number, _interrupts.handle) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Within it, which must be short, a caught interrupt waits; it is raised at the end."""
    _interrupts.held = True
    try:
        yield
    finally:
        _interrupts.held = False
    _interrupts.answer()

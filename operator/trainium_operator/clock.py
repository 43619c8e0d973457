"""A clock for decisions: Unix seconds that never jump, even if the machine's clock is set.

Guarantees:
- It starts at the machine's time, runs with the monotonic clock, and never goes back.
- It approaches a machine's clock that was set, by at most a fiftieth of the time that passes.

So a jump of an hour makes no agent silent and no deadline expire, and after some days the times in a status are right
again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_FASTEST_CORRECTION = 0.02


class SteadyClock:
    """A callable that returns the time."""

    def __init__(self, wall: Callable[[], float], monotonic: Callable[[], float]) -> None:
        self._wall = wall
        self._monotonic = monotonic
        self._at = monotonic()
        self._offset = wall() - self._at

    def __call__(self) -> float:
        """Return Unix seconds."""
        now = self._monotonic()
        max_correction = _FASTEST_CORRECTION * (now - self._at)
        error = self._wall() - now - self._offset
        self._offset += min(max_correction, max(-max_correction, error))
        self._at = now
        return now + self._offset

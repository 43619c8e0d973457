"""A clock for decisions: Unix seconds that never jump, whatever is done to the machine's clock.

Invariants: it starts at the machine's time, runs with the monotonic clock, and follows a machine's clock that was set
by at most a fiftieth of the time that passes; it never goes back. So an hour's jump makes no agent silent and no
deadline due, and after some days the times in a status are right again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_FASTEST_CORRECTION = 0.02


class SteadyClock:
    """Call it for the time."""

    def __init__(self, wall: Callable[[], float], monotonic: Callable[[], float]) -> None:
        self._wall = wall
        self._monotonic = monotonic
        self._at = monotonic()
        self._offset = wall() - self._at

    def __call__(self) -> float:
        """Return Unix seconds."""
        now = self._monotonic()
        most = _FASTEST_CORRECTION * (now - self._at)
        error = self._wall() - now - self._offset
        self._offset += min(most, max(-most, error))
        self._at = now
        return now + self._offset

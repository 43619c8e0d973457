"""Compute the restart delay of a container, as a kubelet does. Pure.

Invariants: the first restart is immediate; then 10 s after the end, doubling to at most 300 s; a container that ran
for twice that long starts over.
"""

from dataclasses import dataclass

INITIAL = 10.0  # seconds
MAXIMUM = 300.0


@dataclass(slots=True)
class Backoff:
    """The back-off of one container."""

    _delay: float = 0.0
    _updated: float = 0.0

    def remaining(self, finished_at: float, now: float) -> float:
        """Seconds until the container may be started again, 0 when it may now; `finished_at` is when it last ended."""
        if self._expired(now):
            return 0.0
        return max(0.0, finished_at + self._delay - now)

    @property
    def delay(self) -> float:
        """The current pause in seconds, 0 before the first restart."""
        return self._delay

    def restarted(self, now: float) -> None:
        """Record a restart of the container."""
        self._delay = INITIAL if self._expired(now) else min(MAXIMUM, self._delay * 2)
        self._updated = now

    def _expired(self, now: float) -> bool:
        return self._delay == 0.0 or now - self._updated > 2 * MAXIMUM

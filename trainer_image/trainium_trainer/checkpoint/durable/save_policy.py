"""Decides when a durable save is due and when failed saves end the run. Pure except for its counters.

Guarantees:
- Only the first rank's policy decides what is saved, by its vote.
- Every rank counts failures, so that all ranks end the run at the same failure.
- A failed save is retried soon, whatever the interval, but never immediately.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Flag, auto
from typing import TYPE_CHECKING

from trainium_trainer.storage.errors import StorageError

if TYPE_CHECKING:
    from trainium_contract.trainer.checkpoint import DurableTierConfig, Milestones

RETRY_SECONDS = 60.0
"""The time from a failed save to its retry, unless the interval is shorter."""


class Save(Flag):
    """The saves that follow a step."""

    NOTHING = 0
    STATE = auto()
    """A checkpoint from which training can resume."""
    MILESTONE = auto()
    """The weights only."""


_BUSY = 4
"""Greater than every value of Save, so that the sum encodes both the wanted saves and the number of busy ranks."""


def encode_vote(wanted: Save, *, busy: bool) -> int:
    """Return the vote of one rank, to be summed over the ranks; only the first rank wants a save."""
    return wanted.value + _BUSY * busy


def decode_votes(votes: int) -> Save:
    """Return the saves decided by the sum of the votes; none while any rank is busy."""
    busy, wanted = divmod(votes, _BUSY)
    return Save.NOTHING if busy else Save(wanted)


@dataclass(slots=True)
class SavePolicy:
    """Tracks the saves and failures of one rank; times are seconds of the caller's clock."""

    durable: DurableTierConfig
    milestones: Milestones
    saved_step: int = 0
    """Step of the newest save that was started, or resumed from."""
    saved_at: float = 0.0
    milestone_tokens: int = 0
    """The position, in tokens, of the newest milestone."""
    failures: int = 0
    """The number of consecutive failed saves."""

    def propose_saves(self, *, step: int, now: float) -> Save:
        """Return what may be saved after `step`; `has_reached_milestone` then decides about the milestone."""
        if self.failures and now - self.saved_at < min(RETRY_SECONDS, self.durable.every_seconds or RETRY_SECONDS):
            return Save.NOTHING
        state = Save.STATE if self.failures or self._interval_is_over(step, now) else Save.NOTHING
        return state | (Save.NOTHING if self.milestones.every_tokens is None else Save.MILESTONE)

    def has_reached_milestone(self, tokens: int) -> bool:
        """Return whether a milestone lies between the newest one and this position."""
        every = self.milestones.every_tokens
        return every is not None and tokens // every > self.milestone_tokens // every

    def record_start(self, step: int, now: float) -> None:
        """Record that a save starts."""
        self.saved_step, self.saved_at = step, now

    def record_success(self) -> int:
        """Record a successful save; return the number of failed saves before it."""
        failures, self.failures = self.failures, 0
        return failures

    def record_failure(self, error: StorageError, newest: int, now: float) -> str:
        """Count a failure; return the message to report while training continues, the store's error first.

        Raises StorageError when too many consecutive saves have failed.
        """
        self.failures += 1
        self.saved_at = now
        safe = f"the newest durable checkpoint is step {newest}" if newest >= 0 else "there is no durable checkpoint"
        if self.failures > self.durable.failure_tolerance:
            more = f" ({self.failures} saves in a row have failed; {safe})" if self.failures > 1 else ""
            raise StorageError(f"{error}{more}") from error
        return f"{error}; training goes on without this save (saves failed in a row: {self.failures}, {safe})"

    def _interval_is_over(self, step: int, now: float) -> bool:
        every = self.durable
        if every.every_steps is not None and step - self.saved_step >= every.every_steps:
            return True
        return every.every_seconds is not None and now - self.saved_at >= every.every_seconds

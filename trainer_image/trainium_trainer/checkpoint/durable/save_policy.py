"""PURE but for the counts that it keeps: when a durable save is due, and when failed saves end the run.

Guarantees:
- The first rank's policy alone decides what is saved, by its vote.
- Every rank counts failures, so that each knows when the run has to end.
- A save that failed is due again soon, whatever the interval, and never at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Flag, auto
from typing import TYPE_CHECKING

from trainium_trainer.storage.errors import StorageError

if TYPE_CHECKING:
    from trainium_contract.trainer.checkpoint import DurableTierConfig, Milestones

RETRY_SECONDS = 60.0
"""From a failed save to the next one, unless the interval is shorter."""


class Save(Flag):
    """The saves that follow a step."""

    NOTHING = 0
    STATE = auto()
    """A checkpoint that training can go on from."""
    MILESTONE = auto()
    """The weights alone."""


_BUSY = 4
"""Above whatever the first rank can want, so that the sum holds both: what is wanted, and how many ranks are busy."""


def vote(wanted: Save, *, busy: bool) -> int:
    """One rank's word, to be summed over the ranks: only the first rank wants something."""
    return wanted.value + _BUSY * busy


def decided(votes: int) -> Save:
    """Return the decision of the sum of the votes; nothing while any rank is busy."""
    busy, wanted = divmod(votes, _BUSY)
    return Save.NOTHING if busy else Save(wanted)


@dataclass(slots=True)
class SavePolicy:
    """The saves of one rank, and their failures; times are of the caller's clock, seconds."""

    durable: DurableTierConfig
    milestones: Milestones
    saved_step: int = 0
    """Step of the newest save that was started, or resumed from."""
    saved_at: float = 0.0
    milestone_tokens: int = 0
    """Position of the newest milestone."""
    failures: int = 0
    """Saves in a row."""

    def wanted(self, *, step: int, now: float) -> Save:
        """Return what may be saved after `step`; `crosses` decides after it whether a milestone is due."""
        if self.failures and now - self.saved_at < min(RETRY_SECONDS, self.durable.every_seconds or RETRY_SECONDS):
            return Save.NOTHING
        state = Save.STATE if self.failures or self._interval_is_over(step, now) else Save.NOTHING
        return state | (Save.NOTHING if self.milestones.every_tokens is None else Save.MILESTONE)

    def crosses(self, tokens: int) -> bool:
        """Return whether a milestone lies between the newest one and this position."""
        every = self.milestones.every_tokens
        return every is not None and tokens // every > self.milestone_tokens // every

    def started(self, step: int, now: float) -> None:
        """Record that a save starts."""
        self.saved_step, self.saved_at = step, now

    def ended(self) -> int:
        """Return a save has ended well; returns how many before it had failed."""
        failures, self.failures = self.failures, 0
        return failures

    def failed(self, error: StorageError, newest: int, now: float) -> str:
        """Count a failure; return the sentence to report while training goes on, the store's own error first.

        StorageError when too many saves in a row have failed.
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

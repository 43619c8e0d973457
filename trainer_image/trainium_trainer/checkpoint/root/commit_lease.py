"""The acquisition of the durable root by a start of the ranks, on the first rank.

Owner, settings, fence, in this order.

Guarantees:
- A start that is refused, because the folder is another job's, holds another run or lies inside another root, has
  written nothing and has fenced nobody out.
- Nothing is committed before this start holds the fence.
- A fence that cannot be written, because the store is full or unreachable, is claimed by the first save that can: a run
  that has its state in memory continues meanwhile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_trainer.checkpoint.errors import UnusableCheckpointError
from trainium_trainer.checkpoint.root.commit import FenceToken, check_fence, claim_fence, read_fence, refuse_newer
from trainium_trainer.checkpoint.root.survey import Survey, nested_root, survey
from trainium_trainer.storage.errors import StorageError
from trainium_trainer.storage.protocol import Retry, Storage

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainium_trainer.checkpoint.root.owner import OwnerRecords

_ONCE_MORE = 1
"""Tries of a fence that the start can do without: a full store does not get room within half a minute."""


class CommitLease:
    """One rank's right to commit below the root; the first rank's `acquire` is called before all else."""

    def __init__(self, storage: Storage, owner: OwnerRecords, token: FenceToken, retry: Retry) -> None:
        self._storage = storage
        self._owner = owner
        self._token = token
        self._retry = retry
        self.claimed = False
        """The fence is ours, as far as this rank knows."""

    @property
    def generation(self) -> int:
        """The generation of this start."""
        return self._token.generation

    def acquire(self, refuse: Callable[[Survey], None]) -> tuple[Survey, StorageError | None]:
        """Return what is below the root, and why the fence could not be claimed, if it could not.

        `refuse` raises when what is there is not this run's. Raises StorageError when the root cannot be read or become
        ours, UnusableCheckpointError when it is another job's, StaleGenerationError when a newer start owns it.
        """
        where, problem = self._storage.location, None
        self._retry.run(self._storage.prepare, where)
        is_held = self._retry.run(self._owner.is_held, where)
        fence = self._retry.run(lambda: read_fence(self._storage), where) if is_held else None
        if fence is None or not fence.run or fence.run != self._token.run:  # not provably of this run
            if (other := nested_root(self._storage)) is not None:
                raise UnusableCheckpointError(
                    f"{where} and {other}, which holds the checkpoints of a run, lie one in the other: choose a "
                    "checkpoint.path (of a job checkpoint.storage.subPath) beside it"
                )
            refuse(self._retry.run(lambda: survey(self._storage), where))
            self._retry.run(self._owner.take_ownership, where)
        try:
            self._claim(Retry(self._retry.delays[:_ONCE_MORE], self._retry.sleep))
        except StorageError as error:
            problem = error
        # Only now: until the fence was ours an earlier start could still commit.
        found = self._retry.run(lambda: survey(self._storage), where)
        refuse(found)
        return found, problem

    def ensure(self) -> None:
        """Before a commit: claim the fence where the start could not. Raises like `acquire`."""
        if not self.claimed:
            self._retry.run(self._owner.take_ownership, self._storage.location)
            self._claim(self._retry)

    def check(self) -> None:
        """Raise StaleGenerationError when the run has gone on without this start, OSError when the store fails."""
        if self.claimed:
            check_fence(self._storage, self._token)
        else:
            refuse_newer(self._storage, self._token)

    def _claim(self, retry: Retry) -> None:
        retry.run(lambda: claim_fence(self._storage, self._token), self._storage.location)
        self.claimed = True

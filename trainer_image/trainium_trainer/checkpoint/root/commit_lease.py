"""Acquire the durable root on rank 0 of a start: check the owner, then the settings, then claim the fence.

Guarantees:
- A start that is refused, because the folder is another job's, holds another run or lies inside another root, has
  written nothing and has fenced out no other start.
- Nothing is committed before this start holds the fence.
- A fence that cannot be written, because the store is full or unreachable, is claimed by the first save that can: a run
  that has its state in memory continues meanwhile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_trainer.checkpoint.errors import UnusableCheckpointError
from trainium_trainer.checkpoint.root.commit import FenceToken, check_fence, claim_fence, read_fence, refuse_newer
from trainium_trainer.checkpoint.root.survey import Survey, find_nested_root, survey
from trainium_trainer.storage.errors import StorageError
from trainium_trainer.storage.protocol import Retry, Storage

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainium_trainer.checkpoint.root.owner import OwnerRecords

_START_RETRIES = 1
"""Retries of the claim at start; more would not help, because a full store does not get space within half a minute."""


class CommitLease:
    """One rank's right to commit below the root; rank 0 calls `acquire` before everything else."""

    def __init__(self, storage: Storage, owner: OwnerRecords, token: FenceToken, retry: Retry) -> None:
        self._storage = storage
        self._owner = owner
        self.token = token
        self._retry = retry
        self.claimed = False
        """Whether this rank has claimed the fence."""

    def acquire(self, refuse: Callable[[Survey], None]) -> tuple[Survey, StorageError | None]:
        """Acquire the root; return its survey and, if the fence could not be claimed, the reason.

        `refuse` raises when the checkpoints belong to another run. Raises StorageError when the root cannot be read or
        acquired, UnusableCheckpointError when it is another job's, StaleGenerationError when a newer start owns it.
        """
        location, problem = self._storage.location, None
        self._retry.run(self._storage.prepare, location)
        is_held = self._retry.run(self._owner.is_held, location)
        fence = self._retry.run(lambda: read_fence(self._storage), location) if is_held else None
        fenced_run = "" if fence is None else fence.token.run
        if not fenced_run or fenced_run != self.token.run:  # the checkpoints may belong to another run
            if (nested_root := find_nested_root(self._storage)) is not None:
                raise UnusableCheckpointError(
                    f"{location} and {nested_root}, which holds the checkpoints of a run, are nested: choose a "
                    "checkpoint.path (of a job checkpoint.storage.subPath) beside it"
                )
            refuse(self._retry.run(lambda: survey(self._storage), location))
            self._retry.run(self._owner.take_ownership, location)
        try:
            self._claim(Retry(self._retry.delays[:_START_RETRIES], self._retry.sleep))
        except StorageError as error:
            problem = error
        # The survey follows the claim, because an earlier start could still commit before it.
        checkpoints = self._retry.run(lambda: survey(self._storage), location)
        refuse(checkpoints)
        return checkpoints, problem

    def ensure(self) -> None:
        """Claim the fence before a commit if the start could not. Raises like `acquire`."""
        if not self.claimed:
            self._retry.run(self._owner.take_ownership, self._storage.location)
            self._claim(self._retry)

    def check(self) -> None:
        """Raise StaleGenerationError if the run continued without this start, OSError if the store fails."""
        if self.claimed:
            check_fence(self._storage, self.token)
        else:
            refuse_newer(self._storage, self.token)

    def _claim(self, retry: Retry) -> None:
        retry.run(lambda: claim_fence(self._storage, self.token), self._storage.location)
        self.claimed = True

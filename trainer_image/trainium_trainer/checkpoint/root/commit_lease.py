"""The acquisition of the durable root by a start of the ranks, on the first rank.

Owner, settings, fence, in this order.

Guarantees:
- A start that is refused, because the folder is another job's, holds another run or lies inside another root, has
  written nothing and has fenced nobody out.
- A checkpoint of another model, of other data or of another format is refused by name and never started over.
- Nothing is committed before this start holds the fence.
- A fence that cannot be written, because the store is full or unreachable, is claimed by the first save that can: a run
  that has its state in memory continues meanwhile.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from trainium_contract.wire.checkpoint_manifest import step_of
from trainium_trainer.checkpoint.errors import UnusableCheckpointError
from trainium_trainer.checkpoint.root.commit import FenceToken, check_fence, claim_fence, read_fence, refuse_newer
from trainium_trainer.checkpoint.root.survey import Survey, nested_root, survey
from trainium_trainer.storage.errors import StorageError
from trainium_trainer.storage.protocol import Retry, Storage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from trainium_trainer.checkpoint.root.owner import OwnerRecords
    from trainium_trainer.checkpoint.root.survey import Survey


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


_MAX_DIFFERENCES = 3


def refuse_foreign(found: Survey, where: str, settings: Mapping[str, Any], config_digest: str) -> None:
    """Raise UnusableCheckpointError when the newest checkpoint is of another version of the trainer or of another run.

    `settings` and `config_digest` are this run's. A converted checkpoint has no digest: it knows some settings only,
    and the run is compared with those.
    """
    newest = found.committed[0].step if found.committed else -1
    for name, sentence in found.newer.items():
        if (step_of(name) or -1) > newest:
            raise UnusableCheckpointError(
                f"{where}: {sentence}: go on with that version, or choose another checkpoint.path"
            )
    if not found.committed:
        return
    manifest = found.committed[0].manifest
    if manifest.config_digest == config_digest:
        return
    converted = not manifest.config_digest
    ours = {name: value for name, value in settings.items() if name in manifest.settings or not converted}
    differing = differences(manifest.settings, ours)
    if differing or not converted:
        raise UnusableCheckpointError(
            f"{where}/step-{newest} was written with other settings ({differing or 'model, data or seed'}): go back to "
            "those settings, or choose another checkpoint.path (of a job checkpoint.storage.subPath) for a new run"
        )


def settings_digest(settings: Mapping[str, Any]) -> str:
    """Return a hex digest, the same for equal settings in any order; values must be such that JSON can hold."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def differences(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    """Return what differs: `model.hiddenSize is 64 there and 128 here`, at most three; empty when nothing does."""
    before, now = dict(_flattened(theirs)), dict(_flattened(ours))
    names = [name for name in sorted(before.keys() | now.keys()) if before.get(name) != now.get(name)]
    texts = [f"{name} is {_shown(before, name)} there and {_shown(now, name)} here" for name in names]
    more = len(texts) - _MAX_DIFFERENCES
    return ", ".join(texts[:_MAX_DIFFERENCES]) + (f", and {more} more" if more > 0 else "")


def _flattened(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from _flattened(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _shown(values: Mapping[str, Any], name: str) -> str:
    if name not in values:
        return "absent"
    text = str(values[name])
    return f"{text[:12]}…" if len(text) > 40 else text

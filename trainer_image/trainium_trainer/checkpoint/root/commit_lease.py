"""Acquire the durable root on the first rank of a start, and check later that the run still belongs to the start.

`CommitLease.acquire` checks the owner, then the settings, and then claims the fence.

A process that was paused with its whole node continues where it stopped: it may still find the parts of its peers of a
collective in its sockets, although a newer start has repeated and recorded the step. A newer start needs time to detect
the failed node, to start, to resume and to repeat the step. So a step that took hardly longer than usual was not
repeated elsewhere, and `OwnershipCheck` queries the store only after a step that took clearly longer.

Guarantees:
- A start that is refused, because the folder is another job's, holds another run or lies inside another root, has
  written nothing and has fenced out no other start.
- A checkpoint of another model, other data or another format is refused by name; the run never silently starts over.
- Nothing is committed before this start holds the fence.
- A fence that cannot be written, because the store is full or unreachable, is claimed by the first save that can: a run
  that has its state in memory continues meanwhile.
- The training thread waits for the store at most for the timeout, and not at all while an earlier query is unanswered.
  A late answer still counts. A store that fails does not stop the step.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import statistics
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from trainium_contract.wire.checkpoint_manifest import parse_step
from trainium_trainer.checkpoint.errors import StaleGenerationError, UnusableCheckpointError
from trainium_trainer.checkpoint.root.commit import FenceToken, check_fence, claim_fence, read_fence, refuse_newer
from trainium_trainer.checkpoint.root.survey import Survey, find_nested_root, survey
from trainium_trainer.storage.errors import StorageError
from trainium_trainer.storage.protocol import Retry, Storage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from trainium_trainer.checkpoint.root.owner import OwnerRecords

_log = logging.getLogger(__name__)

_START_RETRIES = 1
"""Retries of the claim at start; more would not help, because a full store does not get space within half a minute."""


class CommitLease:
    """One rank's right to commit below the root; the first rank calls `acquire` before everything else."""

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
        where, problem = self._storage.location, None
        self._retry.run(self._storage.prepare, where)
        is_held = self._retry.run(self._owner.is_held, where)
        fence = self._retry.run(lambda: read_fence(self._storage), where) if is_held else None
        fenced_run = "" if fence is None else fence.token.run
        if not fenced_run or fenced_run != self.token.run:  # the checkpoints may belong to another run
            if (other := find_nested_root(self._storage)) is not None:
                raise UnusableCheckpointError(
                    f"{where} and {other}, which holds the checkpoints of a run, are nested: choose a "
                    "checkpoint.path (of a job checkpoint.storage.subPath) beside it"
                )
            refuse(self._retry.run(lambda: survey(self._storage), where))
            self._retry.run(self._owner.take_ownership, where)
        try:
            self._claim(Retry(self._retry.delays[:_START_RETRIES], self._retry.sleep))
        except StorageError as error:
            problem = error
        # The survey follows the claim, because an earlier start could still commit before it.
        checkpoints = self._retry.run(lambda: survey(self._storage), where)
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


LATE_SECONDS = 2.0
"""A rank whose step took at most this much longer than usual has not been replaced."""
TIMEOUT_SECONDS = 5.0
"""The timeout for the answer of a store, which normally takes milliseconds."""
_WINDOW = 15
_ENOUGH = 3
"""The number of steps that define the usual duration; the first steps of a run are often long."""


class OwnershipCheck:
    """The check of one rank; `confirm` is called from the training thread."""

    def __init__(
        self,
        ask: Callable[[], None],
        *,
        timeout: float = TIMEOUT_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create the check; `ask` queries the store and raises StaleGenerationError if another start owns the run."""
        self._query_owner = ask
        self._timeout = timeout
        self._clock = clock
        self._durations: deque[float] = deque(maxlen=_WINDOW)
        self._thread: threading.Thread | None = None
        self._refusal: StaleGenerationError | None = None

    def confirm(self, since: float) -> None:
        """Raise StaleGenerationError if the run continued without this rank.

        `since` is a time of the clock after which the peers still needed this rank for the step that it is about to
        record.
        """
        took = self._clock() - since
        # The median ignores single long steps, such as those with a validation.
        usual = statistics.median_low(self._durations) if len(self._durations) >= _ENOUGH else 0.0
        self._durations.append(took)
        if took > usual + LATE_SECONDS:
            self._query()
        if self._refusal is not None:
            raise self._refusal

    def _query(self) -> None:
        if self._thread is not None and self._thread.is_alive():
            return
        # A daemon thread, so that a store that never answers does not keep the process from exiting.
        self._thread = threading.Thread(target=self._answer, name="owner", daemon=True)
        self._thread.start()
        self._thread.join(self._timeout)
        if self._thread.is_alive():
            _log.warning(
                "the ownership check did not finish within %g s; continuing this step without it",
                self._timeout,
            )

    def _answer(self) -> None:
        with contextlib.suppress(OSError, StorageError):
            try:
                self._query_owner()
            except StaleGenerationError as error:
                self._refusal = error


_MAX_DIFFERENCES = 3


def refuse_foreign(checkpoints: Survey, where: str, settings: Mapping[str, Any], config_digest: str) -> None:
    """Raise UnusableCheckpointError when the newest checkpoint is of another version of the trainer or of another run.

    `settings` and `config_digest` are this run's. A converted checkpoint has no digest and only some settings; only
    those are compared.
    """
    newest = checkpoints.committed[0].step if checkpoints.committed else -1
    for name, problem in checkpoints.other_versions.items():
        if (parse_step(name) or -1) > newest:
            raise UnusableCheckpointError(
                f"{where}: {problem}: continue with that version, or choose another checkpoint.path"
            )
    if not checkpoints.committed:
        return
    manifest = checkpoints.committed[0].manifest
    if manifest.config_digest == config_digest:
        return
    converted = not manifest.config_digest
    ours = {name: value for name, value in settings.items() if name in manifest.settings or not converted}
    differing = format_differences(manifest.settings, ours)
    if differing or not converted:
        raise UnusableCheckpointError(
            f"{where}/step-{newest} was written with other settings ({differing or 'model, data or seed'}): go back to "
            "those settings, or choose another checkpoint.path (of a job checkpoint.storage.subPath) for a new run"
        )


def hash_settings(settings: Mapping[str, Any]) -> str:
    """Return a hex digest of JSON values that does not depend on the order of keys."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def format_differences(stored: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    """Describe at most three differences, as `model.hiddenSize is 64 there and 128 here`; empty without any."""
    before, now = dict(_flatten(stored)), dict(_flatten(ours))
    names = [name for name in sorted(before.keys() | now.keys()) if before.get(name) != now.get(name)]
    texts = [f"{name} is {_format_value(before, name)} there and {_format_value(now, name)} here" for name in names]
    more = len(texts) - _MAX_DIFFERENCES
    return ", ".join(texts[:_MAX_DIFFERENCES]) + (f", and {more} more" if more > 0 else "")


def _flatten(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _format_value(values: Mapping[str, Any], name: str) -> str:
    if name not in values:
        return "absent"
    text = str(values[name])
    return f"{text[:12]}…" if len(text) > 40 else text

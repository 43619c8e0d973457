"""The durable tier: one asynchronous sharded save at a time, committed the moment the last rank's write ends.

`start` copies the state (the only cost in the step) and hands it to a thread. There DCP plans, writes and gathers the
results over a process group of its own; the coordinator's thread then commits. This is what DCP's `async_save` does,
with two differences: the copy's buffers are reused, and the thread is a daemon, so a store that hangs cannot keep a
process from leaving.

Invariants: no collective runs on the training thread; every rank is told the same outcome; a save that fails surfaces
as StorageError or StaleGenerationError at the next `poll` and leaves no folder behind, unless it may be committed, for
instance when a peer died before it heard of that; nobody waits for a store beyond the time limit.
"""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainium_contract.manifest import CheckpointKind, Manifest, ManifestFile, folder_name, milestone_name
from trainium_trainer.checkpoint.commit import prepare_commit, publish
from trainium_trainer.checkpoint.errors import StorageError, TooSlowError
from trainium_trainer.checkpoint.policy import Save
from trainium_trainer.checkpoint.records import send_records
from trainium_trainer.checkpoint.staging import Staging, flatten
from trainium_trainer.checkpoint.survey import prune
from trainium_trainer.exits import TrainerError
from trainium_trainer.models.state_dict import parameter_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch.distributed import ProcessGroup

    from trainium_contract.trainer_checkpoint import CheckpointConfig
    from trainium_trainer.checkpoint.commit import FenceToken
    from trainium_trainer.checkpoint.interfaces import Mesh, Position, TrainingState
    from trainium_trainer.checkpoint.storage import Retry, Storage
    from trainium_trainer.checkpoint.survey import Committed


class DurableTier:
    """Saves of one rank; `start`, `poll` and `wait` are called from the training thread."""

    def __init__(
        self,
        storage: Storage,
        *,
        state: TrainingState,
        mesh: Mesh,
        group: ProcessGroup | None,
        token: FenceToken,
        config_digest: str,
        settings: Mapping[str, Any],
        config: CheckpointConfig,
        known_bad: frozenset[str],
        retry: Retry,
    ) -> None:
        self._storage = storage
        self._state = state
        self._mesh = mesh
        self._group = group
        self._token = token
        self._config_digest = config_digest
        self._settings = dict(settings)
        self._config = config
        self._known_bad = known_bad
        self._retry = retry
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._staging: Staging | None = None
        self._started = 0.0
        self._published = ""
        """Attempt of which this rank has begun to publish the receipt, or the last one."""
        self.saves = 0
        """How many have ended well."""
        self.committed_step = -1
        """Newest step that this rank knows to be committed."""
        self.milestone_tokens = 0
        """Position of the newest milestone that this rank knows of."""

    def prepare(self, leftovers: list[str]) -> None:
        """In the background: load DCP, make the staging buffers and, on the coordinator, remove what others left."""

        def work() -> None:
            self._staging = Staging(self._state.state_dict())
            warm()
            if self._mesh.rank == 0:
                for name in leftovers:
                    with contextlib.suppress(OSError):  # an untidy folder is no reason to stop training
                        self._storage.remove_folder(name)

        self._run(work, "prepare")

    @property
    def busy(self) -> bool:
        """Whether a save (or the preparation) is under way on this rank."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, position: Position, what: Save) -> None:
        """Copy the state as of `position` and save it in the background; waits for an earlier save of this rank."""
        self.wait()
        live = self._state.state_dict()
        if self._staging is None:
            self._staging = Staging(live)
        whole = Save.STATE in what
        tensors = self._staging.fill(live, lambda name: whole or parameter_of(name) is not None)
        self._run(lambda: self._save(position, tensors, what), f"save-{position.step}")

    def poll(self) -> None:
        """Raise what went wrong in the background, once; StorageError also for a save that takes too long."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        if self.busy and self._seconds_left() <= 0:
            raise self._too_slow()

    def wait(self) -> None:
        """Return when nothing is under way; raises like `poll`."""
        if self._thread is not None:
            self._thread.join(max(0.0, self._seconds_left()))
            if self._thread.is_alive():
                raise self._too_slow()
            self._thread = None
        self.poll()

    def _seconds_left(self) -> float:
        return self._started + self._config.durable.save_timeout_seconds - time.monotonic()

    def _too_slow(self) -> TooSlowError:
        limit = self._config.durable.save_timeout_seconds
        newest = f"step {self.committed_step}" if self.committed_step >= 0 else "none"
        return TooSlowError(
            f"checkpoint storage {self._storage.location}: a save has not ended after {limit} s (newest durable "
            f"checkpoint: {newest}): look at the store, or raise checkpoint.durable.saveTimeoutSeconds"
        )

    # ---- on the background thread -----------------------------------------------------------------------------------

    def _run(self, work: Callable[[], None], name: str) -> None:
        def guarded() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - it is raised on the training thread
                self._error = explain(error, self._storage.location)

        self._started = time.monotonic()
        self._thread = threading.Thread(target=guarded, name=f"checkpoint-{name}", daemon=True)
        self._thread.start()

    def _save(self, position: Position, tensors: dict[str, Any], what: Save) -> None:
        if Save.STATE in what:
            self._write(position, tensors, folder_name(position.step), CheckpointKind.STATE)
            self.committed_step = position.step
            if self._mesh.rank == 0:
                with contextlib.suppress(OSError):  # an old checkpoint too many is no reason to stop training
                    prune(self._storage, self._config.durable.keep_last, self._known_bad, position.step)
        if Save.MILESTONE in what:
            weights = {name: tensor for name, tensor in tensors.items() if parameter_of(name) is not None}
            self._write(position, weights, milestone_name(position.step), CheckpointKind.WEIGHTS)
            self.milestone_tokens = position.tokens
        self.saves += 1
        if self._mesh.rank == 0 and self._config.records != self._config.path:
            send_records(self._storage, Path(self._config.records))

    def _write(self, position: Position, tensors: dict[str, Any], folder: str, kind: CheckpointKind) -> None:
        from torch.distributed.checkpoint.state_dict_saver import save  # noqa: PLC0415 - slow to import, see `warm`

        from trainium_trainer.checkpoint.shards import ShardWriter  # noqa: PLC0415

        attempt = f"{folder}/{self._token.attempt}"
        writer = ShardWriter(
            self._storage, attempt, self._retry, lambda files: self._commit(position, folder, kind, files)
        )
        if self._group is None:
            # DCP says that it runs alone, which is meant.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        try:
            save(tensors, storage_writer=writer, process_group=self._group, no_dist=self._group is None)
        except BaseException:
            if self._mesh.rank == 0 and self._published != attempt:
                with contextlib.suppress(OSError):
                    self._storage.remove_folder(attempt)
            raise

    def _commit(self, position: Position, folder: str, kind: CheckpointKind, files: list[ManifestFile]) -> None:
        manifest = Manifest(
            kind=kind,
            step=position.step,
            samples=position.samples,
            tokens=position.tokens,
            generation=self._token.generation,
            world_size=self._mesh.world_size,
            data_parallel=self._mesh.dp_size,
            tensor_parallel=self._mesh.tp_size,
            pipeline_parallel=self._mesh.pp_size,
            config_digest=self._config_digest,
            settings=self._settings,
            created=time.time(),
            files=tuple(files),
        )
        receipt = prepare_commit(self._storage, folder, manifest, self._token, self._retry)
        self._published = f"{folder}/{self._token.attempt}"
        publish(self._storage, receipt, self._retry, damaged=folder in self._known_bad)


def load(storage: Storage, checkpoint: Committed, state: TrainingState, retry: Retry) -> None:
    """Fill the live state from a committed checkpoint of any size, verifying what is read; local, no collectives.

    Raises what DCP makes of DamagedFileError and StorageError: see `explain`.
    """
    from torch.distributed.checkpoint.state_dict_loader import load as load_in_place  # noqa: PLC0415 - as above

    from trainium_trainer.checkpoint.reader import ShardReader  # noqa: PLC0415

    reader = ShardReader(storage, checkpoint, retry)
    live = state.state_dict()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        load_in_place(flatten(live), storage_reader=reader, no_dist=True)
    state.load_state_dict(live)


def warm() -> None:
    """Import what saves and loads need, so that neither a step nor a restart pays for it."""
    import trainium_trainer.checkpoint.reader  # noqa: F401, PLC0415


def explain(error: BaseException, where: str) -> BaseException:
    """The error to raise on the training thread: the sentence of the rank that failed, not DCP's parcel of it."""
    failures = getattr(error, "failures", None)
    if isinstance(failures, dict) and failures:
        causes = [failure[0] for failure in failures.values()]
        error = next((cause for cause in causes if isinstance(cause, TrainerError)), causes[0])
    if isinstance(error, OSError) and not isinstance(error, ConnectionError):
        return StorageError(f"checkpoint storage {where}: {error}")
    return error

"""The durable tier: one asynchronous sharded save at a time, committed the moment the last rank's write ends.

`start` copies the state (the only cost in the step) and hands it to a thread. There DCP plans, writes and gathers the
results over a process group of its own; the coordinator's thread then commits. This is what DCP's `async_save` does,
with two differences: the copy's buffers are reused, and the thread is a daemon, so a store that hangs cannot keep a
process from leaving.

Invariants: no collective runs on the training thread; every rank is told the same outcome; a failed save leaves no
folder behind and surfaces as StorageError or StaleGenerationError at the next `poll`.
"""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from typing import TYPE_CHECKING, Any

from trainium_contract.manifest import Manifest, ManifestFile, folder_name
from trainium_trainer.checkpoint import commit as commits
from trainium_trainer.checkpoint.errors import StorageError
from trainium_trainer.checkpoint.staging import Staging, flatten
from trainium_trainer.exits import TrainerError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import ProcessGroup

    from trainium_trainer.checkpoint.commit import Committed, FenceToken
    from trainium_trainer.checkpoint.interfaces import Mesh, Position, TrainingState
    from trainium_trainer.checkpoint.storage import Retry, Storage


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
        keep_last: int,
        known_bad: frozenset[int],
        retry: Retry,
    ) -> None:
        self._storage = storage
        self._state = state
        self._mesh = mesh
        self._group = group
        self._token = token
        self._config_digest = config_digest
        self._keep_last = keep_last
        self._known_bad = known_bad
        self._retry = retry
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._staging: Staging | None = None
        self.committed_step = -1
        """Newest step that this rank knows to be committed."""

    def prepare(self, leftovers: list[str]) -> None:
        """In the background: load DCP, make the staging buffers and, on the coordinator, remove what others left."""

        def work() -> None:
            self._staging = Staging(self._state.state_dict())
            warm()
            if self._mesh.rank == 0:
                for name in leftovers:
                    with contextlib.suppress(OSError):  # an untidy folder is no reason to stop training
                        self._storage.remove(name)

        self._run(work, "prepare")

    @property
    def busy(self) -> bool:
        """Whether a save (or the preparation) is under way on this rank."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, position: Position) -> None:
        """Copy the state as of `position` and save it in the background; waits for an earlier save of this rank."""
        self.wait()
        live = self._state.state_dict()
        if self._staging is None:
            self._staging = Staging(live)
        self._staging.fill(live)
        tensors = self._staging.tensors
        self._run(lambda: self._save(position, tensors), f"save-{position.step}")

    def poll(self) -> None:
        """Raise what went wrong in the background, once."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def wait(self) -> None:
        """Return when nothing is under way; raises like `poll`."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.poll()

    # ---- on the background thread -----------------------------------------------------------------------------------

    def _run(self, work: Callable[[], None], name: str) -> None:
        def guarded() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - it is raised on the training thread
                self._error = explain(error, self._storage.location)

        self._thread = threading.Thread(target=guarded, name=f"checkpoint-{name}", daemon=True)
        self._thread.start()

    def _save(self, position: Position, tensors: dict[str, Any]) -> None:
        from torch.distributed.checkpoint.state_dict_saver import save  # noqa: PLC0415 - slow to import, see `warm`

        from trainium_trainer.checkpoint.shards import ShardWriter  # noqa: PLC0415

        folder = commits.temporary_folder(position.step, self._token)
        writer = ShardWriter(self._storage, folder, self._retry, lambda files: self._commit(position, folder, files))
        if self._group is None:
            # DCP says that it runs alone, which is meant.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        try:
            save(tensors, storage_writer=writer, process_group=self._group, no_dist=self._group is None)
        except BaseException:
            if self._mesh.rank == 0:
                with contextlib.suppress(OSError):
                    self._storage.remove(folder)
            raise
        self.committed_step = position.step
        if self._mesh.rank == 0:
            with contextlib.suppress(OSError):  # an old checkpoint too many is no reason to stop training
                commits.prune(self._storage, self._keep_last, self._known_bad, position.step)

    def _commit(self, position: Position, folder: str, files: list[ManifestFile]) -> None:
        manifest = Manifest(
            step=position.step,
            samples=position.samples,
            tokens=position.tokens,
            generation=self._token.generation,
            world_size=self._mesh.world_size,
            data_parallel=self._mesh.dp_size,
            tensor_parallel=self._mesh.tp_size,
            config_digest=self._config_digest,
            created=time.time(),
            files=tuple(files),
        )
        commits.commit(self._storage, folder, manifest, self._token, self._retry)


def load(storage: Storage, checkpoint: Committed, state: TrainingState) -> None:
    """Fill the live state from a committed checkpoint of any size; local, no collectives."""
    from torch.distributed.checkpoint.state_dict_loader import load as load_in_place  # noqa: PLC0415 - as above

    from trainium_trainer.checkpoint.shards import ShardReader  # noqa: PLC0415

    live = state.state_dict()
    reader = ShardReader(storage, folder_name(checkpoint.step))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        load_in_place(flatten(live), storage_reader=reader, no_dist=True)
    state.load_state_dict(live)


def warm() -> None:
    """Import what saves and loads need, so that neither a step nor a restart pays for it."""
    import trainium_trainer.checkpoint.shards  # noqa: F401, PLC0415


def explain(error: BaseException, where: str) -> BaseException:
    """The error to raise on the training thread: the sentence of the rank that failed, not DCP's parcel of it."""
    failures = getattr(error, "failures", None)
    if isinstance(failures, dict) and failures:
        causes = [failure[0] for failure in failures.values()]
        error = next((cause for cause in causes if isinstance(cause, TrainerError)), causes[0])
    if isinstance(error, OSError) and not isinstance(error, ConnectionError):
        return StorageError(f"checkpoint storage {where}: {error}")
    return error

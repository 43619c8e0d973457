"""Save a step only when a rank fails: a surviving rank writes the state for all of them (just-in-time checkpoints).

With data parallelism every rank has the whole state, so the ranks are each other's copies while they live. Nothing is
copied after a step; the state is written before the process ends. Source: Gupta et al., "Just-In-Time Checkpointing:
Low Cost Error Recovery from Deep Learning Training Failures", EuroSys 2024.

Guarantees:
- What is written is the state at the end of a step. The optimizer waits for the writer, which waits up to 2 s for the
  optimizer. A state whose weights something else has changed since (an average of weights) is not written.
- The space is reserved, and the time of a write is measured, before a failure.
- It is a save like others: `MemoryReader` finds it by its step.
"""

from __future__ import annotations

import atexit
import errno
import logging
import os
import secrets
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import trainium_worker
from trainium_worker import save_request
from trainium_worker.dcp.writer import Draft
from trainium_worker.snapshots.files import SUFFIX, Part, SnapshotFile, Version, checksum

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    import torch

    from trainium_worker.dcp.session import Session

    StateFunction = Callable[[], Mapping[str, torch.Tensor]]

_log = logging.getLogger(__name__)
_OPTIMIZER_SECONDS = 2.0
"""Longest wait for the end of an optimizer's step."""
_MAX_WRITE_SECONDS = 5.0
"""The agent waits for three times as long before it kills a rank."""
_VALUES_BYTES = 4 << 20
"""Space for values that grow, such as the history of a trainer; beyond it, a write needs another file."""
_FREE_FRACTION = 0.25
"""The fraction of the state that stays free in the volume, which data loaders use too."""


def is_replicated(state: Mapping[str, torch.Tensor]) -> bool:
    """Return whether each rank has the whole state on the processor.

    On a device, collectives that fail can end the process or block its streams; this has not been tested there.
    """
    return all(not hasattr(tensor, "to_local") and tensor.device.type == "cpu" for tensor in state.values())


class JustInTimeSave:
    """The state of the newest step, in place, and the file to which it is written when a rank fails."""

    def __init__(self, session: Session, state: Mapping[str, torch.Tensor]) -> None:
        """Reserve the space on the rank that writes for its node, and try a write. Raises OSError."""
        self._session = session
        self._pid = os.getpid()
        self._condition = threading.Condition()
        self._held: tuple[int, StateFunction] | None = None
        self._weights: list[torch.Tensor] = []
        self._changes = 0
        """The number of changes in place of the weights when the state was held."""
        self._saved_step = -1
        self._file: SnapshotFile | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        if session.store_ranks[0] != session.rank:
            return
        self._listener = save_request.listen(Path(os.environ[trainium_worker.ENV_PROGRESS_FILE]), self.write_soon)
        try:
            self._file = self._try_write(state)
        except OSError:
            self._listener.close()
            raise
        atexit.register(self.write)

    def hold(
        self,
        step: int,
        state: StateFunction,
        weights: Iterable[torch.Tensor] = (),
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        """Hold the state after a step until the next step of the optimizer.

        state: returns its tensors where it is written. weights: those of them that only the optimizer may change.
        """
        if optimizer is not None and optimizer is not self._optimizer:
            self._optimizer = optimizer
            optimizer.register_step_pre_hook(lambda *_: self.release())
        with self._condition:
            self._held, self._weights = (step, state), [*weights]
            self._changes = _count_changes(self._weights)
            self._condition.notify_all()

    def release(self) -> None:
        """Wait for a write in progress; the optimizer may change the state then."""
        with self._condition:
            self._held = None

    def set_saved(self, step: int) -> None:
        """Record that a step is saved, so that it is not written again."""
        with self._condition:
            self._saved_step = step

    def write_soon(self) -> bool:
        """Write the state once the optimizer has ended its step; return whether it is saved."""
        with self._condition:
            self._condition.wait_for(lambda: self._held is not None, _OPTIMIZER_SECONDS)
            return self.write()

    def write(self) -> bool:
        """Write the state that is held, once, and return whether it is saved; problems become a notice."""
        if self._file is None or os.getpid() != self._pid:
            return False
        with self._condition:
            if self._held is None:
                return False
            step, state = self._held
            if self._saved_step >= step:
                return True
            try:
                if _count_changes(self._weights) != self._changes:
                    raise RuntimeError("something but the optimizer has changed the weights since")  # noqa: TRY301
                self._write(step, state)
            except Exception as error:  # noqa: BLE001 - the process ends for another reason
                trainium_worker.notice(f"rank {self._session.rank} could not save step {step}: {error}")
                _log.warning("step %d is not saved: %s", step, error)
                return False
            self._saved_step = step
            trainium_worker.saved(step, trainium_worker.MEMORY)
            return True

    def close(self) -> None:
        """Write nothing any more."""
        self.release()
        if self._file is not None:
            atexit.unregister(self.write)
            self._listener.close()
            self._file.path.unlink(missing_ok=True)
            self._file = None

    def _write(self, step: int, state: StateFunction) -> None:
        draft, planner = _draft(state())
        file = self._file
        if file is None or file.capacity < draft.payload_bytes:
            file = self._create_file(draft.payload_bytes)
        file.invalidate()
        draft.copy_to(file.payload, planner)
        version = Version(step, trainium_worker.generation, f"{self._session.id}-just-in-time", "1")
        file.finish(Part(version, "0", str(draft.index_start), draft.payload_bytes))
        _log.warning("step %d is saved by rank %d for all ranks", step, self._session.rank)

    def _try_write(self, state: Mapping[str, torch.Tensor]) -> SnapshotFile:
        """Return a file for a state and its values. Raises OSError without space, or if a write takes too long."""
        started = time.perf_counter()
        draft, planner = _draft(state)
        file = self._create_file(draft.payload_bytes + _VALUES_BYTES)
        draft.copy_to(file.payload, planner)
        checksum(file.payload[: draft.payload_bytes])
        seconds, volume = time.perf_counter() - started, os.statvfs(file.path.parent)
        code = 0
        if volume.f_bavail * volume.f_frsize < _FREE_FRACTION * draft.payload_bytes:
            code = errno.ENOSPC
        elif seconds > _MAX_WRITE_SECONDS:
            code = errno.ETIMEDOUT
        if code:
            file.path.unlink(missing_ok=True)
            raise OSError(code, os.strerror(code), str(file.path))
        return file

    def _create_file(self, payload_bytes: int) -> SnapshotFile:
        directory = self._session.directory
        assert directory is not None, "saves are kept"
        name = f"g{trainium_worker.generation}-survivor-{secrets.token_hex(4)}{SUFFIX}"
        return SnapshotFile.create(directory / name, payload_bytes)


def _draft(state: Mapping[str, torch.Tensor]) -> tuple[Draft, DefaultSavePlanner]:
    """Return a whole state as the only part of a save."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(dict(state), is_coordinator=True)
    return Draft.from_plan(planner.create_local_plan(), planner, 0), planner


def _count_changes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the number of changes in place of tensors; writes to `.data` are not counted."""
    return sum(tensor._version for tensor in tensors)  # noqa: SLF001 - autograd's count has no public name

"""Save a step only when a rank fails: a surviving rank writes the state for all of them (just-in-time checkpoints).

With data parallelism every rank has the whole state, so the ranks are each other's copies while they live. Nothing is
copied after a step; the state is written before the process ends. Source: Gupta et al., "Just-In-Time Checkpointing:
Low Cost Error Recovery from Deep Learning Training Failures", EuroSys 2024.

Guarantees:
- What is written is the state at the end of a step: the optimizer waits for the writer, and the writer for it.
- The space is reserved beforehand, so a full volume is known before a failure.
- It is a save like others: `MemoryReader` finds it by its step.
"""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import trainium_worker
from trainium_worker import save_request
from trainium_worker.dcp.writer import Draft
from trainium_worker.snapshots.files import SUFFIX, Part, SnapshotFile, Version

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from trainium_worker.dcp.session import Session

    StateFunction = Callable[[], Mapping[str, torch.Tensor]]

_log = logging.getLogger(__name__)
_DEVICES = {"cpu", "cuda"}
_OPTIMIZER_SECONDS = 2.0
"""Longest wait for the end of an optimizer's step."""
_VALUES_BYTES = 4 << 20
"""Room for values that grow, such as the history of a trainer."""


def can_survive(state: Mapping[str, torch.Tensor]) -> bool:
    """Return whether each rank has the whole state in tensors whose values change only in a step of the optimizer."""
    return all(not hasattr(tensor, "to_local") and tensor.device.type in _DEVICES for tensor in state.values())


class JustInTimeSave:
    """The state of the newest step, in place, and the file to which it is written when a rank fails."""

    def __init__(self, session: Session, state: Mapping[str, torch.Tensor]) -> None:
        """Reserve the space for a state, on the rank that writes for its node. Raises OSError."""
        self._session = session
        self._pid = os.getpid()
        self._condition = threading.Condition()
        self._held: tuple[int, StateFunction] | None = None
        self._computed: torch.cuda.Event | None = None
        """The end of the work on the device that led to the state."""
        self._saved_step = -1
        self._file: SnapshotFile | None = None
        if session.store_ranks[0] != session.rank:
            return
        self._file = self._create_file(_draft(state)[0].payload_bytes + _VALUES_BYTES)
        save_request.listen(Path(os.environ[trainium_worker.ENV_PROGRESS_FILE]), self.write_soon)
        atexit.register(self.write)

    def hold(self, step: int, state: StateFunction, *, device: torch.device) -> None:
        """Hold the state after a step until `release`; `state` returns its tensors where it is written."""
        with self._condition:
            if device.type == "cuda":
                self._computed = torch.cuda.Event()  # type: ignore[no-untyped-call]
                self._computed.record()
            self._held = (step, state)
            self._condition.notify_all()

    def release(self) -> None:
        """Wait for a write in progress, and for the device; the optimizer may change the state then."""
        if self._computed is not None:
            torch.cuda.synchronize()  # before it, a failure of the collectives of this step is not known
        with self._condition:
            self._held = None

    def set_saved(self, step: int) -> None:
        """Record that a step is saved, so that it is not written again."""
        with self._condition:
            self._saved_step = step

    def write_soon(self) -> None:
        """Write the state once the optimizer has ended its step."""
        with self._condition:
            self._condition.wait_for(lambda: self._held is not None, _OPTIMIZER_SECONDS)
        self.write()

    def write(self) -> None:
        """Write the state that is held, once; problems become a notice."""
        with self._condition:
            if self._held is None or self._file is None or os.getpid() != self._pid:
                return
            step, state = self._held
            if self._saved_step >= step:
                return
            try:
                self._write(step, state)
            except (OSError, RuntimeError, ValueError) as error:
                _log.warning("step %d is not saved: %s", step, error)
                trainium_worker.notice(
                    f"step {step} is lost, because rank {self._session.rank} cannot save it: {error}"
                )
            else:
                self._saved_step = step

    def _write(self, step: int, state: StateFunction) -> None:
        stream = None
        if self._computed is not None:  # the default stream may wait for a rank that has failed
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            stream.wait_event(self._computed)
        with torch.cuda.stream(stream):
            draft, planner = _draft(state())
            file = self._file
            if file is None or file.capacity < draft.payload_bytes:
                file = self._create_file(draft.payload_bytes)
            draft.copy_to(file.payload, planner)
        version = Version(step, trainium_worker.generation, f"{self._session.id}-just-in-time", "1")
        file.finish(Part(version, "0", str(draft.index_start), draft.payload_bytes))
        _log.warning("a rank has failed: step %d is saved by rank %d", step, self._session.rank)

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

"""The state of a trainer in the memory of the nodes: save and resume what is not a tensor."""

from __future__ import annotations

import json
import pickle
import shutil
import tempfile
import threading
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState

from trainium_worker import memory

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainium_worker.dcp import MemoryReader
    from trainium_worker.hooks.elastic.identity import Identity

_KEPT_ATTRIBUTES = ("_metrics", "_total_train_tokens")
"""State of TRL's trainers that is not part of their checkpoints."""


@dataclass(frozen=True)
class OpenStep:
    """The rest of a step after that of the optimizer: to log, evaluate and save."""

    flags: dict[str, bool]
    """Which of it, as attributes of the trainer's control."""
    grad_norm: float | None
    learning_rate: float | None
    is_epoch_end: bool
    """Whether it is that of the whole epoch, which follows that of its last step."""


class History:
    """The log of a trainer as JSON lines, so that a save encodes only what was added."""

    def __init__(self, lines: bytes = b"") -> None:
        self._lock = threading.Lock()
        self._lines = bytearray(lines)
        self._count = len(self._lines.splitlines())

    def encode(self, log_history: list[dict[str, Any]], count: int) -> bytes:
        """Add the new entries of a log up to a count, and return all."""
        with self._lock:  # a request to save has its own thread
            new = log_history[self._count : count]
            self._lines += b"".join(json.dumps(entry).encode() + b"\n" for entry in new)
            self._count += len(new)
            return bytes(self._lines)


def collect_values(
    trainer: Any, identity: Identity, history: History, losses: list[float], open_step: OpenStep | None
) -> Callable[[], dict[str, Any]]:
    """Return a function that returns what is saved beside tensors, the same on all ranks, as it is now.

    losses: each rank's sum of losses that are not logged. open_step: what the trainer does after the step, if it has
    not.
    """
    scaler, log = getattr(trainer.accelerator, "scaler", None), trainer.state.log_history
    count = len(log)
    packed = pickle.dumps(
        {
            "identity": asdict(identity),
            "state": _export_state(trainer),
            "scheduler": trainer.lr_scheduler.state_dict(),
            "scaler": None if scaler is None else scaler.state_dict(),
            "losses": losses,
            "logged": (trainer._total_loss_scalar, trainer._globalstep_last_logged),
            "attributes": {name: vars(trainer)[name] for name in _KEPT_ATTRIBUTES if name in vars(trainer)},
            "open_step": None if open_step is None else asdict(open_step),
        }
    )
    return lambda: {**pickle.loads(packed), "history": history.encode(log, count)}  # noqa: S301 - packed above


def _export_state(trainer: Any) -> dict[str, Any]:
    """Return the trainer's state without its history, with that of its callbacks, as a checkpoint has it."""
    callbacks: dict[str, Any] = {}
    for callback in [*trainer.callback_handler.callbacks, trainer.control]:
        if isinstance(callback, ExportableState):
            callbacks.setdefault(type(callback).__name__, []).append(callback.state())
    state = trainer.state
    values = {field.name: getattr(state, field.name) for field in fields(state) if field.name != "log_history"}
    return {
        **values,
        "stateful_callbacks": {name: states if len(states) > 1 else states[0] for name, states in callbacks.items()},
    }


class MemoryState:
    """A state in memory from which a trainer resumes."""

    def __init__(self, reader: MemoryReader, values: dict[str, Any]) -> None:
        """`values`: those of `collect_values`."""
        assert reader.step is not None, "the reader has found a state"
        self.step = reader.step
        self.identity: dict[str, Any] = values["identity"]
        self._reader, self._values = reader, values
        self._folder = Path()

    def write_folder(self) -> Path:
        """Write the trainer's own state to a folder, from which the trainer reads it."""
        state, history = self._values["state"], self._values["history"]
        self._folder = Path(tempfile.mkdtemp(prefix="trainium-resume-"))
        log_history = [json.loads(line) for line in history.splitlines()]
        (self._folder / TRAINER_STATE_NAME).write_text(json.dumps({**state, "log_history": log_history}))
        return self._folder

    @property
    def history(self) -> History:
        """The log of the trainer."""
        return History(self._values["history"])

    def load(self, trainer: Any) -> None:
        """Load the state, once the trainer has its model, optimizer and schedule. Collective."""
        memory.read(self._reader, trainer.model, trainer.optimizer)
        trainer.lr_scheduler.load_state_dict(self._values["scheduler"])
        if self._values["scaler"] is not None:
            trainer.accelerator.scaler.load_state_dict(self._values["scaler"])
        vars(trainer).update(self._values["attributes"])

    def restore_losses(self, trainer: Any) -> list[float]:
        """Continue the sums of losses that the trainer will log, and return those of all ranks; remove the folder."""
        shutil.rmtree(self._folder, ignore_errors=True)
        trainer._total_loss_scalar, trainer._globalstep_last_logged = self._values["logged"]
        sums: list[float] = self._values["losses"]
        if len(sums) != trainer.args.world_size:
            sums = [sum(sums) / len(sums)] * trainer.args.world_size
        trainer._tr_loss += sums[trainer.args.process_index]
        return sums

    @property
    def open_step(self) -> OpenStep | None:
        """The rest of the step, if the trainer had not done it."""
        saved = self._values["open_step"]
        return None if saved is None else OpenStep(**saved)

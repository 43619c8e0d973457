"""The state of a trainer in the memory of the nodes: save and resume what is not a tensor."""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState

from trainium_worker import memory

if TYPE_CHECKING:
    from trainium_worker.dcp import MemoryReader
    from trainium_worker.hooks.elastic.identity import Identity

_KEPT_ATTRIBUTES = ("_metrics", "_total_train_tokens")
"""State of TRL's trainers that is not part of their checkpoints."""


class History:
    """The log of a trainer as JSON lines, so that a step encodes only what it has added."""

    def __init__(self, lines: bytes = b"") -> None:
        self._lines = bytearray(lines)
        self._count = len(self._lines.splitlines())

    def encode(self, log_history: list[dict[str, Any]]) -> bytes:
        """Add the new entries of a log, and return all."""
        new = log_history[self._count :]
        self._lines += b"".join(json.dumps(entry).encode() + b"\n" for entry in new)
        self._count += len(new)
        return bytes(self._lines)


def collect_values(trainer: Any, identity: Identity, history: History) -> dict[str, Any]:
    """Return what a rank saves beside tensors; the first rank has the history."""
    scaler = getattr(trainer.accelerator, "scaler", None)
    return {
        "identity": asdict(identity),
        "state": _export_state(trainer),
        "history": history.encode(trainer.state.log_history) if trainer.is_world_process_zero() else b"",
        "scheduler": trainer.lr_scheduler.state_dict(),
        "scaler": None if scaler is None else scaler.state_dict(),
        "losses": (trainer._tr_loss.item(), trainer._total_loss_scalar, trainer._globalstep_last_logged),
        "attributes": {name: vars(trainer)[name] for name in _KEPT_ATTRIBUTES if name in vars(trainer)},
    }


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

    def __init__(self, reader: MemoryReader, values: list[dict[str, Any]]) -> None:
        """`values`: what each rank saved."""
        assert reader.step is not None, "the reader has found a state"
        self.step = reader.step
        self.identity: dict[str, Any] = values[0]["identity"]
        self._reader, self._values = reader, values
        self._folder = Path()

    def write_folder(self) -> Path:
        """Write the trainer's own state to a folder, from which the trainer reads it."""
        state, history = self._values[0]["state"], self._values[0]["history"]
        self._folder = Path(tempfile.mkdtemp(prefix="trainium-resume-"))
        log_history = [json.loads(line) for line in history.splitlines()]
        (self._folder / TRAINER_STATE_NAME).write_text(json.dumps({**state, "log_history": log_history}))
        return self._folder

    @property
    def history(self) -> History:
        """The log of the trainer."""
        return History(self._values[0]["history"])

    def load(self, trainer: Any) -> None:
        """Load the state, once the trainer has its model, optimizer and schedule. Collective."""
        memory.read(self._reader, trainer.model, trainer.optimizer)
        values = self._values[trainer.args.process_index if self._is_same_size(trainer) else 0]
        trainer.lr_scheduler.load_state_dict(values["scheduler"])
        if values["scaler"] is not None:
            trainer.accelerator.scaler.load_state_dict(values["scaler"])
        vars(trainer).update(values["attributes"])

    def restore_losses(self, trainer: Any) -> None:
        """Continue the sums from which the trainer computes the losses that it logs; remove the folder."""
        shutil.rmtree(self._folder, ignore_errors=True)
        losses = [values["losses"] for values in self._values]
        is_same_size = self._is_same_size(trainer)
        own = losses[trainer.args.process_index] if is_same_size else losses[0]
        trainer._total_loss_scalar, trainer._globalstep_last_logged = own[1:]
        sums = [own[0]] if is_same_size else [loss[0] for loss in losses]
        trainer._tr_loss += sum(sums) / len(sums)

    def _is_same_size(self, trainer: Any) -> bool:
        return len(self._values) == int(trainer.args.world_size)

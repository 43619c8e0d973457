"""Report the steps of Lightning's `Trainer`, save and exit when the agent asks for it, and recover from memory.

Usage:

    trainer = Trainer(..., callbacks=[ReportToAgent("/checkpoints/run/last.ckpt")])
    trainer.fit(module, ckpt_path=path if path.exists() else None)
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

import trainium_worker
from trainium_worker import memory as node_memory
from trainium_worker.dcp import MemoryReader

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    import torch
    from lightning.pytorch import LightningModule, Trainer

_TENSORS = ("state_dict", "optimizer_states")
"""Parts of a checkpoint of Lightning that `memory.save` keeps by itself."""


class ReportToAgent(Callback):  # type: ignore[misc]  # Any where types are checked
    """A callback of a `Trainer`; the state is saved to `path` when the job requests a stop."""

    def __init__(self, path: str | os.PathLike[str], *, memory: bool = False) -> None:
        """`memory`: also keep each step in the memory of the nodes, and resume from it where it is newer.

        It needs one optimizer, and one device or DDP. The data must be a function of the step: create the loader in
        `train_dataloader` of the module, from `self.trainer.global_step`.
        """
        self._path = path
        self._reported = 0
        self._total_steps = 0
        self._memory = memory
        self._is_dumping = False

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Resume from memory if it has a newer step than the checkpoint. Raises ValueError for other strategies."""
        if not self._memory:
            return
        optimizer = _find_optimizer(trainer)
        connector = trainer._checkpoint_connector
        reader = MemoryReader()
        if reader.step is None or reader.step < connector._loaded_checkpoint.get("global_step", 0):
            return
        states = node_memory.read(reader, pl_module, optimizer)
        # Lightning restores the rest of its state next, from the checkpoint that it has loaded.
        connector._loaded_checkpoint = {**states[0], "optimizer_states": [trainer.strategy.optimizer_state(optimizer)]}
        connector.restore_callbacks()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Continue after the resumed step."""
        self._reported = trainer.global_step
        total = trainer.estimated_stepping_batches
        self._total_steps = int(total) if math.isfinite(total) else 0
        trainium_worker.stage("compile")  # until the first step

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Wait for the save of the step before, so that a fault costs at most one step."""
        if self._memory:
            node_memory.wait()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Report a step of the optimizer; a step may have several batches."""
        if trainer.global_step == self._reported:
            return
        self._reported = trainer.global_step
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        trainium_worker.step(trainer.global_step, loss=loss, total_steps=self._total_steps)
        stops = trainium_worker.should_stop()
        if self._memory:
            optimizer, values = _find_optimizer(trainer), self._dump_state(trainer)
            node_memory.save(trainer.global_step, pl_module, optimizer, values)  # callbacks may exchange the weights
        if stops:
            if self._memory:
                node_memory.wait()
            trainium_worker.stage("save")
            trainer.save_checkpoint(self._path)
            trainium_worker.saved(trainer.global_step, self._path)
            raise SystemExit(trainium_worker.STOPPED)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Wait for the save of the last step."""
        if self._memory:
            node_memory.wait()

    def on_validation_batch_end(self, *args: Any, **kwargs: Any) -> None:
        """Report the progress of a validation."""
        trainium_worker.stage("evaluate")

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: Mapping[str, Any]) -> None:
        """Report that the process is saving."""
        if not self._is_dumping:
            trainium_worker.stage("save")

    def _dump_state(self, trainer: Trainer) -> dict[str, Any]:
        """Return a checkpoint of Lightning without its tensors."""
        self._is_dumping = True
        checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        self._is_dumping = False
        return {name: value for name, value in checkpoint.items() if name not in _TENSORS}


def _find_optimizer(trainer: Trainer) -> torch.optim.Optimizer:
    """Return the optimizer. Raises ValueError if its state and the model are not whole on each rank."""
    if len(trainer.optimizers) != 1 or type(trainer.strategy) not in (DDPStrategy, SingleDeviceStrategy):
        kind, number = type(trainer.strategy).__name__, len(trainer.optimizers)
        raise ValueError(
            f"memory=True keeps one optimizer with DDPStrategy or SingleDeviceStrategy, not {number} with {kind}: "
            "remove memory=True, and resume from ckpt_path"
        )
    optimizer: torch.optim.Optimizer = trainer.optimizers[0]
    return optimizer

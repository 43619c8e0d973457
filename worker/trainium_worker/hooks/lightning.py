"""Report the steps of Lightning's `Trainer`, and save and exit when the agent asks for it.

Usage:

    trainer = Trainer(..., callbacks=[ReportToAgent("/checkpoints/run/last.ckpt")])
    trainer.fit(module, ckpt_path=path if path.exists() else None)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning.pytorch.callbacks import Callback

import trainium_worker

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from lightning.pytorch import LightningModule, Trainer


class ReportToAgent(Callback):  # type: ignore[misc]  # Any where types are checked
    """A callback of a `Trainer`; the state is saved to `path` when the job requests a stop."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = path
        self._reported = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Continue after the resumed step."""
        self._reported = trainer.global_step
        trainium_worker.stage("compile")  # until the first step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Report a step of the optimizer; a step may have several batches."""
        if trainer.global_step == self._reported:
            return
        self._reported = trainer.global_step
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        trainium_worker.step(trainer.global_step, loss=loss, total_steps=max(int(trainer.max_steps), 0))
        if trainium_worker.should_stop():
            trainium_worker.stage("save")
            trainer.save_checkpoint(self._path)
            trainium_worker.saved(trainer.global_step, self._path)
            raise SystemExit(trainium_worker.STOPPED)

    def on_validation_batch_end(self, *args: Any, **kwargs: Any) -> None:
        """Report the progress of a validation."""
        trainium_worker.stage("evaluate")

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: Mapping[str, Any]) -> None:
        """Report that the process is saving."""
        trainium_worker.stage("save")

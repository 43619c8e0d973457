"""Report the steps of `transformers.Trainer`, and save and exit when the agent asks for it.

Usage:

    trainer = Trainer(..., callbacks=[ReportToAgent()])
    trainer.train(resume_from_checkpoint=get_last_checkpoint(arguments.output_dir))
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

import trainium_worker
from trainium_worker.hooks import select_figures

if TYPE_CHECKING:
    from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments


def elastic(trainer: Trainer) -> Trainer:
    """Make a trainer and its run elastic (`trainium_worker.hooks.elastic`): call it on all ranks, before `train`."""
    from trainium_worker.hooks.elastic import elastic as make_elastic  # noqa: PLC0415 - needs transformers 5

    return make_elastic(trainer)


class ReportToAgent(TrainerCallback):
    """Callback of a `Trainer`; the loss is reported as often as the trainer logs it (`logging_steps`)."""

    def __init__(self) -> None:
        self._stops = False

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Report that the state is loaded; the first step compiles."""
        trainium_worker.stage("compile")

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Report a step; request a save when the job requests a stop."""
        samples = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        trainium_worker.step(state.global_step, samples=samples, total_steps=max(state.max_steps, 0))
        if trainium_worker.should_stop() and state.global_step < state.max_steps:
            self._stops = control.should_save = True
        return control

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Add the loss to the newest step."""
        figures = select_figures(kwargs.get("logs", {}))
        if figures and state.global_step:
            trainium_worker.step(state.global_step, **figures)

    def on_prediction_step(self, *args: Any, **kwargs: Any) -> None:
        """Report the progress of an evaluation."""
        trainium_worker.stage("evaluate")

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Report a checkpoint; exit after a requested one."""
        trainium_worker.saved(state.global_step, Path(str(args.output_dir)) / f"checkpoint-{state.global_step}")
        if self._stops:
            raise SystemExit(trainium_worker.STOPPED)

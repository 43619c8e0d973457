"""Methods that an elastic trainer extends, and what cannot be elastic."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset
from transformers import TrainerCallback

import trainium_worker
from trainium_worker import memory
from trainium_worker.hooks import select_figures
from trainium_worker.hooks.elastic.checkpoints import explain_unreadable
from trainium_worker.hooks.elastic.run import Run, count_replicas

if TYPE_CHECKING:
    from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments

_log = logging.getLogger(__name__)


def elastic(trainer: Trainer) -> Trainer:
    """Make a trainer elastic: call it on all ranks, before `train`. Returns the trainer.

    Raises ValueError if the trainer uses something that cannot be the same at another number of processes.
    """
    if isinstance(trainer, _ElasticMethods):
        return trainer
    _check(trainer)
    if getattr(trainer.args, "enable_jit_checkpoint", False):
        from transformers.trainer_jit_checkpoint import JITCheckpointCallback  # noqa: PLC0415 - of newer versions

        trainer.pop_callback(JITCheckpointCallback)
        _log.warning(
            "enable_jit_checkpoint is replaced: all ranks save after the same step when the job requests a stop"
        )
    has_router_loss = getattr(getattr(trainer.model, "config", None), "output_router_logits", False)
    if has_router_loss and not trainer.args.dataloader_drop_last:
        _log.warning(
            "output_router_logits adds the router's loss, a mean that also counts masked rows: the losses after a "
            "smaller last batch of an epoch depend on the number of ranks. Set dataloader_drop_last=True"
        )
    trainer.args.average_tokens_across_devices = True  # else the loss depends on the number of processes
    kind = type(trainer)
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    trainer.__class__ = type(kind.__name__, (_ElasticMethods, kind), names)
    vars(trainer)["_elastic"] = run = Run(trainer)
    trainer.add_callback(_Reports(run))
    return trainer


def _check(trainer: Trainer) -> None:
    """Raise ValueError for what cannot be elastic."""
    args, problem = trainer.args, ""
    if trainer.is_in_train or trainer.state.global_step:
        problem = "it has trained already: call elastic(trainer) before trainer.train()"
    elif trainer.is_deepspeed_enabled:
        problem = "DeepSpeed keeps the state of the optimizer by itself: use FSDP2 instead (fsdp, fsdp_config)"
    elif trainer.is_fsdp_enabled and getattr(trainer.accelerator.state.fsdp_plugin, "fsdp_version", 1) != 2:
        problem = "FSDP1 hides the parameters: use FSDP2 (fsdp_config: {'fsdp_version': 2})"
    elif args.n_gpu > 1:
        problem = f"one process drives {args.n_gpu} devices: start one process for each, as torchrun does"
    elif args.world_size % (replicas := count_replicas(trainer)):
        problem = (
            f"{args.world_size} ranks cannot be divided into groups of {replicas} that compute the same samples "
            "(tensor, context and sequence parallelism): lower these degrees, or run at another size"
        )
    elif args.auto_find_batch_size:
        problem = "auto_find_batch_size changes the batch: set per_device_train_batch_size"
    elif trainer.train_dataset is None:
        problem = "it has no train_dataset"
    elif isinstance(trainer.train_dataset, IterableDataset) or not hasattr(trainer.train_dataset, "__len__"):
        problem = (
            "its train_dataset is a stream, in which no run can continue at a position: load it without streaming, "
            "or create a data set with a length from it (datasets.Dataset.from_generator)"
        )
    elif not len(trainer.train_dataset):
        problem = "its train_dataset has no samples"
    elif getattr(args, "train_sampling_strategy", "") == "batch_rebalance":
        problem = "batch_rebalance orders samples by the number of processes: use 'random' or 'group_by_length'"
    if problem:
        raise ValueError(f"{type(trainer).__name__} cannot be elastic: {problem}")


class _ElasticMethods:
    """The methods of a trainer's class that an elastic trainer extends."""

    _elastic: Run

    def train(self: Any, resume_from_checkpoint: Any = None, trial: Any = None, **kwargs: Any) -> Any:
        if trial is not None:
            raise ValueError(
                "an elastic trainer has one run: search hyperparameters with a trainer that is not elastic"
            )
        self._elastic.ignored_keys = kwargs.get("ignore_keys_for_eval")
        folder = self._elastic.start(resume_from_checkpoint)
        try:
            result = super().train(folder, trial, **kwargs)  # type: ignore[misc]
        except BaseException:
            memory.write_held()
            raise
        memory.wait()
        return result

    def get_train_dataloader(self: Any) -> Any:
        return self._elastic.wrap(super().get_train_dataloader())  # type: ignore[misc]

    def _get_train_sampler(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._elastic.own_sampler = super()._get_train_sampler(*args, **kwargs)  # type: ignore[misc]
        return self._elastic.own_sampler

    def get_batch_samples(self: Any, *args: Any, **kwargs: Any) -> Any:
        batches, items = super().get_batch_samples(*args, **kwargs)  # type: ignore[misc]
        self._elastic.begin_step(items)
        return batches, items

    def _run_epoch(self: Any, *args: Any, **kwargs: Any) -> None:
        """Train no step after the last one, if a fault came between it and the end of the program."""
        if self.state.global_step >= self.state.max_steps or self.control.should_training_stop:
            self.control.should_training_stop = True
        else:
            super()._run_epoch(*args, **kwargs)  # type: ignore[misc]

    def training_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        loss = super().training_step(*args, **kwargs)  # type: ignore[misc]
        self._elastic.micro_batch += 1
        return loss

    def _generate_single_turn(self: Any, prompts: Any, *args: Any, **kwargs: Any) -> Any:
        with self._elastic.seed_answers(len(prompts)):
            return super()._generate_single_turn(prompts, *args, **kwargs)  # type: ignore[misc]

    def compute_loss(
        self: Any, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        result = super().compute_loss(  # type: ignore[misc]
            model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch
        )
        if return_outputs:
            return self._elastic.weigh(result[0], num_items_in_batch), result[1]
        return self._elastic.weigh(result, num_items_in_batch)

    def _maybe_log_save_evaluate(
        self: Any, tr_loss: Any, grad_norm: Any, model: Any, trial: Any, *args: Any, **kwargs: Any
    ) -> None:
        self._elastic.micro_batch = None
        self._elastic.hold_step(grad_norm, kwargs.get("learning_rate"))
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, model, trial, *args, **kwargs)  # type: ignore[misc]
        self._elastic.end_step(model, trial)

    def _save_checkpoint(self: Any, model: Any, trial: Any) -> None:
        with self._elastic.saving(trial):
            super()._save_checkpoint(model, trial)  # type: ignore[misc]

    def _load_from_checkpoint(self: Any, resume_from_checkpoint: str, model: Any = None) -> None:
        if self._elastic.memory_state is None:
            with explain_unreadable(resume_from_checkpoint):
                super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self: Any, checkpoint: str | None) -> None:
        if self._elastic.memory_state is not None:
            self._elastic.memory_state.load(self)
        else:
            with explain_unreadable(checkpoint):
                super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Do nothing: the random numbers of a step are a function of its number."""


def append_metrics(folder: Path, step: int, figures: dict[str, float]) -> None:
    """Append the figures of a step to `metrics.jsonl`, from which `kubectl trn report` draws the loss."""
    names = {name: re.sub("_(.)", lambda match: match[1].upper(), name) for name in figures}
    record = {"step": step, "time": time.time(), **{names[name]: value for name, value in figures.items()}}
    with contextlib.suppress(OSError), (folder / "metrics.jsonl").open("a") as file:  # checkpoints report a full disk
        file.write(json.dumps(record) + "\n")


class _Reports(TrainerCallback):
    """Reports an elastic trainer's steps to the agent, the loss as often as the trainer logs it."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Continue the sums of losses, and end the step that the run resumes."""
        self._run.continue_losses()

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Let the optimizer change the state."""
        self._run.begin_optimizer_step()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Report a step."""
        sampler = self._run.sampler
        assert sampler is not None, "the trainer has its loader"
        trainium_worker.step(
            state.global_step,
            samples=sampler.step_size((state.global_step - 1) % sampler.steps_per_epoch),
            tokens=self._run.tokens,
            total_steps=max(state.max_steps, 0),
        )

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Add the loss to the newest step."""
        figures = select_figures(kwargs.get("logs", {}))
        if not figures or not state.global_step:
            return
        if not self._run.is_catching_up:  # the agent would take the step for one that is computed again
            trainium_worker.step(state.global_step, **figures)
        if state.is_world_process_zero and "loss" in figures:
            append_metrics(Path(str(args.output_dir)), state.global_step, figures)

    def on_prediction_step(self, *args: Any, **kwargs: Any) -> None:
        """Report the progress of an evaluation."""
        trainium_worker.stage("evaluate")

"""Train the reference of pretraining in one process: `transformers`' LlamaForCausalLM and its loss, torch's AdamW.

The trainer computes nothing here. It only provides the initial weights, the samples of each step and the shape; the
learning rate is implemented a second time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from trainium_contract.trainer.optimizer import ScheduleKind, WeightDecayScope
from trainium_trainer.configuration.config import Launch, resolve_settings
from trainium_trainer.data.batches.samples import Share
from trainium_trainer.data.dataset import open_data
from trainium_trainer.data.loader import open_loader
from trainium_trainer.models.huggingface import to_config
from trainium_trainer.models.initialization import draw_initial_tensor

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import Tensor, nn

    from trainium_contract.models.shape import ModelShape
    from trainium_contract.trainer.config import TrainingConfig
    from trainium_trainer.data.loader import MicroBatch


@dataclass(frozen=True, slots=True)
class Reference:
    """Result of a reference run."""

    losses: list[float]
    model: LlamaForCausalLM


def build_shape(config: TrainingConfig) -> ModelShape:
    """Return the model shape that a configuration describes."""
    single_process = Launch(
        rank=0,
        local_rank=0,
        world_size=1,
        generation=0,
        attempt=0,
        run_id="",
        progress_file=None,
        memory_directory=None,
    )
    return resolve_settings(config, single_process).shape


def train_reference(config: TrainingConfig) -> Reference:
    """Train for all steps of the configuration."""
    torch.use_deterministic_algorithms(mode=True)
    shape = build_shape(config)
    options: dict[str, Any] = {**_drop_kind(to_config(shape)), "attn_implementation": "sdpa"}
    model = LlamaForCausalLM(LlamaConfig(**options))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(draw_initial_tensor(name, parameter.shape, seed=config.seed, shape=shape))
    model.train()
    optimizer = create_optimizer(model, config)
    losses = []
    for step, (inputs, labels) in zip(range(config.steps), iterate_batches(config), strict=False):
        for group in optimizer.param_groups:
            group["lr"] = compute_learning_rate(config, step)
        valid = int((labels != -100).sum())
        loss = model(input_ids=inputs, labels=labels, shift_labels=labels, num_items_in_batch=valid).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Reference(losses, model.train(mode=False))


def iterate_batches(config: TrainingConfig) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield inputs and next tokens, each [samples, sequence], of each global batch."""
    return ((batch.inputs, batch.labels) for batch in iterate_micro_batches(config))


def iterate_micro_batches(config: TrainingConfig) -> Iterator[MicroBatch]:
    """Yield the micro-batches of each global batch."""
    size = config.batch.global_size
    share = Share(global_size=size, micro_size=size, dp_rank=0, dp_size=1)
    loader = open_loader(open_data(config.data, size), share)
    try:
        for step in range(config.steps):
            (batch,) = loader.read_batch(step * size).micro_batches
            yield batch
    finally:
        loader.close()


def _drop_kind(config: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration without the fields that name its kind and version."""
    return {key: value for key, value in config.items() if key not in ("architectures", "rope_theta", "rope_scaling")}


def create_optimizer(model: nn.Module, config: TrainingConfig) -> torch.optim.AdamW:
    """Create torch's optimizer with the settings of the configuration, for all trained parameters."""
    settings = config.optimizer
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [{"params": trained}]
    if settings.decay_scope is WeightDecayScope.MATRICES:
        groups = [
            {"params": [parameter for parameter in trained if parameter.ndim > 1]},
            {"params": [parameter for parameter in trained if parameter.ndim == 1], "weight_decay": 0.0},
        ]
    return torch.optim.AdamW(
        groups,
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        weight_decay=settings.weight_decay,
    )


def compute_learning_rate(config: TrainingConfig, step: int) -> float:
    """Return the learning rate of step `step` (from 0)."""
    schedule, peak, number = config.schedule, config.optimizer.learning_rate, step + 1
    if number <= schedule.warmup_steps:
        return peak * number / schedule.warmup_steps
    if schedule.kind is ScheduleKind.COSINE:
        fraction = (number - schedule.warmup_steps) / (config.steps - schedule.warmup_steps)
        return peak * (schedule.final_ratio + (1 - schedule.final_ratio) * (1 + math.cos(math.pi * fraction)) / 2)
    if schedule.kind is not ScheduleKind.WARMUP_STABLE_DECAY or schedule.decay_steps is None:
        raise ValueError(f"the reference has no schedule {schedule.kind}: implement it here")
    remaining = min(1.0, (config.steps - number) / schedule.decay_steps)
    return peak * (schedule.final_ratio + (1 - schedule.final_ratio) * remaining)


def load_model(folder: Path) -> PreTrainedModel:
    """Load the model in a Hugging Face folder with `transformers`."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.train(mode=False)
    return model


@torch.no_grad()
def compute_logits(model: nn.Module, tokens: Tensor) -> Tensor:
    """Compute the logits of a model of `transformers`."""
    logits: Tensor = model(tokens).logits
    return logits

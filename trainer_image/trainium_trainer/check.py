"""`trainium-trainer check`: what a configuration means at a size, and which of its settings have no effect.

Invariant: no torch, no device, no data: what is printed follows from the configuration and the vocabulary alone.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainium_contract.trainer_optimizer import ScheduleKind, WeightDecayScope
from trainium_contract.worker_env import KIND
from trainium_trainer.compile.sizes import sizes_of
from trainium_trainer.config import launch_of, parse, read_document, settle
from trainium_trainer.models.shapes import PRESETS
from trainium_trainer.options import DEFAULT_CONFIG, ConfigFile, Overrides
from trainium_trainer.schedule import learning_rate

if TYPE_CHECKING:
    from trainium_contract.trainer import TrainingConfig
    from trainium_trainer.config import Settings

_SIZES_SHOWN = 12


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command()(check)


def check(
    config: ConfigFile = DEFAULT_CONFIG,
    overrides: Overrides = None,
    ranks: Annotated[
        int | None,
        typer.Option(min=1, help="Training processes of the whole job; default: those of the TrainingJob, else 1."),
    ] = None,
) -> None:
    """Say what a configuration means for a number of processes, or why it cannot be; nothing is started."""
    lines = []
    document = read_document(config)
    if document.get("kind") == KIND:
        plan = sizes_of(config, document, overrides or ())
        start = f"{_sized(plan.nodes[0], 'node')} of {_sized(plan.cores_per_node, 'process')}"
        lines = [f"job: starts on {start}; {_sizes(plan.nodes)}"]
        ranks = ranks or plan.nodes[0] * plan.cores_per_node
        trainer = plan.config
    else:
        trainer = parse(document, overrides or (), str(config))
    launch = replace(launch_of({}), world_size=ranks or 1)
    elsewhere = _tokenizer_elsewhere(trainer)
    settings = settle(trainer, launch, vocabulary=0 if elsewhere else None)
    warnings = [*([elsewhere] if elsewhere else ()), *without_effect(settings.config)]
    typer.echo("\n".join([*lines, *meaning(settings), *(f"warning: {each}" for each in warnings)]))


def _tokenizer_elsewhere(config: TrainingConfig) -> str:
    """A sentence when the tokenizer is only where the job runs and the model's vocabulary is known; else empty."""
    path, model = config.data.tokenizer.path, config.model
    known = model.vocab_size is not None or (model.path is None and PRESETS[model.preset].vocab_size > 0)
    if path is None or not known or Path(path).exists():
        return ""
    return f"data.tokenizer.path {path} is not on this machine: its vocabulary was not compared with the model's"


def _sized(number: int, unit: str) -> str:
    plural = f"{unit}es" if unit.endswith("s") else f"{unit}s"
    return f"{number} {unit if number == 1 else plural}"


def _sizes(nodes: tuple[int, ...]) -> str:
    """At most a line of them."""
    legal = sorted(nodes)
    shown = ", ".join(map(str, legal[:_SIZES_SHOWN]))
    return f"legal sizes: {shown}" + (f" and {len(legal) - _SIZES_SHOWN} more" if len(legal) > _SIZES_SHOWN else "")


def meaning(settings: Settings) -> list[str]:
    """The arithmetic of a run, one line each."""
    config, shape = settings.config, settings.shape
    degrees, batch, length = config.parallelism, config.batch, config.data.sequence_length
    per_step = batch.global_size * length
    passes = batch.global_size // (batch.micro_size * settings.dp_size)
    last = learning_rate(config, config.steps - 1)
    return [
        f"model: {shape.num_parameters:,} parameters, {shape.num_layers} layers of width {shape.hidden_size}",
        (
            f"processes: {settings.launch.world_size} = data {settings.dp_size} x tensor {degrees.tensor} x pipeline "
            f"{degrees.pipeline}"
        ),
        (
            f"step: {batch.global_size} samples of {length} tokens = {per_step:,} tokens; {passes} passes of "
            f"{batch.micro_size} samples on each data-parallel rank"
        ),
        f"run: {config.steps:,} steps = {config.steps * per_step:,} tokens",
        (
            f"learning rate: up to {config.optimizer.learning_rate:g} in {config.schedule.warmup_steps:,} steps, "
            f"{config.schedule.kind}, {last:g} in the last"
        ),
    ]


def without_effect(config: TrainingConfig) -> list[str]:
    """Settings that say nothing next to the others, each with the reason."""
    schedule, degrees = config.schedule, config.parallelism
    found = []
    if schedule.kind is ScheduleKind.CONSTANT and schedule.decay_steps is not None:
        found.append("schedule.decaySteps has no effect: schedule.kind Constant does not decay")
    if config.optimizer.weight_decay == 0 and config.optimizer.decay_scope is not WeightDecayScope.ALL:
        found.append("optimizer.decayScope has no effect: optimizer.weightDecay is 0")
    if degrees.sequence and degrees.tensor == 1:
        found.append("parallelism.sequence has no effect: parallelism.tensor is 1")
    return found

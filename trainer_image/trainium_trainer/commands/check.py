"""Report the meaning of a configuration at a size, and settings without effect: `trainium-trainer check`.

Guarantees:
- No torch and no device are used, no record is read and no store is accessed.
"""

from __future__ import annotations

import glob
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainium_contract.accelerators import INSTANCES
from trainium_contract.models.families import PRESETS
from trainium_contract.models.parameters import count_parameters
from trainium_contract.pages.formatting import pluralize
from trainium_contract.requirements.descriptors import count_required_files, explain_file_limit
from trainium_contract.spec.workers import DEVICE_MISSING
from trainium_contract.trainer.parallelism import BackendChoice
from trainium_contract.trainer.tuning import BASE_REFERENCE
from trainium_contract.wire.worker_env import KIND
from trainium_contract.worker_process.open_files import read_limit
from trainium_trainer.backends.choose import choose_backend, refuse_unsupported
from trainium_trainer.commands.options import DEFAULT_CONFIG, ConfigFile, Overrides
from trainium_trainer.compile.sizes import resolve_sizes
from trainium_trainer.configuration.config import (
    Launch,
    Settings,
    parse,
    parse_job_spec,
    read_document,
    read_launch,
    resolve_settings,
    resolve_steps,
)
from trainium_trainer.data.sources.files import is_in_store
from trainium_trainer.data.sources.resolve import PYTHON_DOCS, list_sources
from trainium_trainer.exits import UserError
from trainium_trainer.loop import memory_check
from trainium_trainer.loop.memory_check import estimate_run_memory, refuse_too_small
from trainium_trainer.loop.schedule import compute_learning_rate
from trainium_trainer.trackers.process import find_missing_trackers
from trainium_trainer.tuning.trainable import is_reference_in_model

if TYPE_CHECKING:
    from trainium_contract.job import TrainingJobSpec
    from trainium_contract.trainer.config import TrainingConfig
    from trainium_contract.trainer.model import ModelConfig


_WEIGHTS = ("*.safetensors", "*.bin")


def find_missing(config: TrainingConfig) -> list[str]:
    """Return the errors that would end a run on this machine: missing data or packages."""
    sources = config.data.sources or (config.data,)
    names = [source.source for source in sources if source.hub is None and source.source is not None]
    problems = [
        f"data.source {name}: there is no such file or folder on this machine: correct the path or mount the data"
        for name in names
        if not _is_available(name)
    ]
    if config.backend is BackendChoice.NXD:
        try:
            choose_backend(config.backend, config.device)
        except UserError as error:
            problems.append(str(error))
    return [*problems, *find_missing_trackers(config.monitor.trackers)]


def find_unread_weights(model: ModelConfig) -> list[str]:
    """Report weights in the folder of a shape that the run does not load."""
    if model.path is None:
        return []
    folder = Path(model.path).expanduser()
    if not any(file for pattern in _WEIGHTS for file in folder.glob(pattern)):
        return []
    warning = (
        f"model.path {model.path} gives the shape only and its weights are not read: the run begins with random ones; "
        "to begin with those, name the folder in model.weights instead"
    )
    return [warning]


def _is_available(name: str) -> bool:
    """Return whether a source is on this machine or does not have to be."""
    if name == PYTHON_DOCS or is_in_store(name):
        return True
    path = Path(name).expanduser()
    return path.exists() or (glob.has_magic(name) and bool(glob.glob(str(path), recursive=True)))  # noqa: PTH207


_MAX_SIZES = 12
_MAX_COMMAND = 200
"""Characters of a program's command that are shown."""


def check(
    config: ConfigFile = DEFAULT_CONFIG,
    overrides: Overrides = None,
    ranks: Annotated[
        int | None,
        typer.Option(min=1, help="Training processes of the whole job; default: those of the TrainingJob, else 1."),
    ] = None,
) -> None:
    """Explain a configuration for a number of processes, or report why it is invalid; nothing is started."""
    header, nodes, instance_type = [], 1, ""
    document = read_document(config)
    # Jobs and larger worlds run elsewhere; otherwise refuse what `train` would refuse on this machine.
    elsewhere = document.get("kind") == KIND or ranks is not None
    if document.get("kind") == KIND:
        spec = parse_job_spec(config, document)
        if not spec.workers.accelerator.is_given:
            raise UserError(f"{config}: {DEVICE_MISSING}")
        if not spec.workload.reads_configuration:
            typer.echo("\n".join(describe_program(spec)))
            return
        plan = resolve_sizes(config, document, overrides or ())
        start = f"{pluralize(plan.nodes[0], 'node')} of {pluralize(plan.cores_per_node, 'process')}"
        header = [f"job: starts on {start}; {_format_sizes(plan.nodes)}"]
        ranks = ranks or plan.nodes[0] * plan.cores_per_node
        nodes = max(1, ranks // plan.cores_per_node)
        instance_type = plan.instance_type
        trainer = plan.config
    else:
        trainer = parse(document, overrides or (), str(config))
    launch = replace(read_launch({}), world_size=ranks or 1)
    tokenizer = _find_missing_tokenizer(trainer)
    settings = resolve_settings(trainer, launch, vocabulary=0 if tokenizer else None)
    refuse_unsupported(settings)
    list_sources(settings.config.data)  # refuses data that names none
    absent = find_missing(settings.config)
    if absent and not elsewhere:
        raise UserError(absent[0])
    if not tokenizer and not absent:
        from trainium_trainer.data.dataset import refuse_unusable  # noqa: PLC0415 - numpy, only for what is here

        refuse_unusable(settings.config.data)
    if not elsewhere:
        refuse_few_files(launch)
    warnings = [*([tokenizer] if tokenizer else ()), *absent, *find_unread_weights(settings.config.model)]
    warnings += [*find_idle_ranks(settings), *find_absent_ranks(settings)]
    estimate = estimate_run_memory(settings, max(1, launch.world_size // nodes), instance_type)
    memory = memory_check.format_lines(estimate, of_node=bool(instance_type) or not elsewhere)
    if instance_type in INSTANCES:
        warnings += refuse_too_small(estimate, INSTANCES[instance_type], instance_type)
    typer.echo(
        "\n".join([*header, *describe_run(settings, nodes), *memory, *(f"warning: {text}" for text in warnings)])
    )


def describe_program(spec: TrainingJobSpec) -> list[str]:
    """Describe a job that runs a program, one line each. Raises UserError if no size is legal."""
    workload, program = spec.workload, spec.program
    assert program is not None, "the caller has checked it"
    sizes = spec.useful_sizes()
    if not sizes:
        raise UserError(
            f"workers.replicas {spec.workers.replicas} is not a legal size, nor is any below it: change it, "
            "parallelism or program.batch"
        )
    start = f"{pluralize(sizes[0], 'node')} of {pluralize(workload.processes_per_node, 'process')}"
    lines = [
        f"job: starts on {start}; {_format_sizes(sizes)}",
        f"program: {shlex.join((*program.command, *program.args))[:_MAX_COMMAND]}",
        f"image: {program.image}",
    ]
    if program.checkpoints is None:
        lines.append("warning: program.checkpoints is not given, so status, drains and `kubectl trn why` know none")
    if not spec.checkpoint.storage.is_persistent:
        lines.append(
            "warning: checkpoint.storage is not given: what the program writes to /checkpoints is lost with a pod"
        )
    return lines


def refuse_few_files(launch: Launch) -> None:
    """Raise UserError if this machine's limit of open files is too low for rank 0 of this world."""
    if launch.world_size > 1 and (shortage := explain_file_limit(read_limit(), launch.world_size)):
        raise UserError(shortage)


def _find_missing_tokenizer(config: TrainingConfig) -> str:
    """Return a message if only the job has the tokenizer and the model's vocabulary is known; else empty."""
    path, model = config.data.tokenizer.path, config.model
    knows_vocabulary = model.vocab_size is not None or (model.path is None and PRESETS[model.preset].vocab_size > 0)
    if path is None or not knows_vocabulary or Path(path).exists():
        return ""
    return f"data.tokenizer.path {path} is not on this machine: its vocabulary was not compared with the model's"


def _format_sizes(nodes: tuple[int, ...]) -> str:
    """Format sizes, at most one line of them."""
    sizes = sorted(nodes)
    shown = ", ".join(map(str, sizes[:_MAX_SIZES]))
    return f"useful sizes: {shown}" + (f" and {len(sizes) - _MAX_SIZES} more" if len(sizes) > _MAX_SIZES else "")


def describe_run(settings: Settings, nodes: int = 1) -> list[str]:
    """Describe a run on a number of nodes in numbers, one line each."""
    config, shape = settings.config, settings.shape
    degrees, batch, length = config.parallelism, config.batch, config.data.sequence_length
    sequences = config.data.rows_per_sample
    per_step = settings.batch * sequences * length
    unit, multiplier = ("sample", "") if sequences == 1 else ("pair", f"{sequences} x ")
    capacity = settings.passes * batch.micro_size * settings.dp_size
    empty = f", {settings.batch} of {capacity} rows filled" if capacity > settings.batch else ""
    nominal = f" (batch.globalSize is {batch.global_size})" if settings.batch != batch.global_size else ""
    return [
        f"model: {count_parameters(shape):,} parameters, {shape.num_layers} layers of width {shape.hidden_size}",
        *_describe_window(settings),
        *_describe_tuning(settings),
        *_describe_objective(config),
        (
            f"processes: {settings.launch.world_size} = data {settings.dp_size} x tensor {degrees.tensor} x pipeline "
            f"{degrees.pipeline}" + (f" x context {degrees.context}" if degrees.context > 1 else "")
        ),
        (
            f"step: {pluralize(settings.batch, unit)}{nominal} of {multiplier}{length} tokens = {per_step:,} tokens; "
            f"{pluralize(settings.passes, 'pass')} of {pluralize(batch.micro_size, unit)} on each data-parallel rank"
            f"{empty}"
        ),
        _describe_length(config),
        _describe_learning_rate(config),
        f"open files: up to {count_required_files(settings.launch.world_size, nodes):,} in one process",
    ]


def _describe_window(settings: Settings) -> list[str]:
    """Return a line about the window of attention, if the model has one."""
    shape, length = settings.shape, settings.config.data.sequence_length
    window = shape.sliding_window
    if window is None:
        return []
    layers = sum(shape.window_size(layer) is not None for layer in range(shape.num_layers))
    effect = "" if window < length else f", which a sequence of {length:,} tokens does not exceed: it has no effect"
    return [f"window: a token sees {window:,} positions in {layers} of {shape.num_layers} layers{effect}"]


def _describe_tuning(settings: Settings) -> list[str]:
    """Return a line about the trained parameters, if not all are trained."""
    tuning, trainable, shape = settings.config.tuning, settings.trainable, settings.shape
    if not tuning.freezes:
        return []
    count = count_parameters(shape)
    share = f"{trainable.trained:,} of {count:,} parameters ({trainable.trained / count:.2%})"
    if not trainable.adapters:
        return [f"tuning: {share} are trained, the others are frozen"]
    lora = tuning.lora
    ranks, scales = (
        " or ".join(f"{value:g}" for value in sorted({of(name) for name in trainable.adapters}))
        for of in (lora.rank_of, lora.find_scale)
    )
    kind = "DoRA" if lora.dora else "LoRA"
    return [f"tuning: {kind} of rank {ranks} on {len(trainable.adapters)} layers, scale {scales}; {share} are trained"]


def _describe_objective(config: TrainingConfig) -> list[str]:
    """Return a line about the loss on pairs of answers, if there is one."""
    objective = config.tuning.objective
    if objective is None:
        return []
    line = f"objective: {objective.kind}, beta {objective.beta:g}"
    if is_reference_in_model(config.tuning):
        return [f"{line}; the reference is the model without its adapters, in the same step"]
    model = config.model.weights if objective.reference == BASE_REFERENCE else objective.reference
    return [f"{line}; log-probabilities of the reference {model} are computed before the first step"]


def _describe_length(config: TrainingConfig) -> str:
    if config.epochs:
        return (
            f"run: {config.epochs:g} epoch{'' if config.epochs == 1 else 's'}; the number of steps depends on the data"
        )
    tokens = config.steps * config.batch.global_size * config.data.rows_per_sample * config.data.sequence_length
    unit = "batches of batch.globalSize samples" if config.batch.tolerance else "steps"
    return f"run: {config.steps:,} {unit} = {tokens:,} tokens"


def _describe_learning_rate(config: TrainingConfig) -> str:
    schedule, peak = config.schedule, f"learning rate: up to {config.optimizer.learning_rate:g}"
    if config.epochs:
        warmup = "" if schedule.warmup_ratio is None else f" in the first {schedule.warmup_ratio:.1%} of the steps"
        return f"{peak}{warmup}, {schedule.kind}"
    resolved = resolve_steps(config, None)
    last = compute_learning_rate(resolved, resolved.steps - 1)
    return f"{peak} in {resolved.schedule.warmup_steps:,} steps, {schedule.kind}, {last:g} in the last"


def find_idle_ranks(settings: Settings) -> list[str]:
    """Return a message if there are more data-parallel ranks than samples in a step."""
    samples, ranks = settings.batch, settings.dp_size
    if samples >= ranks:
        return []
    warning = (
        f"batch.globalSize {samples} is less than the {ranks} data-parallel ranks: {ranks - samples} of them have no "
        f"sample in any step, so {samples / ranks:.0%} of the devices do all the work; take fewer workers"
    )
    return [warning]


def find_absent_ranks(settings: Settings) -> list[str]:
    """Return a message about profiled ranks that this size does not have."""
    profile, ranks = settings.config.monitor.profile, settings.launch.world_size
    absent = [str(rank) for rank in sorted(profile.ranks) if rank >= ranks] if profile is not None else []
    if not absent:
        return []
    return [f"monitor.profile.ranks names {', '.join(absent)}, which is not there: the ranks are 0 to {ranks - 1}"]

"""Measure models on held-out examples or on the tasks of lm-eval: `trainium-trainer evaluate`.

Guarantees:
- Importing this module imports no torch.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainium_contract.trainer.evaluate import GenerationConfig, TasksConfig
from trainium_trainer.commands.model_options import (
    Adapter,
    BatchSize,
    DeviceOption,
    EndpointAddress,
    EndpointModel,
    EndpointSeconds,
    MaxNewTokens,
    PrecisionOption,
    Stop,
    merge_generation,
    open_server,
    pick_models,
)
from trainium_trainer.commands.options import Overrides  # noqa: TC001 - typer reads annotations
from trainium_trainer.configuration.config import load
from trainium_trainer.evaluate.answering.folder import ComputeType, ModelLocations
from trainium_trainer.exits import UserError
from trainium_trainer.validation_errors import validate

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainium_contract.trainer.config import TrainingConfig
    from trainium_trainer.evaluate.answering.endpoint import Endpoint
    from trainium_trainer.evaluate.compare import EvaluationSettings
    from trainium_trainer.evaluate.report import EvaluationResult
    from trainium_trainer.evaluate.tasks import TaskRun

_Models = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="MODEL",
        help="Hugging Face folder, or s3://bucket/prefix; several beside each other with --tasks.",
        show_default=False,
    ),
]
_EvaluatedConfig = Annotated[
    Path | None,
    typer.Option(
        help="A TrainingJob or the trainer's configuration: its data.validation and evaluate.tasks are asked."
    ),
]
_Tasks = Annotated[
    str | None,
    typer.Option(help="Measure by tasks of lm-eval instead, names with commas between: mmlu,hellaswag,gsm8k."),
]
_Shots = Annotated[int | None, typer.Option(help="--tasks: solved examples before each question.")]
_Limit = Annotated[int | None, typer.Option(help="--tasks: most questions of each task.")]
_TasksSeed = Annotated[int | None, typer.Option(help="--tasks: seed of the solved examples and of draws.")]
_IncludePath = Annotated[
    str | None, typer.Option(help="--tasks: folder with more task files, which may name local data.")
]
_ChatTemplate = Annotated[
    bool, typer.Option("--chat-template", help="--tasks: ask by the chat template of the tokenizer.")
]
_KeepSamples = Annotated[
    bool, typer.Option("--keep-samples", help="--tasks: write each question and its answers beside --output.")
]
_ComparedBase = Annotated[
    str | None, typer.Option(help="The model to compare with, also the base of --adapter; the column before.")
]
_Samples = Annotated[
    int | None, typer.Option(min=1, help="Most examples; default: evaluate.samples.", show_default=False)
]
_Markdown = Annotated[Path | None, typer.Option(help="File to write the table to.")]
_Output = Annotated[Path | None, typer.Option(help="File to write figures and answers to, as JSON.")]
_Message = Annotated[
    Path | None,
    typer.Option(help="--config: file to write the figures alone to: a pod's termination message."),
]


def evaluate(
    model: _Models = None,
    *,
    config: _EvaluatedConfig = None,
    overrides: Overrides = None,
    tasks: _Tasks = None,
    shots: _Shots = None,
    limit: _Limit = None,
    seed: _TasksSeed = None,
    include_path: _IncludePath = None,
    chat_template: _ChatTemplate = False,
    keep_samples: _KeepSamples = False,
    base: _ComparedBase = None,
    adapter: Adapter = None,
    endpoint: EndpointAddress = None,
    endpoint_model: EndpointModel = None,
    endpoint_seconds: EndpointSeconds = 300.0,
    samples: _Samples = None,
    max_new_tokens: MaxNewTokens = None,
    stop: Stop = None,
    batch_size: BatchSize = None,
    precision: PrecisionOption = ComputeType.AUTO,
    device: DeviceOption = None,
    markdown: _Markdown = None,
    output: _Output = None,
    message: _Message = None,
) -> None:
    """Measure a model on held-out examples, its base beside it; or models by the tasks of lm-eval."""
    paths = list(model or ())
    _check_origin(paths, config, tasks, keeps_samples=keep_samples, output=output)
    if tasks is not None:
        requested = _parse_tasks(
            tasks,
            shots=shots,
            limit=limit,
            batchSize=batch_size,
            seed=seed,
            includePath=include_path,
            chatTemplate=chat_template,
            keepSamples=keep_samples,
        )
        server = open_server(endpoint, endpoint_model, endpoint_seconds, *paths[1:], base, adapter)
        columns = (
            _list_models(paths, base, adapter) if server is None else [ModelLocations(model=next(iter(paths), ""))]
        )
        _evaluate_tasks(columns, requested, server, output, markdown, device=device, precision=precision)
        return
    assert config is not None
    training = load(config, overrides or ())
    server = open_server(endpoint, endpoint_model, endpoint_seconds, *paths, base, adapter)
    generation = merge_generation(training, maxNewTokens=max_new_tokens, stop=stop or None, batchSize=batch_size)
    max_samples = samples or training.evaluate.samples
    if server is not None:
        result = _evaluate_endpoint(server, training, max_samples, generation)
    else:
        models = pick_models(next(iter(paths), None), base, adapter, compared=True)
        from trainium_trainer.evaluate.compare import EvaluationSettings  # noqa: PLC0415 - torch

        settings = EvaluationSettings(generation=generation, device=device, precision=precision)
        result = _evaluate_config(models, training, max_samples, settings, output)
    typer.echo(result.to_markdown(), nl=False)
    _write((markdown, result.to_markdown()), (output, result.to_json()))
    if message is not None:
        message.write_text(result.format_message())


def _check_origin(
    paths: list[str], config: Path | None, tasks: str | None, *, keeps_samples: bool, output: Path | None
) -> None:
    """Raise UserError unless exactly one of tasks and configuration is given, with the options that go with it."""
    if tasks is not None and config is not None:
        raise UserError("--tasks asks lm-eval's questions, --config the run's: give one of them")
    if tasks is not None and keeps_samples and output is None:
        raise UserError("--keep-samples goes with --output: the samples are written beside that file")
    if tasks is None and config is None:
        raise UserError("give --config, whose data.validation and evaluate.tasks are asked, or --tasks")
    if tasks is None and len(paths) > 1:
        raise UserError(f"{paths[1]}: several models are compared by --tasks alone: give one MODEL, and --base")


def _parse_tasks(names: str, **fields: Any) -> TasksConfig:
    """Return the tasks with these comma-separated names and the options that were given. Raises UserError."""
    given = {name: value for name, value in fields.items() if value is not None}
    return validate(TasksConfig, {"names": [name.strip() for name in names.split(",") if name.strip()]} | given)


def _evaluate_tasks(
    columns: list[ModelLocations],
    tasks: TasksConfig,
    server: Endpoint | None,
    output: Path | None,
    markdown: Path | None,
    **options: Any,
) -> None:
    """Measure models by tasks, print the table and write the files; continue the figures that `output` has."""
    from trainium_trainer.evaluate.tasks import measure_tasks, read_report  # noqa: PLC0415 - torch

    def keep(run: TaskRun) -> None:
        _write((output, run.report.to_json()))

    earlier = read_report(output) if output is not None else None
    run = measure_tasks(columns, tasks, endpoint=server, earlier=earlier, keep=keep, **options)
    typer.echo(run.report.to_markdown(), nl=False)
    _write((markdown, run.report.to_markdown()), (output, run.report.to_json()))
    _write_samples(output, run)


def _evaluate_endpoint(
    server: Endpoint, training: TrainingConfig, count: int, generation: GenerationConfig
) -> EvaluationResult:
    """Return the figures of a server on held-out examples."""
    from trainium_trainer.evaluate.compare import measure_endpoint  # noqa: PLC0415 - torch

    with _show_progress() as heartbeat:
        return measure_endpoint(server, training.data, count, generation, heartbeat=heartbeat)


def _evaluate_config(
    models: ModelLocations, training: TrainingConfig, count: int, settings: EvaluationSettings, output: Path | None
) -> EvaluationResult:
    """Return the figures on held-out examples and on the tasks of a configuration."""
    from trainium_trainer.evaluate.compare import compare  # noqa: PLC0415 - torch
    from trainium_trainer.evaluate.held_out import read_held_out_examples  # noqa: PLC0415 - torch
    from trainium_trainer.evaluate.report import EvaluationResult  # noqa: PLC0415 - torch
    from trainium_trainer.evaluate.tasks import list_compared_models, measure_tasks, read_report  # noqa: PLC0415 - torch
    from trainium_trainer.peers import Peers  # noqa: PLC0415 - torch

    tasks = training.evaluate.tasks
    result = EvaluationResult(model=models.name, base=models.base, examples=0)
    if training.data.validation is not None or tasks is None:
        with _show_progress() as heartbeat:
            result = compare(
                models, read_held_out_examples(training.data, count), settings, Peers(0, 1), heartbeat=heartbeat
            )
    if tasks is None:
        return result

    def keep(run: TaskRun) -> None:
        _write((output, result.add_tasks(run.report).to_json()))

    earlier = read_report(output) if output is not None else None
    run = measure_tasks(
        list_compared_models(models),
        tasks,
        device=settings.device,
        precision=settings.precision,
        earlier=earlier,
        keep=keep,
    )
    _write_samples(output, run)
    return result.add_tasks(run.report)


def _write_samples(output: Path | None, run: TaskRun) -> None:
    if output is not None and run.samples:
        _write((output.with_suffix(".samples.jsonl"), run.samples))


def _list_models(models: list[str], base: str | None, adapter: str | None) -> list[ModelLocations]:
    """Return the models of the table, the base first."""
    first = [ModelLocations(model=base)] if base is not None else []
    if adapter is not None or not models:
        return [*first, pick_models(models[0] if models else None, base, adapter)]
    return [*first, *(ModelLocations(model=location) for location in models)]


@contextlib.contextmanager
def _show_progress() -> Iterator[Any]:
    """Yield a progress bar on stderr; without a terminal nothing is drawn."""
    from rich.console import Console  # noqa: PLC0415 - only this command draws
    from rich.progress import Progress  # noqa: PLC0415

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("asking", total=1.0)
        yield lambda done: bar.update(task, completed=done)


def _write(*files: tuple[Path | None, str]) -> None:
    """Write a file atomically. Raises StorageError."""
    from trainium_trainer.artifacts.store import create_write_error  # noqa: PLC0415 - as the next
    from trainium_trainer.storage.posix import PosixStorage  # noqa: PLC0415 - only where a file is asked for
    from trainium_trainer.storage.protocol import Retry  # noqa: PLC0415

    for file, text in files:
        if file is not None:
            storage, data = PosixStorage(file.absolute().parent), text.encode()
            Retry().run(lambda: storage.write(file.name, data), str(file), create_write_error)  # noqa: B023 - called at once

"""Generate answers with a model and evaluate it: `trainium-trainer generate` and `evaluate`.

Guarantees:
- Importing this module imports no torch.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainium_contract.accelerators import Device
from trainium_contract.trainer.evaluate import GenerationConfig, TasksConfig
from trainium_trainer.commands.options import Overrides  # noqa: TC001 - typer reads annotations
from trainium_trainer.configuration.config import load
from trainium_trainer.evaluate.answering.folder import ComputeType, ModelLocations
from trainium_trainer.exits import UserError
from trainium_trainer.validation_errors import validate

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from trainium_contract.trainer.config import TrainingConfig
    from trainium_trainer.data.examples.held_out import HeldOutExample
    from trainium_trainer.evaluate.answering.endpoint import Endpoint
    from trainium_trainer.evaluate.answering.generation import GeneratedAnswer
    from trainium_trainer.evaluate.compare import EvaluationSettings
    from trainium_trainer.evaluate.report import EvaluationResult
    from trainium_trainer.evaluate.tasks import TaskRun

_Model = Annotated[
    str | None, typer.Argument(metavar="MODEL", help="Hugging Face folder, or s3://bucket/prefix.", show_default=False)
]
_Adapter = Annotated[
    str | None, typer.Option(help="Folder of an adapter in peft's format, put beside --base without merging.")
]
_Config = Annotated[
    Path | None, typer.Option(help="A TrainingJob or the trainer's configuration: its data, template and settings.")
]
_Device = Annotated[Device | None, typer.Option(help="Omitted: a GPU if there is one, else the CPU.")]
_Type = Annotated[ComputeType, typer.Option(help="Auto: float32 on a CPU, the folder's own type on a GPU.")]
_Endpoint = Annotated[
    str | None,
    typer.Option(help="Ask a server with OpenAI's protocol: http://HOST:8000/v1; key: OPENAI_API_KEY."),
]
_EndpointModel = Annotated[str | None, typer.Option(help="Name of the model there; omitted: the only one.")]
_EndpointSeconds = Annotated[float, typer.Option(min=1, max=86_400, help="Longest time of an answer of the endpoint.")]
_MaxNewTokens = Annotated[int | None, typer.Option(help="Most tokens of an answer; 128.", show_default=False)]
_Temperature = Annotated[
    float | None, typer.Option(help="0, the default, takes the likeliest token; above, tokens are drawn.")
]
_TopP = Annotated[float | None, typer.Option(help="Draw from the likeliest tokens of this probability together.")]
_TopK = Annotated[int | None, typer.Option(help="Draw from that many likeliest tokens; 0: all.")]
_Stop = Annotated[list[str] | None, typer.Option(help="A text that ends an answer; may be repeated.")]
_Seed = Annotated[int | None, typer.Option(help="Seed of the draws.")]
_BatchSize = Annotated[int | None, typer.Option(help="Prompts that are answered at once; 8.", show_default=False)]
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
_AdapterBase = Annotated[str | None, typer.Option(help="The base model of --adapter.")]
_Prompt = Annotated[list[str] | None, typer.Option(help="A prompt; may be repeated.")]
_Prompts = Annotated[
    Path | None, typer.Option(help="File of prompts: one on each line, or .jsonl with a text or a record on each.")
]
_HeldOut = Annotated[
    int | None, typer.Option(min=1, help="Ask the first examples that data.validation of --config holds back.")
]
_AsJson = Annotated[bool, typer.Option("--json", help="One JSON object for each answer, on a line.")]


def generate(
    model: _Model = None,
    *,
    base: _AdapterBase = None,
    adapter: _Adapter = None,
    endpoint: _Endpoint = None,
    endpoint_model: _EndpointModel = None,
    endpoint_seconds: _EndpointSeconds = 300.0,
    prompt: _Prompt = None,
    prompts: _Prompts = None,
    config: _Config = None,
    overrides: Overrides = None,
    held_out: _HeldOut = None,
    max_new_tokens: _MaxNewTokens = None,
    temperature: _Temperature = None,
    top_p: _TopP = None,
    top_k: _TopK = None,
    stop: _Stop = None,
    seed: _Seed = None,
    batch_size: _BatchSize = None,
    precision: _Type = ComputeType.AUTO,
    device: _Device = None,
    as_json: _AsJson = False,
) -> None:
    """Answer prompts with a model; with --config by the template that it was trained with."""
    if sum((bool(prompt), prompts is not None, held_out is not None)) != 1:
        raise UserError("give what is to be answered: one of --prompt, --prompts and --held-out")
    if held_out is not None and config is None:
        raise UserError("--held-out needs --config: it names the data")
    server = _open_server(endpoint, endpoint_model, endpoint_seconds, model, base, adapter)
    models = _pick_models(model, base, adapter) if server is None else None
    training = load(config, overrides or ()) if config is not None else None
    settings = _merge_generation(
        training,
        maxNewTokens=max_new_tokens,
        temperature=temperature,
        topP=top_p,
        topK=top_k,
        stop=stop or None,
        seed=seed,
        batchSize=batch_size,
    )
    questions = _open_questions(training, prompt, prompts, held_out)
    if models is not None:
        from trainium_trainer.evaluate.questions import answer_questions  # noqa: PLC0415 - torch

        answers = answer_questions(models, questions, settings, device=device, precision=precision)
        for line in _format_answers(questions, answers, as_json=as_json):
            typer.echo(line)
    elif server is not None:
        _print_stream(server, questions, settings, as_json=as_json)


def _open_questions(
    training: TrainingConfig | None, texts: list[str] | None, file: Path | None, held_out: int | None
) -> list[HeldOutExample]:
    """Return the questions of the one origin that is given; those held back need a configuration. Raises UserError."""
    from trainium_trainer.evaluate.questions import (  # noqa: PLC0415 - torch
        build_questions,
        read_held_out_questions,
        read_prompts,
    )

    if held_out is not None:
        assert training is not None
        return list(read_held_out_questions(training.data, held_out).questions)
    prompts = list(texts or ()) or read_prompts(file)  # type: ignore[arg-type]  # one of them is given
    return build_questions(prompts, training.data if training is not None else None)


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
    adapter: _Adapter = None,
    endpoint: _Endpoint = None,
    endpoint_model: _EndpointModel = None,
    endpoint_seconds: _EndpointSeconds = 300.0,
    samples: _Samples = None,
    max_new_tokens: _MaxNewTokens = None,
    stop: _Stop = None,
    batch_size: _BatchSize = None,
    precision: _Type = ComputeType.AUTO,
    device: _Device = None,
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
        server = _open_server(endpoint, endpoint_model, endpoint_seconds, *paths[1:], base, adapter)
        columns = (
            _list_models(paths, base, adapter) if server is None else [ModelLocations(model=next(iter(paths), ""))]
        )
        _evaluate_tasks(columns, requested, server, output, markdown, device=device, precision=precision)
        return
    assert config is not None
    training = load(config, overrides or ())
    server = _open_server(endpoint, endpoint_model, endpoint_seconds, *paths, base, adapter)
    generation = _merge_generation(training, maxNewTokens=max_new_tokens, stop=stop or None, batchSize=batch_size)
    max_samples = samples or training.evaluate.samples
    if server is not None:
        result = _evaluate_endpoint(server, training, max_samples, generation)
    else:
        models = _pick_models(next(iter(paths), None), base, adapter, compared=True)
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
    from trainium_trainer.evaluate.questions import measure_endpoint  # noqa: PLC0415 - torch

    with _show_progress() as heartbeat:
        return measure_endpoint(server, training.data, count, generation, heartbeat=heartbeat)


def _evaluate_config(
    models: ModelLocations, training: TrainingConfig, count: int, settings: EvaluationSettings, output: Path | None
) -> EvaluationResult:
    """Return the figures on held-out examples and on the tasks of a configuration."""
    from trainium_trainer.evaluate.compare import compare  # noqa: PLC0415 - torch
    from trainium_trainer.evaluate.questions import read_held_out_questions  # noqa: PLC0415 - torch
    from trainium_trainer.evaluate.report import EvaluationResult  # noqa: PLC0415 - torch
    from trainium_trainer.evaluate.tasks import list_compared_models, measure_tasks, read_report  # noqa: PLC0415 - torch
    from trainium_trainer.peers import Peers  # noqa: PLC0415 - torch

    tasks = training.evaluate.tasks
    result = EvaluationResult(model=models.name, base=models.base, examples=0)
    if training.data.validation is not None or tasks is None:
        with _show_progress() as heartbeat:
            result = compare(
                models, read_held_out_questions(training.data, count), settings, Peers(0, 1), heartbeat=heartbeat
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


def _open_server(url: str | None, model: str | None, seconds: float, *folders: str | None) -> Endpoint | None:
    """Return the endpoint; None if folders are given. Raises UserError, also if both are given."""
    if url is None:
        return None
    if any(folders):
        raise UserError("--endpoint asks a server: leave out --base, --adapter and MODEL, which tasks alone may need")
    from trainium_trainer.evaluate.answering.endpoint import open_endpoint  # noqa: PLC0415 - torch

    return open_endpoint(url, model, seconds)


def _list_models(models: list[str], base: str | None, adapter: str | None) -> list[ModelLocations]:
    """Return the models of the table, the base first."""
    first = [ModelLocations(model=base)] if base is not None else []
    if adapter is not None or not models:
        return [*first, _pick_models(models[0] if models else None, base, adapter)]
    return [*first, *(ModelLocations(model=location) for location in models)]


def _pick_models(model: str | None, base: str | None, adapter: str | None, *, compared: bool = False) -> ModelLocations:
    """Return the model, or the adapter with its base; `compared`: the base is evaluated too."""
    if adapter is not None:
        if base is None or model is not None:
            raise UserError("--adapter goes with --base, the model it was made for, and with no other MODEL")
        return ModelLocations(model=base, adapter=adapter, base=base if compared else None)
    if model is None:
        raise UserError("give a MODEL folder, or --base and --adapter")
    if base is not None and not compared:
        raise UserError("--base goes with --adapter: leave it out, or give the adapter")
    return ModelLocations(model=model, base=base)


def _merge_generation(training: TrainingConfig | None, **options: Any) -> GenerationConfig:
    """Return the settings of the configuration, overridden by options. Raises UserError."""
    wire = training.evaluate.generation.to_wire() if training is not None else {}
    return validate(GenerationConfig, wire | {name: value for name, value in options.items() if value is not None})


def _format_answers(
    questions: Sequence[HeldOutExample], answers: Sequence[GeneratedAnswer], *, as_json: bool
) -> Iterator[str]:
    """Format answers as text, or as JSON, one object per line."""
    for number, (question, answer) in enumerate(zip(questions, answers, strict=True), start=1):
        if as_json:
            yield _format_json(question, answer)
            continue
        yield from _format_question(number, question)
        length = f"{answer.tokens} tokens, {answer.finish_reason}"
        yield f"{typer.style(f'[{number}] answer', bold=True)} ({length})\n{answer.text}"


def _print_stream(
    server: Endpoint, questions: Sequence[HeldOutExample], generation: GenerationConfig, *, as_json: bool
) -> None:
    """Print answers while the server sends them."""
    for number, question in enumerate(questions, start=1):
        if as_json:
            typer.echo(_format_json(question, server.complete(question.prompt, generation)))
            continue
        for line in _format_question(number, question):
            typer.echo(line)
        typer.echo(f"{typer.style(f'[{number}] answer', bold=True)} of {server.model}")
        answer = server.complete(question.prompt, generation, lambda part: typer.echo(part, nl=False))
        typer.echo(f"\n({answer.tokens} tokens, {answer.finish_reason})")


def _format_json(question: HeldOutExample, answer: GeneratedAnswer) -> str:
    line = {"prompt": question.prompt, "answer": answer.text, "tokens": answer.tokens, "ending": answer.finish_reason}
    return json.dumps(line | ({"expected": question.answer} if question.answer else {}), ensure_ascii=False)


def _format_question(number: int, question: HeldOutExample) -> Iterator[str]:
    rule = "" if number == 1 else "\n"
    yield f"{rule}{typer.style(f'[{number}] prompt', bold=True)}\n{question.prompt}"
    if question.answer:
        yield f"{typer.style(f'[{number}] expected', bold=True)}\n{question.answer}"


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

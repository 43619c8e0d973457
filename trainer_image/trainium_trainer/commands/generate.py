"""Answer prompts with a model: `trainium-trainer generate`.

Guarantees:
- Importing this module imports no torch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

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
from trainium_trainer.evaluate.answering.folder import ComputeType
from trainium_trainer.exits import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from trainium_contract.trainer.config import TrainingConfig
    from trainium_contract.trainer.evaluate import GenerationConfig
    from trainium_trainer.data.examples.held_out import HeldOutExample
    from trainium_trainer.evaluate.answering.endpoint import Endpoint
    from trainium_trainer.evaluate.answering.generation import GeneratedAnswer

_Model = Annotated[
    str | None, typer.Argument(metavar="MODEL", help="Hugging Face folder, or s3://bucket/prefix.", show_default=False)
]
_Config = Annotated[
    Path | None, typer.Option(help="A TrainingJob or the trainer's configuration: its data, template and settings.")
]
_Temperature = Annotated[
    float | None, typer.Option(help="0, the default, takes the likeliest token; above, tokens are drawn.")
]
_TopP = Annotated[float | None, typer.Option(help="Draw from the likeliest tokens of this probability together.")]
_TopK = Annotated[int | None, typer.Option(help="Draw from that many likeliest tokens; 0: all.")]
_Seed = Annotated[int | None, typer.Option(help="Seed of the draws.")]
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
    adapter: Adapter = None,
    endpoint: EndpointAddress = None,
    endpoint_model: EndpointModel = None,
    endpoint_seconds: EndpointSeconds = 300.0,
    prompt: _Prompt = None,
    prompts: _Prompts = None,
    config: _Config = None,
    overrides: Overrides = None,
    held_out: _HeldOut = None,
    max_new_tokens: MaxNewTokens = None,
    temperature: _Temperature = None,
    top_p: _TopP = None,
    top_k: _TopK = None,
    stop: Stop = None,
    seed: _Seed = None,
    batch_size: BatchSize = None,
    precision: PrecisionOption = ComputeType.AUTO,
    device: DeviceOption = None,
    as_json: _AsJson = False,
) -> None:
    """Answer prompts with a model; with --config by the template that it was trained with."""
    if sum((bool(prompt), prompts is not None, held_out is not None)) != 1:
        raise UserError("give what is to be answered: one of --prompt, --prompts and --held-out")
    if held_out is not None and config is None:
        raise UserError("--held-out needs --config: it names the data")
    server = open_server(endpoint, endpoint_model, endpoint_seconds, model, base, adapter)
    models = pick_models(model, base, adapter) if server is None else None
    training = load(config, overrides or ()) if config is not None else None
    settings = merge_generation(
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
        from trainium_trainer.evaluate.prompts import answer_prompts  # noqa: PLC0415 - torch

        answers = answer_prompts(models, questions, settings, device=device, precision=precision)
        for line in _format_answers(questions, answers, as_json=as_json):
            typer.echo(line)
    elif server is not None:
        _print_stream(server, questions, settings, as_json=as_json)


def _open_questions(
    training: TrainingConfig | None, texts: list[str] | None, file: Path | None, held_out: int | None
) -> list[HeldOutExample]:
    """Return the questions of the one origin that is given; those held back need a configuration. Raises UserError."""
    from trainium_trainer.evaluate.held_out import read_held_out_examples  # noqa: PLC0415 - torch
    from trainium_trainer.evaluate.prompts import encode_prompts, read_prompts  # noqa: PLC0415

    if held_out is not None:
        assert training is not None
        return list(read_held_out_examples(training.data, held_out).examples)
    prompts = list(texts or ()) or read_prompts(file)  # type: ignore[arg-type]  # one of them is given
    return encode_prompts(prompts, training.data if training is not None else None)


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

"""Questions from a run's data: its held-back examples, and prompts by its template.

Guarantees:
- Token ids equal those of the same record in training.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from trainium_contract.trainer.examples import DataFormat
from trainium_trainer.data.dataset import encode_text_prompts, open_data
from trainium_trainer.data.examples.held_out import HeldOutExample, build_prompts, read_held_out
from trainium_trainer.evaluate.answering.folder import ComputeType, ModelLocations, open_models
from trainium_trainer.evaluate.answering.generation import GeneratedAnswer, check_prompts, generate
from trainium_trainer.evaluate.answering.loading import load
from trainium_trainer.evaluate.report import EvaluationResult, build_figures, select_answers
from trainium_trainer.evaluate.scoring import QuestionSet, score_answer
from trainium_trainer.exits import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from trainium_contract.accelerators import Device
    from trainium_contract.trainer.data import DataConfig
    from trainium_contract.trainer.evaluate import GenerationConfig
    from trainium_trainer.evaluate.answering.endpoint import Endpoint


def read_held_out_questions(config: DataConfig, samples: int) -> QuestionSet:
    """Return at most `samples` of the examples that `data.validation` holds back, always the same ones.

    Samples of running text have `sequenceLength` tokens and no answer. Raises UserError, also if there are none, and
    StorageError.
    """
    if config.validation is None:
        raise UserError("data.validation is not given, so no examples are held back: give it a fraction or a source")
    if config.format is DataFormat.TEXT:
        return _read_running_text(config, samples)
    split = read_held_out(config, samples)
    if not split.examples:
        raise UserError(
            "data.validation: of the examples that are held back none has an answer within data.sequenceLength: raise "
            "that, or data.validation.fraction"
        )
    return QuestionSet(
        questions=split.examples, labels=split.labels, label_ids=split.label_ids, end_tokens=(split.end,)
    )


def encode_training_prompts(config: DataConfig, prompts: Sequence[PromptInput]) -> list[HeldOutExample]:
    """Build prompts by the training's template, with their token ids in training. Raises UserError."""
    if config.format is DataFormat.TEXT:
        texts = [read_plain_text(prompt) for prompt in prompts]
        encoded = list(zip(texts, encode_text_prompts(config, texts), strict=True))
    else:
        encoded = build_prompts(config, prompts)
    return [HeldOutExample(prompt=text, prompt_ids=ids) for text, ids in encoded]


def _read_running_text(config: DataConfig, samples: int) -> QuestionSet:
    assert config.validation is not None
    validation = config.validation.model_copy(update={"samples": samples})
    data = open_data(config.model_copy(update={"validation": validation}), 1)
    assert data.validation is not None
    rules = data.validation.rules
    rows = [sample.list_rows(rules)[0] for sample in data.validation.read_rank_samples(0, 1) if sample is not None]
    texts = [[*row.inputs.tolist(), int(row.targets[-1])] for row in rows]
    pieces = [
        piece for text in texts for piece in _divide_into_documents(text, rules.end_of_document) if len(piece) > 1
    ]
    if not pieces:
        raise UserError("data.validation: holds back no text: raise data.validation.fraction")
    return QuestionSet(
        questions=tuple(
            HeldOutExample(prompt="", prompt_ids=tuple(piece[:1]), answer_ids=tuple(piece[1:])) for piece in pieces
        ),
        has_answers=False,
    )


def _divide_into_documents(tokens: list[int], end: int | None) -> Iterator[list[int]]:
    """Yield the parts of a sample whose tokens attend to each other."""
    start = 0
    for position, token in enumerate(tokens, start=1):
        if token == end:
            yield tokens[start:position]
            start = position
    yield tokens[start:]


PromptInput = str | dict[str, Any]
"""A text, or a record from which a template builds a text."""
_PROMPT = "prompt"


def read_prompts(file: Path) -> list[PromptInput]:
    """Read the prompts of a file: lines of .jsonl are texts or records, other lines are plain prompts.

    Raises UserError, also if there are none.
    """
    try:
        text = file.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UserError(f"--prompts {file}: cannot be read ({error.strerror}): give an existing file") from error
    except UnicodeDecodeError as error:
        raise UserError(f"--prompts {file}: is not UTF-8 text: write one prompt on each line") from error
    plain = (line for line in text.splitlines() if line.strip())
    prompts: list[PromptInput] = list(_read_records(file, text) if file.suffix == ".jsonl" else plain)
    if not prompts:
        raise UserError(f"--prompts {file}: holds no prompt: write one on each line")
    return prompts


def read_plain_text(prompt: PromptInput) -> str:
    """Return the prompt of a record without a configured format. Raises UserError."""
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt.get(_PROMPT), str):
        return str(prompt[_PROMPT])
    fields = ", ".join(map(repr, prompt)) or "none"
    raise UserError(
        f"a record of --prompts has no text {_PROMPT!r} (its fields: {fields}): give --config, so that the template of "
        "the training makes the prompt"
    )


def _read_records(file: Path, text: str) -> Iterator[PromptInput]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise UserError(f"--prompts {file} line {number}: not valid JSON ({error}): correct the line") from error
        if not isinstance(record, (str, dict)):
            raise UserError(
                f"--prompts {file} line {number}: is neither a text nor an object: write a text in quotes or an "
                "object with the fields of a record"
            )
        yield record


def build_questions(prompts: Sequence[PromptInput], data: DataConfig | None) -> list[HeldOutExample]:
    """Build questions from a user's prompts; without data the tokenizer encodes them later. Raises UserError."""
    if data is not None:
        return encode_training_prompts(data, prompts)
    return [HeldOutExample(prompt=read_plain_text(prompt), prompt_ids=()) for prompt in prompts]


def answer_questions(
    models: ModelLocations,
    questions: Sequence[HeldOutExample],
    generation: GenerationConfig,
    *,
    device: Device | None,
    precision: ComputeType,
) -> list[GeneratedAnswer]:
    """Return answers in the order of the questions. Raises UserError and StorageError."""
    with open_models(models) as model_files:
        prompts = [list(question.prompt_ids) or model_files.encode(question.prompt) for question in questions]
        check_prompts(model_files, prompts)  # checked before the model is loaded, which takes minutes
        model = load(model_files, device=device, precision=precision)
        return generate(model, prompts, generation)


def measure_endpoint(
    endpoint: Endpoint,
    data: DataConfig,
    samples: int,
    generation: GenerationConfig,
    *,
    heartbeat: Callable[[float], None],
) -> EvaluationResult:
    """Return the figures of a served model on held-out examples, from its answers only. Raises UserError."""
    question_set = read_held_out_questions(data, samples)
    if not question_set.has_answers:
        raise UserError("data.format is Text, which has no answers: measure the folder itself")
    with ThreadPoolExecutor(generation.batch_size) as pool:
        answered = pool.map(lambda question: endpoint.complete(question.prompt, generation), question_set.questions)
        scores = []
        for number, answer in enumerate(answered):
            scores.append(score_answer(question_set, number, answer.text))
            heartbeat(len(scores) / len(question_set.questions))
    return EvaluationResult(
        model=endpoint.model,
        examples=len(scores),
        computed=f"answered by {endpoint.url}",
        generation=generation,
        figures=build_figures([], scores),
        notes=("A server gives answers alone: no perplexity.",),
        answers=select_answers(question_set, [], scores),
    )

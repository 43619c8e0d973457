"""Questions out of a run's data: the examples that it holds back, and prompts by its template.

Invariant: token ids are those that the same record has in training.
"""

from __future__ import annotations

import contextlib
import json
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from trainium_contract.trainer.examples import DataFormat
from trainium_trainer.data.examples.held_out import build_prompts, read_held_out
from trainium_trainer.data.opening import open_data, text_prompt_ids
from trainium_trainer.evaluate.answering.folder import ComputeDevice, ComputeType, Models, local_folder, open_candidate
from trainium_trainer.evaluate.answering.generation import GeneratedAnswer, check_prompts, generate
from trainium_trainer.evaluate.answering.loading import load
from trainium_trainer.evaluate.compare import Asking, compare
from trainium_trainer.evaluate.exam import Exam, Question, score_answer
from trainium_trainer.evaluate.report import EvaluationResult, answers_of, table
from trainium_trainer.exits import UserError
from trainium_trainer.peers import Peers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from trainium_contract.trainer.data import DataConfig
    from trainium_contract.trainer.evaluate import GenerationConfig
    from trainium_trainer.evaluate.answering.endpoint import Endpoint


def exam_of(config: DataConfig, samples: int) -> Exam:
    """At most `samples` of the examples that `data.validation` holds back, always the same ones.

    Of running text they are samples of `sequenceLength` tokens, and nothing is to be answered. Raises UserError, also
    when there are none, and StorageError.
    """
    if config.validation is None:
        raise UserError("data.validation is not given, so no examples are held back: give it a fraction or a source")
    if config.format is DataFormat.TEXT:
        return _running_text(config, samples)
    held = read_held_out(config, samples)
    if not held.examples:
        raise UserError(
            "data.validation: of the examples that are held back none has an answer within data.sequenceLength: raise "
            "that, or data.validation.fraction"
        )
    return Exam(
        questions=tuple(
            Question(
                prompt=each.prompt_text,
                prompt_ids=each.prompt_ids,
                answer=each.answer_text,
                answer_ids=each.answer_ids,
                label=None if each.label is None else held.labels.index(each.label),
            )
            for each in held.examples
        ),
        labels=held.labels,
        label_ids=held.label_ids,
        ends=(held.end,),
    )


def asked_as_in_training(config: DataConfig, asked: Sequence[Asked]) -> list[Question]:
    """Prompts made by the template of the training, with the token ids that they have there. Raises UserError."""
    if config.format is DataFormat.TEXT:
        texts = [plain_text(each) for each in asked]
        made = list(zip(texts, text_prompt_ids(config, texts), strict=True))
    else:
        made = build_prompts(config, asked)
    return [Question(prompt=text, prompt_ids=ids, answer="", answer_ids=()) for text, ids in made]


def _running_text(config: DataConfig, samples: int) -> Exam:
    assert config.validation is not None
    held = config.validation.model_copy(update={"samples": samples})
    data = open_data(config.model_copy(update={"validation": held}), 1)
    assert data.validation is not None
    rules = data.validation.rules
    rows = [sample.rows(rules)[0] for sample in data.validation.share(0, 1) if sample is not None]
    texts = [[*row.inputs.tolist(), int(row.targets[-1])] for row in rows]
    pieces = [piece for text in texts for piece in _documents(text, rules.end_of_document) if len(piece) > 1]
    if not pieces:
        raise UserError("data.validation: holds back no text: raise data.validation.fraction")
    return Exam(
        questions=tuple(
            Question(prompt="", prompt_ids=tuple(piece[:1]), answer="", answer_ids=tuple(piece[1:])) for piece in pieces
        ),
        generates=False,
    )


def _documents(tokens: list[int], end: int | None) -> Iterator[list[int]]:
    """Yield the parts of a sample whose tokens see each other."""
    start = 0
    for place, token in enumerate(tokens, start=1):
        if token == end:
            yield tokens[start:place]
            start = place
    yield tokens[start:]


Asked = str | dict[str, Any]
"""A text, or a record of which a template makes one."""
_PROMPT = "prompt"


def read_prompts(file: Path) -> list[Asked]:
    """Return the prompts of a file: the lines of .jsonl are texts or records, of any other file plain prompts.

    Raises UserError, also when there is none.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"--prompts {file}: cannot be read ({error.strerror}): give an existing file") from error
    except UnicodeDecodeError as error:
        raise UserError(f"--prompts {file}: is not UTF-8 text: write one prompt on each line") from error
    plain = (line for line in text.splitlines() if line.strip())
    prompts: list[Asked] = list(_records(file, text) if file.suffix == ".jsonl" else plain)
    if not prompts:
        raise UserError(f"--prompts {file}: holds no prompt: write one on each line")
    return prompts


def plain_text(asked: Asked) -> str:
    """Return the prompt of a record without a configured format. Raises UserError."""
    if isinstance(asked, str):
        return asked
    if isinstance(asked.get(_PROMPT), str):
        return str(asked[_PROMPT])
    fields = ", ".join(map(repr, asked)) or "none"
    raise UserError(
        f"a record of --prompts has no text {_PROMPT!r} (its fields: {fields}): give --config, so that the template of "
        "the training makes the prompt"
    )


def _records(file: Path, text: str) -> Iterator[Asked]:
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


def questions_of(asked: Sequence[Asked], data: DataConfig | None) -> list[Question]:
    """Prompts of a user's; without data their ids are still to be made, by the model's tokenizer. Raises UserError."""
    if data is not None:
        return asked_as_in_training(data, asked)
    return [Question(prompt=plain_text(each), prompt_ids=(), answer="", answer_ids=()) for each in asked]


def answer(
    models: Models,
    questions: Sequence[Question],
    generation: GenerationConfig,
    *,
    device: ComputeDevice,
    precision: ComputeType,
) -> list[GeneratedAnswer]:
    """Answers, in the order of the questions. Raises UserError and StorageError."""
    with contextlib.ExitStack() as stack:
        path = stack.enter_context(local_folder(models.model))
        adapter = stack.enter_context(local_folder(models.adapter)) if models.adapter is not None else None
        candidate = open_candidate(path, adapter)
        prompts = [list(each.prompt_ids) or candidate.encode(each.prompt) for each in questions]
        check_prompts(candidate, prompts)  # before minutes of loading
        model = load(candidate, device=device, precision=precision)
        return generate(model, prompts, generation)


def measure(
    models: Models,
    data: DataConfig,
    samples: int,
    generation: GenerationConfig,
    *,
    device: ComputeDevice,
    precision: ComputeType,
    beat: Callable[[float], None],
) -> EvaluationResult:
    """Return the figures of a model on held-out examples. Raises UserError and StorageError."""
    exam = exam_of(data, samples)
    asking = Asking(generation=generation, device=device, precision=precision)
    return compare(models, exam, asking, Peers(0, 1), beat=beat)


def measure_endpoint(
    endpoint: Endpoint,
    data: DataConfig,
    samples: int,
    generation: GenerationConfig,
    *,
    beat: Callable[[float], None],
) -> EvaluationResult:
    """Return the figures of a served model on held-out examples, from its answers alone. Raises UserError."""
    exam = exam_of(data, samples)
    if not exam.generates:
        raise UserError("data.format is Text, which has no answers: measure the folder itself")
    with ThreadPoolExecutor(generation.batch_size) as pool:
        answered = pool.map(lambda question: endpoint.complete(question.prompt, generation), exam.questions)
        scores = []
        for number, answer in enumerate(answered):
            scores.append(score_answer(exam, number, answer.text))
            beat(len(scores) / len(exam.questions))
    return EvaluationResult(
        model=endpoint.model,
        examples=len(scores),
        computed=f"answered by {endpoint.url}",
        generation=generation,
        figures=table([], scores),
        notes=("A server gives answers alone: no perplexity.",),
        answers=answers_of(exam, [], scores),
    )

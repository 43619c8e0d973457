"""What the commands do: from options that were checked to answers and figures."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from trainium_trainer.artifacts.writer import Alone
from trainium_trainer.evaluate.answering.folder import open_candidate
from trainium_trainer.evaluate.answering.generation import check_prompts, generate
from trainium_trainer.evaluate.answering.loading import ComputeDevice, ComputeType, load
from trainium_trainer.evaluate.answering.places import local_folder
from trainium_trainer.evaluate.compare import Asking, compare
from trainium_trainer.evaluate.exam import Question
from trainium_trainer.evaluate.prompts import Asked, plain_text
from trainium_trainer.evaluate.questions import asked_as_in_training, exam_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trainium_contract.trainer.data import DataConfig
    from trainium_contract.trainer.evaluate import GenerationConfig
    from trainium_trainer.evaluate.answering.folder import Models
    from trainium_trainer.evaluate.answering.generation import GeneratedAnswer
    from trainium_trainer.evaluate.report import EvaluationResult


def questions_of(asked: Sequence[Asked], data: DataConfig | None) -> list[Question]:
    """Prompts of a user's; without data their ids are still to be made, by the model's tokenizer. Raises UserError."""
    if data is not None:
        return asked_as_in_training(data, asked)
    return [Question(prompt=plain_text(each), prompt_ids=(), answer="", answer_ids=()) for each in asked]


def held_out_questions(data: DataConfig, count: int) -> list[Question]:
    """The first held-out examples. Raises UserError."""
    return list(exam_of(data, count).questions)


def answer(
    models: Models, questions: Sequence[Question], generation: GenerationConfig, *, device: str, precision: str
) -> list[GeneratedAnswer]:
    """Answers, in the order of the questions. Raises UserError and StorageError."""
    with contextlib.ExitStack() as stack:
        path = stack.enter_context(local_folder(models.model))
        adapter = stack.enter_context(local_folder(models.adapter)) if models.adapter is not None else None
        candidate = open_candidate(path, adapter)
        prompts = [list(each.prompt_ids) or candidate.encode(each.prompt) for each in questions]
        check_prompts(candidate, prompts)  # before minutes of loading
        model = load(candidate, device=ComputeDevice(device), precision=ComputeType(precision))
        return generate(model, prompts, generation)


def measure(
    models: Models,
    data: DataConfig,
    samples: int,
    generation: GenerationConfig,
    *,
    device: str,
    precision: str,
    beat: Callable[[float], None],
) -> EvaluationResult:
    """The figures of a model on held-out examples. Raises UserError and StorageError."""
    exam = exam_of(data, samples)
    asking = Asking(generation=generation, device=ComputeDevice(device), precision=ComputeType(precision))
    return compare(models, exam, asking, Alone(), beat=beat)

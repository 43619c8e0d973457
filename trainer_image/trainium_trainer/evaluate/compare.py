"""Ask two models the same questions, one after the other, in one process or in several that share the batches."""

from __future__ import annotations

import contextlib
import gc
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainium_trainer.evaluate.answering.folder import (
    ComputeType,
    ModelFiles,
    ModelLocations,
    open_local_folder,
    open_model_files,
    open_models,
)
from trainium_trainer.evaluate.answering.generation import select_batches
from trainium_trainer.evaluate.answering.loading import load
from trainium_trainer.evaluate.report import EvaluationResult, build_figures, select_answers
from trainium_trainer.evaluate.scoring import QuestionScore, QuestionSet, score_model
from trainium_trainer.exits import UserError

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainium_contract.accelerators import Device
    from trainium_contract.trainer.evaluate import GenerationConfig
    from trainium_trainer.peers import Peers


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSettings:
    """The settings of an evaluation."""

    generation: GenerationConfig
    device: Device | None = None
    precision: ComputeType = ComputeType.AUTO
    loads_model: bool = True
    """Whether this process loads models and evaluates a part of the batches; at least one rank must."""


def compare(
    models: ModelLocations,
    question_set: QuestionSet,
    settings: EvaluationSettings,
    peers: Peers,
    *,
    heartbeat: Callable[[float], None] = lambda _: None,
) -> EvaluationResult:
    """Return the figures of a model and of its base on every rank. Collective.

    `heartbeat` is called often with the completed fraction. Raises UserError and StorageError.
    """
    parts = 1 if models.base is None else 2
    notes: list[str] = []
    before: list[QuestionScore] = []
    base = models.base
    with contextlib.ExitStack() as stack:
        model_files = stack.enter_context(open_models(models, lambda: heartbeat(0.0)))
        if question_set.largest_token >= model_files.vocabulary:
            raise UserError(
                f"{models.name}: the examples have the token {question_set.largest_token}, but the model has "
                f"{model_files.vocabulary} rows: data.tokenizer is not that of the model"
            )
        after, computed = _score_questions(
            model_files, question_set, settings, peers, heartbeat=lambda done: heartbeat(done / parts)
        )
        if not all(math.isfinite(outcome.log_likelihood) for outcome in after):
            notes.append("The model gives values that are not finite: do not use it.")
        if base is not None:
            folder = stack.enter_context(open_local_folder(base, lambda: heartbeat(1 / parts)))
            other = open_model_files(folder, tokenizer_from=model_files.adapter or model_files.path)
            if question_set.largest_token >= other.vocabulary:
                notes.append("The base does not know tokens that were added, so it was not asked.")
                base = None
            else:
                before, _ = _score_questions(
                    other, question_set, settings, peers, heartbeat=lambda done: heartbeat((1 + done) / parts)
                )
                if before == after:
                    notes.append("Both models answer exactly alike: the tuning left no trace in the result.")
    return EvaluationResult(
        model=models.name,
        base=base,
        examples=len(question_set.questions),
        answer_tokens=sum(outcome.tokens for outcome in after),
        computed=computed,
        generation=settings.generation,
        figures=build_figures(before, after),
        notes=tuple(notes),
        answers=select_answers(question_set, before, after),
    )


def _score_questions(
    model_files: ModelFiles,
    question_set: QuestionSet,
    settings: EvaluationSettings,
    peers: Peers,
    *,
    heartbeat: Callable[[float], None],
) -> tuple[list[QuestionScore], str]:
    """Return a model's scores of all questions, in order, and how it computed them, on every rank. Collective.

    The outcomes are bitwise equal for any number of ranks of one kind that share the batches.
    """
    readers = [rank for rank, loads_model in enumerate(peers.gather(settings.loads_model)) if loads_model]
    scores: list[QuestionScore] = []
    computed = ""
    if peers.rank in readers:
        mine = select_batches(
            question_set.group_into_batches(settings.generation.batch_size), readers.index(peers.rank), len(readers)
        )
        heartbeat(0.0)
        model = load(model_files, device=settings.device, precision=settings.precision)
        computed = f"computed in {str(model.network.dtype).removeprefix('torch.')} on {model.device.type}"
        scores = score_model(model, question_set, mine, settings.generation, heartbeat=heartbeat)
        del model
        gc.collect()  # the next model may not fit into memory as well
    gathered = peers.gather((scores, computed))
    outcomes = sorted((score for part, _ in gathered for score in part), key=lambda outcome: outcome.number)
    return outcomes, gathered[readers[0]][1]

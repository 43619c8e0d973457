"""Two models put to the same questions, one after the other, by one process or by several that share the batches."""

from __future__ import annotations

import contextlib
import gc
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainium_trainer.evaluate.answering.folder import (
    Candidate,
    ComputeDevice,
    ComputeType,
    Models,
    local_folder,
    open_candidate,
)
from trainium_trainer.evaluate.answering.generation import share
from trainium_trainer.evaluate.answering.loading import load
from trainium_trainer.evaluate.exam import Exam, QuestionScore, take
from trainium_trainer.evaluate.report import EvaluationResult, answers_of, table
from trainium_trainer.exits import UserError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from trainium_contract.trainer.evaluate import GenerationConfig
    from trainium_trainer.peers import Peers


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """The settings for asking a model."""

    generation: GenerationConfig
    device: ComputeDevice = ComputeDevice.AUTO
    precision: ComputeType = ComputeType.AUTO
    reads: bool = True
    """Whether this process loads models and takes a share of the batches; at least one rank must."""


def compare(
    models: Models,
    exam: Exam,
    asking: Asking,
    peers: Peers,
    *,
    beat: Callable[[float], None] = lambda _: None,
) -> EvaluationResult:
    """Return the figures of a model, and of its base beside it; every rank gets them. Collective.

    `beat` is called often with the share that is done. Raises UserError and StorageError.
    """
    parts = 1 if models.base is None else 2
    notes: list[str] = []
    before: list[QuestionScore] = []
    base = models.base
    with contextlib.ExitStack() as stack:

        def local(location: str, done: float) -> Path:
            return stack.enter_context(local_folder(location, lambda: beat(done)))

        path = local(models.model, 0.0)
        beside = local(models.adapter, 0.0) if models.adapter is not None else None
        candidate = open_candidate(path, beside)
        if exam.largest_token >= candidate.vocabulary:
            raise UserError(
                f"{models.name}: the examples have the token {exam.largest_token}, but the model has "
                f"{candidate.vocabulary} rows: data.tokenizer is not that of the model"
            )
        after, computed = _outcomes(candidate, exam, asking, peers, beat=lambda done: beat(done / parts))
        if not all(math.isfinite(outcome.log_likelihood) for outcome in after):
            notes.append("The model gives values that are not finite: do not use it.")
        if base is not None:
            other = open_candidate(local(base, 1 / parts), tokenizer_from=beside or path)
            if exam.largest_token >= other.vocabulary:
                notes.append("The base does not know tokens that were added, so it was not asked.")
                base = None
            else:
                before, _ = _outcomes(other, exam, asking, peers, beat=lambda done: beat((1 + done) / parts))
                if before == after:
                    notes.append("Both models answer exactly alike: the tuning left no trace in the result.")
    return EvaluationResult(
        model=models.name,
        base=base,
        examples=len(exam.questions),
        answer_tokens=sum(outcome.tokens for outcome in after),
        computed=computed,
        generation=asking.generation,
        figures=table(before, after),
        notes=tuple(notes),
        answers=answers_of(exam, before, after),
    )


def _outcomes(
    candidate: Candidate,
    exam: Exam,
    asking: Asking,
    peers: Peers,
    *,
    beat: Callable[[float], None],
) -> tuple[list[QuestionScore], str]:
    """Return a model's scores for all questions, in order, and how it computed them. Collective.

    Every rank gets the whole. The outcomes are the same, bit for bit, however many ranks of one kind share the batches.
    """
    readers = [rank for rank, reads in enumerate(peers.gather(asking.reads)) if reads]
    own: list[QuestionScore] = []
    computed = ""
    if peers.rank in readers:
        mine = share(exam.batches(asking.generation.batch_size), readers.index(peers.rank), len(readers))
        beat(0.0)
        model = load(candidate, device=asking.device, precision=asking.precision)
        computed = f"computed in {str(model.network.dtype).removeprefix('torch.')} on {model.device.type}"
        own = take(model, exam, mine, asking.generation, beat=beat)
        del model
        gc.collect()  # the next one may not fit beside it
    gathered = peers.gather((own, computed))
    outcomes = sorted((each for part, _ in gathered for each in part), key=lambda outcome: outcome.number)
    return outcomes, gathered[readers[0]][1]

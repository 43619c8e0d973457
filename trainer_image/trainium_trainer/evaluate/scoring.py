"""Questions with known answers, and the scores of a model.

Guarantees:
- The outcomes of a batch of questions depend only on that batch, so the figures do not depend on the number of readers.
- Questions in two batches are asked equally.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from trainium_trainer.evaluate import metrics
from trainium_trainer.evaluate.answering.generation import (
    GeneratedAnswer,
    compute_likelihoods,
    draw_seeds,
    generate,
    group_by_length,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trainium_contract.trainer.evaluate import GenerationConfig
    from trainium_trainer.data.examples.held_out import HeldOutExample
    from trainium_trainer.evaluate.answering.loading import LoadedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionSet:
    """Questions in a fixed order."""

    questions: tuple[HeldOutExample, ...]
    labels: tuple[str, ...] = ()
    label_ids: tuple[tuple[int, ...], ...] = ()
    """The token ids of each label as an answer."""
    end_tokens: tuple[int, ...] = ()
    """The tokens that end an answer in training, besides those of a model's folder."""
    has_answers: bool = True
    """Whether answers are generated; not for running text, which has none."""

    @property
    def largest_token(self) -> int:
        """The largest id in any prompt or answer."""
        return max(max(question.prompt_ids + question.answer_ids) for question in self.questions)

    def group_into_batches(self, size: int) -> list[list[int]]:
        """Return the indices of the questions in batches of `size`."""
        return group_by_length([len(question.prompt_ids) for question in self.questions], size)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionScore:
    """The score of a model for one question."""

    number: int
    log_likelihood: float
    """The natural logarithm of the expected answer's likelihood."""
    tokens: int
    """The number of tokens of the expected answer."""
    answer: str | None = None
    """The answer of the model."""
    exact_match: bool | None = None
    rouge_l: float | None = None
    label_is_likeliest: bool | None = None
    """Whether the correct label was the most likely one."""
    label_is_generated: bool | None = None
    """Whether the answer begins with the correct label."""


def score_model(
    model: LoadedModel,
    question_set: QuestionSet,
    mine: Sequence[list[int]],
    generation: GenerationConfig,
    *,
    heartbeat: Callable[[float], None] = lambda _: None,
) -> list[QuestionScore]:
    """Ask a model the questions of some batches; `heartbeat` is called often with the completed fraction.

    Raises UserError.
    """
    seeds = draw_seeds([question.prompt_ids for question in question_set.questions], generation.seed)
    outcomes: list[QuestionScore] = []
    for done, batch in enumerate(mine):
        report = partial(heartbeat, done / len(mine))
        outcomes += _score_batch(model, question_set, batch, [seeds[number] for number in batch], generation, report)
    return outcomes


def _score_batch(
    model: LoadedModel,
    question_set: QuestionSet,
    batch: list[int],
    seeds: list[int],
    generation: GenerationConfig,
    heartbeat: Callable[[], None],
) -> list[QuestionScore]:
    questions = [question_set.questions[number] for number in batch]
    truth = compute_likelihoods(
        model,
        [(question.prompt_ids, question.answer_ids) for question in questions],
        batch_size=len(batch),
        heartbeat=heartbeat,
    )
    answers: list[GeneratedAnswer | None] = [None] * len(batch)
    if question_set.has_answers:
        prompts = [question.prompt_ids for question in questions]
        answers = list(
            generate(model, prompts, generation, seeds=seeds, ends=question_set.end_tokens, heartbeat=heartbeat)
        )
    choices = _choose_labels(model, question_set, questions, heartbeat) if question_set.labels else [None] * len(batch)
    return [
        score_answer(
            question_set,
            number,
            answer.text if answer is not None else None,
            log_likelihood=known.log_likelihood,
            tokens=known.tokens,
            label_is_likeliest=None if choice is None else choice == question_set.questions[number].label,
        )
        for number, known, answer, choice in zip(batch, truth, answers, choices, strict=True)
    ]


def score_answer(
    question_set: QuestionSet,
    number: int,
    text: str | None,
    *,
    log_likelihood: float = 0.0,
    tokens: int = 0,
    label_is_likeliest: bool | None = None,
) -> QuestionScore:
    """Compare an answer with the expected one."""
    question = question_set.questions[number]
    return QuestionScore(
        number=number,
        log_likelihood=log_likelihood,
        tokens=tokens,
        answer=text,
        exact_match=None if text is None else metrics.is_exact_match(text, question.answer),
        rouge_l=None if text is None or question_set.labels else metrics.compute_rouge_l(text, question.answer),
        label_is_likeliest=label_is_likeliest,
        label_is_generated=None
        if text is None or not question_set.labels
        else metrics.label_in(text, question_set.labels) == question.label,
    )


def _choose_labels(
    model: LoadedModel, question_set: QuestionSet, questions: Sequence[HeldOutExample], heartbeat: Callable[[], None]
) -> list[int]:
    """Return the most likely label of each question."""
    pairs = [(question.prompt_ids, ids) for question in questions for ids in question_set.label_ids]
    results = compute_likelihoods(model, pairs, batch_size=len(questions), heartbeat=heartbeat)
    count = len(question_set.labels)
    return [
        metrics.find_likeliest(
            [likelihood.log_likelihood for likelihood in results[index * count : (index + 1) * count]]
        )
        for index in range(len(questions))
    ]


def compute_figures(outcomes: Sequence[QuestionScore]) -> dict[str, tuple[float, float | None]]:
    """Return the available figures by name with their standard errors, independent of the order of outcomes."""
    tokens = sum(outcome.tokens for outcome in outcomes)
    total = math.fsum(outcome.log_likelihood for outcome in outcomes)
    scores: dict[str, list[float | None]] = {
        "accuracy": [outcome.label_is_likeliest for outcome in outcomes],
        "generatedAccuracy": [outcome.label_is_generated for outcome in outcomes],
        "exactMatch": [outcome.exact_match for outcome in outcomes],
        "rougeL": [outcome.rouge_l for outcome in outcomes],
    }
    rows = {
        name: (metrics.compute_mean(values), metrics.compute_standard_error(values)) for name, values in scores.items()
    }
    rows = {"perplexity": (metrics.compute_perplexity(total, tokens) if tokens else None, None), **rows}
    return {name: (value, error) for name, (value, error) in rows.items() if value is not None}

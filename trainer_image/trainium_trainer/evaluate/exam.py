"""An examination: questions with known answers, and what one model makes of them.

Invariants: what comes out of a batch of questions depends on that batch alone, so the figures are the same however many
readers share the batches; questions that are put in two batches are asked alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainium_trainer.evaluate import metrics
from trainium_trainer.evaluate.answering.generation import GeneratedAnswer, batches, draw_seeds, generate, likelihoods

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trainium_contract.trainer.evaluate import GenerationConfig
    from trainium_trainer.evaluate.answering.loading import LoadedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A prompt and what should follow it."""

    prompt: str
    prompt_ids: tuple[int, ...]
    answer: str
    answer_ids: tuple[int, ...]
    """With the token that ends it, where it is trained."""
    label: int | None = None
    """Place of the right one among the labels; None where there are none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exam:
    """Questions, in an order that never changes."""

    questions: tuple[Question, ...]
    labels: tuple[str, ...] = ()
    label_ids: tuple[tuple[int, ...], ...] = ()
    """Token ids of each label as an answer."""
    ends: tuple[int, ...] = ()
    """Tokens that end an answer in training, beside those that a model's folder names."""
    generates: bool = True
    """Whether answers are to be generated: not for running text, which has none."""

    @property
    def largest_token(self) -> int:
        """The largest id in any prompt or answer."""
        return max(max(each.prompt_ids + each.answer_ids) for each in self.questions)

    def batches(self, size: int) -> list[list[int]]:
        """Numbers of the questions in batches of `size`."""
        return batches([len(question.prompt_ids) for question in self.questions], size)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionScore:
    """The score of a model for one question."""

    number: int
    log_likelihood: float
    """Natural logarithm of the true answer's likelihood."""
    tokens: int
    """Tokens of the true answer."""
    answer: str | None = None
    """Answer of the model."""
    exact: bool | None = None
    rouge: float | None = None
    chosen: bool | None = None
    """Whether the right label was the likeliest of all."""
    named: bool | None = None
    """Whether the answer begins with the right label."""


def take(
    model: LoadedModel,
    exam: Exam,
    mine: Sequence[list[int]],
    generation: GenerationConfig,
    *,
    beat: Callable[[float], None] = lambda _: None,
) -> list[QuestionScore]:
    """Ask a model the questions of some batches; `beat` is called often with the share done. Raises UserError."""
    seeds = draw_seeds([question.prompt_ids for question in exam.questions], generation.seed)
    outcomes: list[QuestionScore] = []
    for done, batch in enumerate(mine):

        def alive(done: int = done) -> None:
            beat(done / len(mine))

        outcomes += _batch(model, exam, batch, [seeds[number] for number in batch], generation, alive)
    return outcomes


def _batch(
    model: LoadedModel,
    exam: Exam,
    batch: list[int],
    seeds: list[int],
    generation: GenerationConfig,
    alive: Callable[[], None],
) -> list[QuestionScore]:
    questions = [exam.questions[number] for number in batch]
    truth = likelihoods(
        model, [(each.prompt_ids, each.answer_ids) for each in questions], batch_size=len(batch), beat=alive
    )
    answers: list[GeneratedAnswer | None] = [None] * len(batch)
    if exam.generates:
        prompts = [question.prompt_ids for question in questions]
        answers = list(generate(model, prompts, generation, seeds=seeds, ends=exam.ends, beat=alive))
    chosen = _choices(model, exam, questions, alive) if exam.labels else [None] * len(batch)
    return [
        score_answer(
            exam,
            number,
            answer.text if answer is not None else None,
            log_likelihood=known.log,
            tokens=known.tokens,
            chosen=None if choice is None else choice == exam.questions[number].label,
        )
        for number, known, answer, choice in zip(batch, truth, answers, chosen, strict=True)
    ]


def score_answer(
    exam: Exam,
    number: int,
    text: str | None,
    *,
    log_likelihood: float = 0.0,
    tokens: int = 0,
    chosen: bool | None = None,
) -> QuestionScore:
    """Compare an answer with the expected one."""
    question = exam.questions[number]
    return QuestionScore(
        number=number,
        log_likelihood=log_likelihood,
        tokens=tokens,
        answer=text,
        exact=None if text is None else metrics.exact_match(text, question.answer),
        rouge=None if text is None or exam.labels else metrics.rouge_l(text, question.answer),
        chosen=chosen,
        named=None if text is None or not exam.labels else metrics.label_in(text, exam.labels) == question.label,
    )


def _choices(model: LoadedModel, exam: Exam, questions: Sequence[Question], alive: Callable[[], None]) -> list[int]:
    """Return the likeliest label of each question."""
    pairs = [(question.prompt_ids, ids) for question in questions for ids in exam.label_ids]
    found = likelihoods(model, pairs, batch_size=len(questions), beat=alive)
    count = len(exam.labels)
    return [
        metrics.likeliest([each.log for each in found[place * count : (place + 1) * count]])
        for place in range(len(questions))
    ]


def figures(outcomes: Sequence[QuestionScore]) -> dict[str, tuple[float, float | None]]:
    """Return the figures by name with their standard errors, over outcomes in any order, as far as there are any."""
    tokens = sum(outcome.tokens for outcome in outcomes)
    total = math.fsum(outcome.log_likelihood for outcome in outcomes)
    scores: dict[str, list[float | None]] = {
        "accuracy": [outcome.chosen for outcome in outcomes],
        "generatedAccuracy": [outcome.named for outcome in outcomes],
        "exactMatch": [outcome.exact for outcome in outcomes],
        "rougeL": [outcome.rouge for outcome in outcomes],
    }
    found = {name: (metrics.mean(values), metrics.standard_error(values)) for name, values in scores.items()}
    found = {"perplexity": (metrics.perplexity(total, tokens) if tokens else None, None), **found}
    return {name: (value, error) for name, (value, error) in found.items() if value is not None}

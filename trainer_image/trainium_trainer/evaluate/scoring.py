"""The scores of a model on held-out examples.

Guarantees:
- The scores of a batch of examples depend only on that batch, so the figures do not depend on the number of readers.
- An example gets the same score in any batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from trainium_trainer.evaluate import metrics
from trainium_trainer.evaluate.answering.generation import draw_seeds, generate
from trainium_trainer.evaluate.answering.likelihood import compute_likelihoods

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trainium_contract.trainer.evaluate import GenerationConfig
    from trainium_trainer.data.examples.held_out import HeldOutExample, HeldOutExamples
    from trainium_trainer.evaluate.answering.generation import GeneratedAnswer
    from trainium_trainer.evaluate.answering.loading import LoadedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleScore:
    """The score of a model on one example."""

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
    held_out: HeldOutExamples,
    batches: Sequence[list[int]],
    generation: GenerationConfig,
    *,
    heartbeat: Callable[[float], None] = lambda _: None,
) -> list[ExampleScore]:
    """Score a model on the examples of some batches of indices. Raises UserError.

    `heartbeat` is called often with the completed fraction.
    """
    seeds = draw_seeds([example.prompt_ids for example in held_out.examples], generation.seed)
    scores: list[ExampleScore] = []
    for done, batch in enumerate(batches):
        report = partial(heartbeat, done / len(batches))
        examples = [held_out.examples[number] for number in batch]
        pairs = [(example.prompt_ids, example.answer_ids) for example in examples]
        likelihoods = compute_likelihoods(model, pairs, batch_size=len(batch), heartbeat=report)
        answers: list[GeneratedAnswer] | list[None] = [None] * len(batch)
        if held_out.has_answers:
            answers = generate(
                model,
                [example.prompt_ids for example in examples],
                generation,
                seeds=[seeds[number] for number in batch],
                ends=held_out.end_tokens,
                heartbeat=report,
            )
        labels = _choose_labels(model, held_out, examples, report) if held_out.labels else [None] * len(batch)
        scores += [
            score_answer(
                held_out,
                number,
                None if answer is None else answer.text,
                log_likelihood=likelihood.log_likelihood,
                tokens=likelihood.tokens,
                label_is_likeliest=None if label is None else label == held_out.examples[number].label,
            )
            for number, likelihood, answer, label in zip(batch, likelihoods, answers, labels, strict=True)
        ]
    return scores


def score_answer(
    held_out: HeldOutExamples,
    number: int,
    text: str | None,
    *,
    log_likelihood: float = 0.0,
    tokens: int = 0,
    label_is_likeliest: bool | None = None,
) -> ExampleScore:
    """Compare an answer with the expected one."""
    example = held_out.examples[number]
    return ExampleScore(
        number=number,
        log_likelihood=log_likelihood,
        tokens=tokens,
        answer=text,
        exact_match=None if text is None else metrics.is_exact_match(text, example.answer),
        rouge_l=None if text is None or held_out.labels else metrics.compute_rouge_l(text, example.answer),
        label_is_likeliest=label_is_likeliest,
        label_is_generated=None
        if text is None or not held_out.labels
        else metrics.label_in(text, held_out.labels) == example.label,
    )


def _choose_labels(
    model: LoadedModel, held_out: HeldOutExamples, examples: Sequence[HeldOutExample], heartbeat: Callable[[], None]
) -> list[int]:
    """Return the most likely label of each example."""
    pairs = [(example.prompt_ids, ids) for example in examples for ids in held_out.label_ids]
    results = compute_likelihoods(model, pairs, batch_size=len(examples), heartbeat=heartbeat)
    count = len(held_out.labels)
    return [
        metrics.find_likeliest(
            [likelihood.log_likelihood for likelihood in results[index * count : (index + 1) * count]]
        )
        for index in range(len(examples))
    ]


def compute_figures(scores: Sequence[ExampleScore]) -> dict[str, tuple[float, float | None]]:
    """Return the available figures by name with their standard errors, independent of the order of scores."""
    tokens = sum(score.tokens for score in scores)
    total = math.fsum(score.log_likelihood for score in scores)
    values_by_name: dict[str, list[float | None]] = {
        "accuracy": [score.label_is_likeliest for score in scores],
        "generatedAccuracy": [score.label_is_generated for score in scores],
        "exactMatch": [score.exact_match for score in scores],
        "rougeL": [score.rouge_l for score in scores],
    }
    rows = {
        name: (metrics.compute_mean(values), metrics.compute_standard_error(values))
        for name, values in values_by_name.items()
    }
    rows = {"perplexity": (metrics.compute_perplexity(total, tokens) if tokens else None, None), **rows}
    return {name: (value, error) for name, (value, error) in rows.items() if value is not None}

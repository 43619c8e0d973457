"""Metrics of answers, as pure functions of texts and numbers."""

from __future__ import annotations

import math
import re
import statistics
from typing import TYPE_CHECKING

from rouge_score import rouge_scorer  # type: ignore[import-untyped]

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_ROUGE = "rougeL"
_scorer = rouge_scorer.RougeScorer([_ROUGE])


def is_exact_match(answer: str, reference: str) -> bool:
    """Return whether the texts are equal, ignoring surrounding whitespace."""
    return answer.strip() == reference.strip()


def compute_rouge_l(answer: str, reference: str) -> float | None:
    """Return the F-measure of the longest common subsequence of words, 0 to 1, by `rouge_score`.

    The library considers only the letters a to z and digits; None for a reference without any.
    """
    if not any(character.isascii() and character.isalnum() for character in reference.lower()):
        return None
    return float(_scorer.score(reference, answer)[_ROUGE].fmeasure)


def compute_perplexity(log_likelihood: float, tokens: int) -> float:
    """Return the perplexity of a summed natural log-likelihood of `tokens` tokens; infinite on overflow."""
    try:
        return math.exp(-log_likelihood / tokens)
    except OverflowError:
        return math.inf


def find_likeliest(log_likelihoods: Sequence[float]) -> int:
    """Return the index of the largest value, the first of equal ones."""
    return max(range(len(log_likelihoods)), key=lambda index: (log_likelihoods[index], -index))


def label_in(answer: str, labels: Sequence[str]) -> int | None:
    """Return the index of the longest label with which an answer begins, as whole words; None if none."""
    text = answer.strip()
    matching = [index for index, label in enumerate(labels) if re.match(rf"{re.escape(label.strip())}(?!\w)", text)]
    return max(matching, key=lambda index: (len(labels[index]), -index), default=None)


def compute_mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values that are not None, in any order; None without values."""
    numbers = [value for value in values if value is not None]
    return math.fsum(numbers) / len(numbers) if numbers else None


def compute_standard_error(values: Iterable[float | None]) -> float | None:
    """Return the standard error of that mean; None for fewer than two values."""
    numbers = [value for value in values if value is not None]
    return statistics.stdev(numbers) / math.sqrt(len(numbers)) if len(numbers) > 1 else None

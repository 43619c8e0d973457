"""Figures of answers. Pure functions of texts and numbers."""

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


def exact_match(answer: str, reference: str) -> bool:
    """Return whether the texts are equal, apart from white space around them."""
    return answer.strip() == reference.strip()


def rouge_l(answer: str, reference: str) -> float | None:
    """F-measure of the longest common subsequence of words, 0 to 1, by `rouge_score`.

    The library counts words with the letters a to z and digits; None for a reference without any.
    """
    if not any(character.isascii() and character.isalnum() for character in reference.lower()):
        return None
    return float(_scorer.score(reference, answer)[_ROUGE].fmeasure)


def perplexity(log_likelihood: float, tokens: int) -> float:
    """From the summed natural log-likelihood of `tokens` tokens; infinite where a float cannot hold it."""
    try:
        return math.exp(-log_likelihood / tokens)
    except OverflowError:
        return math.inf


def likeliest(log_likelihoods: Sequence[float]) -> int:
    """Place of the largest; the first of equal ones."""
    return max(range(len(log_likelihoods)), key=lambda place: (log_likelihoods[place], -place))


def label_in(answer: str, labels: Sequence[str]) -> int | None:
    """Place of the label that an answer begins with, as whole words; the longest if several do, None if none does."""
    text = answer.strip()
    found = [place for place, label in enumerate(labels) if re.match(rf"{re.escape(label.strip())}(?!\w)", text)]
    return max(found, key=lambda place: (len(labels[place]), -place), default=None)


def mean(values: Iterable[float | None]) -> float | None:
    """Mean of those that are there; None when none is. The same whatever their order was."""
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


def standard_error(values: Iterable[float | None]) -> float | None:
    """Return the standard error of that mean; None for fewer than two values."""
    known = [value for value in values if value is not None]
    return statistics.stdev(known) / math.sqrt(len(known)) if len(known) > 1 else None

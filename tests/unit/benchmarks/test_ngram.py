"""Kneser-Ney n-grams against values that were worked out by hand."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from benchmarks.learn.ngram import KneserNey

A, B, C, D = range(4)
TEXT = np.array([A, B, A, B, A, C, A, B, C])
"""Bigrams: AB 3, BA 2, AC 1, CA 1, BC 1. One is seen twice, three once: D2 = 3 / 5.

Before A: B, C; before B: A; before C: A, B. Together 5 continuations; counts 2, 1, 2: D1 = 1 / (1 + 4) = 1 / 5.
"""


def unigram(count: int) -> float:
    """Three different tokens continue; the rest is spread over a vocabulary of 4."""
    return (max(count - 0.2, 0) + 0.2 * 3 / 4) / 5


def test_bigrams_have_the_probabilities_that_were_worked_out_by_hand() -> None:
    model = KneserNey(TEXT, order=2, vocabulary=4)
    # After A: B 3, C 1, 4 in all, 2 different. After B: A 2, C 1, 3 in all, 2 different. After C: A 1.
    expected = {
        (A, B): (3 - 0.6 + 0.6 * 2 * unigram(1)) / 4,
        (A, C): (1 - 0.6 + 0.6 * 2 * unigram(2)) / 4,
        (A, A): (0.6 * 2 * unigram(2)) / 4,
        (A, D): (0.6 * 2 * unigram(0)) / 4,
        (B, A): (2 - 0.6 + 0.6 * 2 * unigram(2)) / 3,
        (C, A): (1 - 0.6 + 0.6 * 1 * unigram(2)) / 1,
        (D, A): unigram(2),
    }
    for pair, probability in expected.items():
        assert model.probabilities(np.array(pair)) == pytest.approx([probability])
    assert expected[A, B] == pytest.approx(0.6 + 0.3 * 0.19)


def test_the_loss_is_the_mean_over_all_tokens_but_the_first() -> None:
    model = KneserNey(TEXT, order=2, vocabulary=4)
    first, second = (float(model.probabilities(np.array(pair))[0]) for pair in ((A, B), (B, A)))
    assert model.loss(np.array([A, B, A])) == pytest.approx(-(math.log(first) + math.log(second)) / 2)


def test_trigrams_back_off_to_continuation_counts() -> None:
    model = KneserNey(TEXT, order=3, vocabulary=4)
    # Trigrams: ABA 2, BAB 1, BAC 1, ACA 1, CAB 1, ABC 1: D3 = 5 / 7. Bigrams by different tokens before them: AB 2
    # (B, C), BA 1, AC 1, CA 1, BC 1: D2 = 4 / (4 + 2) = 2 / 3. Unigrams by different bigrams' first tokens as before.
    below = (2 - 2 / 3 + 2 / 3 * 2 * unigram(1)) / 3
    assert model.probabilities(np.array([B, A, B]))[1] == pytest.approx((1 - 5 / 7 + 5 / 7 * 2 * below) / 2)
    assert model.probabilities(np.array([B, A, B]))[0] == pytest.approx(model.probabilities(np.array([B, A]))[0])


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_probabilities_of_all_tokens_sum_to_one_after_any_history(order: int) -> None:
    model = KneserNey(TEXT, order=order, vocabulary=4)
    for history in itertools.product(range(4), repeat=3):
        total = sum(model.probabilities(np.array([*history, token]))[-1] for token in range(4))
        assert total == pytest.approx(1.0)


def test_orders_that_do_not_fit_a_number_are_refused() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        KneserNey(TEXT, order=6, vocabulary=4096)

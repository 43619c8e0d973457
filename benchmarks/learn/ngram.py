"""Implement interpolated Kneser-Ney n-gram models over token ids, as a baseline for a language model.

Kneser and Ney 1995, in the interpolated form of Chen and Goodman 1998 with one discount per order, n1 / (n1 + 2 n2):

    p_k(w | h) = max(c_k(h w) - D_k, 0) / c_k(h .) + D_k N(h .) / c_k(h .) p_(k-1)(w | h without its oldest token)

c_n are counts in the text; c_k below the highest order counts the different tokens that are seen before a k-gram;
N(h .) is how many different tokens are seen after h; below the unigrams all tokens are equally likely. A history that
was never seen leaves the lower order alone. Probabilities of all tokens after any history sum to 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Order:
    """Counts of an order; k-grams and histories are sorted numbers in base `vocabulary`."""

    grams: Ids
    counts: Ids
    histories: Ids
    totals: Ids
    followers: Ids
    discount: float


class KneserNey:
    """An n-gram model; `order` token ids together must fit in 63 bits."""

    def __init__(self, tokens: Ids, *, order: int, vocabulary: int) -> None:
        """Count the n-grams of a text, [tokens] ids below `vocabulary`."""
        if vocabulary**order > 2**63:
            msg = f"{order}-grams of {vocabulary} tokens do not fit 63 bits"
            raise ValueError(msg)
        self.order = order
        self._vocabulary = vocabulary
        self._orders: list[_Order] = []
        grams, counts = np.unique(_windows(tokens.astype(np.int64), order, vocabulary), return_counts=True)
        for size in range(order, 0, -1):
            self._orders.append(_order(grams, counts, vocabulary))
            # The different tokens before: each different k-gram counts once for its last k - 1 tokens.
            grams, counts = np.unique(grams % vocabulary ** (size - 1), return_counts=True)

    def probabilities(self, tokens: Ids) -> NDArray[np.float64]:
        """Return the probability of each token but the first, given up to `order` - 1 tokens before it."""
        tokens = tokens.astype(np.int64)
        probability = np.full(len(tokens) - 1, 1.0 / self._vocabulary)
        for size, order in zip(range(1, self.order + 1), reversed(self._orders), strict=True):
            first = max(0, size - 2)  # tokens near the beginning have a shorter history
            grams = _windows(tokens, size, self._vocabulary)[1 if size == 1 else 0 :]
            count = _look_up(grams, order.grams, order.counts)
            total = _look_up(grams // self._vocabulary, order.histories, order.totals)
            followers = _look_up(grams // self._vocabulary, order.histories, order.followers)
            seen = total > 0
            below = probability[first:]
            own = np.maximum(count[seen] - order.discount, 0.0)
            below[seen] = (own + order.discount * followers[seen] * below[seen]) / total[seen]
        return probability

    def loss(self, tokens: Ids) -> float:
        """Return the mean negative logarithm of these probabilities, nats per token."""
        return float(-np.log(self.probabilities(tokens)).mean())


def _windows(tokens: Ids, size: int, vocabulary: int) -> Ids:
    """Return all n-grams of `size` tokens as numbers in base `vocabulary`, the oldest token first."""
    count = len(tokens) - size + 1
    grams = np.zeros(max(count, 0), np.int64)
    for place in range(size):
        grams = grams * vocabulary + tokens[place : place + count]
    return grams


def _order(grams: Ids, counts: Ids, vocabulary: int) -> _Order:
    histories, starts, followers = np.unique(grams // vocabulary, return_index=True, return_counts=True)
    once, twice = int((counts == 1).sum()), int((counts == 2).sum())
    return _Order(
        grams,
        counts,
        histories,
        np.add.reduceat(counts, starts),
        followers,
        once / (once + 2 * twice) if once else 0.0,
    )


def _look_up(keys: Ids, known: Ids, values: Ids) -> Ids:
    """Return the value of each key, 0 for an unknown one."""
    places = np.minimum(np.searchsorted(known, keys), len(known) - 1)
    return np.where(known[places] == keys, values[places], 0)

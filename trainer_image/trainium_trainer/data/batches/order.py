"""Compute the shuffle of an epoch and the source of each sample, as pure functions.

Guarantees:
- There is no state: everything can be recomputed from seed and position.
- The results do not depend on the random numbers of a library, so they are the same with every version.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import itertools
from typing import TYPE_CHECKING

import numpy as np

from trainium_worker.data import Permutation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

WINDOW = 10_000
"""The number of samples over which the shares of a mixture are exact."""


def find_shuffled_item(number: int, size: int, seed: int) -> int:
    """Return item `number` of an endless stream of epochs, each of which contains each of `size` items once."""
    epoch, index = divmod(number, size)
    return _draw_permutation(size, seed, epoch)[index]


class EpochOrder:
    """Epochs over several sources: each epoch has every item once, in a new order, and ends with a full batch."""

    def __init__(self, sizes: Sequence[int], batch: int, seed: int) -> None:
        """Create the order; `sizes` are the items of each source, `batch` the items of a step."""
        self._ends = list(itertools.accumulate(sizes))
        self._seed = seed
        self.positions = -(-self._ends[-1] // batch) * batch
        """Positions of one epoch."""

    def __getitem__(self, position: int) -> tuple[int, int] | None:
        """Return source and item at a position; None where the last batch of an epoch is padded."""
        epoch, index = divmod(position, self.positions)
        if index >= self._ends[-1]:
            return None
        item = _draw_permutation(self._ends[-1], self._seed, epoch)[index]
        source = bisect.bisect_right(self._ends, item)
        return source, item - (self._ends[source - 1] if source else 0)


@functools.lru_cache(maxsize=64)
def _draw_permutation(size: int, seed: int, epoch: int) -> Permutation:
    return Permutation(size, seed, epoch)


class Mixture:
    """Assigns each number of a stream to one of several sources.

    Every window of 10,000 numbers has each source exactly as often as its weight demands (rounded once, by largest
    remainders). Within a window a source occurs at even distances, so that any range is near its share.
    """

    def __init__(self, weights: Sequence[float], seed: int, phase: Sequence[float] = ()) -> None:
        """Create the mixture; `phase` shifts each source within a window, in [0, 1)."""
        total = sum(weights)
        exact = [weight / total * WINDOW for weight in weights]
        self.quotas = [max(1, int(share)) for share in exact]
        by_remainder = sorted(range(len(weights)), key=lambda number: (int(exact[number]) - exact[number], number))
        # Weights too small for one sample in a window get one, which the largest quotas lose.
        while (missing := WINDOW - sum(self.quotas)) != 0:
            for number in by_remainder if missing > 0 else [int(np.argmax(self.quotas))]:
                self.quotas[number] += 1 if missing > 0 else -1
                if sum(self.quotas) == WINDOW:
                    break
        self._seed = seed
        self._phase = phase or [0.0] * len(weights)
        self._window = functools.lru_cache(maxsize=2)(self._build_window)

    def __getitem__(self, number: int) -> tuple[int, int]:
        """Return the source of a number, and the count of earlier numbers from that source."""
        if len(self.quotas) == 1:
            return 0, number
        window, offset = divmod(number, WINDOW)
        sources, earlier = self._window(window)
        source = int(sources[offset])
        return source, window * self.quotas[source] + int(earlier[offset])

    def count_before(self, number: int, source: int) -> int:
        """Return the count of earlier numbers from a source."""
        if len(self.quotas) == 1:
            return number
        window, offset = divmod(number, WINDOW)
        within = int((self._window(window)[0][:offset] == source).sum()) if offset else 0
        return window * self.quotas[source] + within

    def _build_window(self, window: int) -> tuple[NDArray[np.int16], NDArray[np.int16]]:
        times, sources = [], []
        for source, quota in enumerate(self.quotas):
            key = f"mixture:{self._seed}:{window}:{source}".encode()
            random = int.from_bytes(hashlib.blake2b(key, digest_size=6).digest(), "little") / 2.0**48
            times.append((np.arange(quota) + (random + self._phase[source]) % 1.0) / quota)
            sources.append(np.full(quota, source, np.int16))
        order = np.argsort(np.concatenate(times), kind="stable")
        mixed = np.concatenate(sources)[order]
        earlier = np.empty(WINDOW, np.int16)
        for source, quota in enumerate(self.quotas):
            earlier[mixed == source] = np.arange(quota)
        return mixed, earlier

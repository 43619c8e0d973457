"""Samples by global position: which tokens a step sees does not depend on how many ranks share it.

Invariants: sample number g (0, 1, 2, ...) is from the source that the mixture says; of that source it is number n, and
that is `shuffled(n)`: each epoch of a source has each of its samples once, in a fresh order; the position (the count of
samples consumed) is the whole state, so a run may stop and go on at any size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from trainium_trainer.data.order import Mixture, shuffled
from trainium_trainer.exits import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray


class Run(Protocol):
    """A long run of tokens that is read in stretches."""

    @property
    def tokens(self) -> int:
        """How many there are."""
        ...

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """Tokens start .. stop - 1."""
        ...


@dataclass(frozen=True, slots=True)
class Part:
    """One source of the samples."""

    name: str
    run: Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How tokens become samples."""

    sequence_length: int
    vocabulary: int
    end_of_document: int | None = None
    """The token at which documents are divided by a mask; None when they are not."""

    def checked(self, tokens: NDArray[Any], name: str) -> NDArray[Any]:
        """The tokens, all of which are of the vocabulary. Raises UserError."""
        largest = int(tokens.max())
        if largest >= self.vocabulary:
            raise UserError(
                f"data.source {name}: holds token id {largest}, but the vocabulary has {self.vocabulary} entries: "
                "copy the data again, or prepare them with the right tokenizer"
            )
        return tokens


@dataclass(frozen=True, slots=True)
class Sample:
    """One row of a batch."""

    number: int
    """Names its tokens: equal when they are."""
    tokens: NDArray[Any]
    """At most sequence length + 1 of them; the last one is only predicted."""


class Samples:
    """All samples, by position."""

    def __init__(self, parts: Sequence[Part], mixture: Mixture, *, seed: int, rules: Rules) -> None:
        self.rules = rules
        self.parts = list(parts)
        self._mixture = mixture
        self._seed = seed
        self.sizes = [-(-(part.run.tokens - 1) // rules.sequence_length) for part in parts]
        """Samples of one epoch of each source; the last one may be shorter than the others."""
        self._firsts = [sum(self.sizes[:number]) for number in range(len(parts))]

    @property
    def num_samples(self) -> int:
        """Different samples of all sources together."""
        return sum(self.sizes)

    def numbers(self, position: int, count: int) -> list[int]:
        """What names the samples position .. position + count - 1."""
        return [self._firsts[source] + index for source, index in map(self._place, range(position, position + count))]

    def at(self, position: int, count: int) -> list[Sample]:
        """The samples position .. position + count - 1. Raises UserError."""
        return [self.sample(*self._place(place)) for place in range(position, position + count)]

    def in_order(self) -> Iterator[tuple[int, int]]:
        """Source and number of unshuffled samples, each once, as the mixture has them, until the first source ends."""
        position = 0
        while True:
            source, index = self._mixture[position]
            if index >= self.sizes[source]:
                return
            yield source, index
            position += 1

    def sample(self, source: int, index: int) -> Sample:
        """Sample number `index` of a source, before any shuffle."""
        part, length = self.parts[source], self.rules.sequence_length
        start = index * length
        tokens = part.run.read(start, min(start + length + 1, part.run.tokens))
        return Sample(self._firsts[source] + index, self.rules.checked(tokens, part.name))

    def _place(self, position: int) -> tuple[int, int]:
        source, number = self._mixture[position]
        return source, shuffled(number, self.sizes[source], self._seed)


class ValidationSet:
    """The few samples that a measurement of the loss is made on, always the same."""

    def __init__(self, samples: Samples, most: int) -> None:
        self._samples = samples
        self._chosen = [place for _, place in zip(range(most), samples.in_order(), strict=False)]
        self.rules = samples.rules

    @property
    def num_samples(self) -> int:
        """Samples of one measurement."""
        return len(self._chosen)

    def share(self, dp_rank: int, dp_size: int) -> list[Sample | None]:
        """One rank's samples; None where another rank has one more, so that all do the same number of passes."""
        count = -(-len(self._chosen) // dp_size)
        mine = self._chosen[dp_rank * count : (dp_rank + 1) * count]
        return [self._samples.sample(*place) for place in mine] + [None] * (count - len(mine))


def positions_of(inputs: NDArray[Any], end: int) -> NDArray[np.int64]:
    """Position of each token within its document, for the tokens of one sample: 0 after each `end`."""
    places = np.arange(len(inputs))
    starts = np.zeros(len(inputs), np.int64)
    first = np.flatnonzero(inputs[:-1] == end) + 1
    starts[first] = first
    return places - np.maximum.accumulate(starts)

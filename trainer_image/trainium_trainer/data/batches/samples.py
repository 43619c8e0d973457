"""Address samples by global position: the tokens of a step do not depend on the number of ranks.

Guarantees:
- Sample number g (0, 1, 2, ...) is from the source that the mixture chooses.
- Of that source it is number n, and that is `shuffled(n)`: each epoch of a source has each of its samples once, in a
  new order.
- Where epochs are counted, they are those of all sources together, each filled up to a full batch.
- The position (the count of samples consumed) is the whole state, so a run may stop and continue at any size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from trainium_trainer.data.batches.order import EpochOrder, Mixture, shuffled
from trainium_trainer.exits import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray


class TokenRun(Protocol):
    """A long run of tokens that is read in stretches."""

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        ...

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """Tokens start .. stop - 1."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRules:
    """Rules by which tokens become samples."""

    sequence_length: int
    vocabulary: int
    end_of_document: int | None = None
    """The token at which documents are divided by a mask; None when they are not."""
    packed: bool = False
    """Whether samples hold several examples, which are divided by a mask."""
    rows: int = 1
    """Rows of a batch that a sample fills: two for a pair of answers."""
    padding: int = 0
    """The token that fills up what is too short."""

    @property
    def masked(self) -> bool:
        """Whether samples have positions at which something begins that attends to nothing before it."""
        return self.packed or self.end_of_document is not None

    def checked(self, tokens: NDArray[Any], name: str) -> NDArray[Any]:
        """Return the tokens, all of which are of the vocabulary. Raises UserError."""
        largest = int(tokens.max())
        if largest >= self.vocabulary:
            raise UserError(
                f"data.source {name}: holds token id {largest}, but the vocabulary has {self.vocabulary} entries: "
                "copy the data again, or prepare them with the right tokenizer"
            )
        return tokens


@dataclass(frozen=True, slots=True)
class Row:
    """The part of a batch that a sample fills: at most a sequence of each."""

    inputs: NDArray[Any]
    targets: NDArray[Any]
    """The token that follows each input."""
    learned: NDArray[np.bool_]
    """Whether it is to be predicted."""
    positions: NDArray[np.int64] | None
    """The place of each input in its document or example; None where samples are one stretch."""
    answer: int = 0
    """First position of a pair's row whose target is of the answer."""
    reference: float = 0.0
    """Log-probability of a pair's answer by the reference model."""


class Sample(Protocol):
    """One row of a batch, or the two of a pair."""

    @property
    def number(self) -> int:
        """Names its tokens: equal when they are."""
        ...

    def rows(self, rules: SampleRules) -> tuple[Row, ...]:
        """Return the rows that it adds to a batch."""
        ...


@dataclass(frozen=True, slots=True)
class TextSample:
    """A stretch of text."""

    number: int
    tokens: NDArray[Any]
    """At most sequence length + 1 of them; the last one is only predicted."""

    def rows(self, rules: SampleRules) -> tuple[Row, ...]:
        """See `Sample.rows`."""
        inputs, end = self.tokens[:-1], rules.end_of_document
        if end is None:
            return (Row(inputs, self.tokens[1:], np.ones(len(inputs), np.bool_), None),)
        # Nothing foretells how the next document begins.
        return (Row(inputs, self.tokens[1:], inputs != end, positions_of(inputs, end)),)


class SamplePart(Protocol):
    """One source of the samples."""

    @property
    def name(self) -> str:
        """The source, for sentences."""
        ...

    def size(self, rules: SampleRules) -> int:
        """Return samples of one epoch."""
        ...

    def sample(self, rules: SampleRules, number: int, index: int) -> Sample:
        """Sample number `index` of the source, before any shuffle, called `number`. Raises UserError."""
        ...


@dataclass(frozen=True, slots=True)
class TextPart:
    """A text."""

    name: str
    run: TokenRun

    def size(self, rules: SampleRules) -> int:
        """Return samples of one epoch; the last one may be shorter than the others."""
        return -(-(self.run.tokens - 1) // rules.sequence_length)

    def sample(self, rules: SampleRules, number: int, index: int) -> TextSample:
        """See `SamplePart.sample`."""
        start = index * rules.sequence_length
        tokens = self.run.read(start, min(start + rules.sequence_length + 1, self.run.tokens))
        return TextSample(number, rules.checked(tokens, self.name))


class Samples:
    """All samples, by position."""

    def __init__(
        self,
        parts: Sequence[SamplePart],
        mixture: Mixture,
        *,
        seed: int,
        rules: SampleRules,
        epoch_batch: int | None = None,
    ) -> None:
        """`epoch_batch` is the global batch where epochs are counted; weights of the mixture then have no effect."""
        self.rules = rules
        self.parts: list[Any] = list(parts)
        self._mixture = mixture
        self._seed = seed
        self.sizes = [part.size(rules) for part in parts]
        """Samples of one epoch of each source."""
        self._firsts = [sum(self.sizes[:number]) for number in range(len(parts))]
        self._epochs = EpochOrder(self.sizes, epoch_batch, seed) if epoch_batch is not None else None

    @property
    def num_samples(self) -> int:
        """Different samples of all sources together."""
        return sum(self.sizes)

    def numbers(self, position: int, count: int) -> list[int]:
        """Return the numbers of samples position .. position + count - 1, without those that only fill up an epoch."""
        places = filter(None, map(self._place, range(position, position + count)))
        return [self._firsts[source] + index for source, index in places]

    @property
    def epoch_samples(self) -> int | None:
        """Positions of one epoch, a multiple of the global batch; None where epochs are not counted."""
        return self._epochs.positions if self._epochs is not None else None

    def at(self, position: int, count: int) -> list[Sample | None]:
        """Return samples position .. position + count - 1; None fills up an epoch's last batch. Raises UserError."""
        places = map(self._place, range(position, position + count))
        return [self.sample(*place) if place is not None else None for place in places]

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
        sample: Sample = self.parts[source].sample(self.rules, self._firsts[source] + index, index)
        return sample

    def _place(self, position: int) -> tuple[int, int] | None:
        if self._epochs is not None:
            return self._epochs[position]
        source, number = self._mixture[position]
        return source, shuffled(number, self.sizes[source], self._seed)


class ValidationSet:
    """The few samples that a measurement of the loss is made on, always the same."""

    def __init__(self, samples: Samples, most: int) -> None:
        self._samples = samples
        self._chosen = [place for _, place in zip(range(most), samples.in_order(), strict=False)]
        self.rules = samples.rules
        self.parts = samples.parts

    @property
    def num_samples(self) -> int:
        """Samples of one measurement."""
        return len(self._chosen)

    def share(self, dp_rank: int, dp_size: int) -> list[Sample | None]:
        """One rank's samples; None where another rank has one more, so that all do the same number of passes."""
        count = -(-len(self._chosen) // dp_size)
        mine = self._chosen[dp_rank * count : (dp_rank + 1) * count]
        return [self._samples.sample(*place) for place in mine] + [None] * (count - len(mine))


def refuse_weights(weights: Sequence[float]) -> None:
    """Refuse weights of sources where epochs are counted. Raises UserError."""
    if len(set(weights)) > 1:
        raise UserError(
            f"data.sources: has the weights {', '.join(f'{weight:g}' for weight in weights)}, but with epochs each "
            "sample is seen once in each: leave out the weights, or set steps in place of epochs"
        )


def positions_of(inputs: NDArray[Any], end: int) -> NDArray[np.int64]:
    """Position of each token within its document, for the tokens of one sample: 0 after each `end`."""
    places = np.arange(len(inputs))
    starts = np.zeros(len(inputs), np.int64)
    first = np.flatnonzero(inputs[:-1] == end) + 1
    starts[first] = first
    return places - np.maximum.accumulate(starts)

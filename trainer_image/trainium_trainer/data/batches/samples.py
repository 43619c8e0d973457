"""Address samples by global position: the tokens of a step do not depend on the number of ranks.

Guarantees:
- The mixture chooses the source of sample number g (0, 1, 2, ...).
- Within its source it has number n, which selects `find_shuffled_item(n)`: each epoch of a source has each of its
  samples once, in a new order.
- Where epochs are counted, an epoch covers all sources together and is padded to a full batch.
- The position (the count of samples consumed) is the whole state, so a run may stop and continue at any size.
- The shares of the ranks in a step are contiguous, differ by at most one sample and together form the step's batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from trainium_contract.sizes import count_micro_batches
from trainium_trainer.data.batches.order import EpochOrder, Mixture, find_shuffled_item
from trainium_trainer.exits import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray


class TokenSequence(Protocol):
    """A long sequence of tokens that is read in ranges."""

    @property
    def tokens(self) -> int:
        """The number of tokens."""
        ...

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """Return tokens start .. stop - 1."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRules:
    """The rules by which tokens become samples."""

    sequence_length: int
    vocabulary: int
    end_of_document: int | None = None
    """The token after which a mask separates documents; None without such a mask."""
    packed: bool = False
    """Whether samples hold several examples, separated by a mask."""
    rows: int = 1
    """The rows of a batch per sample: two for a pair of answers."""
    padding: int = 0
    """The padding token."""

    @property
    def masked(self) -> bool:
        """Whether a mask separates documents or examples within samples."""
        return self.packed or self.end_of_document is not None

    def check_tokens(self, tokens: NDArray[Any], name: str) -> NDArray[Any]:
        """Return the tokens. Raises UserError if one is outside the vocabulary."""
        largest = int(tokens.max())
        if largest >= self.vocabulary:
            raise UserError(
                f"data.source {name}: holds token id {largest}, but the vocabulary has {self.vocabulary} entries: "
                "copy the data again, or prepare them with the right tokenizer"
            )
        return tokens


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a batch: at most a sequence of each field."""

    inputs: NDArray[Any]
    targets: NDArray[Any]
    """The token that follows each input."""
    loss_mask: NDArray[np.bool_]
    """Whether the target is predicted."""
    positions: NDArray[np.int64] | None
    """The position of each input in its document or example; None if a sample is one document."""
    answer: int = 0
    """The first position of a pair's row whose target belongs to the answer."""
    reference: float = 0.0
    """The log-probability of a pair's answer by the reference model."""


class Sample(Protocol):
    """One row of a batch, or the two of a pair."""

    @property
    def number(self) -> int:
        """Identifies the tokens: samples with equal numbers have equal tokens."""
        ...

    def list_rows(self, rules: SampleRules) -> tuple[Row, ...]:
        """Return the sample's rows of a batch."""
        ...


@dataclass(frozen=True, slots=True)
class TextSample:
    """A range of a text."""

    number: int
    tokens: NDArray[Any]
    """At most sequence length + 1 tokens; the last one is only a target."""

    def list_rows(self, rules: SampleRules) -> tuple[Row, ...]:
        """See `Sample.list_rows`."""
        inputs, end = self.tokens[:-1], rules.end_of_document
        if end is None:
            return (Row(inputs, self.tokens[1:], np.ones(len(inputs), np.bool_), None),)
        # The first token of a document cannot be predicted from the document before it.
        return (Row(inputs, self.tokens[1:], inputs != end, compute_document_positions(inputs, end)),)


class SampleSource(Protocol):
    """One source of the samples."""

    @property
    def name(self) -> str:
        """The source, for messages."""
        ...

    def count_samples(self, rules: SampleRules) -> int:
        """Return the number of samples of one epoch."""
        ...

    def sample(self, rules: SampleRules, number: int, index: int) -> Sample:
        """Return sample `index` of the unshuffled source, under the number `number`. Raises UserError."""
        ...


@dataclass(frozen=True, slots=True)
class TextSampleSource:
    """Samples of one tokenized text."""

    name: str
    sequence: TokenSequence

    def count_samples(self, rules: SampleRules) -> int:
        """Return the number of samples of one epoch; the last sample may be shorter than the others."""
        return -(-(self.sequence.tokens - 1) // rules.sequence_length)

    def sample(self, rules: SampleRules, number: int, index: int) -> TextSample:
        """See `SampleSource.sample`."""
        start = index * rules.sequence_length
        tokens = self.sequence.read(start, min(start + rules.sequence_length + 1, self.sequence.tokens))
        return TextSample(number, rules.check_tokens(tokens, self.name))


class Samples:
    """All samples, by position."""

    def __init__(
        self,
        sources: Sequence[SampleSource],
        weights: Sequence[float],
        *,
        seed: int,
        rules: SampleRules,
        epoch_batch: int | None = None,
    ) -> None:
        """`epoch_batch` is the global batch where epochs are counted; the weights then have no effect."""
        self.rules = rules
        self.sources: list[Any] = list(sources)
        self._mixture = Mixture(weights, seed)
        self._seed = seed
        self.sizes = [source.count_samples(rules) for source in sources]
        """The number of samples of one epoch of each source."""
        self._first_numbers = [sum(self.sizes[:number]) for number in range(len(sources))]
        self._epochs = EpochOrder(self.sizes, epoch_batch, seed) if epoch_batch is not None else None

    @property
    def num_samples(self) -> int:
        """The number of distinct samples of all sources."""
        return sum(self.sizes)

    def list_numbers(self, position: int, count: int) -> list[int]:
        """Return the numbers of samples position .. position + count - 1, without the padding of an epoch."""
        locations = filter(None, map(self._locate, range(position, position + count)))
        return [self._first_numbers[source] + index for source, index in locations]

    @property
    def epoch_samples(self) -> int | None:
        """The positions of one epoch, a multiple of the global batch; None if epochs are not counted."""
        return self._epochs.positions if self._epochs is not None else None

    def read_at(self, position: int, count: int) -> list[Sample | None]:
        """Return samples position .. position + count - 1; None pads the last batch of an epoch. Raises UserError."""
        locations = map(self._locate, range(position, position + count))
        return [self.sample(*location) if location is not None else None for location in locations]

    def iterate_in_order(self) -> Iterator[tuple[int, int]]:
        """Yield source and index of unshuffled samples in the order of the mixture, until the first source ends."""
        position = 0
        while True:
            source, index = self._mixture[position]
            if index >= self.sizes[source]:
                return
            yield source, index
            position += 1

    def sample(self, source: int, index: int) -> Sample:
        """Return sample `index` of an unshuffled source."""
        sample: Sample = self.sources[source].sample(self.rules, self._first_numbers[source] + index, index)
        return sample

    def _locate(self, position: int) -> tuple[int, int] | None:
        if self._epochs is not None:
            return self._epochs[position]
        source, number = self._mixture[position]
        return source, find_shuffled_item(number, self.sizes[source], self._seed)


def count_step_samples(position: int, batch: int, end: int | None) -> int:
    """Return the samples of the step at global sample `position`; the last one before `end` takes the rest."""
    # No step trains beyond the end, but the loader prefetches there.
    return batch if end is None or position >= end else min(batch, end - position)


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One data-parallel rank's part of every step."""

    global_size: int
    """Samples of a step over all ranks; the last step may have fewer."""
    micro_size: int
    dp_rank: int
    dp_size: int
    end: int | None = None
    """Samples of the whole run, where samples are counted."""

    @property
    def passes(self) -> int:
        """The number of micro-batches per step, equal on all ranks."""
        return count_micro_batches(self.global_size, self.micro_size, self.dp_size)

    @property
    def offset(self) -> int:
        """The offset of this rank's first sample within a full step."""
        return self._take_part(self.global_size).start

    @property
    def size(self) -> int:
        """The number of this rank's samples in a full step; may be 0 if there are fewer samples than ranks."""
        return len(self._take_part(self.global_size))

    def list_positions(self, position: int) -> range:
        """Return the global positions of this rank's samples in the step that begins at `position`."""
        part = self._take_part(count_step_samples(position, self.global_size, self.end))
        return range(position + part.start, position + part.stop)

    def _take_part(self, samples: int) -> range:
        """Return this rank's range of a step's samples."""
        return range(self.dp_rank * samples // self.dp_size, (self.dp_rank + 1) * samples // self.dp_size)


class SampleReader(Protocol):
    """Reads one rank's samples of a step."""

    def read(self, position: int) -> list[Sample | None]:
        """Return the samples of the step at global sample `position`; None pads an epoch. Fast for consecutive steps.

        Raises UserError and StorageError.
        """
        ...

    def close(self) -> None:
        """Release its resources."""
        ...


class RankSamples:
    """Reads one rank's share of samples whose tokens exist before training."""

    def __init__(self, samples: Samples, share: Share) -> None:
        self._samples = samples
        self._share = share

    def read(self, position: int) -> list[Sample | None]:
        """See `SampleReader.read`."""
        positions = self._share.list_positions(position)
        return self._samples.read_at(positions.start, len(positions))

    def close(self) -> None:
        """Do nothing."""


class ValidationSet:
    """The fixed samples of a validation."""

    def __init__(self, samples: Samples, max_samples: int) -> None:
        self._samples = samples
        self._locations = [
            location for _, location in zip(range(max_samples), samples.iterate_in_order(), strict=False)
        ]
        self.rules = samples.rules
        self.sources = samples.sources

    @property
    def num_samples(self) -> int:
        """The number of samples of one validation."""
        return len(self._locations)

    def read_rank_samples(self, dp_rank: int, dp_size: int) -> list[Sample | None]:
        """Return one rank's samples; None pads, so that all ranks make the same number of passes."""
        count = -(-len(self._locations) // dp_size)
        locations = self._locations[dp_rank * count : (dp_rank + 1) * count]
        return [self._samples.sample(*location) for location in locations] + [None] * (count - len(locations))


def refuse_weights(weights: Sequence[float]) -> None:
    """Raise UserError for weights of sources where epochs are counted."""
    if len(set(weights)) > 1:
        raise UserError(
            f"data.sources: has the weights {', '.join(f'{weight:g}' for weight in weights)}, but with epochs each "
            "sample is seen once in each: leave out the weights, or set steps in place of epochs"
        )


def compute_document_positions(inputs: NDArray[Any], end: int) -> NDArray[np.int64]:
    """Return the position of each token of a sample within its document: 0 after each `end`."""
    indices = np.arange(len(inputs))
    starts = np.zeros(len(inputs), np.int64)
    document_starts = np.flatnonzero(inputs[:-1] == end) + 1
    starts[document_starts] = document_starts
    return indices - np.maximum.accumulate(starts)

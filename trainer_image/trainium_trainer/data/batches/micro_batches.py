"""Divide the samples of a step over ranks and passes, and convert them to tensors.

Guarantees:
- A rank's samples of a step are a pure function of the sizes, the rank and the position.
- The ranks' shares are contiguous, differ by at most one sample and together form the step's batch, so the loss and the
  order of samples are the same at every size.
- Every rank makes the same number of passes at every step, the smallest that holds the batch.
- All micro-batches of a step have the same shape on every rank. Empty rows are the last ones of a share: they are
  computed like the others but do not count.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from trainium_contract.sizes import passes
from trainium_trainer.models.loss import IGNORED_LABEL

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from trainium_trainer.data.batches.samples import Sample, SampleRules, ValidationSet


def samples_at(position: int, batch: int, end: int | None) -> int:
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
        return passes(self.global_size, self.micro_size, self.dp_size)

    @property
    def offset(self) -> int:
        """The offset of this rank's first sample within a full step."""
        return self._part(self.global_size).start

    @property
    def size(self) -> int:
        """The number of this rank's samples in a full step; may be 0 if there are fewer samples than ranks."""
        return len(self._part(self.global_size))

    def at(self, position: int) -> range:
        """Return the global positions of this rank's samples in the step that begins at `position`."""
        part = self._part(samples_at(position, self.global_size, self.end))
        return range(position + part.start, position + part.stop)

    def _part(self, samples: int) -> range:
        """Return this rank's range of a step's samples."""
        return range(self.dp_rank * samples // self.dp_size, (self.dp_rank + 1) * samples // self.dp_size)


@dataclass(frozen=True, slots=True)
class Pairs:
    """The answers of a micro-batch of pairs, whose rows 2k are preferred to rows 2k + 1."""

    count: int
    """The number of pairs that are not padding."""
    answers: Tensor
    """[rows] int64, the first position whose label belongs to the answer."""
    references: Tensor
    """[rows] float32, log-probability of each answer by the reference model; 0 if it is not computed ahead."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The samples of one forward and backward pass."""

    inputs: Tensor
    """[rows, sequence] int64."""
    labels: Tensor
    """[rows, sequence] int64, the next token of each input; IGNORED_LABEL where none is predicted."""
    valid_tokens: int
    sample_positions: Tensor
    """[rows] int64, numbers by the global position of each row's sample, which seed dropout; 0 for rows of evaluations
    and empty passes.
    """
    positions: Tensor | None = None
    """[rows, sequence] int64, the position of each token in its document: a 0 begins a document, and tokens attend only
    to their document. None: a sample is one document, with positions 0, 1, 2, ...
    """
    pairs: Pairs | None = None
    """Set where rows are pairs of answers."""

    @property
    def divisor(self) -> int:
        """This micro-batch's part of the divisor of the summed loss: its pairs, else its valid tokens."""
        return self.valid_tokens if self.pairs is None else self.pairs.count


@dataclass(frozen=True, slots=True)
class RankBatch:
    """This rank's share of a step."""

    micro_batches: tuple[MicroBatch, ...]
    samples: tuple[int, ...]
    """The numbers of the samples, for the record; samples that fill up an epoch have none."""


def build_micro_batch(samples: Sequence[Sample | None], rules: SampleRules, first: int | None = None) -> MicroBatch:
    """Convert samples to tensors; samples that are None or too short are padded.

    `first` is the global position of the first sample, which the others follow; None in an evaluation.
    """
    length, count = rules.sequence_length, len(samples) * rules.rows
    inputs = torch.full((count, length), rules.padding)
    labels = torch.full_like(inputs, IGNORED_LABEL)
    positions = torch.arange(length).repeat(count, 1) if rules.masked else None
    answers, references = torch.zeros(count, dtype=torch.int64), torch.zeros(count)
    for index, sample in enumerate(samples):
        for number, row in enumerate(() if sample is None else sample.rows(rules), start=index * rules.rows):
            end = len(row.inputs)
            inputs[number, :end] = torch.from_numpy(row.inputs.astype("int64"))
            labels[number, :end] = torch.from_numpy(np.where(row.loss_mask, row.targets.astype("int64"), IGNORED_LABEL))
            if positions is not None and row.positions is not None:
                positions[number, :end] = torch.from_numpy(row.positions)
            answers[number], references[number] = row.answer, row.reference
    numbers = torch.zeros(count, dtype=torch.int64) if first is None else torch.arange(count) + first * rules.rows
    pairs = None
    if rules.rows > 1:
        pairs = Pairs(sum(sample is not None for sample in samples), answers, references)
    return MicroBatch(inputs, labels, int((labels != IGNORED_LABEL).sum()), numbers, positions, pairs)


def trim_padding(batch: MicroBatch, multiple: int) -> MicroBatch:
    """Remove trailing columns in which no row predicts a token, `multiple` columns at a time.

    Tokens do not attend to later ones, so the loss stays the same. One block of columns always remains.
    """
    length = batch.inputs.shape[1]
    predicted = (batch.labels != IGNORED_LABEL).any(0).nonzero()
    used = int(predicted[-1]) + 1 if len(predicted) else 1
    width = -(-used // multiple) * multiple
    if width >= length or batch.positions is not None:
        return batch
    return replace(batch, inputs=batch.inputs[:, :width], labels=batch.labels[:, :width])


def divide_samples(
    samples: Sequence[Sample | None], rules: SampleRules, micro_size: int, first: int | None = None
) -> Iterator[MicroBatch]:
    """Yield samples in micro-batches; `first` as in `build_micro_batch`."""
    for start in range(0, len(samples), micro_size):
        yield build_micro_batch(samples[start : start + micro_size], rules, None if first is None else first + start)


def validation_batches(data: ValidationSet, *, dp_rank: int, dp_size: int, micro_size: int) -> Iterator[MicroBatch]:
    """Yield one rank's share of a validation: equally many micro-batches on every rank, some of them empty."""
    return divide_samples(data.samples_of_rank(dp_rank, dp_size), data.rules, micro_size)


class BatchBuilder(Protocol):
    """Prepares one rank's share of a step."""

    def build(self, position: int) -> RankBatch:
        """Build the share of the step that starts at global sample `position`; fast for consecutive steps."""
        ...

    def close(self) -> None:
        """Release its resources."""
        ...


class MicroBatchBuilder:
    """Divides a rank's samples of a step into its passes."""

    def __init__(self, rules: SampleRules, share: Share) -> None:
        self._rules = rules
        self._share = share
        self._empty: MicroBatch | None = None

    def build(self, samples: Sequence[Sample | None], first: int) -> tuple[MicroBatch, ...]:
        """Return micro-batches of one size, padded with empty rows; `first` as in `build_micro_batch`."""
        size = self._share.micro_size
        rows = [*samples, *[None] * (-len(samples) % size)]
        empty = self._share.passes - len(rows) // size
        if empty and self._empty is None:
            # Empty passes share their tensors, so that they cost the host nothing.
            self._empty = build_micro_batch([None] * size, self._rules)
        missing = (self._empty,) * empty if self._empty is not None else ()
        return (*divide_samples(rows, self._rules, size, first), *missing)

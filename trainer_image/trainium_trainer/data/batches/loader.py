"""Prepare the batches of one rank ahead of the step.

Guarantees:
- A rank's samples of a step are a pure function of the sizes, the rank and the position.
- The ranks' shares are contiguous, differ by one sample at most and together are the step's batch, so the loss and the
  order of samples are the same at every size.
- Every rank makes the same number of passes at every step, the fewest that hold the batch.
- All micro-batches of a step have the same shape on every rank. Rows that a share does not fill are its last ones: they
  are computed like the others, and count for nothing.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from trainium_contract.sizes import passes
from trainium_trainer.models.loss import IGNORED_LABEL

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from trainium_trainer.data.batches.samples import Sample, SampleRules, Samples, ValidationSet


def samples_at(position: int, batch: int, end: int | None) -> int:
    """Return the samples of the step at global sample `position`; the last one before `end` takes the rest."""
    # Nobody trains beyond the end, but the loader looks ahead.
    return batch if end is None or position >= end else min(batch, end - position)


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One data-parallel rank's part of every step."""

    global_size: int
    """Samples of a step over all ranks, but the last."""
    micro_size: int
    dp_rank: int
    dp_size: int
    end: int | None = None
    """Samples of the whole run, where they are what is counted."""

    @property
    def passes(self) -> int:
        """Micro-batches of one step, on this and on every other rank."""
        return passes(self.global_size, self.micro_size, self.dp_size)

    @property
    def offset(self) -> int:
        """The first of this rank's samples within a full step."""
        return self._part(self.global_size).start

    @property
    def size(self) -> int:
        """Samples of a full step; 0 where there are fewer samples than ranks and this is one of those without any."""
        return len(self._part(self.global_size))

    def at(self, position: int) -> range:
        """Return the global positions of this rank's samples in the step that begins at `position`."""
        part = self._part(samples_at(position, self.global_size, self.end))
        return range(position + part.start, position + part.stop)

    def _part(self, samples: int) -> range:
        """Return the range of a step's samples that are this rank's."""
        return range(self.dp_rank * samples // self.dp_size, (self.dp_rank + 1) * samples // self.dp_size)


@dataclass(frozen=True, slots=True)
class Pairs:
    """Facts about the answers of a micro-batch, whose rows 2k are preferred to rows 2k + 1."""

    count: int
    """Pairs that are not padding."""
    answers: Tensor
    """[rows] int64, the first position whose label is of the answer."""
    references: Tensor
    """[rows] float32, log-probability of each answer by the reference model; 0 where it is not computed ahead."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Samples of one forward and backward pass."""

    inputs: Tensor
    """[rows, sequence] int64."""
    labels: Tensor
    """[rows, sequence] int64, the next token of each input; IGNORED_LABEL where none is to be predicted."""
    valid_tokens: int
    places: Tensor
    """[rows] int64, numbers by the global position of each row's sample, which dropout follows from; 0 for a row that
    is only measured or part of an empty pass."""
    positions: Tensor | None = None
    """[rows, sequence] int64, the place of each token in its document: a 0 begins a document, and tokens attend to
    their own document only. None: a sample is one stretch, with positions 0, 1, 2, ..."""
    pairs: Pairs | None = None
    """Where rows are pairs of answers."""

    @property
    def divisor(self) -> int:
        """Number by whose sum over the global batch the summed loss is divided: pairs, else valid tokens."""
        return self.valid_tokens if self.pairs is None else self.pairs.count


@dataclass(frozen=True, slots=True)
class RankBatch:
    """This rank's share of a step."""

    micro_batches: tuple[MicroBatch, ...]
    samples: tuple[int, ...]
    """Numbers of the samples, for the record; what fills up an epoch has none."""


def build_micro_batch(samples: Sequence[Sample | None], rules: SampleRules, first: int | None = None) -> MicroBatch:
    """Return samples as tensors; a sample that is too short or None is filled up with what does not count.

    `first` is the global position of the first one, the others follow it; None when they are only measured.
    """
    length, count = rules.sequence_length, len(samples) * rules.rows
    inputs = torch.full((count, length), rules.padding)
    labels = torch.full_like(inputs, IGNORED_LABEL)
    positions = torch.arange(length).repeat(count, 1) if rules.masked else None
    answers, references = torch.zeros(count, dtype=torch.int64), torch.zeros(count)
    for place, sample in enumerate(samples):
        for number, row in enumerate(() if sample is None else sample.rows(rules), start=place * rules.rows):
            end = len(row.inputs)
            inputs[number, :end] = torch.from_numpy(row.inputs.astype("int64"))
            labels[number, :end] = torch.from_numpy(np.where(row.learned, row.targets.astype("int64"), IGNORED_LABEL))
            if positions is not None and row.positions is not None:
                positions[number, :end] = torch.from_numpy(row.positions)
            answers[number], references[number] = row.answer, row.reference
    places = torch.zeros(count, dtype=torch.int64) if first is None else torch.arange(count) + first * rules.rows
    pairs = None
    if rules.rows > 1:
        pairs = Pairs(sum(sample is not None for sample in samples), answers, references)
    return MicroBatch(inputs, labels, int((labels != IGNORED_LABEL).sum()), places, positions, pairs)


def trim_padding(batch: MicroBatch, multiple: int) -> MicroBatch:
    """Return a micro-batch without the last columns in which no row predicts a token, `multiple` columns at a time.

    Tokens attend to nothing after them, so the loss stays the same. One column block always remains.
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
    """Yield samples in micro-batches; `first` as for `build_micro_batch`."""
    for start in range(0, len(samples), micro_size):
        yield build_micro_batch(samples[start : start + micro_size], rules, None if first is None else first + start)


def validation_batches(data: ValidationSet, *, dp_rank: int, dp_size: int, micro_size: int) -> Iterator[MicroBatch]:
    """One rank's share of a measurement: as many micro-batches on every rank, some of them empty."""
    return divide_samples(data.share(dp_rank, dp_size), data.rules, micro_size)


class BatchMaker(Protocol):
    """Makes one rank's share of a step."""

    def make(self, position: int) -> RankBatch:
        """Build the share of the step that starts at global sample `position`; quick for the next step."""
        ...

    def close(self) -> None:
        """Let go of what it holds."""
        ...


class Passes:
    """Divides a rank's samples of a step into its passes."""

    def __init__(self, rules: SampleRules, share: Share) -> None:
        self._rules = rules
        self._share = share
        self._empty: MicroBatch | None = None

    def of(self, samples: Sequence[Sample | None], first: int) -> tuple[MicroBatch, ...]:
        """Micro-batches of one size; what the samples do not fill is empty. `first` is as for `build_micro_batch`."""
        size = self._share.micro_size
        rows = [*samples, *[None] * (-len(samples) % size)]
        empty = self._share.passes - len(rows) // size
        if empty and self._empty is None:
            # The same tensors each time: a pass without a sample costs the host nothing.
            self._empty = build_micro_batch([None] * size, self._rules)
        missing = (self._empty,) * empty if self._empty is not None else ()
        return (*divide_samples(rows, self._rules, size, first), *missing)


class SampleMaker:
    """Batches from tokens that are all there."""

    def __init__(self, samples: Samples, share: Share) -> None:
        self._samples = samples
        self._share = share
        self._passes = Passes(samples.rules, share)

    def make(self, position: int) -> RankBatch:
        """Read the samples. Raises UserError."""
        mine = self._share.at(position)
        samples = self._samples.at(mine.start, len(mine))
        return RankBatch(
            self._passes.of(samples, mine.start), tuple(sample.number for sample in samples if sample is not None)
        )

    def close(self) -> None:
        """Nothing to do."""


class Loader:
    """Endless batches of one data-parallel rank; the next ones are prepared in the background."""

    def __init__(self, maker: BatchMaker, *, global_size: int, ahead: int = 1) -> None:
        self._maker = maker
        self._global = global_size
        self._ahead = ahead
        self._thread: ThreadPoolExecutor | None = None
        self._ready: deque[tuple[int, Future[RankBatch]]] = deque()

    def batch_at(self, position: int) -> RankBatch:
        """Return this rank's share of the step that starts at global sample `position`. Raises UserError."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="loader")
        if not self._ready or self._ready[0][0] != position:
            for _, waiting in self._ready:
                waiting.cancel()
            self._ready.clear()
            self._ready.append((position, self._thread.submit(self._maker.make, position)))
        _, batch = self._ready.popleft()
        while len(self._ready) < self._ahead:
            following = (self._ready[-1][0] if self._ready else position) + self._global
            self._ready.append((following, self._thread.submit(self._maker.make, following)))
        return batch.result()

    def close(self) -> None:
        """Stop the background thread and what it works with."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
            self._maker.close()  # wakes a thread that waits for it
            self._thread.shutdown(wait=True)
        self._maker.close()  # what that thread may have started at the last moment

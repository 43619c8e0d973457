"""Load the batches of one rank: read its samples of the next steps ahead, and convert them to tensors.

Guarantees:
- A rank's samples of a step are a pure function of the sizes, the rank and the position, so the loss and the order of
  samples are the same at every size.
- Every rank makes the same number of passes at every step, the smallest that holds the batch.
- All micro-batches of a step have the same shape on every rank. Empty rows are the last ones of a share: they are
  computed like the others but do not count.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from trainium_trainer.data.batches.samples import RankSamples, SampleReader, Share
from trainium_trainer.data.online.shard_reader import SampleGroup, SampleReceiver, SampleSender, ShardReader
from trainium_trainer.data.online.streams import BlockCounts, Streams
from trainium_trainer.models.loss import IGNORED_LABEL

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from torch import Tensor

    from trainium_trainer.data.batches.samples import Sample, SampleRules, ValidationSet
    from trainium_trainer.data.dataset import Dataset


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
        for number, row in enumerate(() if sample is None else sample.list_rows(rules), start=index * rules.rows):
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


def iterate_validation_batches(
    data: ValidationSet, *, dp_rank: int, dp_size: int, micro_size: int
) -> Iterator[MicroBatch]:
    """Yield one rank's share of a validation: equally many micro-batches on every rank, some of them empty."""
    return divide_samples(data.read_rank_samples(dp_rank, dp_size), data.rules, micro_size)


class Loader:
    """Endless batches of one data-parallel rank; the next ones are prepared in the background."""

    def __init__(self, reader: SampleReader, rules: SampleRules, share: Share, *, ahead: int = 1) -> None:
        """Create the loader, which prepares `ahead` steps."""
        self._reader = reader
        self._rules = rules
        self._share = share
        self._ahead = ahead
        self._thread: ThreadPoolExecutor | None = None
        self._prepared: deque[tuple[int, Future[RankBatch]]] = deque()
        self._empty: MicroBatch | None = None

    def read_batch(self, position: int) -> RankBatch:
        """Return this rank's share of the step that starts at global sample `position`. Raises UserError."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="loader")
        if not self._prepared or self._prepared[0][0] != position:
            for _, batch in self._prepared:
                batch.cancel()
            self._prepared.clear()
            self._prepared.append((position, self._thread.submit(self._prepare, position)))
        _, batch = self._prepared.popleft()
        while len(self._prepared) < self._ahead:
            following = (self._prepared[-1][0] if self._prepared else position) + self._share.global_size
            self._prepared.append((following, self._thread.submit(self._prepare, following)))
        return batch.result()

    def _prepare(self, position: int) -> RankBatch:
        samples, first = self._reader.read(position), self._share.list_positions(position).start
        numbers = tuple(sample.number for sample in samples if sample is not None)
        return RankBatch(self._build_micro_batches(samples, first), numbers)

    def _build_micro_batches(self, samples: Sequence[Sample | None], first: int) -> tuple[MicroBatch, ...]:
        """Return micro-batches of one size, padded with empty rows; `first` as in `build_micro_batch`."""
        size = self._share.micro_size
        rows = [*samples, *[None] * (-len(samples) % size)]
        missing = self._share.passes - len(rows) // size
        if missing and self._empty is None:
            # Empty passes share their tensors, so that they cost the host nothing.
            self._empty = build_micro_batch([None] * size, self._rules)
        empty = (self._empty,) * missing if self._empty is not None else ()
        return (*divide_samples(rows, self._rules, size, first), *empty)

    def close(self) -> None:
        """Stop the background thread and close the reader."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
            self._reader.close()  # wakes a thread that waits for the reader
            self._thread.shutdown(wait=True)
        self._reader.close()  # the thread may have started work after the first call


def open_loader(
    data: Dataset,
    share: Share,
    *,
    ahead: int = 1,
    counts_folder: Path | None = None,
    writes: bool = True,
    sample_group: SampleGroup | None = None,
) -> Loader:
    """Return a loader of one rank's batches.

    The block counts of streams are recorded in `counts_folder`; one of the ranks with the same samples `writes` them.
    One rank of the `sample_group` reads the samples of streams and sends them to the others.
    """
    training = data.training
    reader: SampleReader
    if not isinstance(training, Streams):
        reader = RankSamples(training, share)
    elif sample_group is not None and sample_group.is_follower:
        reader = SampleReceiver(sample_group)
    else:
        counts = BlockCounts(counts_folder, training.identity, share.dp_rank if writes else None)
        shards = ShardReader(training, share, counts)
        reader = shards if sample_group is None else SampleSender(shards, sample_group)
    return Loader(reader, training.rules, share, ahead=ahead)

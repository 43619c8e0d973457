"""Batches for one rank, made ready ahead of the step.

Invariants: a step takes the next `global_size` samples and each data-parallel rank a contiguous slice of them, so that
the loss and the order of samples are the same at every size.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from trainium_trainer.data.samples import positions_of
from trainium_trainer.models.loss import IGNORED_LABEL

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from concurrent.futures import Future

    from torch import Tensor

    from trainium_trainer.data.samples import Rules, Sample, Samples, ValidationSet


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Samples of one forward and backward pass."""

    inputs: Tensor
    """[samples, sequence] int64."""
    labels: Tensor
    """[samples, sequence] int64, the next token of each input; IGNORED_LABEL where none is to be predicted."""
    valid_tokens: int
    positions: Tensor | None = None
    """[samples, sequence] int64, the place of each token in its document: a 0 begins a document, and tokens attend to
    their own document only. None: a sample is one stretch, with positions 0, 1, 2, ..."""


@dataclass(frozen=True, slots=True)
class RankBatch:
    """This rank's share of a step."""

    micro_batches: tuple[MicroBatch, ...]
    samples: tuple[int, ...]
    """What names the samples, for the record."""


def micro_batch(samples: Sequence[Sample | None], rules: Rules) -> MicroBatch:
    """Samples as tensors; a sample that is too short or None is filled up with what does not count."""
    length, end = rules.sequence_length, rules.end_of_document
    inputs = torch.zeros(len(samples), length, dtype=torch.int64)
    labels = torch.full_like(inputs, IGNORED_LABEL)
    positions = torch.arange(length).repeat(len(samples), 1) if end is not None else None
    for row, sample in enumerate(samples):
        if sample is None:
            continue
        tokens = torch.from_numpy(sample.tokens.astype("int64"))
        count = len(tokens) - 1
        inputs[row, :count] = tokens[:-1]
        labels[row, :count] = tokens[1:]
        if positions is not None:
            assert end is not None
            labels[row][inputs[row] == end] = IGNORED_LABEL  # nothing foretells how the next document begins
            labels[row, count:] = IGNORED_LABEL
            positions[row, :count] = torch.from_numpy(positions_of(sample.tokens[:-1], end))
    return MicroBatch(inputs, labels, int((labels != IGNORED_LABEL).sum()), positions)


def divided(samples: Sequence[Sample | None], rules: Rules, micro_size: int) -> Iterator[MicroBatch]:
    """Samples in micro-batches."""
    for start in range(0, len(samples), micro_size):
        yield micro_batch(samples[start : start + micro_size], rules)


def validation_batches(data: ValidationSet, *, dp_rank: int, dp_size: int, micro_size: int) -> Iterator[MicroBatch]:
    """One rank's share of a measurement: as many micro-batches on every rank, some of them empty."""
    return divided(data.share(dp_rank, dp_size), data.rules, micro_size)


class Maker(Protocol):
    """Makes one rank's share of a step."""

    def make(self, position: int) -> RankBatch:
        """The share of the step that starts at global sample `position`; quick for the step after the last one."""
        ...

    def close(self) -> None:
        """Let go of what it holds."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One data-parallel rank's part of every step."""

    global_size: int
    micro_size: int
    dp_rank: int
    dp_size: int

    @property
    def size(self) -> int:
        """Samples of one step."""
        return self.global_size // self.dp_size

    @property
    def offset(self) -> int:
        """The first of them within the global batch."""
        return self.dp_rank * self.size


class SampleMaker:
    """Batches from tokens that are all there."""

    def __init__(self, samples: Samples, share: Share) -> None:
        self._samples = samples
        self._share = share

    def make(self, position: int) -> RankBatch:
        """Read the samples. Raises UserError."""
        samples = self._samples.at(position + self._share.offset, self._share.size)
        micro_batches = tuple(divided(samples, self._samples.rules, self._share.micro_size))
        return RankBatch(micro_batches, tuple(sample.number for sample in samples))

    def close(self) -> None:
        """Nothing to do."""


class Loader:
    """Endless batches of one data-parallel rank; the next ones are prepared in the background."""

    def __init__(self, maker: Maker, *, global_size: int, ahead: int = 1) -> None:
        self._maker = maker
        self._global = global_size
        self._ahead = ahead
        self._thread: ThreadPoolExecutor | None = None
        self._ready: deque[tuple[int, Future[RankBatch]]] = deque()

    def batch_at(self, position: int) -> RankBatch:
        """This rank's share of the step that starts at global sample `position`. Raises UserError."""
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

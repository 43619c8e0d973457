"""The samples of each step as a function of a seed and the position in the run, for any number of ranks.

    sampler = PositionSampler(len(dataset), global_batch=64, micro_batch=4, completed=step)
    loader = DataLoader(dataset, batch_sampler=sampler)
    for epoch in range(sampler.first_epoch, epochs):
        sampler.set_epoch(epoch)
        batches = iter(loader)
        for step in range(sampler.first_step, sampler.steps_per_epoch):
            for number in range(sampler.accumulation):
                loss = compute_mean_loss(next(batches)) * sampler.weight(step, number)
                loss.backward()

Guarantees:
- Step `s` of an epoch has positions `s * global_batch` and following of the epoch's order at any number of ranks; the
  last one has what is left. An epoch has each sample once.
- A resume after `completed` steps needs no pass over the earlier samples.
- With `weight`, the mean over the ranks of their sums of losses is the mean over the samples of the step. Where the
  samples do not divide, a rank may compute a micro-batch again whose weight is 0.
- The order does not depend on the random numbers of a library. The module needs only Python 3.9.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_ROUNDS = 6


class Permutation(Sequence[int]):
    """A pseudo-random permutation of range(size) without memory: a Feistel network with cycle walking."""

    def __init__(self, size: int, seed: int, epoch: int) -> None:
        self.size = size
        self._half_bits = max(1, -(-max(1, (size - 1).bit_length()) // 2))
        self._mask = (1 << self._half_bits) - 1
        self._keys = [f"{seed}:{epoch}:{number}".encode() for number in range(_ROUNDS)]

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:  # type: ignore[override]  # no slices
        """Return the image of `index`; values outside the range are mapped on until they fall inside."""
        if not 0 <= index < self.size:
            raise IndexError(index)
        value = self._encrypt(index)
        while value >= self.size:
            value = self._encrypt(value)
        return value

    def _encrypt(self, value: int) -> int:
        left, right = value >> self._half_bits, value & self._mask
        for key in self._keys:
            digest = hashlib.blake2b(right.to_bytes(8, "little"), key=key, digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(digest, "little") & self._mask)
        return left << self._half_bits | right


class MicroBatch(list):  # type: ignore[type-arg]  # Python 3.9
    """The indices of the samples of one micro-batch of a rank."""

    position: int = 0
    """The position in the run of its first sample."""
    rows: int = 0
    """Number of indices that are of this step; further ones, at the end, repeat the first."""


class PositionSampler:
    """A batch sampler: the micro-batches of this rank in an epoch, the same number on each rank."""

    def __init__(
        self,
        size: int,
        *,
        global_batch: int,
        micro_batch: int,
        seed: int = 0,
        completed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        drop_last: bool = False,
        pads: bool = False,
    ) -> None:
        """Create the sampler of `size` samples.

        global_batch: samples of a step over all ranks; micro_batch: samples that a rank computes at once. completed:
        steps of the run that are done. rank, world_size: of data parallelism; unset: from the environment. drop_last:
        leave out an epoch's last, smaller step. pads: fill each micro-batch with samples that do not count.
        """
        self.rank = int(os.environ.get("RANK", "0")) if rank is None else rank
        self.world_size = int(os.environ.get("WORLD_SIZE", "1")) if world_size is None else world_size
        batch = max(1, global_batch)
        steps = size // batch if drop_last else -(-size // batch)
        if min(global_batch, micro_batch, steps) < 1 or not 0 <= self.rank < self.world_size:
            raise ValueError(
                f"{size} samples with a global batch of {global_batch} in micro-batches of {micro_batch}, rank "
                f"{self.rank} of {self.world_size}: there must be at least one sample, one step, and the rank"
            )
        self.size, self.global_batch, self.micro_batch, self.seed = size, global_batch, micro_batch, seed
        self.pads = pads
        self.steps_per_epoch = steps
        """The steps of an epoch."""
        self.accumulation = -(-global_batch // (micro_batch * self.world_size))
        """The micro-batches of a step on each rank."""
        self.first_epoch, self._resumed_step = divmod(completed, steps)
        """The epoch in which the run continues."""
        self.epoch = self.first_epoch

    @property
    def first_step(self) -> int:
        """The step at which the epoch starts: where the run continues, in its first epoch."""
        return self._resumed_step if self.epoch == self.first_epoch else 0

    def set_epoch(self, epoch: int) -> None:
        """Select the epoch of the next iteration, from 0."""
        self.epoch = epoch

    def order(self, epoch: int) -> Sequence[int]:
        """Return the samples of an epoch by position."""
        return Permutation(self.size, self.seed, epoch)

    def __len__(self) -> int:
        """Return the number of micro-batches of a whole epoch."""
        return self.steps_per_epoch * self.accumulation

    def __iter__(self) -> Iterator[MicroBatch]:
        order, start = self.order(self.epoch), self.epoch * self.size
        for step in range(self.first_step, self.steps_per_epoch):
            for number in range(self.accumulation):
                positions = self.positions(step, number)
                batch = MicroBatch(order[position] for position in positions or [step * self.global_batch])
                batch.position, batch.rows = start + positions.start, len(positions)
                if self.pads:
                    batch.extend(batch[:1] * (self.micro_batch - len(batch)))
                yield batch

    def positions(self, step: int, number: int) -> range:
        """Return the positions, in its epoch, of a micro-batch of this rank. Pure."""
        first = step * self.global_batch
        rows, extra = divmod(self.step_size(step), self.world_size)
        start = first + self.rank * rows + min(self.rank, extra)
        share = range(start, start + rows + (self.rank < extra))
        return share[number * self.micro_batch :][: self.micro_batch]

    def step_size(self, step: int) -> int:
        """Return the number of samples of a step of an epoch. Pure."""
        return min(self.global_batch, self.size - step * self.global_batch)

    def weight(self, step: int, number: int) -> float:
        """Return the factor of a micro-batch's mean loss by which the mean over ranks is that over the step. Pure."""
        return len(self.positions(step, number)) * self.world_size / self.step_size(step)

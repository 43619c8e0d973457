"""Batches by global sample position: which samples a step sees does not depend on how many ranks share it.

Invariants: sample number g (0, 1, 2, ...) is `order(seed, g // n)[g % n]`, a fresh permutation of the n samples each
epoch; a step takes the next `global_size` numbers and each data-parallel rank a contiguous slice of them; the position
(the count of samples consumed) is the whole state, so a run may stop and go on at any size.
"""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from trainium_trainer.models.llama import IGNORED_LABEL

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future

    from torch import Tensor

    from trainium_trainer.data.packing import TokenFile

_ROUNDS = 6


class Permutation:
    """A pseudo-random permutation of range(size) that needs no memory: a Feistel network with cycle walking."""

    def __init__(self, size: int, seed: int, epoch: int) -> None:
        self.size = size
        self._half_bits = max(1, -(-max(1, (size - 1).bit_length()) // 2))
        self._mask = (1 << self._half_bits) - 1
        self._keys = [f"{seed}:{epoch}:{number}".encode() for number in range(_ROUNDS)]

    def __getitem__(self, index: int) -> int:
        """The image of `index`; values outside the range are mapped on until they fall inside."""
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


def samples_at(position: int, count: int, *, num_samples: int, seed: int) -> list[int]:
    """Sample indices of the global numbers position .. position + count - 1."""
    indices = []
    epoch, order = -1, None
    for number in range(position, position + count):
        if number // num_samples != epoch or order is None:
            epoch = number // num_samples
            order = Permutation(num_samples, seed, epoch)
        indices.append(order[number % num_samples])
    return indices


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Samples of one forward and backward pass."""

    inputs: Tensor
    """[samples, sequence] int64."""
    labels: Tensor
    """[samples, sequence] int64, the next token of each input; IGNORED_LABEL where there is none."""
    valid_tokens: int


@dataclass(frozen=True, slots=True)
class RankBatch:
    """This rank's share of a step."""

    micro_batches: tuple[MicroBatch, ...]
    samples: tuple[int, ...]
    """Indices of the samples, for the record."""


class Loader:
    """Endless batches of one data-parallel rank; the next one is prepared in the background."""

    def __init__(
        self, tokens: TokenFile, *, seed: int, global_size: int, micro_size: int, dp_rank: int, dp_size: int
    ) -> None:
        self._tokens = tokens
        self._seed = seed
        self._global = global_size
        self._micro = micro_size
        self._share = global_size // dp_size
        self._offset = dp_rank * self._share
        self._thread: ThreadPoolExecutor | None = None
        self._ahead: tuple[int, Future[RankBatch]] | None = None

    def batch_at(self, position: int) -> RankBatch:
        """This rank's share of the step that starts at global sample `position`."""
        if self._ahead is not None and self._ahead[0] == position:
            batch = self._ahead[1].result()
        else:
            batch = self._make(position)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="loader")
        following = position + self._global
        self._ahead = (following, self._thread.submit(self._make, following))
        return batch

    def close(self) -> None:
        """Stop the background thread."""
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)

    def _make(self, position: int) -> RankBatch:
        indices = samples_at(
            position + self._offset, self._share, num_samples=self._tokens.num_samples, seed=self._seed
        )
        starts = range(0, self._share, self._micro)
        micro_batches = tuple(self._micro_batch(indices[start : start + self._micro]) for start in starts)
        return RankBatch(micro_batches, tuple(indices))

    def _micro_batch(self, indices: Sequence[int]) -> MicroBatch:
        length = self._tokens.sequence_length
        inputs = torch.zeros(len(indices), length, dtype=torch.int64)
        labels = torch.full_like(inputs, IGNORED_LABEL)
        valid = 0
        for row, index in enumerate(indices):
            tokens = torch.from_numpy(self._tokens.sample(index).astype("int64"))
            count = len(tokens) - 1
            inputs[row, :count] = tokens[:-1]
            labels[row, :count] = tokens[1:]
            valid += count
        return MicroBatch(inputs, labels, valid)

"""Samples of a trainer by position: its order, data set and collator, with the random numbers of the position."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils.data import Dataset, RandomSampler, SequentialSampler

from trainium_worker.data import MicroBatch, PositionSampler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


def derive_seed(*parts: object) -> int:
    """Return a seed of 32 bits for anything whose `repr` is the same in each process."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=4).digest(), "little")


def seed_processor(seed: int) -> None:
    """Seed the random numbers of the processor, not those of devices."""
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - what data sets and collators use
    torch.default_generator.manual_seed(seed)


@contextlib.contextmanager
def _seeded(*parts: object) -> Iterator[int]:
    """Seed the random numbers of the processor for a block, by `parts`, and restore them after it."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002 - as below
    seed = derive_seed(*parts)
    seed_processor(seed)
    try:
        yield seed
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002 - as above
        torch.set_rng_state(states[2])


class AnswerSeeds(TorchFunctionMode):
    """Within the context, `torch.multinomial` draws each row by the random numbers of its seed.

    An answer is then a function of its seed and its prompt, whatever else is in the batch. A tensor with another number
    of rows, or on a device without generators, is drawn as always.
    """

    def __init__(self, seeds: Sequence[int]) -> None:
        super().__init__()
        self._seeds = seeds
        self._generators: list[torch.Generator] = []

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is not torch.multinomial or kwargs.get("generator") is not None or not self._is_batch(args[0]):
            return function(*args, **kwargs)
        if not self._generators:
            self._generators = [torch.Generator(args[0].device).manual_seed(seed) for seed in self._seeds]
        rows = zip(args[0], self._generators, strict=True)
        return torch.stack([torch.multinomial(row, *args[1:], **kwargs, generator=each) for row, each in rows])

    def _is_batch(self, weights: torch.Tensor) -> bool:
        return weights.dim() == 2 and len(weights) == len(self._seeds) and weights.device.type in {"cpu", "cuda"}


class TrainerSampler(PositionSampler):
    """The sampler of an elastic trainer, in the order of the trainer's own sampler."""

    def __init__(self, size: int, sampler: Any, *, generates: bool, **options: Any) -> None:
        """`sampler`: the trainer's own; `generates`: each micro-batch has all samples of the rank's step."""
        self._sampler, self._generates = sampler, generates
        self._listed: tuple[int, list[int]] = (-1, [])
        is_random = type(sampler) is RandomSampler and not sampler.replacement and len(sampler) == size
        self._is_listed = not is_random and type(sampler) is not SequentialSampler
        super().__init__(len(sampler), **options)

    def order(self, epoch: int) -> Sequence[int]:
        """Return the samples of an epoch: those of the trainer's sampler with the random numbers of seed and epoch."""
        if type(self._sampler) is SequentialSampler:
            return range(self.size)
        if not self._is_listed:
            return super().order(epoch)
        if self._listed[0] != epoch:
            self._listed = epoch, self._list(epoch)
        return self._listed[1]

    def positions(self, step: int, number: int) -> range:
        """Return the positions of a micro-batch, or of all of them where the trainer generates once for the step."""
        if not self._generates:
            return super().positions(step, number)
        rows = self.step_size(step) // self.world_size
        first = step * self.global_batch + self.rank * rows
        return range(first, first + rows)

    def weight(self, step: int, number: int) -> float:
        """Return the factor of a micro-batch's mean loss."""
        return super().weight(step, number) / (self.accumulation if self._generates else 1)

    def check_order(self, all_gather: Callable[[Any], list[Any]]) -> None:
        """Raise ValueError if the trainer's sampler has another order for another rank or the same random numbers."""
        if not self._is_listed:
            return
        orders = all_gather([derive_seed(self._list(0)) for _ in range(2)])
        if len({number for rank in orders for number in rank}) > 1:
            raise ValueError(
                f"the trainer cannot be elastic: the order of its {type(self._sampler).__name__} is not the same on "
                "each rank and for the same random numbers. Use a sampler of all samples, whatever the rank is, that "
                "draws from its `generator` or from the global random numbers of torch, numpy or Python"
            )

    def _list(self, epoch: int) -> list[int]:
        sampler = self._sampler
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        with _seeded("order", self.seed, epoch) as seed:
            if isinstance(getattr(sampler, "generator", None), torch.Generator):
                sampler.generator.manual_seed(seed)
            indices = [int(index) for index in sampler]
        if len(indices) != self.size:
            raise ValueError(
                f"the trainer cannot be elastic: its {type(sampler).__name__} has {len(indices)} samples in epoch "
                f"{epoch} and the length {self.size}"
            )
        return indices

    def __iter__(self) -> Iterator[MicroBatch]:
        """Yield placeholders for the completed steps, which the trainer skips without reading them."""
        yield from itertools.repeat(MicroBatch(), self.first_step * self.accumulation)
        yield from super().__iter__()


class Samples(Dataset[Any]):
    """The data set of a trainer, read by micro-batches with the random numbers of their position."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self._dataset, self._seed = dataset, seed

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, batch: MicroBatch) -> tuple[MicroBatch, list[Any]]:
        with _seeded("samples", self._seed, batch.position):
            if callable(getattr(self._dataset, "__getitems__", None)):
                return batch, self._dataset.__getitems__(list(batch))
            return batch, [self._dataset[index] for index in batch]


@dataclass(frozen=True)
class Collate:
    """Collates micro-batches; where samples repeat, they do not count."""

    collate: Callable[[list[Any]], Any]
    seed: int

    def __call__(self, samples: Any) -> Any:
        """Return the batch of a micro-batch: padded, with masked labels, if it has labels for each row."""
        micro_batch, rows = samples
        batch = self._collate(micro_batch, rows)
        if micro_batch.rows == len(rows) or _mask(batch, micro_batch.rows, len(rows)):
            return batch
        batch = self._collate(micro_batch, rows[: max(1, micro_batch.rows)])
        if not micro_batch.rows:
            _mask(batch, 0, None)
        return batch

    def _collate(self, micro_batch: MicroBatch, rows: list[Any]) -> Any:
        with _seeded("collate", self.seed, micro_batch.position):
            return self.collate(rows)


def _mask(batch: Any, first: int, rows: int | None) -> bool:
    """Mask the labels from a row on; return whether they have `rows` rows and can be masked."""
    names = [name for name in ("labels", "shift_labels") if name in batch]
    tensors = [batch[name] for name in names]
    if not tensors or any(tensor.is_floating_point() or rows not in (None, len(tensor)) for tensor in tensors):
        return False
    for tensor in tensors:
        tensor[first:] = -100
    return True

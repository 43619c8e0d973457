"""Boxes of stored tensors, a few rows at a time.

Invariant: memory beyond the target is at most one chunk.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from trainium_trainer.weights.headers import ITEM_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from trainium_trainer.weights.headers import FileTensor
    from trainium_trainer.weights.source import WeightsSource

TORCH_TYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
CHUNK_BYTES = 8 << 20


def rows_of(source: WeightsSource, stored: FileTensor, first: int, count: int) -> Iterator[tuple[int, Tensor]]:
    """`count` rows from `first` on, a chunk at a time, each with its number among them; valid until the next one."""
    item = ITEM_BYTES[stored.dtype]
    row = math.prod(stored.shape[1:]) * item
    most = max(1, CHUNK_BYTES // max(1, row))
    for at in range(0, count, most):
        rows = min(most, count - at)
        with source.stretch(stored.file, stored.start + (first + at) * row, rows * row) as view:
            raw = torch.frombuffer(view, dtype=torch.uint8)
            if raw.data_ptr() % item:  # the format does not promise alignment
                raw = raw.clone()
            yield at, raw.view(TORCH_TYPES[stored.dtype]).view(rows, *stored.shape[1:])


@torch.no_grad()
def copy_box(source: WeightsSource, stored: FileTensor, offsets: tuple[int, ...], target: Tensor) -> None:
    """Copy the box that begins at `offsets` and has the target's size, of any floating-point type, on any device.

    Raises DamagedFileError when the file was cut short meanwhile, StorageError when the store fails.
    """
    for at, chunk in rows_of(source, stored, offsets[0], target.shape[0]):
        box = chunk
        for dimension in range(1, target.dim()):
            box = box.narrow(dimension, offsets[dimension], target.shape[dimension])
        target.narrow(0, at, box.shape[0]).copy_(box)


def check_box(name: str, whole: tuple[float, ...], offsets: tuple[int, ...], size: tuple[int, ...]) -> None:
    """ValueError unless the box of `size` at `offsets` is within a tensor of the size `whole`."""
    if not len(whole) == len(offsets) == len(size):
        raise ValueError(f"{name} has {len(whole)} dimensions")
    ends = [begin + length for begin, length in zip(offsets, size, strict=True)]
    if min(offsets) < 0 or any(end > limit for end, limit in zip(ends, whole, strict=True)):
        raise ValueError(f"the box at {offsets} of size {size} is not within {name}, {whole}")

"""Read tensors of safetensors files (8 bytes of length, then JSON, then data), and boxes of them, row by row.

Guarantees:
- Every tensor lies within the file and has as many bytes as its type and size need.
- Memory beyond the target of a copy is at most one chunk.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from trainium_trainer.exits import UserError
from trainium_trainer.storage.errors import DamagedFileError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from trainium_trainer.weights.source import WeightsSource

LENGTH_BYTES = 8
_LONGEST_HEADER = 100 << 20
"""The format's limit, in bytes."""
TORCH_TYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""The supported number formats of weights, by the names of safetensors."""
CHUNK_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor in a file."""

    file: str
    dtype: str
    """The type by the name of safetensors."""
    shape: tuple[int, ...]
    start: int
    """The offset in the file."""
    length: int
    """The length in bytes."""


def parse_header_length(head: bytes, size: int) -> int:
    """Return the length of the JSON from the first LENGTH_BYTES. Raises ValueError if the file cannot be valid."""
    length = int.from_bytes(head, "little")
    if length > _LONGEST_HEADER:
        raise ValueError("does not begin as a safetensors file does")
    if LENGTH_BYTES + length > size:
        raise ValueError("ends within its header")
    return length


def parse_header(text: bytes, file: str, size: int, metadata: dict[str, str] | None = None) -> dict[str, FileTensor]:
    """Return the tensors of a header in a file of `size` bytes, and its metadata in `metadata`.

    Raises ValueError with the problem of an invalid header.
    """
    try:
        entries = json.loads(text)
        stored_metadata = entries.pop("__metadata__", {})
        if metadata is not None:
            metadata |= stored_metadata
        tensors = {name: _parse_entry(name, entry, file, LENGTH_BYTES + len(text)) for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(error.args[0] if isinstance(error, _HeaderError) else "has an invalid header") from error
    end = max((tensor.start + tensor.length for tensor in tensors.values()), default=0)
    if end > size:
        raise ValueError(f"is cut short: it has {size} bytes and its header describes {end}")
    return tensors


class _HeaderError(ValueError):
    """A header that contradicts itself."""


def _parse_entry(name: str, entry: dict[str, Any], file: str, base: int) -> FileTensor:
    dtype, shape, (begin, end) = entry["dtype"], tuple(map(int, entry["shape"])), entry["data_offsets"]
    if dtype not in TORCH_TYPES:
        # Only the reader of this tensor refuses its type, because the tensor may be for another program.
        return FileTensor(file, str(dtype), shape, base + int(begin), int(end) - int(begin))
    expected = math.prod(shape) * TORCH_TYPES[dtype].itemsize
    if begin < 0 or end - begin != expected:
        raise _HeaderError(f"gives {name} of size {list(shape)} in {dtype} {end - begin} bytes, not {expected}")
    return FileTensor(file, dtype, shape, base + begin, end - begin)


def iterate_rows(source: WeightsSource, stored: FileTensor, first: int, count: int) -> Iterator[tuple[int, Tensor]]:
    """Yield `count` rows from `first` on in chunks, each with its first index; valid until the next chunk."""
    item = TORCH_TYPES[stored.dtype].itemsize
    row = math.prod(stored.shape[1:]) * item
    rows_per_read = max(1, CHUNK_BYTES // max(1, row))
    for at in range(0, count, rows_per_read):
        rows = min(rows_per_read, count - at)
        with source.read_range(stored.file, stored.start + (first + at) * row, rows * row) as view:
            raw = torch.frombuffer(view, dtype=torch.uint8)
            if raw.data_ptr() % item:  # the format does not guarantee alignment
                raw = raw.clone()
            yield at, raw.view(TORCH_TYPES[stored.dtype]).view(rows, *stored.shape[1:])


@torch.no_grad()
def copy_box(source: WeightsSource, stored: FileTensor, offsets: tuple[int, ...], target: Tensor) -> None:
    """Copy the box that begins at `offsets` and has the target's size, of any floating-point type, on any device.

    Raises DamagedFileError if the file was truncated in the meantime, StorageError if the store fails.
    """
    for at, chunk in iterate_rows(source, stored, offsets[0], target.shape[0]):
        box = chunk
        for dimension in range(1, target.dim()):
            box = box.narrow(dimension, offsets[dimension], target.shape[dimension])
        target.narrow(0, at, box.shape[0]).copy_(box)


@torch.no_grad()
def fill_box(
    source: WeightsSource,
    name: str,
    stored: FileTensor,
    offsets: tuple[int, ...],
    target: Tensor,
    row_beyond: Callable[[], Tensor] | None = None,
) -> None:
    """Copy a box as `copy_box`; rows beyond those of the file get the row that `row_beyond` returns, if given.

    Raises ValueError for a box outside the tensor `name`, UserError if the file was truncated in the meantime,
    StorageError if the store fails.
    """
    rows = stored.shape[0]
    max_rows = rows if row_beyond is None else math.inf
    check_box(name, (max_rows, *stored.shape[1:]), offsets, tuple(target.shape))
    stored_rows = max(0, min(target.shape[0], rows - offsets[0]))
    try:
        copy_box(source, stored, offsets, target.narrow(0, 0, stored_rows))
        if stored_rows < target.shape[0] and row_beyond is not None:
            beyond = target.narrow(0, stored_rows, target.shape[0] - stored_rows)
            beyond.copy_(row_beyond().narrow(0, offsets[1], target.shape[1]).expand_as(beyond))
    except DamagedFileError as error:
        raise UserError(f"{source.label}: {error}: copy or fetch the file again") from error


def are_equal(
    size: tuple[int, ...],
    fill_first: Callable[[tuple[int, ...], Tensor], None],
    fill_second: Callable[[tuple[int, ...], Tensor], None],
) -> bool:
    """Return whether two tensors of one size have the same values; reads them up to the first difference.

    The functions copy the box at an offset into a target, as `copy_box`. Raises their errors.
    """
    rows = max(1, CHUNK_BYTES // max(1, math.prod(size[1:]) * torch.float64.itemsize))
    for start in range(0, size[0], rows):
        offsets = (start, *(0 for _ in size[1:]))
        boxes = [torch.empty((min(rows, size[0] - start), *size[1:]), dtype=torch.float64) for _ in range(2)]
        for fill, box in zip((fill_first, fill_second), boxes, strict=True):
            fill(offsets, box)
        if not torch.equal(*boxes):
            return False
    return True


def compute_mean_row(source: WeightsSource, stored: FileTensor) -> Tensor:
    """Return the mean of all rows of a matrix in float32, over fixed chunks and so equal on every rank."""
    total = torch.zeros(stored.shape[1], dtype=torch.float64)
    for _, chunk in iterate_rows(source, stored, 0, stored.shape[0]):
        total += chunk.sum(dim=0, dtype=torch.float64)
    return (total / stored.shape[0]).float()


def check_box(name: str, limits: tuple[float, ...], offsets: tuple[int, ...], size: tuple[int, ...]) -> None:
    """Raise ValueError unless the box of `size` at `offsets` is within a tensor with the sizes `limits`."""
    if not len(limits) == len(offsets) == len(size):
        raise ValueError(f"{name} has {len(limits)} dimensions")
    ends = [begin + length for begin, length in zip(offsets, size, strict=True)]
    if min(offsets) < 0 or any(end > limit for end, limit in zip(ends, limits, strict=True)):
        raise ValueError(f"the box at {offsets} of size {size} is not within {name}, {limits}")

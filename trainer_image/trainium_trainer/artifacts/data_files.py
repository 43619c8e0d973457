"""Divide the tensors of an artifact into data files, and write each as a stream.

Guarantees:
- Every tensor is in exactly one file, in the order of the model.
- No file is larger than `LARGEST` unless one tensor alone is.
- There are as many files as writers where files then do not get smaller than `SMALLEST`.
- While a file is written, memory holds only the rows being written and the next few.
"""

from __future__ import annotations

import hashlib
import math
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from trainium_trainer.artifacts.manifest import ArtifactFile
from trainium_trainer.checkpoint.format.layout import ITEM_BYTES, build_safetensors_header
from trainium_trainer.checkpoint.format.writer import view_as_bytes
from trainium_trainer.weights.tensors import TORCH_TYPES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import torch
    from torch import Tensor

    from trainium_trainer.storage.protocol import Storage

LARGEST = 5_000_000_000
SMALLEST = 256_000_000


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A safetensors file."""

    name: str
    tensors: tuple[tuple[str, tuple[int, ...]], ...]
    """The name and size of each tensor, in order."""
    dtype: str
    """The type by the format's name."""
    header: bytes
    """The header of the file."""

    @property
    def size(self) -> int:
        """The size of the whole file in bytes."""
        return len(self.header) + sum(math.prod(size) for _, size in self.tensors) * ITEM_BYTES[self.dtype]


def plan_files(
    sizes: Mapping[str, tuple[int, ...]],
    dtype: str,
    stem: str,
    *,
    writers: int = 1,
    max_file_bytes: int | None = None,
    metadata: Mapping[str, str] | None = None,
) -> tuple[PlannedFile, ...]:
    """Return the files for tensors of these sizes: `stem.safetensors`, or several with numbers.

    Each has at most `max_file_bytes` bytes of tensors; by default the limit follows from the number of writers.
    """
    item = ITEM_BYTES[dtype]
    total = sum(math.prod(size) for size in sizes.values()) * item
    if max_file_bytes is None:
        max_file_bytes = min(LARGEST, max(SMALLEST, -(-total // writers)))
    parts: list[list[tuple[str, tuple[int, ...]]]] = [[]]
    used = 0
    for name, size in sizes.items():
        length = math.prod(size) * item
        if parts[-1] and used + length > max_file_bytes:
            parts.append([])
            used = 0
        parts[-1].append((name, tuple(size)))
        used += length
    names = [f"{stem}.safetensors"]
    if len(parts) > 1:
        names = [f"{stem}-{number:05d}-of-{len(parts):05d}.safetensors" for number in range(1, len(parts) + 1)]
    metadata = {"format": "pt", **(metadata or {})}
    return tuple(
        PlannedFile(
            name,
            tuple(part),
            dtype,
            build_safetensors_header([(tensor, dtype, size) for tensor, size in part], metadata),
        )
        for name, part in zip(names, parts, strict=True)
    )


def build_index(files: tuple[PlannedFile, ...]) -> dict[str, Any]:
    """Return the contents of the index of several files."""
    total = sum(file.size - len(file.header) for file in files)
    file_by_tensor = {name: file.name for file in files for name, _ in file.tensors}
    return {"metadata": {"total_size": total}, "weight_map": file_by_tensor}


CHUNK_BYTES = 16 << 20
"""The size of the rows computed at once, in float32: the C library reuses such memory without new pages."""
_FLOAT32_BYTES = 4
_MADE_AHEAD = 2


def write_file(
    storage: Storage,
    file: PlannedFile,
    rows: Callable[[str, int, int, torch.dtype], Tensor],
    heartbeat: Callable[[int], None],
) -> ArtifactFile:
    """Write a file; `rows` returns rows of a tensor, `heartbeat` is called with the number of written bytes.

    Raises OSError if the store fails, and the errors of `rows`.
    """
    sha = hashlib.sha256()
    failures: list[BaseException] = []
    with ThreadPoolExecutor(_MADE_AHEAD + 1, thread_name_prefix="artifact") as pool:

        def iterate_pieces() -> Iterator[memoryview]:
            try:
                yield from _encode_pieces(file, rows, sha.update, pool, heartbeat)
            except GeneratorExit:
                raise
            except BaseException as error:
                failures.append(error)
                raise

        try:
            storage.write_stream(file.name, iterate_pieces(), file.size)
        except BaseException:
            if failures:  # some stores wrap it in another error
                raise failures[0] from None
            raise
    return ArtifactFile(name=file.name, size=file.size, digest=sha.hexdigest())


def _encode_pieces(
    file: PlannedFile,
    rows: Callable[[str, int, int, torch.dtype], Tensor],
    update: Callable[[memoryview], None],
    pool: ThreadPoolExecutor,
    heartbeat: Callable[[int], None],
) -> Iterator[memoryview]:
    dtype = TORCH_TYPES[file.dtype]

    def make(part: tuple[str, int, int]) -> memoryview:
        return view_as_bytes(rows(*part, dtype))

    header = memoryview(file.header)
    update(header)
    yield header
    parts = _divide_file(file)
    coming = deque(pool.submit(make, part) for part in islice(parts, _MADE_AHEAD))
    hashed: Future[None] | None = None
    while coming:
        view = coming.popleft().result()
        coming.extend(pool.submit(make, part) for part in islice(parts, 1))
        if hashed is not None:
            hashed.result()
        hashed = pool.submit(update, view)
        yield view
        heartbeat(len(view))
    if hashed is not None:
        hashed.result()


def _divide_file(file: PlannedFile) -> Iterator[tuple[str, int, int]]:
    """Yield tensor, first row and number of rows of each piece, in the file's order."""
    for name, size in file.tensors:
        rows_per_part = max(1, CHUNK_BYTES // (_FLOAT32_BYTES * math.prod(size[1:])))
        for first in range(0, size[0], rows_per_part):
            yield name, first, min(rows_per_part, size[0] - first)

"""PURE. Which tensors go into which file of an artifact: a function of sizes, type and number of writers.

Invariants: every tensor is in exactly one file, in the order of the model; no file is larger than `LARGEST` unless one
tensor alone is; there are as many files as writers where files then do not get smaller than `SMALLEST`.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainium_trainer.weights.tensors import ITEM_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping

LARGEST = 5_000_000_000
SMALLEST = 256_000_000
_ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """One safetensors file."""

    name: str
    tensors: tuple[tuple[str, tuple[int, ...]], ...]
    """Name and size of each, in their order."""
    dtype: str
    """Type, as the format names it."""
    header: bytes
    """The file's first bytes."""

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return len(self.header) + sum(math.prod(size) for _, size in self.tensors) * ITEM_BYTES[self.dtype]


def plan_files(
    sizes: Mapping[str, tuple[int, ...]],
    dtype: str,
    stem: str,
    *,
    writers: int = 1,
    largest: int | None = None,
    metadata: Mapping[str, str] | None = None,
) -> tuple[PlannedFile, ...]:
    """Return the files for tensors of these sizes: `stem.safetensors`, or several with numbers.

    Each has at most `largest` bytes of tensors; omitted, that follows from the number of writers.
    """
    item = ITEM_BYTES[dtype]
    total = sum(math.prod(size) for size in sizes.values()) * item
    if largest is None:
        largest = min(LARGEST, max(SMALLEST, -(-total // writers)))
    parts: list[list[tuple[str, tuple[int, ...]]]] = [[]]
    used = 0
    for name, size in sizes.items():
        length = math.prod(size) * item
        if parts[-1] and used + length > largest:
            parts.append([])
            used = 0
        parts[-1].append((name, tuple(size)))
        used += length
    names = [f"{stem}.safetensors"]
    if len(parts) > 1:
        names = [f"{stem}-{number:05d}-of-{len(parts):05d}.safetensors" for number in range(1, len(parts) + 1)]
    return tuple(
        PlannedFile(name, tuple(part), dtype, _header(part, dtype, metadata or {}))
        for name, part in zip(names, parts, strict=True)
    )


def index_of(files: tuple[PlannedFile, ...]) -> dict[str, Any]:
    """Return the contents of the index of several files."""
    total = sum(file.size - len(file.header) for file in files)
    places = {name: file.name for file in files for name, _ in file.tensors}
    return {"metadata": {"total_size": total}, "weight_map": places}


def _header(tensors: list[tuple[str, tuple[int, ...]]], dtype: str, metadata: Mapping[str, str]) -> bytes:
    """Length and JSON, padded so that tensors are aligned."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    at = 0
    for name, size in tensors:
        end = at + math.prod(size) * ITEM_BYTES[dtype]
        entries[name] = {"dtype": dtype, "shape": list(size), "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text

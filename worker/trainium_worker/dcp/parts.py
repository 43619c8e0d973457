"""The parts of a save: one per rank, with an index of its tensors at the end of its payload.

The name of a part is its rank, its layout the offset of the index, and a version has the number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Union

from trainium_worker.snapshots.files import ALIGNMENT_BYTES, round_up

if TYPE_CHECKING:
    import io
    import os
    from collections.abc import Iterable, Sequence

    import torch
    from torch.distributed.checkpoint.planner import WriteItem

    from trainium_worker.snapshots.files import Part, Version

StrPath = Union[str, "os.PathLike[str]"]


@dataclass(frozen=True)
class Span:
    """The location of an item of a save: bytes `start` to `end` in the payload of a rank."""

    rank: int
    start: int
    end: int

    @property
    def size(self) -> int:
        """The number of bytes."""
        return self.end - self.start

    @property
    def aligned_size(self) -> int:
        """The number of bytes up to the next item, so that every item is aligned for its type."""
        return round_up(self.size, ALIGNMENT_BYTES)


@dataclass(frozen=True)
class Entry:
    """An item of the plan of a save and its location."""

    item: WriteItem
    span: Span

    def tensor(self, payload: torch.Tensor) -> torch.Tensor:
        """Return the tensor at the start of a slice of a payload."""
        data = self.item.tensor_data
        assert data is not None, "only items with tensors have one"
        return payload[: self.span.size].view(data.properties.dtype).view(data.chunk.sizes)


def lay_out(items: Sequence[WriteItem], serialized: dict[int, io.BytesIO], rank: int) -> list[Entry]:
    """Lay out the items in a rank's payload one after another; `serialized`: those without a tensor, by index. Pure."""
    entries, start = [], 0
    for number, item in enumerate(items):
        if item.tensor_data is None:
            size = serialized[number].getbuffer().nbytes
        else:
            size = prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize
        entries.append(Entry(item, Span(rank, start, start + size)))
        start = round_up(start + size, ALIGNMENT_BYTES)
    return entries


def newest_complete(parts_in_memory: Iterable[Part]) -> tuple[Part, ...]:
    """Return the parts, by rank, of the newest save with all parts; empty if there is none. Pure."""
    saves: dict[Version, dict[str, Part]] = {}
    for part in parts_in_memory:
        saves.setdefault(part.version, {})[part.name] = part
    complete_saves = [version for version, parts in saves.items() if str(len(parts)) == version.details]
    if not complete_saves:
        return ()
    newest = max(complete_saves)
    return tuple(saves[newest][str(rank)] for rank in range(int(newest.details)))

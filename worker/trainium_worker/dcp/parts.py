"""The parts of a save: one per rank, in a snapshot file with an index of its tensors."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass
from math import prod
from typing import TYPE_CHECKING, Union

from trainium_worker import snapshot
from trainium_worker.snapshot import DamagedSnapshotError

if TYPE_CHECKING:
    import io
    import os
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    import torch
    from torch.distributed.checkpoint.planner import WriteItem

_log = logging.getLogger(__name__)

SUFFIX = ".snapshot"
ALIGNMENT_BYTES = 64
StrPath = Union[str, "os.PathLike[str]"]


@dataclass(frozen=True, order=True)
class SaveId:
    """The identity of a save, which its parts have in common; ordered by age."""

    step: int
    generation: int
    attempt: int
    session: str
    """The session of the processes that saved: two sessions may have reached one step with different states."""
    world_size: int


@dataclass(frozen=True)
class Part:
    """One rank's part of a save."""

    save: SaveId
    rank: int
    payload_bytes: int
    index_start: int
    """The offset of the index in the payload."""
    checksum: str = ""

    def to_header(self) -> bytes:
        """Serialize the part as the header of a snapshot."""
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def from_header(header: bytes, name: str) -> Part:
        """Parse the result of `to_header`. Raises DamagedSnapshotError for a header of another format."""
        try:
            values = json.loads(header)
            return Part(**{**values, "save": SaveId(**values["save"])})
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedSnapshotError(f"{name}: the header is of another format") from error


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


def round_up(value: int, multiple: int) -> int:
    """Round a value up to the next multiple."""
    return -(-value // multiple) * multiple


def read_parts(directory: Path) -> dict[Path, Part]:
    """Return the finished snapshots in a directory with valid headers."""
    parts: dict[Path, Part] = {}
    for path in sorted(directory.glob(f"*{SUFFIX}")):
        try:
            header = snapshot.read_header(path)
            part = None if header is None else Part.from_header(header, path.name)
        except FileNotFoundError:  # another rank of this node has removed it
            continue
        except (DamagedSnapshotError, OSError) as error:
            _log.warning("a snapshot in memory is not used: %s", error)
            continue
        if part is not None:
            parts[path] = part
    return parts


def newest_complete(parts_in_memory: Iterable[Part]) -> tuple[Part, ...]:
    """Return the parts, by rank, of the newest save with all parts; empty if there is none. Pure."""
    saves: dict[SaveId, dict[int, Part]] = {}
    for part in parts_in_memory:
        saves.setdefault(part.save, {})[part.rank] = part
    complete_saves = [save for save, parts in saves.items() if len(parts) == save.world_size]
    if not complete_saves:
        return ()
    newest = max(complete_saves)
    return tuple(saves[newest][rank] for rank in range(newest.world_size))


def find_buddies(stores: Sequence[str], rank: int) -> tuple[int | None, list[int]]:
    """Return the rank that keeps copies for `rank`, if any, and the ranks for which it keeps copies. Pure.

    stores: the store of the node of each rank.
    """
    ranks_by_store: dict[str, list[int]] = {}
    for number, store in enumerate(stores):
        ranks_by_store.setdefault(store, []).append(number)
    partners = snapshot.pair_stores(list(ranks_by_store))

    def find_target(source: int) -> int | None:
        targets = ranks_by_store.get(partners.get(stores[source], ""))
        return targets[ranks_by_store[stores[source]].index(source) % len(targets)] if targets else None

    return find_target(rank), [source for source in range(len(stores)) if find_target(source) == rank]

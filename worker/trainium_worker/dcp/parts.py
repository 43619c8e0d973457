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
ALIGNMENT = 64
StrPath = Union[str, "os.PathLike[str]"]
SaveKey = tuple[int, int, int, str, int]


@dataclass(frozen=True)
class Part:
    """One rank's part of a save."""

    step: int
    generation: int
    attempt: int
    session: str
    """The session of the processes that saved: two sessions may have reached one step with different states."""
    rank: int
    world: int
    payload_bytes: int
    index_start: int
    """The offset of the index in the payload."""
    checksum: str = ""

    @property
    def save(self) -> SaveKey:
        """Return the common identity of the parts of a save, ordered by age."""
        return self.step, self.generation, self.attempt, self.session, self.world

    def to_text(self) -> bytes:
        """Serialize the part as the text of a snapshot's header."""
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def from_text(text: bytes, name: str) -> Part:
        """Parse the result of `to_text`. Raises DamagedSnapshotError for a text of another format."""
        try:
            return Part(**json.loads(text))
        except (TypeError, ValueError) as error:
            raise DamagedSnapshotError(f"{name}: the header is of another format") from error


@dataclass(frozen=True)
class Entry:
    """The location of an item of the plan of a save in the payload of a rank."""

    item: WriteItem
    start: int
    end: int

    def tensor(self, payload: torch.Tensor) -> torch.Tensor:
        """Return the tensor in a payload, or in a slice of it that begins with the entry."""
        data = self.item.tensor_data
        assert data is not None, "only items with tensors have one"
        return payload[: self.end - self.start].view(data.properties.dtype).view(data.chunk.sizes)


def lay_out(items: Sequence[WriteItem], texts: dict[int, io.BytesIO]) -> list[Entry]:
    """Lay out the items in a payload one after another; `texts` are those without a tensor, by index. Pure."""
    entries, at = [], 0
    for number, item in enumerate(items):
        if item.tensor_data is None:
            size = texts[number].getbuffer().nbytes
        else:
            size = prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize
        entries.append(Entry(item, at, at + size))
        at = round_up(at + size, ALIGNMENT)
    return entries


def round_up(value: int, multiple: int) -> int:
    """Round a value up to the next multiple."""
    return -(-value // multiple) * multiple


def read_parts(directory: Path) -> dict[Path, Part]:
    """Return the finished snapshots in a directory with valid headers."""
    parts: dict[Path, Part] = {}
    for path in sorted(directory.glob(f"*{SUFFIX}")):
        try:
            text = snapshot.read_text(path)
            part = None if text is None else Part.from_text(text[0], path.name)
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
    saves: dict[SaveKey, dict[int, Part]] = {}
    for part in parts_in_memory:
        saves.setdefault(part.save, {})[part.rank] = part
    complete_saves = [save for save, parts in saves.items() if len(parts) == save[-1]]
    return tuple(saves[max(complete_saves)][rank] for rank in range(max(complete_saves)[-1])) if complete_saves else ()


def find_buddies(stores: Sequence[str], rank: int) -> tuple[int | None, list[int]]:
    """Return the rank that keeps copies for `rank`, if any, and the ranks for which it keeps copies. Pure.

    stores: the store of the node of each rank.
    """
    ranks: dict[str, list[int]] = {}
    for number, store in enumerate(stores):
        ranks.setdefault(store, []).append(number)
    partner = snapshot.pair_stores(list(ranks))

    def target(source: int) -> int | None:
        keepers = ranks.get(partner.get(stores[source], ""))
        return keepers[ranks[stores[source]].index(source) % len(keepers)] if keepers else None

    return target(rank), [source for source in range(len(stores)) if target(source) == rank]

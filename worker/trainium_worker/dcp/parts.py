"""Describe a save: one part of each rank, in a snapshot file with an index of its tensors."""

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
    """One rank's share of a save."""

    step: int
    generation: int
    attempt: int
    session: str
    """Session of the processes that saved: two sessions may have reached one step with different states."""
    rank: int
    world: int
    payload_bytes: int
    index_start: int
    """Where the index of the payload begins in it."""
    checksum: str = ""

    @property
    def save(self) -> SaveKey:
        """Return what the parts of a save have in common, ordered by age."""
        return self.step, self.generation, self.attempt, self.session, self.world

    def to_text(self) -> bytes:
        """Return the text of a snapshot's header."""
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def from_text(text: bytes, name: str) -> Part:
        """Return the reverse. DamagedSnapshotError for a text of another format."""
        try:
            return Part(**json.loads(text))
        except (TypeError, ValueError) as error:
            raise DamagedSnapshotError(f"{name}: the header is of another format") from error


@dataclass(frozen=True)
class Entry:
    """Where an item of the plan of a save lies in the payload of a rank."""

    item: WriteItem
    start: int
    end: int

    def tensor(self, payload: torch.Tensor) -> torch.Tensor:
        """Return the tensor in a payload, or in a slice of it that begins with the entry."""
        data = self.item.tensor_data
        assert data is not None, "only items with tensors have one"
        return payload[: self.end - self.start].view(data.properties.dtype).view(data.chunk.sizes)


def lay_out(items: Sequence[WriteItem], texts: dict[int, io.BytesIO]) -> list[Entry]:
    """PURE. Place the items in a payload one after another; `texts`: those without a tensor, by number."""
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
    """Return the next multiple that is not below a value."""
    return -(-value // multiple) * multiple


def read_parts(directory: Path) -> dict[Path, Part]:
    """Return the finished snapshots in a directory whose headers are whole."""
    found: dict[Path, Part] = {}
    for path in sorted(directory.glob(f"*{SUFFIX}")):
        try:
            text = snapshot.read_text(path)
            part = None if text is None else Part.from_text(text[0], path.name)
        except FileNotFoundError:  # another rank of this node removed it
            continue
        except (DamagedSnapshotError, OSError) as error:
            _log.warning("a snapshot in memory is not used: %s", error)
            continue
        if part is not None:
            found[path] = part
    return found


def newest_complete(held: Iterable[Part]) -> tuple[Part, ...]:
    """PURE. Return the parts, by rank, of the newest save of which every part is held; none where there is none."""
    saves: dict[SaveKey, dict[int, Part]] = {}
    for part in held:
        saves.setdefault(part.save, {})[part.rank] = part
    whole = [save for save, parts in saves.items() if len(parts) == save[-1]]
    return tuple(saves[max(whole)][rank] for rank in range(max(whole)[-1])) if whole else ()


def find_buddies(stores: Sequence[str], rank: int) -> tuple[int | None, list[int]]:
    """PURE. Return the rank that keeps copies for `rank`, if any, and the ranks that it keeps copies for.

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

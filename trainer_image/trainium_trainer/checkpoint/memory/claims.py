"""PURE. The identity of a snapshot: the part of the state, the moment, and the claim of a store to hold it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainium_trainer.checkpoint.interfaces import Position


@dataclass(frozen=True, slots=True, order=True)
class ShardKey:
    """Which part of the state a snapshot holds; replicas share one key (their data-parallel part is 0 of 1)."""

    tp_rank: int
    tp_size: int
    dp_rank: int = 0
    dp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1

    def same_layout(self, other: ShardKey) -> bool:
        """Return whether both belong to the same way of cutting up the state."""
        return (self.tp_size, self.dp_size, self.pp_size) == (other.tp_size, other.dp_size, other.pp_size)

    def __str__(self) -> str:
        stage = f"p{self.pp_rank}of{self.pp_size}" if self.pp_size > 1 else ""
        return f"t{self.tp_rank}of{self.tp_size}-d{self.dp_rank}of{self.dp_size}{stage}"


@dataclass(frozen=True, slots=True, order=True)
class Moment:
    """One state of the whole run: a position as one session reached it."""

    position: Position
    generation: int
    session: str


@dataclass(frozen=True, slots=True, order=True)
class Claim:
    """A snapshot that a store claims to hold."""

    moment: Moment
    key: ShardKey
    layout: str
    """Digest of names, shapes and types of the shard's tensors."""
    checksum: str

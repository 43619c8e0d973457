"""PURE. Which step to resume, from where, and who sends which snapshot to whom.

Every rank evaluates `decide` on the same gathered views and so reaches the same answer without further talk.

Invariants: a step is taken from memory only when every shard that some rank needs exists in some store, written by the
same session (two sessions may have written different states under one step number); the newest such step wins and
loses only to a strictly newer durable one; every store that lacks a shard receives it exactly once, from a store that
has it by then, and the number of rounds grows with the logarithm of the number of receivers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from trainium_trainer.checkpoint.interfaces import Position


@dataclass(frozen=True, slots=True, order=True)
class ShardKey:
    """Which part of the state a snapshot holds; replicas share one key (their data-parallel part is 0 of 1)."""

    tp_rank: int
    tp_size: int
    dp_rank: int = 0
    dp_size: int = 1

    def same_layout(self, other: ShardKey) -> bool:
        """Whether both belong to the same way of cutting up the state."""
        return (self.tp_size, self.dp_size) == (other.tp_size, other.dp_size)

    def __str__(self) -> str:
        return f"t{self.tp_rank}of{self.tp_size}-d{self.dp_rank}of{self.dp_size}"


@dataclass(frozen=True, slots=True, order=True)
class Moment:
    """One state of the whole run: a position as one session reached it."""

    position: Position
    generation: int
    session: str


@dataclass(frozen=True, slots=True, order=True)
class Claim:
    """A snapshot that a store says it holds."""

    moment: Moment
    key: ShardKey
    layout: str
    """Digest of names, shapes and types of the shard's tensors."""
    checksum: str


@dataclass(frozen=True, slots=True)
class RankView:
    """What one rank needs and what the snapshot store that it can read holds; ranks of a node share a store."""

    rank: int
    store: str
    needs: ShardKey
    layout: str
    claims: frozenset[Claim] = field(default_factory=frozenset)


@dataclass(frozen=True, slots=True, order=True)
class Transfer:
    """One shard that rank `source` sends to rank `target`, which keeps it in its store."""

    source: int
    target: int
    key: ShardKey


@dataclass(frozen=True, slots=True)
class FromMemory:
    """Resume this moment; do the rounds of transfers in order, then every rank finds its shard in its store."""

    moment: Moment
    rounds: tuple[tuple[Transfer, ...], ...]


@dataclass(frozen=True, slots=True)
class FromDurable:
    """Resume the committed checkpoint of this step."""

    step: int


@dataclass(frozen=True, slots=True)
class Fresh:
    """Start from the initial weights."""


Decision = FromMemory | FromDurable | Fresh


def decide(views: Sequence[RankView], durable_steps: Iterable[int]) -> Decision:
    """The newest state that the ranks of `views` can all resume, memory before storage at the same step."""
    durable = max(durable_steps, default=None)
    moments = sorted({claim.moment for view in views for claim in view.claims}, reverse=True)
    for moment in moments:
        if durable is not None and durable > moment.position.step:
            break
        if _is_complete(views, moment):
            return FromMemory(moment, _rounds(views, moment))
    return Fresh() if durable is None else FromDurable(durable)


def writers(views: Sequence[RankView]) -> frozenset[int]:
    """The ranks that write snapshots: one of those that share both a store and a shard, the lowest."""
    chosen: dict[tuple[str, ShardKey], int] = {}
    for view in views:
        place = (view.store, view.needs)
        chosen[place] = min(view.rank, chosen.get(place, view.rank))
    return frozenset(chosen.values())


def caretakers(views: Sequence[RankView]) -> frozenset[int]:
    """The ranks that clear leftovers: the lowest of each store."""
    lowest: dict[str, int] = {}
    for view in views:
        lowest[view.store] = min(view.rank, lowest.get(view.store, view.rank))
    return frozenset(lowest.values())


def _is_complete(views: Sequence[RankView], moment: Moment) -> bool:
    held = {(claim.key, claim.layout) for view in views for claim in view.claims if claim.moment == moment}
    return all((view.needs, view.layout) in held for view in views)


def _rounds(views: Sequence[RankView], moment: Moment) -> tuple[tuple[Transfer, ...], ...]:
    """Per key a doubling tree over stores: each store that has the shard sends it to one that lacks it."""
    rounds: list[list[Transfer]] = []
    for key in sorted({view.needs for view in views}):
        has = {view.store for view in views for claim in view.claims if claim.moment == moment and claim.key == key}
        senders = [_spokesman(views, store, key) for store in sorted(has)]
        senders.sort()
        receivers = sorted(
            _spokesman(views, store, key) for store in {v.store for v in views if v.needs == key} if store not in has
        )
        number = 0
        while receivers:
            batch, receivers = receivers[: len(senders)], receivers[len(senders) :]
            if number == len(rounds):
                rounds.append([])
            rounds[number].extend(Transfer(source, target, key) for source, target in zip(senders, batch, strict=False))
            senders += batch
            number += 1
    return tuple(tuple(each) for each in rounds)


def _spokesman(views: Sequence[RankView], store: str, key: ShardKey) -> int:
    """The rank that sends or receives `key` for a store: one that needs it if there is one, the lowest."""
    return min((view.needs != key, view.rank) for view in views if view.store == store)[1]

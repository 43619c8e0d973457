"""PURE. What the stores hold, the step to resume, its source, and who sends which snapshot to whom.

The first rank evaluates `decide` on what all ranks report (`first_rank.py`).

Guarantees:
- A step is taken from memory only when every shard that some rank needs exists in some store, written by the same
  session: two sessions may have written different states under one step number.
- The newest such step wins and loses only to a strictly newer durable one.
- Every store that lacks a shard receives it exactly once, from a store that has it by then.
- The number of rounds grows with the logarithm of the number of receivers.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from trainium_worker.snapshot import pair_stores

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from trainium_trainer.checkpoint.memory.snapshot import Claim, Moment, ShardKey


@dataclass(frozen=True, slots=True)
class RankView:
    """The needs of one rank, and the contents of the snapshot store that it can read; ranks of a node share a store."""

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


@dataclass(frozen=True, slots=True, order=True)
class BuddyCopy:
    """A shard that is in one store only: rank `source` writes it and passes copies on to rank `target`."""

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
    """Return the newest state that the ranks of `views` can all resume, memory before storage at the same step.

    Its cost is linear in the number of views and claims together: each is looked at once.
    """
    durable = max(durable_steps, default=None)
    held = _index(views)
    needed = {(view.needs, view.layout) for view in views}
    # A set is compared by the smaller one's size, so all comparisons together cost what the claims do.
    moment = max((moment for moment, shards in held.items() if needed <= shards.whole), default=None)
    if moment is not None and (durable is None or durable <= moment.position.step):
        return FromMemory(moment, _rounds(views, held[moment].stores))
    return Fresh() if durable is None else FromDurable(durable)


def claims_to_report(neighbours: Iterable[RankView], rank: int, claims: Iterable[Claim]) -> frozenset[Claim]:
    """Return those of a store's `claims` that `rank` reports; `neighbours` are at least all that share the store.

    One rank of a store represents each shard, the same that would send it, and nobody represents shards of another
    way of cutting up the state, which no rank can need. So all ranks together report each snapshot once, and `decide`
    comes to what it would if each reported everything.
    """
    here = list(neighbours)
    mine = next(view for view in here if view.rank == rank)
    representatives = _Representatives(view for view in here if view.store == mine.store)
    return frozenset(
        claim
        for claim in claims
        if claim.key.same_layout(mine.needs) and representatives.of(mine.store, claim.key) == rank
    )


def writers(views: Sequence[RankView]) -> frozenset[int]:
    """Return the ranks that write snapshots: one of those that share both a store and a shard, the lowest."""
    chosen: dict[tuple[str, ShardKey], int] = {}
    for view in views:
        place = (view.store, view.needs)
        chosen[place] = min(view.rank, chosen.get(place, view.rank))
    return frozenset(chosen.values())


def cleanup_ranks(views: Sequence[RankView]) -> frozenset[int]:
    """Return the ranks that clear leftovers: the lowest of each store."""
    lowest: dict[str, int] = {}
    for view in views:
        lowest[view.store] = min(view.rank, lowest.get(view.store, view.rank))
    return frozenset(lowest.values())


def choose_buddies(views: Sequence[RankView], usable: Iterable[str]) -> tuple[BuddyCopy, ...]:
    """Return who keeps copies of which shards, so that no shard is lost with one of the `usable` stores.

    Only shards that a single store holds need one: replicas are copies already.
    """
    holders: dict[ShardKey, set[str]] = {}
    ranks: dict[str, list[int]] = {}
    for view in sorted(views, key=lambda view: view.rank):
        holders.setdefault(view.needs, set()).add(view.store)
        ranks.setdefault(view.store, []).append(view.rank)
    chosen = set(usable)
    partner = pair_stores([store for store in ranks if store in chosen])
    writing = writers(views)
    exposed: dict[str, list[RankView]] = {}
    found: list[BuddyCopy] = []
    for view in sorted(views, key=lambda view: view.rank):
        if view.store in partner and view.rank in writing and len(holders[view.needs]) == 1:
            exposed.setdefault(view.store, []).append(view)
    for store, other in partner.items():
        for number, view in enumerate(exposed.get(store, ())):
            keepers = ranks[other]
            found.append(BuddyCopy(view.rank, keepers[number % len(keepers)], view.needs))
    return tuple(sorted(found))


@dataclass(slots=True)
class _Held:
    """The parts of one moment that all stores together hold."""

    whole: set[tuple[ShardKey, str]] = field(default_factory=set)
    """Shards and their layouts."""
    stores: dict[ShardKey, set[str]] = field(default_factory=dict)


def _index(views: Sequence[RankView]) -> dict[Moment, _Held]:
    found: dict[Moment, _Held] = {}
    for view in views:
        for claim in view.claims:
            held = found.get(claim.moment)
            if held is None:
                held = found[claim.moment] = _Held()
            held.whole.add((claim.key, claim.layout))
            held.stores.setdefault(claim.key, set()).add(view.store)
    return found


class _Representatives:
    """The rank that sends or receives a shard for a store: one that needs it if there is one, the lowest."""

    def __init__(self, views: Iterable[RankView]) -> None:
        self._any: dict[str, int] = {}
        self._needing: dict[tuple[str, ShardKey], int] = {}
        for view in views:
            self._any[view.store] = min(view.rank, self._any.get(view.store, view.rank))
            place = (view.store, view.needs)
            self._needing[place] = min(view.rank, self._needing.get(place, view.rank))

    def of(self, store: str, key: ShardKey) -> int:
        """For one store and shard."""
        return self._needing.get((store, key), self._any[store])


def _rounds(views: Sequence[RankView], holders: Mapping[ShardKey, set[str]]) -> tuple[tuple[Transfer, ...], ...]:
    """Per key a doubling tree over stores: each store that has the shard sends it to one that lacks it.

    `holders`: the stores that have a shard of the moment to resume.
    """
    rounds: list[list[Transfer]] = []
    representatives = _Representatives(views)
    wanting: dict[ShardKey, set[str]] = {}
    for view in views:
        wanting.setdefault(view.needs, set()).add(view.store)
    for key, stores in sorted(wanting.items()):
        has = holders[key]
        senders = sorted(representatives.of(store, key) for store in has)
        receivers = sorted(representatives.of(store, key) for store in stores - has)
        number = 0
        while receivers:
            batch, receivers = receivers[: len(senders)], receivers[len(senders) :]
            if number == len(rounds):
                rounds.append([])
            rounds[number].extend(Transfer(source, target, key) for source, target in zip(senders, batch, strict=False))
            senders += batch
            number += 1
    return tuple(tuple(each) for each in rounds)


class SnapshotInventory:
    """The contents of every snapshot store of one start, as the first rank learns them.

    Each rank reports once what it represents (`claims_to_report`). Differences follow: a snapshot that turned out
    damaged, a moment that could not be exchanged, a store without space. The cost of every method is linear in the
    ranks, their claims and the transfers.
    """

    def __init__(self, views: Sequence[RankView], reported: Sequence[Iterable[Claim]]) -> None:
        """Take the views of all ranks, by rank, without claims, and the claims that each rank reports."""
        self._places = tuple(views)
        self._claims: dict[str, set[Claim]] = {view.store: set() for view in views}
        for view, claims in zip(views, reported, strict=True):
            self._claims[view.store].update(claims)
        self._split: set[str] = set()

    def views(self) -> list[RankView]:
        """Return what `decide` is asked with, by rank; one rank of each store has the store's claims."""
        reported: set[str] = set()
        found: list[RankView] = []
        for view in self._places:
            if view.store in self._split:
                # They cannot share what arrives, though they all read what is there.
                own = replace(view, store=f"{view.store}#{view.rank}", claims=frozenset(self._claims[view.store]))
            else:
                own = view if view.store in reported else replace(view, claims=frozenset(self._claims[view.store]))
                reported.add(view.store)
            found.append(own)
        return found

    def split(self, without_space: Iterable[int]) -> None:
        """Split the stores of these ranks, which cannot be written, where several ranks share one.

        Each rank gets its part.
        """
        sharing: dict[str, int] = {}
        for view in self._places:
            sharing[view.store] = sharing.get(view.store, 0) + 1
        self._split |= {store for rank in without_space if sharing[store := self._places[rank].store] > 1}

    def remove_claims(self, rank: int, claims: Iterable[Claim]) -> None:
        """Snapshots that `rank` could not read in its store."""
        self._claims[self._places[rank].store].difference_update(claims)

    def exclude(self, moment: Moment) -> None:
        """Exclude a moment that could not be exchanged."""
        for store, claims in self._claims.items():
            self._claims[store] = {claim for claim in claims if claim.moment != moment}

    def checks(self, decision: FromMemory) -> list[tuple[Claim, ...]]:
        """By rank: the snapshots of its store that it needs or sends."""
        held = self._held(decision.moment)
        wanted = [{view.needs} for view in self._places]
        for batch in decision.rounds:
            for each in batch:
                wanted[each.source].add(each.key)
        return [
            tuple(claim for key in sorted(keys) if (claim := held[view.store].get(key)) is not None)
            for view, keys in zip(self._places, wanted, strict=True)
        ]

    def origins(self, decision: FromMemory) -> list[Claim]:
        """By rank: the snapshot that its shard stems from after the exchange, the one that was sent first."""
        held = self._held(decision.moment)
        stores = [view.store for view in self.views()]
        arrived: dict[tuple[str, ShardKey], Claim] = {}

        def origin(rank: int, key: ShardKey) -> Claim:
            own = held[self._places[rank].store].get(key)
            return own if own is not None else arrived[stores[rank], key]

        for batch in decision.rounds:
            for each in batch:
                arrived[stores[each.target], each.key] = origin(each.source, each.key)
        return [origin(view.rank, view.needs) for view in self._places]

    def _held(self, moment: Moment) -> dict[str, dict[ShardKey, Claim]]:
        """Return what each store has of a moment; of two snapshots of a shard the lesser."""
        found: dict[str, dict[ShardKey, Claim]] = {}
        for store, claims in self._claims.items():
            here = found[store] = {}
            for claim in claims:
                if claim.moment == moment:
                    other = here.get(claim.key)
                    here[claim.key] = claim if other is None else min(claim, other)
        return found

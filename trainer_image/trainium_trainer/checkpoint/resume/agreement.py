"""Decide the step to resume, its source and the transfers of snapshots between stores. Pure functions.

Rank 0 evaluates `decide` on what all ranks report (`leader.py`).

Guarantees:
- A step is taken from memory only when every shard that some rank needs exists in some store, written by the same
  session: two sessions may have written different states under one step number.
- The newest such step is resumed, unless a durable checkpoint is strictly newer.
- Every store that lacks a shard receives it exactly once, from a store that already has it.
- The number of rounds grows with the logarithm of the number of receivers.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from trainium_trainer.checkpoint.memory.layout import describe_mesh
from trainium_worker.snapshots import copies

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from trainium_worker.snapshots.files import Part, Version


@dataclass(frozen=True, slots=True)
class RankView:
    """The shard that a rank needs and the contents of its snapshot store; ranks of a node share a store."""

    rank: int
    store: str
    needs: str
    """The name of the shard."""
    layout: str
    records: frozenset[Part] = field(default_factory=frozenset)


@dataclass(frozen=True, slots=True, order=True)
class Transfer:
    """A shard that rank `source` sends to rank `target`, which writes it into its store: once, or as a buddy."""

    source: int
    target: int
    key: str


@dataclass(frozen=True, slots=True)
class ResumeFromMemory:
    """Resume this version: after the rounds of transfers, in order, every rank finds its shard in its store."""

    version: Version
    rounds: tuple[tuple[Transfer, ...], ...]


@dataclass(frozen=True, slots=True)
class ResumeFromDurable:
    """Resume the committed checkpoint of this step."""

    step: int


@dataclass(frozen=True, slots=True)
class FreshStart:
    """Start from the initial weights."""


Decision = ResumeFromMemory | ResumeFromDurable | FreshStart


def decide(views: Sequence[RankView], durable_steps: Iterable[int]) -> Decision:
    """Return the newest state that the ranks of `views` can all resume, memory before storage at the same step.

    The cost is linear in the number of views plus records.
    """
    durable = max(durable_steps, default=None)
    shards_by_version = _group_shards(views)
    needed = {(view.needs, view.layout) for view in views}
    # Comparing two sets costs the size of the smaller one, so all comparisons cost at most the number of records.
    version = max((version for version, shards in shards_by_version.items() if needed <= shards.present), default=None)
    if version is not None and (durable is None or durable <= version.step):
        return ResumeFromMemory(version, _plan_rounds(views, shards_by_version[version].stores))
    return FreshStart() if durable is None else ResumeFromDurable(durable)


def select_records(neighbours: Iterable[RankView], rank: int, records: Iterable[Part]) -> frozenset[Part]:
    """Return the `records` of a store that `rank` reports; `neighbours` include all ranks that share the store.

    One rank of a store represents each shard, the one that would send it. No rank represents shards of another division
    of the state, which no rank can need. So the ranks report each snapshot once, and `decide` returns the same as if
    every rank reported everything.
    """
    node_views = list(neighbours)
    own_view = next(view for view in node_views if view.rank == rank)
    representatives = _Representatives(view for view in node_views if view.store == own_view.store)
    mesh = describe_mesh(own_view.needs)
    return frozenset(
        record
        for record in records
        if describe_mesh(record.name) == mesh and representatives.find_rank(own_view.store, record.name) == rank
    )


def find_snapshot_writers(views: Sequence[RankView]) -> frozenset[int]:
    """Return the ranks that write snapshots: the lowest of those that share both a store and a shard."""
    writers: dict[tuple[str, str], int] = {}
    for view in views:
        key = (view.store, view.needs)
        writers[key] = min(view.rank, writers.get(key, view.rank))
    return frozenset(writers.values())


def find_cleanup_ranks(views: Sequence[RankView]) -> frozenset[int]:
    """Return the ranks that remove leftovers: the lowest of each store."""
    lowest: dict[str, int] = {}
    for view in views:
        lowest[view.store] = min(view.rank, lowest.get(view.store, view.rank))
    return frozenset(lowest.values())


def choose_buddies(views: Sequence[RankView], usable: Iterable[str]) -> tuple[Transfer, ...]:
    """Return the copies that are needed so that no shard is lost with one of the `usable` stores; `views` are by rank.

    Only shards that a single store holds need a copy: replicas are copies already.
    """
    buddies = copies.choose_buddies([(view.store, view.needs) for view in views], frozenset(usable))
    return tuple(Transfer(source, target, views[source].needs) for source, target in buddies.items())


@dataclass(slots=True)
class _VersionShards:
    """The parts of one version that all stores together hold."""

    present: set[tuple[str, str]] = field(default_factory=set)
    """The shards and their layouts."""
    stores: dict[str, set[str]] = field(default_factory=dict)


def _group_shards(views: Sequence[RankView]) -> dict[Version, _VersionShards]:
    by_version: dict[Version, _VersionShards] = {}
    for view in views:
        for record in view.records:
            shards = by_version.get(record.version)
            if shards is None:
                shards = by_version[record.version] = _VersionShards()
            shards.present.add((record.name, record.layout))
            shards.stores.setdefault(record.name, set()).add(view.store)
    return by_version


class _Representatives:
    """The rank that sends or receives a shard for a store: the lowest that needs it, else the lowest of the store."""

    def __init__(self, views: Iterable[RankView]) -> None:
        self._any: dict[str, int] = {}
        self._needing: dict[tuple[str, str], int] = {}
        for view in views:
            self._any[view.store] = min(view.rank, self._any.get(view.store, view.rank))
            store_key = (view.store, view.needs)
            self._needing[store_key] = min(view.rank, self._needing.get(store_key, view.rank))

    def find_rank(self, store: str, key: str) -> int:
        """Return the rank for one store and shard."""
        return self._needing.get((store, key), self._any[store])


def _plan_rounds(views: Sequence[RankView], holders: Mapping[str, set[str]]) -> tuple[tuple[Transfer, ...], ...]:
    """Plan the transfers of each shard as a doubling tree: each store that has the shard sends it to one that lacks it.

    `holders`: the stores that have a shard of the version to resume.
    """
    rounds: list[list[Transfer]] = []
    representatives = _Representatives(views)
    stores_by_needed_shard: dict[str, set[str]] = {}
    for view in views:
        stores_by_needed_shard.setdefault(view.needs, set()).add(view.store)
    for key, stores in sorted(stores_by_needed_shard.items()):
        has = holders[key]
        senders = sorted(representatives.find_rank(store, key) for store in has)
        receivers = sorted(representatives.find_rank(store, key) for store in stores - has)
        number = 0
        while receivers:
            batch, receivers = receivers[: len(senders)], receivers[len(senders) :]
            if number == len(rounds):
                rounds.append([])
            rounds[number].extend(Transfer(source, target, key) for source, target in zip(senders, batch, strict=False))
            senders += batch
            number += 1
    return tuple(tuple(transfers) for transfers in rounds)


class SnapshotInventory:
    """The contents of every snapshot store at one start, kept by rank 0.

    Each rank reports once the records that it represents (`select_records`). Changes follow: a damaged snapshot, a
    version that could not be exchanged, a store without space. The cost of every method is linear in the ranks, their
    records and the transfers.
    """

    def __init__(self, views: Sequence[RankView], reported: Sequence[Iterable[Part]]) -> None:
        """Create the inventory from the views of all ranks, by rank and without records, and each rank's records."""
        self._places = tuple(views)
        self._records: dict[str, set[Part]] = {view.store: set() for view in views}
        for view, records in zip(views, reported, strict=True):
            self._records[view.store].update(records)
        self._split: set[str] = set()

    def summarize_by_rank(self) -> list[RankView]:
        """Return the input of `decide`, by rank; one rank of each store has the store's records."""
        reported: set[str] = set()
        views: list[RankView] = []
        for view in self._places:
            if view.store in self._split:
                # These ranks cannot share received snapshots, although they all read the existing ones.
                reduced = replace(view, store=f"{view.store}#{view.rank}", records=frozenset(self._records[view.store]))
            else:
                reduced = (
                    view if view.store in reported else replace(view, records=frozenset(self._records[view.store]))
                )
                reported.add(view.store)
            views.append(reduced)
        return views

    def split(self, without_space: Iterable[int]) -> None:
        """Split the stores of these ranks, which cannot be written, into one per rank where several ranks share one."""
        sharing: dict[str, int] = {}
        for view in self._places:
            sharing[view.store] = sharing.get(view.store, 0) + 1
        self._split |= {store for rank in without_space if sharing[store := self._places[rank].store] > 1}

    def remove_records(self, rank: int, records: Iterable[Part]) -> None:
        """Remove the snapshots that `rank` could not read in its store."""
        self._records[self._places[rank].store].difference_update(records)

    def exclude(self, version: Version) -> None:
        """Exclude a version that could not be exchanged."""
        for store, records in self._records.items():
            self._records[store] = {record for record in records if record.version != version}

    def list_checks(self, decision: ResumeFromMemory) -> list[tuple[Part, ...]]:
        """Return, by rank, the snapshots of its store that the rank needs or sends."""
        records = self._group_by_store(decision.version)
        wanted = [{view.needs} for view in self._places]
        for batch in decision.rounds:
            for transfer in batch:
                wanted[transfer.source].add(transfer.key)
        return [
            tuple(record for key in sorted(keys) if (record := records[view.store].get(key)) is not None)
            for view, keys in zip(self._places, wanted, strict=True)
        ]

    def find_origins(self, decision: ResumeFromMemory) -> list[Part]:
        """Return, by rank, the snapshot from which its shard originates after the exchange."""
        records = self._group_by_store(decision.version)
        stores = [view.store for view in self.summarize_by_rank()]
        arrived: dict[tuple[str, str], Part] = {}

        def origin(rank: int, key: str) -> Part:
            local = records[self._places[rank].store].get(key)
            return local if local is not None else arrived[stores[rank], key]

        for batch in decision.rounds:
            for transfer in batch:
                arrived[stores[transfer.target], transfer.key] = origin(transfer.source, transfer.key)
        return [origin(view.rank, view.needs) for view in self._places]

    def _group_by_store(self, version: Version) -> dict[str, dict[str, Part]]:
        """Return the snapshots of a version in each store; of two snapshots of a shard, the lesser."""
        by_store: dict[str, dict[str, Part]] = {}
        for store, records in self._records.items():
            store_records = by_store[store] = {}
            for record in records:
                if record.version == version:
                    earlier = store_records.get(record.name)
                    store_records[record.name] = record if earlier is None else min(record, earlier)
        return by_store

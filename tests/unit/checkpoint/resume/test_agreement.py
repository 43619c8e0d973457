"""Which step and whose snapshot all ranks resume from, and which nodes keep copies for each other."""

import math
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.testing.suite.trials import trials
from tests.unit.checkpoint.resume.test_agreement_law import rank_views
from trainium_trainer.checkpoint.interfaces import Position
from trainium_trainer.checkpoint.memory.layout import format_shard_name
from trainium_trainer.checkpoint.resume.agreement import (
    RankView,
    ResumeFromMemory,
    SnapshotInventory,
    choose_buddies,
    decide,
    find_cleanup_ranks,
    find_snapshot_writers,
)
from trainium_worker.snapshots.files import Part, Version


def version(step: int, session: str = "a", generation: int = 1) -> Version:
    return Version(step, generation, session, Position(step, step * 8, step * 100).encode())


def record(step: int, key: str | None = None, session: str = "a", layout: str = "L") -> Part:
    return Part(version(step, session), key or format_shard_name(0, 1), layout, 4096, f"sum-{step}")


def view(rank: int, records: Any, *, store: str | None = None, key: str | None = None, layout: str = "L") -> RankView:
    return RankView(rank, store or f"node-{rank}", key or format_shard_name(0, 1), layout, frozenset(records))


def test_ranks_of_one_node_share_a_snapshot_and_one_of_them_writes_it() -> None:
    views = [view(rank, [], store=f"node-{rank // 4}") for rank in range(8)]
    assert find_snapshot_writers(views) == {0, 4}
    assert find_cleanup_ranks(views) == {0, 4}
    sharded = [view(rank, [], store="node", key=format_shard_name(rank, 4)) for rank in range(4)]
    assert find_snapshot_writers(sharded) == {0, 1, 2, 3}
    assert find_cleanup_ranks(sharded) == {0}


def test_a_snapshot_reaches_a_hundred_new_nodes_in_seven_rounds() -> None:
    decision = decide([view(0, [record(1)]), *(view(rank, []) for rank in range(1, 101))], [])
    assert isinstance(decision, ResumeFromMemory)
    assert len(decision.rounds) == 7


def test_recorded_losses_do_not_distinguish_snapshots() -> None:
    first, second = format_shard_name(0, 1, 0, 2), format_shard_name(0, 1, 1, 2)
    with_loss = Version(4, 1, "a", Position(4, 32, 400, loss=1.5, grad_norm=float("nan")).encode())
    views = [
        view(0, [record(4, first)], key=first),
        view(1, [Part(with_loss, second, "L", 4096, "sum")], key=second),
    ]
    decision = decide(views, [])
    assert isinstance(decision, ResumeFromMemory)
    assert decision.version.step == 4


def test_shards_that_every_node_holds_need_no_copy() -> None:
    replicas = [view(rank, [], store=f"node-{rank // 2}", key=format_shard_name(rank % 2, 2)) for rank in range(8)]
    assert choose_buddies(replicas, {v.store for v in replicas}) == ()
    alone = [view(rank, [], store="node", key=format_shard_name(0, 1, rank, 4)) for rank in range(4)]
    assert choose_buddies(alone, {"node"}) == ()


def test_nodes_keep_copies_of_each_other_in_pairs_far_apart() -> None:
    views = [view(rank, [], key=format_shard_name(0, 1, rank, 6)) for rank in range(6)]
    pairs = {(copy.source, copy.target) for copy in choose_buddies(views, {v.store for v in views})}
    assert pairs == {(0, 3), (3, 0), (1, 4), (4, 1), (2, 5), (5, 2)}


def test_an_odd_node_makes_a_ring_of_three() -> None:
    views = [view(rank, [], key=format_shard_name(0, 1, rank, 5)) for rank in range(5)]
    pairs = {(copy.source, copy.target) for copy in choose_buddies(views, {v.store for v in views})}
    assert pairs == {(0, 2), (2, 0), (1, 3), (3, 4), (4, 1)}


@settings(max_examples=trials(50))
@given(rank_views(), st.sets(st.integers(0, 4), max_size=2))
def test_each_shard_of_a_single_node_has_one_copy_on_another_node(views: Any, without_capacity: set[int]) -> None:
    stores = {v.store for v in views}
    usable = stores - {f"node-{number}" for number in without_capacity}
    copies = choose_buddies(views, usable)
    holders = {v.needs: {w.store for w in views if w.needs == v.needs} for v in views}
    single = {key for key, nodes in holders.items() if len(nodes) == 1 and nodes <= usable}
    assert {copy.key for copy in copies} == (single if len(usable) > 1 else set())
    assert len({copy.key for copy in copies}) == len(copies)
    store = {v.rank: v.store for v in views}
    for copy in copies:
        assert copy.source in find_snapshot_writers(views)
        assert store[copy.source] != store[copy.target]
        assert {store[copy.source], store[copy.target]} <= usable
    copies_per_keeper = [sum(copy.target == v.rank for copy in copies) for v in views]
    ranks_per_node = [sum(v.store == name for v in views) for name in stores]
    assert max(copies_per_keeper, default=0) <= math.ceil(max(ranks_per_node) / min(ranks_per_node))


KEY = format_shard_name(0, 1)
CLAIM = Part(version(3), KEY, "layout", 4096, "sum")


def inventory() -> SnapshotInventory:
    """Return the snapshots of ranks 0 and 1, which share a node, and of rank 2."""
    views = [RankView(rank, store, KEY, "layout") for rank, store in enumerate(("a", "a", "b"))]
    return SnapshotInventory(views, [[CLAIM], [], []])


def test_a_step_whose_exchange_failed_is_excluded_in_every_store() -> None:
    snapshots = inventory()
    snapshots.exclude(CLAIM.version)
    assert all(not view.records for view in snapshots.summarize_by_rank())

"""Compare the decision where to resume with a plain, slow version of its rules, and bound its cost."""

import hashlib
import pickle
import sys
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.testing.suite.trials import trials
from trainium_trainer.checkpoint.collectives import pack_values
from trainium_trainer.checkpoint.interfaces import Position
from trainium_trainer.checkpoint.memory.layout import format_shard_name
from trainium_trainer.checkpoint.resume import agreement
from trainium_trainer.checkpoint.resume.agreement import (
    Decision,
    FreshStart,
    RankView,
    ResumeFromDurable,
    ResumeFromMemory,
    SnapshotInventory,
    Transfer,
    choose_buddies,
    decide,
    select_records,
)
from trainium_worker.snapshots import copies
from trainium_worker.snapshots.files import Part, Version

OWN_SNAPSHOTS, BUDDY_COPIES = 3, 2
"""Snapshots that a node holds of each of its shards, and copies of each shard of another node."""

# ---- the rules, one after the other, without an index --------------------------------------------------------------


def decide_plainly(views: Sequence[RankView], durable_steps: Sequence[int]) -> Decision:
    """Decide by the plain rules, as `decide` must."""
    complete = [
        version
        for version in {record.version for view in views for record in view.records}
        if all(has_snapshot(views, version, view.needs, view.layout) for view in views)
    ]
    newest = max(durable_steps, default=-1)
    best = max(complete, default=None)
    if best is not None and best.step >= newest:
        return ResumeFromMemory(best, broadcast_rounds(views, best))
    return FreshStart() if newest < 0 else ResumeFromDurable(newest)


def has_snapshot(views: Sequence[RankView], version: Version, key: str, layout: str) -> bool:
    return any((c.version, c.name, c.layout) == (version, key, layout) for view in views for c in view.records)


def broadcast_rounds(views: Sequence[RankView], version: Version) -> tuple[tuple[Transfer, ...], ...]:
    """Return rounds in which each store that holds a shard sends it to one that lacks it, lowest ranks first."""
    rounds: list[list[Transfer]] = []
    for key in sorted({view.needs for view in views}):
        stores_with = {v.store for v in views for c in v.records if (c.version, c.name) == (version, key)}
        stores_without = {v.store for v in views if v.needs == key} - stores_with
        senders = sorted(representative(views, store, key) for store in stores_with)
        receivers = sorted(representative(views, store, key) for store in stores_without)
        number = 0
        while receivers:
            rounds += [[] for _ in range(number + 1 - len(rounds))]
            for source in list(senders):
                if receivers:
                    rounds[number].append(Transfer(source, receivers[0], key))
                    senders.append(receivers.pop(0))
            number += 1
    return tuple(tuple(transfers) for transfers in rounds)


def representative(views: Sequence[RankView], store: str, key: str) -> int:
    ranks = [view.rank for view in views if view.store == store]
    needing = [view.rank for view in views if view.store == store and view.needs == key]
    return min(needing or ranks)


# ---- ranks of any mesh ----------------------------------------------------------------------------------------------


@st.composite
def rank_views(draw: Any) -> list[RankView]:
    tp, dp, pp = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 2))
    sharded = draw(st.booleans())
    keys = [
        format_shard_name(t, tp, d if sharded else 0, dp if sharded else 1, p, pp)
        for p in range(pp)
        for d in range(dp)
        for t in range(tp)
    ]
    foreign = [format_shard_name(t, tp + 1) for t in range(tp + 1)]
    versions = st.builds(
        lambda step, generation, session: Version(step, generation, session, Position(step, 8 * step, 9).encode()),
        st.integers(0, 4),
        st.integers(1, 2),
        st.sampled_from("ab"),
    )
    records = st.builds(
        Part,
        versions,
        st.sampled_from(keys + foreign),
        st.sampled_from("LLLM"),
        st.just(4096),
        st.sampled_from(["one", "two"]),
    )
    per_node = draw(st.integers(1, 4))
    stores = [f"node-{rank // per_node}" for rank in range(len(keys))]
    held = {store: set(draw(st.lists(records, max_size=6))) for store in sorted(set(stores))}
    for version in draw(st.lists(versions, max_size=2)):  # otherwise, a complete version is rare
        for key in keys:
            held[draw(st.sampled_from(sorted(held)))].add(Part(version, key, "L", 4096, "one"))
    return [
        RankView(rank, store, key, draw(st.sampled_from("LLLLLLLM")), frozenset(held[store]))
        for rank, (store, key) in enumerate(zip(stores, draw(st.permutations(keys)), strict=True))
    ]


STEPS = st.lists(st.integers(0, 5), max_size=3)


def report_records(views: list[RankView]) -> SnapshotInventory:
    """Return the inventory after each rank has reported the records that it represents."""
    return SnapshotInventory(
        [RankView(view.rank, view.store, view.needs, view.layout) for view in views],
        [select_records(views, view.rank, view.records) for view in views],
    )


@settings(max_examples=trials(100))
@given(rank_views(), STEPS, st.randoms())
def test_the_decision_is_that_of_the_plain_rules_in_any_order_of_the_reports(
    views: list[RankView], durable: list[int], random: Random
) -> None:
    shuffled = random.sample(views, len(views))
    assert decide(shuffled, durable) == decide_plainly(views, durable)


@settings(max_examples=trials(50))
@given(rank_views(), STEPS)
def test_ranks_that_report_each_snapshot_once_decide_as_if_each_had_reported_everything(
    views: list[RankView], durable: list[int]
) -> None:
    reported = report_records(views).summarize_by_rank()
    assert decide(reported, durable) == decide_plainly(views, durable)
    needed = {view.needs for view in views}
    all_records = {(view.store, record) for view in views for record in view.records if record.name in needed}
    assert sum(len(select_records(views, view.rank, view.records)) for view in views) == len(all_records)


@settings(max_examples=trials(50))
@given(rank_views(), STEPS, st.data())
def test_a_snapshot_that_one_rank_finds_damaged_is_missing_for_its_whole_node(
    views: list[RankView], durable: list[int], data: st.DataObject
) -> None:
    inventory = report_records(views)
    rank = data.draw(st.sampled_from(range(len(views))))
    damaged = data.draw(st.sets(st.sampled_from(sorted(views[rank].records)))) if views[rank].records else set()
    inventory.remove_records(rank, damaged)
    remaining = [
        RankView(v.rank, v.store, v.needs, v.layout, v.records - damaged if v.store == views[rank].store else v.records)
        for v in views
    ]
    assert decide(inventory.summarize_by_rank(), durable) == decide_plainly(remaining, durable)


@settings(max_examples=trials(50))
@given(rank_views(), STEPS, st.integers(0, 23))
def test_ranks_of_a_node_without_capacity_count_as_separate_stores(
    views: list[RankView], durable: list[int], number: int
) -> None:
    inventory = report_records(views)
    store = views[number % len(views)].store
    inventory.split([number % len(views)])
    is_alone = sum(view.store == store for view in views) == 1
    remaining = [
        RankView(v.rank, f"{store}#{v.rank}", v.needs, v.layout, v.records) if v.store == store and not is_alone else v
        for v in views
    ]
    assert decide(inventory.summarize_by_rank(), durable) == decide_plainly(remaining, durable)


@settings(max_examples=trials(50))
@given(rank_views())
def test_a_rank_receives_a_snapshot_from_a_store_that_held_it(views: list[RankView]) -> None:
    inventory = report_records(views)
    decision = decide(inventory.summarize_by_rank(), [])
    if not isinstance(decision, ResumeFromMemory):
        return
    for view, original in zip(views, inventory.find_origins(decision), strict=True):
        assert (original.version, original.name) == (decision.version, view.needs)
        held = {record for record in view.records if (record.version, record.name) == (decision.version, view.needs)}
        assert original in (held or {record for other in views for record in other.records})


# ---- costs ----------------------------------------------------------------------------------------------------------


def build_rank_views(ranks: int, *, replaced: int = 0) -> list[RankView]:
    """Return ranks in nodes of 32: tensor parallel 8, otherwise sharded, with copies on a buddy.

    `replaced`: the number of first nodes that are new and hold nothing.
    """
    keys = [format_shard_name(rank % 8, 8, rank // 8, ranks // 8) for rank in range(ranks)]
    nodes = max(1, ranks // 32)
    views = []
    for node in range(nodes):
        own = range(32 * node, 32 * (node + 1))
        buddy = (node + nodes // 2) % nodes
        kept = range(32 * buddy, 32 * (buddy + 1))
        records = [snapshot(keys[rank], step) for rank in own for step in range(OWN_SNAPSHOTS)]
        records += [
            snapshot(keys[rank], step) for rank in kept for step in range(OWN_SNAPSHOTS - BUDDY_COPIES, OWN_SNAPSHOTS)
        ]
        held = frozenset(records if node >= replaced else ())
        views += [RankView(rank, f"{node:032x}", keys[rank], "a" * 32, held) for rank in own]
    return views


def snapshot(key: str, step: int) -> Part:
    position = Position(step, 1024 * step, 4_194_304 * step, loss=2.5, grad_norm=0.25)
    version = Version(step, 3, "0123456789ab", position.encode())
    return Part(version, key, "a" * 32, 1 << 30, hashlib.sha256(f"{key} {step}".encode()).hexdigest()[:32])


def count_bytecodes(module: Any, call: Callable[[], object]) -> int:
    """Count the instructions of a module that a call executes."""
    count = 0

    def trace(frame: Any, event: str, _: object) -> Any:
        nonlocal count
        if frame.f_code.co_filename != module.__file__:
            return None
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("replaced", [0, 1])
def test_the_decision_costs_in_proportion_to_ranks_and_snapshots(replaced: int) -> None:
    """A quarter of the nodes are new, or none."""
    views_by_size = [
        report_records(build_rank_views(ranks, replaced=replaced * ranks // 128)).summarize_by_rank()
        for ranks in (128, 1024)
    ]
    small, large = (count_bytecodes(agreement, lambda views=views: decide(views, [1])) for views in views_by_size)
    assert isinstance(decide(views_by_size[1], [1]), ResumeFromMemory)
    assert large < 8.5 * small


def test_choosing_buddies_costs_in_proportion_to_the_ranks() -> None:
    views_by_size = [build_rank_views(ranks) for ranks in (128, 1024)]
    small, large = (
        count_bytecodes(copies, lambda views=views: choose_buddies(views, {view.store for view in views}))
        for views in views_by_size
    )
    assert large < 8.5 * small


def test_a_start_from_memory_costs_the_first_rank_less_than_256_bytes_of_every_other() -> None:
    """It then receives less than a MiB at 4,096 ranks (measured in `docs/measurements.md`)."""
    views = build_rank_views(512)
    empty_views = [RankView(view.rank, view.store, view.needs, view.layout) for view in views]
    reported = [select_records(views, view.rank, view.records) for view in views]
    received = sum(len(pack_values([pickle.dumps(value) for value in values])) for values in (empty_views, reported))
    assert received < 256 * len(views)

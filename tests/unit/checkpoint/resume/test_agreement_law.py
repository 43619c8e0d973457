"""The decision where to resume, beside a plain and slow statement of its rules, and the law of what it costs."""

import hashlib
import pickle
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.testing.suite.trials import trials
from trainium_trainer.checkpoint.collectives import pack_values
from trainium_trainer.checkpoint.interfaces import Position
from trainium_trainer.checkpoint.memory.snapshot import Claim, ShardKey, StateVersion
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
    claims_to_report,
    decide,
)

OWN, KEPT = 3, 2
"""Snapshots that a node holds of each of its shards, and copies of each of another node's."""


# ---- the rules, one after the other, without an index --------------------------------------------------------------


def decide_plainly(views: Sequence[RankView], durable_steps: Sequence[int]) -> Decision:
    """Decide by the plain rules, as `decide` must."""
    complete = [
        version
        for version in {claim.version for view in views for claim in view.claims}
        if all(holds(views, version, view.needs, view.layout) for view in views)
    ]
    newest = max(durable_steps, default=-1)
    best = max(complete, default=None)
    if best is not None and best.position.step >= newest:
        return ResumeFromMemory(best, tree(views, best))
    return FreshStart() if newest < 0 else ResumeFromDurable(newest)


def holds(views: Sequence[RankView], version: StateVersion, key: ShardKey, layout: str) -> bool:
    return any((c.version, c.key, c.layout) == (version, key, layout) for view in views for c in view.claims)


def tree(views: Sequence[RankView], version: StateVersion) -> tuple[tuple[Transfer, ...], ...]:
    """Return rounds in which each store that holds a shard sends it to one that lacks it, lowest ranks first."""
    rounds: list[list[Transfer]] = []
    for key in sorted({view.needs for view in views}):
        having = {v.store for v in views for c in v.claims if (c.version, c.key) == (version, key)}
        lacking = {v.store for v in views if v.needs == key} - having
        senders = sorted(representative(views, store, key) for store in having)
        receivers = sorted(representative(views, store, key) for store in lacking)
        number = 0
        while receivers:
            rounds += [[] for _ in range(number + 1 - len(rounds))]
            for source in list(senders):
                if receivers:
                    rounds[number].append(Transfer(source, receivers[0], key))
                    senders.append(receivers.pop(0))
            number += 1
    return tuple(tuple(each) for each in rounds)


def representative(views: Sequence[RankView], store: str, key: ShardKey) -> int:
    here = [view for view in views if view.store == store]
    needing = [view.rank for view in here if view.needs == key]
    return min(needing) if needing else min(view.rank for view in here)


# ---- any world ------------------------------------------------------------------------------------------------------


@st.composite
def worlds(draw: Any) -> list[RankView]:
    tp, dp, pp = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 2))
    sharded = draw(st.booleans())
    keys = [
        ShardKey(t, tp, d if sharded else 0, dp if sharded else 1, p, pp)
        for p in range(pp)
        for d in range(dp)
        for t in range(tp)
    ]
    foreign = [ShardKey(t, tp + 1) for t in range(tp + 1)]
    versions = st.builds(
        lambda step, generation, session: StateVersion(Position(step, 8 * step, 100 * step), generation, session),
        st.integers(0, 4),
        st.integers(1, 2),
        st.sampled_from("ab"),
    )
    claims = st.builds(
        Claim, versions, st.sampled_from(keys + foreign), st.sampled_from("LLLM"), st.sampled_from(["one", "two"])
    )
    per_node = draw(st.integers(1, 4))
    stores = [f"node-{rank // per_node}" for rank in range(len(keys))]
    held = {store: set(draw(st.lists(claims, max_size=6))) for store in sorted(set(stores))}
    for version in draw(st.lists(versions, max_size=2)):  # else a whole one is rare
        for key in keys:
            held[draw(st.sampled_from(sorted(held)))].add(Claim(version, key, "L", "one"))
    return [
        RankView(rank, store, key, draw(st.sampled_from("LLLLLLLM")), frozenset(held[store]))
        for rank, (store, key) in enumerate(zip(stores, draw(st.permutations(keys)), strict=True))
    ]


STEPS = st.lists(st.integers(0, 5), max_size=3)


def as_reported(views: list[RankView]) -> SnapshotInventory:
    """Return what all ranks know when each has reported the claims that it represents."""
    return SnapshotInventory(
        [RankView(view.rank, view.store, view.needs, view.layout) for view in views],
        [claims_to_report(views, view.rank, view.claims) for view in views],
    )


@settings(max_examples=trials(50))
@given(worlds(), STEPS)
def test_the_decision_is_that_of_the_plain_rules(views: list[RankView], durable: list[int]) -> None:
    assert decide(views, durable) == decide_plainly(views, durable)


@settings(max_examples=trials(50))
@given(worlds(), STEPS)
def test_ranks_that_report_each_snapshot_once_decide_as_if_each_had_reported_everything(
    views: list[RankView], durable: list[int]
) -> None:
    reported = as_reported(views).views()
    assert decide(reported, durable) == decide_plainly(views, durable)
    needed = {view.needs for view in views}
    everything = {(view.store, claim) for view in views for claim in view.claims if claim.key in needed}
    assert sum(len(claims_to_report(views, view.rank, view.claims)) for view in views) == len(everything)


@settings(max_examples=trials(50))
@given(worlds(), STEPS, st.data())
def test_a_snapshot_that_one_rank_finds_damaged_is_missing_for_its_whole_node(
    views: list[RankView], durable: list[int], data: st.DataObject
) -> None:
    holdings = as_reported(views)
    rank = data.draw(st.sampled_from(range(len(views))))
    lost = data.draw(st.sets(st.sampled_from(sorted(views[rank].claims)))) if views[rank].claims else set()
    holdings.remove_claims(rank, lost)
    left = [
        RankView(v.rank, v.store, v.needs, v.layout, v.claims - lost if v.store == views[rank].store else v.claims)
        for v in views
    ]
    assert decide(holdings.views(), durable) == decide_plainly(left, durable)


@settings(max_examples=trials(50))
@given(worlds(), STEPS, st.integers(0, 23))
def test_ranks_of_a_node_without_capacity_count_as_separate_stores(
    views: list[RankView], durable: list[int], number: int
) -> None:
    holdings = as_reported(views)
    store = views[number % len(views)].store
    holdings.split([number % len(views)])
    alone = sum(view.store == store for view in views) == 1
    left = [
        RankView(v.rank, f"{store}#{v.rank}", v.needs, v.layout, v.claims) if v.store == store and not alone else v
        for v in views
    ]
    assert decide(holdings.views(), durable) == decide_plainly(left, durable)


@settings(max_examples=trials(50))
@given(worlds())
def test_a_rank_receives_a_snapshot_from_a_store_that_held_it(views: list[RankView]) -> None:
    holdings = as_reported(views)
    decision = decide(holdings.views(), [])
    if not isinstance(decision, ResumeFromMemory):
        return
    for view, original in zip(views, holdings.origins(decision), strict=True):
        assert (original.version, original.key) == (decision.version, view.needs)
        here = {claim for claim in view.claims if (claim.version, claim.key) == (decision.version, view.needs)}
        assert original in (here or {claim for other in views for claim in other.claims})


# ---- laws -----------------------------------------------------------------------------------------------------------


def fleet(ranks: int, *, replaced: int = 0) -> list[RankView]:
    """Return ranks as those of HLAT: nodes of 32, tensor parallel 8, the rest sharded, copies with a buddy.

    `replaced`: the first nodes came new and hold nothing.
    """
    keys = [ShardKey(rank % 8, 8, rank // 8, ranks // 8) for rank in range(ranks)]
    nodes = max(1, ranks // 32)
    views = []
    for node in range(nodes):
        own = range(32 * node, 32 * (node + 1))
        buddy = (node + nodes // 2) % nodes
        kept = range(32 * buddy, 32 * (buddy + 1))
        claims = [snapshot(keys[rank], step) for rank in own for step in range(OWN)]
        claims += [snapshot(keys[rank], step) for rank in kept for step in range(OWN - KEPT, OWN)]
        holds = frozenset(claims if node >= replaced else ())
        views += [RankView(rank, f"{node:032x}", keys[rank], "a" * 32, holds) for rank in own]
    return views


def snapshot(key: ShardKey, step: int) -> Claim:
    version = StateVersion(Position(step, 1024 * step, 4_194_304 * step, loss=2.5, grad_norm=0.25), 3, "0123456789ab")
    return Claim(version, key, "a" * 32, hashlib.sha256(f"{key} {step}".encode()).hexdigest()[:32])


def bytecodes(module: Any, call: Callable[[], object]) -> int:
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
    """A quarter of the nodes came new, or none."""
    worlds = [as_reported(fleet(ranks, replaced=replaced * ranks // 128)).views() for ranks in (128, 1024)]
    small, large = (bytecodes(agreement, lambda views=views: decide(views, [1])) for views in worlds)
    assert isinstance(decide(worlds[1], [1]), ResumeFromMemory)
    assert large < 8.5 * small


def test_choosing_buddies_costs_in_proportion_to_the_ranks() -> None:
    worlds = [fleet(ranks) for ranks in (128, 1024)]
    small, large = (
        bytecodes(agreement, lambda views=views: choose_buddies(views, {view.store for view in views}))
        for views in worlds
    )
    assert large < 8.5 * small


def test_a_start_from_memory_costs_the_first_rank_less_than_256_bytes_of_every_other() -> None:
    """It then receives less than a MiB at 4,096 ranks; `docs/scale.md` shows how much."""
    views = fleet(512)
    places = [RankView(view.rank, view.store, view.needs, view.layout) for view in views]
    reported = [claims_to_report(views, view.rank, view.claims) for view in views]
    received = sum(len(pack_values([pickle.dumps(each) for each in values])) for values in (places, reported))
    assert received < 256 * len(views)

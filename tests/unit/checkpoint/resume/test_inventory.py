"""Take stock of stores: ranks that share one without capacity help themselves and read what is there."""

from __future__ import annotations

from checkpoint_world import position

from trainium_trainer.checkpoint.memory.claims import Claim, Moment, ShardKey
from trainium_trainer.checkpoint.resume.agreement import RankView, SnapshotInventory

KEY = ShardKey(0, 1)
CLAIM = Claim(Moment(position(3), 1, "s"), KEY, "layout", 7)


def holdings() -> SnapshotInventory:
    """Ranks 0 and 1 share a node, rank 2 has one to itself."""
    views = [RankView(rank, store, KEY, "layout") for rank, store in enumerate(("a", "a", "b"))]
    return SnapshotInventory(views, [[CLAIM], [], []])


def test_of_ranks_that_share_a_store_one_reports_it() -> None:
    assert [(view.store, set(view.claims)) for view in holdings().views()] == [
        ("a", {CLAIM}),
        ("a", set()),
        ("b", set()),
    ]


def test_ranks_that_share_a_store_without_capacity_are_planned_for_one_by_one() -> None:
    found = holdings()
    found.split([1, 2])
    assert [(view.store, set(view.claims)) for view in found.views()] == [
        ("a#0", {CLAIM}),
        ("a#1", {CLAIM}),
        ("b", set()),
    ]


def test_a_moment_that_could_not_be_exchanged_is_out_of_the_question_in_every_store() -> None:
    found = holdings()
    found.exclude(CLAIM.moment)
    assert all(not view.claims for view in found.views())

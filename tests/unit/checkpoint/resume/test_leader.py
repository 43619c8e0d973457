"""Coordinate a start on the first rank; fake ranks carry it out with sets of snapshots."""

import pickle
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.testing.suite.trials import trials
from tests.unit.checkpoint.checkpoint_builders import committed_checkpoint
from tests.unit.checkpoint.resume.test_agreement_law import STEPS, build_rank_views, decide_plainly, rank_views
from trainium_trainer.checkpoint.collectives import pack_part, pack_values
from trainium_trainer.checkpoint.errors import UnusableCheckpointError
from trainium_trainer.checkpoint.memory.layout import format_shard_name
from trainium_trainer.checkpoint.resume.agreement import (
    FreshStart,
    RankView,
    ResumeFromDurable,
    ResumeFromMemory,
    select_records,
)
from trainium_trainer.checkpoint.resume.leader import (
    SHARED_WARNINGS,
    Exchange,
    Finish,
    Load,
    RankReport,
    ReplicaCapacity,
    ResumeLeader,
    SnapshotReport,
    Verify,
    assign_replicas,
    plan_replicas,
)
from trainium_trainer.checkpoint.root.survey import Survey
from trainium_trainer.exits import UserError
from trainium_trainer.storage.errors import StorageError
from trainium_worker.snapshots.files import Part


class FakeRanks:
    """All ranks of a start and their leader; `rounds` records what each rank sends and receives."""

    def __init__(self, views: Sequence[RankView], durable: Sequence[int] = ()) -> None:
        self.views = views
        self.leader = ResumeLeader("root")
        self.leader.record_survey(Survey([committed_checkpoint(step) for step in sorted(set(durable), reverse=True)]))
        self.stores = {view.store: set(view.records) for view in views}
        self.own: dict[int, Part] = {}
        """The snapshot that each rank will restore, by rank."""
        self.sent: dict[tuple[int, str], Part] = {}
        self.rounds: list[tuple[list[Any], list[Any]]] = []

    def ask(self, sent_values: list[Any], decide: Any) -> list[Any]:
        answers = decide(sent_values)
        self.rounds.append((sent_values, answers))
        assert len(answers) == len(self.views)
        return answers

    def start(self, lost: frozenset[Part] = frozenset(), damaged: frozenset[int] = frozenset()) -> list[Finish]:
        """Run the start to its end; `lost`: snapshots with damaged contents, `damaged`: damaged checkpoints."""
        empty_views = [RankView(view.rank, view.store, view.needs, view.layout) for view in self.views]
        views_of_nodes = self.ask(empty_views, self.leader.collect)
        reports = [
            SnapshotReport(select_records(node_views, view.rank, view.records), can_write=True)
            for node_views, view in zip(views_of_nodes, self.views, strict=True)
        ]
        orders = self.ask(reports, self.leader.decide)
        while not isinstance(orders[0], Finish):
            assert len({type(order) for order in orders}) == 1
            if isinstance(orders[0], Exchange):
                reports = self.exchange(orders)
            else:
                reports = [
                    self.execute(view, order, lost, damaged) for view, order in zip(self.views, orders, strict=True)
                ]
            orders = self.ask(reports, self.leader.decide_orders)
        return orders

    def execute(self, view: RankView, order: Any, lost: frozenset[Part], damaged: frozenset[int]) -> RankReport:
        if isinstance(order, Load):
            step = order.checkpoint.step
            bad = step in damaged and view.rank == step % len(self.views)
            return RankReport(not bad, damaged=((f"step-{step}", "torn"),) if bad else ())
        assert isinstance(order, Verify)
        assert set(order.records) <= self.stores[view.store], "a rank verifies only snapshots of its store"
        self.own.pop(view.rank, None)
        for record in set(order.records) - lost:
            self.sent[view.rank, record.name] = record
            if record.name == view.needs:
                self.own[view.rank] = record
        bad = lost & set(order.records)
        return RankReport(not bad, bad)

    def exchange(self, orders: list[Exchange]) -> list[RankReport]:
        for number in range(len(orders[0].rounds)):
            round_moves = sorted({move for order in orders for move in order.rounds[number]})
            for rank, order in enumerate(orders):
                assert set(order.rounds[number]) == {move for move in round_moves if rank in (move.source, move.target)}
            assert len({move.target for move in round_moves}) == len(round_moves)
            carried = {move: self.sent[move.source, move.key] for move in round_moves}
            for move, record in carried.items():
                self.sent[move.target, move.key] = record
                self.stores[self.views[move.target].store].add(record)
                if move.key == self.views[move.target].needs:
                    self.own[move.target] = record
                    assert orders[move.target].origin == record, "it has the checksum of the first sender's snapshot"
        for view, order in zip(self.views, orders, strict=True):
            if view.rank not in self.own:  # a neighbour has received it
                assert order.origin in self.stores[view.store]
                self.own[view.rank] = order.origin
        return [RankReport() for _ in orders]


@settings(max_examples=trials(50))
@given(rank_views(), STEPS, st.data())
def test_every_rank_ends_with_its_shard_of_the_newest_state_that_is_whole(
    views: list[RankView], durable: list[int], data: st.DataObject
) -> None:
    records = sorted({record for view in views for record in view.records})
    lost = frozenset(data.draw(st.sets(st.sampled_from(records), max_size=3))) if records else frozenset()
    ranks = FakeRanks(views, durable)
    ends = ranks.start(lost)
    assert len({end.agreed for end in ends}) == 1
    decision = ends[0].agreed.decision
    intact = [RankView(v.rank, v.store, v.needs, v.layout, v.records - lost) for v in views]
    best = decide_plainly(intact, durable)
    if isinstance(decision, ResumeFromMemory):
        assert isinstance(best, ResumeFromMemory)
        assert decision.version.step == best.version.step
        for view in views:
            own = ranks.own[view.rank]
            assert own not in lost
            assert (own.version, own.name) == (decision.version, view.needs)
    else:
        assert decision == best
    assert {end.cleans_up for end in ends} >= {True}


def test_all_ranks_resume_from_the_checkpoint_before_a_damaged_one() -> None:
    ends = FakeRanks(build_rank_views(64, replaced=2), [2, 4, 6]).start(damaged=frozenset({6, 4}))
    assert {end.agreed.decision for end in ends} == {ResumeFromDurable(2)}
    assert ends[0].agreed.known_bad == {"step-6", "step-4"}
    assert ends[0].agreed.durable_step == 2


def test_a_start_with_nothing_whole_below_its_root_is_refused() -> None:
    with pytest.raises(UnusableCheckpointError, match="root holds checkpoints but none is whole"):
        FakeRanks(build_rank_views(64, replaced=2), [2]).start(damaged=frozenset({2}))
    assert {end.agreed.decision for end in FakeRanks(build_rank_views(64, replaced=2)).start()} == {FreshStart()}


def test_a_rank_whose_mesh_differs_is_named() -> None:
    views = [RankView(rank, "node", format_shard_name(rank, 4), "L") for rank in range(3)]
    other = RankView(3, "node", format_shard_name(1, 2, 1, 2), "L")
    with pytest.raises(UserError, match="rank 3 has the mesh 2 x 2 x 1 and rank 0 4 x 1 x 1"):
        ResumeLeader("root").collect([*views, other])


def test_the_error_of_one_rank_is_raised_for_all() -> None:
    ranks = FakeRanks(build_rank_views(64), [1])
    leader = ranks.leader
    leader.collect(list(ranks.views))
    leader.decide([SnapshotReport() for _ in ranks.views])
    with pytest.raises(StorageError, match="no answer"):
        leader.decide_orders(
            [RankReport(), RankReport(ok=False, error=StorageError("no answer")), *[RankReport()] * 62]
        )


def test_warnings_that_all_ranks_receive_are_bounded_and_the_first_rank_has_them_all() -> None:
    ranks = FakeRanks(build_rank_views(64))
    leader = ranks.leader
    leader.collect(list(ranks.views))
    leader.decide([SnapshotReport(warnings=(f"rank {rank}: no room",)) for rank in range(64)])
    assert len(leader.warnings) == 64
    (shared,) = {end.agreed.warnings for end in leader.decide_orders([RankReport() for _ in ranks.views])}
    assert len(shared) == SHARED_WARNINGS + 1
    assert shared[-1] == "44 more such warnings are in the output of rank 0"


def count_bytes(rounds: Sequence[tuple[list[Any], list[Any]]]) -> tuple[int, int]:
    """Return the bytes of the whole job, and the largest number that a rank other than the first handles."""
    total, largest_load = 0, 0
    for sent_values, answers in rounds:
        size = len(sent_values)
        loads = [0] * size
        distance = 1
        while distance < size:
            for rank in range(distance, size, 2 * distance):
                group = slice(rank, min(rank + distance, size))
                data = len(pack_values([pickle.dumps(value) for value in sent_values[group]])) + len(
                    pack_part("value", answers[group])
                )
                total += data
                loads[rank] += data
                loads[rank - distance] += data
            distance *= 2
        largest_load = max(largest_load, *loads[1:])
    return total, largest_load


@pytest.mark.parametrize("replaced", [0, 1])
def test_the_bytes_of_a_start_grow_with_ranks_and_the_height_of_the_tree(replaced: int) -> None:
    """From 128 to 1,024 ranks, they grow by 8 x 10/7; if all sent to all, by 64. `replaced`: quarters of new nodes."""
    byte_counts = []
    for size in (128, 1024):
        ranks = FakeRanks(build_rank_views(size, replaced=replaced * size // 128))
        assert isinstance(ranks.start()[0].agreed.decision, ResumeFromMemory)
        wanted, views = ranks.leader.buddy_copies, ranks.leader.views
        tasks = plan_replicas(wanted, views, [1000] * size)
        capacities = [
            ReplicaCapacity(frozenset(task.number for task in rank_tasks if task.copy.target == rank), ())
            for rank, rank_tasks in enumerate(tasks)
        ]
        copies = [([1000] * size, [*tasks]), (list(capacities), [*assign_replicas(wanted, views, capacities)])]
        byte_counts.append(count_bytes([*ranks.rounds, *copies]))
    (small, _), (large, largest_load) = byte_counts
    assert large < 8 * 10 / 7 * 1.15 * small
    assert largest_load < 256 * 1024


def test_each_copy_with_capacity_is_assigned_to_both_its_ranks_and_to_the_node_that_keeps_it() -> None:
    ranks = FakeRanks(build_rank_views(128))
    ranks.start()
    wanted, views = ranks.leader.buddy_copies, ranks.leader.views
    assert len(wanted) == 128
    tasks = plan_replicas(wanted, views, list(range(128)))
    full = {
        task.number for rank, rank_tasks in enumerate(tasks) for task in rank_tasks if task.copy.target == rank == 5
    }
    capacities = [
        ReplicaCapacity(
            frozenset(task.number for task in rank_tasks if task.copy.target == rank) - full, (f"{rank}",) * (rank == 5)
        )
        for rank, rank_tasks in enumerate(tasks)
    ]
    assignments = assign_replicas(wanted, views, capacities)
    for number, copy in enumerate(wanted):
        assigned = {rank for rank, assignment in enumerate(assignments) if number in assignment.numbers}
        assert assigned == (set() if number in full else {copy.source, copy.target})
        keeping_store = views[copy.target].store
        assert all(
            (copy.key in assignments[v.rank].keys) == (number not in full) for v in views if v.store == keeping_store
        )
    assert all(task.payload_bytes == task.copy.source for rank_tasks in tasks for task in rank_tasks)
    assert {assignment.warnings for assignment in assignments} == {("5",)}

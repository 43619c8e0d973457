"""Whole lives of a job in the fake cluster: each fault alone, and what it must lead to."""

import re
from typing import Any

import pytest
from plan_builders import condition_of, spec
from plan_cluster import FakeCluster, names_of

from trainium_contract.faults.causes import Cause
from trainium_contract.status.conditions import ConditionType, Phase
from trainium_contract.status.interruptions import Rung
from trainium_operator.plan.model.conditions import is_true
from trainium_operator.plan.model.observed import PodPhase


def started(*, nodes: Any = 6, spares: Any = 1, steps: Any = 100_000, **workers: Any) -> Any:
    cluster = FakeCluster(spec(workers={"spares": spares, **workers}, trainer={"steps": steps}), nodes)
    cluster.run(15)
    assert cluster.status.phase is Phase.RUNNING
    return cluster


def last(cluster: Any) -> Any:
    return cluster.status.history[-1]


def test_a_job_starts_trains_and_completes_and_its_spare_is_released() -> None:
    cluster = started(steps=60)
    cluster.run(60)
    assert cluster.status.phase is Phase.COMPLETED
    assert cluster.status.progress.step == 60
    assert set(cluster.pods) == {f"demo-w-{at}" for at in range(4)}
    assert cluster.status.history == ()
    assert set(cluster.status.goodput.lost_seconds) == {"Startup"}


def test_a_crashed_process_is_restarted_in_place_and_no_pod_is_touched() -> None:
    cluster = started()
    pods = set(cluster.pods)
    assert cluster.crash_process(2)
    cluster.run(10)
    assert cluster.status.phase is Phase.RUNNING
    assert set(cluster.pods) == pods
    assert (last(cluster).rung, last(cluster).cause, last(cluster).pods_replaced) == (Rung.IN_PLACE, Cause.CRASH, 0)
    assert last(cluster).pod == names_of(cluster)[2]
    assert last(cluster).steps_lost == 0
    assert last(cluster).recovered_seconds <= 4
    assert cluster.membership.generation == 1
    assert cluster.status.membership.attempt == 1


def test_a_killed_pod_is_replaced_by_the_spare_and_a_new_spare_is_made() -> None:
    cluster = started()
    victim = names_of(cluster)[1]
    cluster.kill_pod(victim)
    cluster.run(10)
    assert cluster.status.phase is Phase.RUNNING
    assert names_of(cluster) == ["demo-w-0", "demo-w-4", "demo-w-2", "demo-w-3"]
    assert (last(cluster).rung, last(cluster).cause, last(cluster).pods_replaced) == (Rung.SPARE, Cause.POD_LOST, 1)
    assert cluster.status.spares == 1
    assert victim not in cluster.pods


def test_a_lost_node_with_a_spare_is_answered_within_seconds_and_not_at_its_not_ready() -> None:
    cluster = started()
    node = cluster.members()[1].view.node
    lost_at = cluster.now
    cluster.lose_node(node)
    cluster.run(12)
    assert cluster.status.phase is Phase.RUNNING
    assert last(cluster).cause is Cause.NODE_LOST
    assert last(cluster).rung is Rung.SPARE
    assert 4 <= last(cluster).detected_seconds <= 6
    assert last(cluster).recovered_seconds <= 10
    assert cluster.now - lost_at < 40
    assert len(cluster.status.history) == 1


def test_a_new_spare_does_not_go_to_the_node_that_was_just_lost_whatever_the_scheduler_prefers() -> None:
    cluster = started()
    cluster.scorns_preferences = True
    node = cluster.members()[1].view.node
    cluster.lose_node(node)
    cluster.run(25)  # for 40 s the node still requeue_at ready to the scheduler
    assert all(each.view.node != node for each in cluster.pods.values())
    assert cluster.status.spares == 1


def test_a_new_pod_goes_to_the_node_that_was_just_lost_when_there_is_no_other() -> None:
    cluster = started(nodes=4, spares=0)
    node = cluster.members()[1].view.node
    cluster.lose_node(node)
    cluster.run(15)
    assert [each.view.node for each in cluster.pods.values()].count(node) == 1
    cluster.restore_node(node)
    cluster.run(15)
    assert cluster.status.phase is Phase.RUNNING
    assert len(cluster.names_used) == 6, "the pod that found no node was made anew, once"


def test_without_a_spare_the_survivors_wait_for_a_new_pod() -> None:
    cluster = started(spares=0)
    cluster.kill_pod(names_of(cluster)[0])
    cluster.run(12)
    assert cluster.status.phase is Phase.RUNNING
    assert names_of(cluster)[0] == "demo-w-4"
    assert last(cluster).rung is Rung.REPLACE


def test_without_capacity_an_elastic_job_shrinks_and_grows_back() -> None:
    cluster = started(nodes=4, spares=0, minReplicas=2)
    node = cluster.members()[3].view.node
    cluster.lose_node(node)
    cluster.run(115)
    assert cluster.status.phase is Phase.RECOVERING
    cluster.run(30)
    assert cluster.status.phase is Phase.RUNNING
    assert last(cluster).rung is Rung.SHRINK
    assert names_of(cluster) == ["demo-w-0", "demo-w-1", "demo-w-2"]
    cluster.restore_node(node)
    cluster.run(100)
    assert len(names_of(cluster)) == 3
    cluster.run(25)
    assert len(names_of(cluster)) == 4
    assert last(cluster).rung is Rung.GROW
    assert cluster.status.phase is Phase.RUNNING


def test_scaling_down_and_up_is_graceful_and_uses_the_spare_first() -> None:
    cluster = started()
    cluster.change(replicas=3)
    cluster.run(10)
    assert cluster.status.phase is Phase.RUNNING
    assert names_of(cluster) == ["demo-w-0", "demo-w-1", "demo-w-2"]
    assert (last(cluster).rung, last(cluster).cause) == (Rung.RESIZE, Cause.RESIZE)
    assert len(cluster.pods) == 4
    cluster.change(replicas=4)
    cluster.run(12)
    assert cluster.status.phase is Phase.RUNNING
    assert len(names_of(cluster)) == 4
    assert last(cluster).rung is Rung.RESIZE
    assert last(cluster).recovered_seconds is not None
    assert cluster.status.failures == ()
    assert not is_true(cluster.status, ConditionType.RESIZING)


def test_a_suspended_job_releases_all_pods_and_resumes_in_a_new_generation() -> None:
    cluster = started()
    cluster.suspend(True)
    cluster.run(3)
    assert cluster.status.phase is Phase.SUSPENDING or cluster.pods == {}
    cluster.run(3)
    assert cluster.status.phase is Phase.SUSPENDED
    assert cluster.pods == {}
    wall = cluster.status.goodput.wall_seconds
    cluster.run(100)
    cluster.suspend(False)
    cluster.run(15)
    assert cluster.status.phase is Phase.RUNNING
    assert cluster.membership.generation == 2
    assert cluster.status.history == ()
    assert cluster.status.goodput.wall_seconds < wall + 30


@pytest.mark.parametrize(("code", "reason"), [(64, "UserError"), (65, "NumericalError"), (66, "OutOfMemory")])
def test_a_stopping_exit_code_ends_the_job_with_a_verdict_and_frees_the_nodes(code: Any, reason: Any) -> None:
    cluster = started()
    assert cluster.give_up(1, code)
    cluster.run(6)
    assert cluster.status.phase is Phase.FAILED
    assert next(c for c in cluster.status.conditions if c.type is ConditionType.FAILED).reason == reason
    assert "boom" in cluster.status.verdict
    assert cluster.status.avoided_nodes == ()
    left = [(each.view.phase, each.view.exit_code) for each in cluster.pods.values()]
    assert left == [(PodPhase.FAILED, code)], "what it said stays, and no node is held"


def test_a_process_that_keeps_crashing_moves_to_another_node() -> None:
    cluster = started()
    node = cluster.members()[1].view.node
    cluster.give_up(1, 139)
    cluster.run(8)
    assert cluster.status.phase is Phase.RUNNING
    assert last(cluster).rung is Rung.SPARE
    assert cluster.status.avoided_nodes == (node,)
    assert node not in {each.view.node for each in cluster.members()}


@pytest.mark.parametrize(
    ("reason", "advice"), [("Error", "Look at the pod's log"), ("StartError", "never ran, so there is no log")]
)
def test_a_worker_that_never_starts_ends_the_job_within_two_tries(reason: str, advice: str) -> None:
    cluster = FakeCluster(spec(workers={"replicas": 1}), 3)
    for _ in range(6):
        cluster.run(2)
        for each in list(cluster.pods.values()):
            if each.view.node and each.agent is None and each.view.exit_code is None:
                from dataclasses import replace

                each.view = replace(
                    each.view, phase=PodPhase.FAILED, reason=reason, exit_code=1, message="No module named 'trainer'"
                )
                cluster.dirty = True
    assert cluster.status.phase is Phase.FAILED
    assert "No module named 'trainer'" in cluster.status.verdict
    assert "2 worker pods ended before they could train" in cluster.status.verdict
    assert advice in cluster.status.verdict
    admitted = condition_of(cluster.status, ConditionType.ADMITTED)
    assert admitted.message == "the job has ended"
    assert cluster.status.avoided_nodes == ()
    assert cluster.status.next_pod_ordinal == 2


def test_restarts_in_place_continue_while_the_operator_is_down_and_are_recorded_afterwards() -> None:
    cluster = started()
    cluster.crash_operator(seconds=20)
    cluster.run(2)
    assert cluster.crash_process(0)
    cluster.run(8)
    assert cluster.crash_process(1)
    cluster.run(20)
    assert [entry.rung for entry in cluster.status.history] == [Rung.IN_PLACE, Rung.IN_PLACE]
    assert all(entry.recovered_seconds is not None for entry in cluster.status.history)
    assert cluster.membership.generation == 1
    assert cluster.status.phase is Phase.RUNNING


def test_messages_of_a_job_of_one_worker_use_the_singular() -> None:
    cluster = FakeCluster(spec(workers={"replicas": 1, "minReplicas": 1, "spares": 1}, trainer={"steps": 500}), nodes=3)
    messages: list[str] = []

    def listen(seconds: int) -> None:
        for _ in range(seconds):
            cluster.run(1)
            messages.extend(condition.message for condition in cluster.status.conditions)

    listen(30)
    cluster.kill_pod(cluster.members()[0].view.name)
    listen(40)
    cluster.change(replicas=2)
    listen(40)
    cluster.change(replicas=1)
    listen(40)
    cluster.suspend(value=True)
    listen(20)
    messages += [entry.message for entry in cluster.status.history]
    assert "1 worker is registered" in messages
    assert "from 2 to 1 node" in messages
    assert not [each for each in messages if re.search(r"(?<![\d.,])1 (workers|nodes|pods)\b", each)]

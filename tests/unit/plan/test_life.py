"""Single faults of a job in the fake cluster, and the recoveries from them."""

import re
from dataclasses import replace
from typing import Any

import pytest

from tests.unit.plan import plan_builders as build
from tests.unit.plan.plan_cluster import FakeCluster, start_cluster
from tests.unit.plan.plan_results import get_condition
from trainium_contract.faults.causes import Cause
from trainium_contract.status.conditions import ConditionType, Phase
from trainium_contract.status.interruptions import RecoveryResponse
from trainium_operator.plan.model.observed import PodPhase


def start_job(*, nodes: int = 6, spares: int = 1, steps: int = 100_000, **workers: Any) -> Any:
    return start_cluster(build.spec(workers={"spares": spares, **workers}, trainer={"steps": steps}), nodes)


def test_a_lost_node_is_replaced_by_a_spare_within_seconds() -> None:
    cluster = start_job()
    node = cluster.node_of_rank(1)
    lost_at = cluster.now
    cluster.lose_node(node)
    cluster.run(12)
    assert cluster.status.phase is Phase.RUNNING
    assert cluster.newest_entry.cause is Cause.NODE_LOST
    assert cluster.newest_entry.response is RecoveryResponse.SPARE
    assert 4 <= cluster.newest_entry.detected_seconds <= 6
    assert cluster.newest_entry.recovered_seconds <= 10
    assert cluster.now - lost_at < 40
    assert len(cluster.status.history) == 1


def test_a_new_spare_avoids_the_node_that_was_just_lost() -> None:
    cluster = start_job()
    cluster.ignores_preferences = True
    node = cluster.node_of_rank(1)
    cluster.lose_node(node)
    cluster.run(25)  # for 40 s the scheduler still sees the node as ready
    assert all(pod.view.node != node for pod in cluster.pods.values())
    assert cluster.status.spares == 1


def test_a_new_pod_uses_a_lost_node_if_there_is_no_other() -> None:
    cluster = start_job(nodes=4, spares=0)
    node = cluster.node_of_rank(1)
    cluster.lose_node(node)
    cluster.run(15)
    assert [pod.view.node for pod in cluster.pods.values()].count(node) == 1
    cluster.restore_node(node)
    cluster.run(15)
    assert cluster.status.phase is Phase.RUNNING
    assert len(cluster.names_used) == 6, "the unschedulable pod was recreated once"


def test_a_process_that_keeps_crashing_moves_to_another_node() -> None:
    cluster = start_job()
    node = cluster.node_of_rank(1)
    cluster.give_up(1, 139)
    cluster.run(8)
    assert cluster.status.phase is Phase.RUNNING
    assert cluster.newest_entry.response is RecoveryResponse.SPARE
    assert cluster.status.avoided_nodes == (node,)
    assert node not in {pod.view.node for pod in cluster.members()}


@pytest.mark.parametrize(
    ("reason", "advice"), [("Error", "Look at the pod's log"), ("StartError", "never ran, so there is no log")]
)
def test_a_worker_that_never_starts_ends_the_job_within_two_tries(reason: str, advice: str) -> None:
    cluster = FakeCluster(build.spec(workers={"replicas": 1}), 3)
    for _ in range(6):
        cluster.run(2)
        for pod in list(cluster.pods.values()):
            if pod.view.node and pod.agent is None and pod.view.exit_code is None:
                pod.view = replace(
                    pod.view, phase=PodPhase.FAILED, reason=reason, exit_code=1, message="No module named 'trainer'"
                )
                cluster.dirty = True
    assert cluster.status.phase is Phase.FAILED
    assert "No module named 'trainer'" in cluster.status.verdict
    assert "2 worker pods ended before they could train" in cluster.status.verdict
    assert advice in cluster.status.verdict
    admitted = get_condition(cluster.status, ConditionType.ADMITTED)
    assert admitted.message == "the job has ended"
    assert cluster.status.avoided_nodes == ()
    assert cluster.status.next_pod_ordinal == 2


def test_restarts_in_place_during_an_operator_outage_are_recorded_later() -> None:
    cluster = start_job()
    cluster.crash_operator(seconds=20)
    cluster.run(2)
    assert cluster.crash_process(0)
    cluster.run(8)
    assert cluster.crash_process(1)
    cluster.run(20)
    assert [entry.response for entry in cluster.status.history] == [
        RecoveryResponse.IN_PLACE,
        RecoveryResponse.IN_PLACE,
    ]
    assert all(entry.recovered_seconds is not None for entry in cluster.status.history)
    assert cluster.membership.generation == 1
    assert cluster.status.phase is Phase.RUNNING


def test_messages_of_a_job_of_one_worker_use_the_singular() -> None:
    cluster = FakeCluster(
        build.spec(workers={"replicas": 1, "minReplicas": 1, "spares": 1}, trainer={"steps": 500}), nodes=3
    )
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
    assert not [message for message in messages if re.search(r"(?<![\d.,])1 (workers|nodes|pods)\b", message)]

"""Nodes with interruption notices: handover to spares, graceful shrinks, and their cost."""

from dataclasses import replace
from typing import Any

import pytest

from tests.unit.plan import plan_builders as build
from tests.unit.plan.plan_builders import NOW
from tests.unit.plan.plan_cluster import FakeCluster, start_cluster
from tests.unit.plan.plan_results import make_plan
from trainium_contract.faults.causes import Cause
from trainium_contract.status.conditions import Phase
from trainium_contract.status.interruptions import RecoveryResponse
from trainium_contract.wire.messages import Transition
from trainium_operator.plan.model.observed import FleetView, NodeView, Taint

SPOT = Taint("aws-node-termination-handler/spot-itn", "", "NoSchedule")
KARPENTER = Taint("karpenter.sh/disrupted", "", "NoSchedule")


def start_job(*, nodes: int = 6, spares: int = 0, recovery: Any = None, **workers: Any) -> FakeCluster:
    job_spec = build.spec(workers={"spares": spares, **workers}, recovery=recovery or {}, trainer={"steps": 10**6})
    return start_cluster(job_spec, nodes)


def makes_steps(cluster: FakeCluster) -> bool:
    before = cluster.best_step
    cluster.run(3)
    return cluster.best_step > before


@pytest.mark.parametrize(
    "mark",
    [
        {"taint": SPOT},
        {"taint": KARPENTER},
        {"taint": Taint("aws-node-termination-handler/scheduled-maintenance", "", "NoSchedule")},
        {"taint": Taint("aws-node-termination-handler/asg-lifecycle-termination", "", "NoSchedule")},
        {"taint": Taint("ToBeDeletedByClusterAutoscaler", "1700000000", "NoSchedule")},
        {"deleting": True},
    ],
)
def test_a_rank_on_a_leaving_node_moves_to_the_spare_without_a_lost_step(mark: Any) -> None:
    cluster = start_job(spares=1)
    leaver, node = cluster.member_names()[1], cluster.node_of_rank(1)
    cluster.mark_node(node, **mark)
    cluster.run(8)
    assert cluster.status.phase is Phase.RUNNING
    assert cluster.member_names() == ["demo-w-0", "demo-w-4", "demo-w-2", "demo-w-3"]
    assert cluster.membership is not None
    assert cluster.membership.transition is Transition.GRACEFUL
    entry = cluster.newest_entry
    assert (entry.cause, entry.response, entry.steps_lost or 0) == (Cause.PREEMPTED, RecoveryResponse.SPARE, 0)
    assert cluster.status.failures == ()
    assert cluster.status.leaving_since is None
    cluster.run(8)
    assert leaver not in cluster.pods
    assert cluster.status.spares == 1, "a new spare is made in the background"
    assert node not in {pod.view.node for pod in cluster.pods.values()}


def test_no_warm_worker_is_deleted_during_a_handover() -> None:
    fewer = build.spec(workers={"spares": 1})
    observed = build.running_job(4, spares=4, job_spec=fewer)
    assert set(make_plan(observed).deleted_pods) == {"demo-w-5", "demo-w-6", "demo-w-7"}, "beyond the spare"
    result = make_plan(with_leaving_nodes(observed, 1))
    assert result.published_membership is not None
    assert result.deleted_pods == {}


def with_leaving_nodes(observed: Any, *ordinals: int, taint: Taint = KARPENTER) -> Any:
    nodes = {f"node-{number}": NodeView(name=f"node-{number}", taints=(taint,)) for number in ordinals}
    return replace(observed, nodes={**observed.nodes, **nodes})


def test_without_a_spare_the_member_trains_on_until_its_replacement_is_warm() -> None:
    cluster = start_job()
    cluster.mark_node(cluster.node_of_rank(2), taint=KARPENTER)
    cluster.dirty = True
    cluster.run(1)
    assert cluster.member_names()[2] == "demo-w-2"
    assert len(cluster.pods) == 5
    assert makes_steps(cluster)
    cluster.run(8)
    assert cluster.member_names()[2] == "demo-w-4"
    assert cluster.newest_entry.response is RecoveryResponse.REPLACE
    assert cluster.status.phase is Phase.RUNNING
    cluster.run(8)
    assert len(cluster.pods) == 4


def test_a_notice_is_reported_once_with_its_node_and_its_source() -> None:
    result = make_plan(with_leaving_nodes(build.running_job(4), 1))
    (note,) = result.event_notes("InterruptionNotice")
    assert "node-1" in note
    assert "karpenter.sh/disrupted" in note
    assert result.status.leaving_since == NOW
    again = make_plan(with_leaving_nodes(build.with_status(build.running_job(4), leaving_since=NOW - 5), 1))
    assert again.event_notes("InterruptionNotice") == []
    assert again.status.leaving_since == NOW - 5


def test_an_elastic_job_without_capacity_shrinks_gracefully_after_the_wait() -> None:
    cluster = start_job(nodes=4, minReplicas=2)
    cluster.mark_node(cluster.node_of_rank(3), taint=KARPENTER)
    cluster.run(100)
    assert len(cluster.member_names()) == 4
    assert makes_steps(cluster)
    cluster.run(30)
    assert cluster.member_names() == ["demo-w-0", "demo-w-1", "demo-w-2"]
    assert cluster.membership is not None
    assert cluster.membership.transition is Transition.GRACEFUL
    assert (cluster.newest_entry.response, cluster.newest_entry.cause) == (RecoveryResponse.SHRINK, Cause.PREEMPTED)
    assert cluster.status.phase is Phase.RUNNING


def test_an_elastic_job_shrinks_before_a_spot_instance_ends() -> None:
    cluster = start_job(nodes=4, minReplicas=2)
    cluster.mark_node(cluster.node_of_rank(3), taint=SPOT)
    cluster.run(48)
    assert len(cluster.member_names()) == 4
    cluster.run(8)
    assert len(cluster.member_names()) == 3
    assert cluster.newest_entry.recovered_seconds is not None, "60 s before the end it trains without the node"


def test_a_rigid_job_saves_before_the_known_end_of_a_notice() -> None:
    cluster = start_job(nodes=4)
    cluster.mark_node(cluster.node_of_rank(3), taint=SPOT)
    cluster.run(48)
    assert len(cluster.members()) == 4
    assert cluster.status.history == ()
    cluster.run(6)
    assert len(cluster.members()) == 3, "its pod was asked to end, so that all ranks save"
    assert cluster.status.phase is Phase.RECOVERING
    cluster.clear_node("node-3")
    cluster.run(15)
    assert cluster.status.phase is Phase.RUNNING
    assert cluster.status.failures == ()


def test_a_rigid_job_trains_on_during_an_open_ended_notice() -> None:
    cluster = start_job(nodes=4)
    cluster.mark_node(cluster.node_of_rank(3), taint=KARPENTER)
    cluster.run(600)
    assert cluster.status.history == ()
    assert makes_steps(cluster)


def test_a_withdrawn_notice_does_not_change_the_membership() -> None:
    cluster = start_job(nodes=4, minReplicas=2)
    node = cluster.node_of_rank(3)
    cluster.mark_node(node, taint=KARPENTER)
    cluster.run(60)
    cluster.clear_node(node)
    cluster.run(200)
    assert cluster.status.history == ()
    assert cluster.status.leaving_since is None
    assert len(cluster.pods) == 4


def test_a_cordon_replaces_nobody() -> None:
    cluster = start_job(spares=1)
    cluster.mark_node(
        cluster.node_of_rank(1), schedulable=False, taint=Taint("node.kubernetes.io/unschedulable", "", "NoSchedule")
    )
    cluster.run(300)
    assert cluster.status.history == ()
    assert cluster.membership is not None
    assert cluster.membership.generation == 1


def test_an_out_of_service_node_is_lost_at_once() -> None:
    taint = Taint("node.kubernetes.io/out-of-service", "nodeshutdown", "NoExecute")
    result = make_plan(with_leaving_nodes(build.running_job(4, spares=1), 1, taint=taint))
    assert result.published_membership is not None
    assert result.newest_entry.cause is Cause.NODE_LOST
    assert result.deleted_pods["demo-w-1"] == 0


def test_a_spare_on_a_leaving_node_is_replaced_without_touching_the_members() -> None:
    cluster = start_job(spares=1)
    (spare,) = set(cluster.pods) - set(cluster.member_names())
    cluster.mark_node(cluster.pods[spare].view.node, taint=KARPENTER)
    cluster.run(10)
    assert spare not in cluster.pods
    assert cluster.status.spares == 1
    assert cluster.membership is not None
    assert cluster.membership.generation == 1


def test_a_frozen_fleet_still_honours_interruption_notices() -> None:
    """The circuit breaker covers health, not announced interruptions."""
    observed = replace(
        with_leaving_nodes(build.running_job(4, spares=1), 1), fleet=FleetView(frozen="too many nodes are bad")
    )
    assert make_plan(observed).published_members == ["demo-w-0", "demo-w-4", "demo-w-2", "demo-w-3"]


def test_two_leaving_members_move_to_two_spares_at_once() -> None:
    result = make_plan(with_leaving_nodes(build.running_job(4, spares=2), 1, 2))
    assert result.published_members == ["demo-w-0", "demo-w-4", "demo-w-5", "demo-w-3"]
    assert result.status.restarts.total == 1

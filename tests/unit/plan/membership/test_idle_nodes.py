"""Idle nodes are used where they save a pass, leave first, and cost no step and no place of others."""

from typing import Any

import pytest

from tests.unit.plan import plan_builders as build
from tests.unit.plan.plan_cluster import FakeCluster, start_cluster
from tests.unit.plan.plan_results import make_plan
from trainium_contract.faults.causes import Cause
from trainium_contract.status.conditions import Phase
from trainium_contract.status.interruptions import RecoveryResponse
from trainium_contract.wire.messages import Transition
from trainium_operator.plan.model.observed import Taint
from trainium_operator.plan.view.size import decide_size

RESCALE_AFTER_SECONDS = 30
TAKES = {"idleNodes": "Take"}


def start_job(
    *,
    nodes: int,
    replicas: int = 2,
    batch: int = 24,
    steps: int = 10**7,
    rest: int = RESCALE_AFTER_SECONDS,
    **workers: Any,
) -> FakeCluster:
    """Start a job that may use idle nodes."""
    job_spec = build.spec(
        workers={"replicas": replicas, "maxReplicas": 4, **workers},
        recovery={"rescaleAfterSeconds": rest},
        trainer={"steps": steps, "batch": {"globalSize": batch}},
        elasticity=TAKES,
    )
    return start_cluster(job_spec, nodes, 30)


def extras(cluster: FakeCluster) -> list[str]:
    return sorted(name for name, pod in cluster.pods.items() if pod.view.extra)


def is_graceful(cluster: FakeCluster) -> bool:
    """Return whether all ranks saved before the newest change."""
    return cluster.membership is not None and cluster.membership.transition is Transition.GRACEFUL


def test_a_job_grows_onto_idle_nodes_and_reports_it() -> None:
    cluster = start_job(nodes=6)

    assert cluster.size == 4
    assert cluster.status.phase is Phase.RUNNING
    assert (cluster.status.desired, cluster.status.idle_nodes.taken, cluster.status.idle_nodes.wanted) == (4, 2, 2)
    assert cluster.responses() == [RecoveryResponse.GROW]
    assert cluster.status.history[0].cause is Cause.CAPACITY
    assert "2 idle nodes beyond the 2 requested" in cluster.status.history[0].message
    assert is_graceful(cluster)
    assert len(extras(cluster)) == 2
    assert cluster.status.membership.speed == 2


def test_preempted_extras_leave_without_a_lost_step() -> None:
    cluster = start_job(nodes=4)
    assert cluster.size == 4

    cluster.foreign_pending_pods = 2
    cluster.run(20)

    assert len(cluster.foreign_nodes) == 2
    assert cluster.size == 2
    assert cluster.status.phase is Phase.RUNNING
    assert is_graceful(cluster)
    assert all(entry.response in (RecoveryResponse.GROW, RecoveryResponse.SHRINK) for entry in cluster.status.history)
    assert {entry.cause for entry in cluster.status.history[1:]} == {Cause.PREEMPTED}
    assert cluster.status.failures == (), "no failure is recorded"


def test_a_waiting_gang_gets_nodes_by_a_planned_shrink() -> None:
    cluster = start_job(nodes=4)
    cluster.nodes_wanted_by_gangs = 2
    cluster.dirty = True
    cluster.run(30)
    assert cluster.size == 2
    assert extras(cluster) == []
    entry = cluster.newest_entry
    assert (entry.cause, entry.response) == (Cause.CAPACITY, RecoveryResponse.RESIZE)
    assert is_graceful(cluster)
    assert "2 idle nodes released" in entry.message
    cluster.run(300)
    assert extras(cluster) == [], "while they wait nothing is asked for"


def test_an_interruption_notice_removes_an_extra_at_once() -> None:
    cluster = start_job(nodes=4, rest=300)
    assert cluster.size == 4
    node = cluster.pods[extras(cluster)[0]].view.node
    cluster.mark_node(node, taint=Taint("aws-node-termination-handler/scheduled-maintenance"))
    cluster.run(10)
    assert cluster.size == 3
    assert node not in {pod.view.node for pod in cluster.members()}
    assert is_graceful(cluster)


def test_an_interruption_notice_of_a_member_is_answered_with_an_extra() -> None:
    cluster = start_job(nodes=4, rest=300)
    member = next(pod for pod in cluster.members() if not pod.view.extra)
    cluster.mark_node(member.view.node, taint=Taint("aws-node-termination-handler/scheduled-maintenance"))
    before = cluster.status.membership.generation
    cluster.run(2)
    assert cluster.status.membership.generation > before, "there is no wait"
    cluster.run(1200)
    assert cluster.size == 3
    assert sum(not pod.view.extra for pod in cluster.members()) == 2, "its place is taken by one that was asked for"
    assert is_graceful(cluster)


def test_a_spare_is_no_extra_and_stays_a_spare() -> None:
    cluster = start_job(nodes=8, spares=1)
    assert cluster.size == 4
    outside = [pod for pod in cluster.pods.values() if pod not in cluster.members()]
    assert len(outside) == 1
    assert not outside[0].view.extra

    cluster.foreign_pending_pods = 5
    cluster.run(30)
    assert cluster.size == 2
    assert sum(not pod.view.extra for pod in cluster.pods.values()) == 3


def test_scaling_up_turns_extras_into_requested_workers() -> None:
    cluster = start_job(nodes=4)
    before = [pod.view.name for pod in cluster.members()]
    cluster.change(replicas=4)
    cluster.run(20)
    assert [pod.view.name for pod in cluster.members()] == before
    assert (cluster.status.desired, cluster.status.idle_nodes.taken) == (4, 0)


def test_failing_extras_back_off_and_use_no_budget() -> None:
    cluster = start_job(nodes=2)
    cluster.run(120)
    cluster.nodes.update({name: node for name, node in FakeCluster(cluster.spec, 4).nodes.items() if name > "node-1"})
    made: set[str] = set()
    for _ in range(900):
        cluster.run(1)
        fresh = [name for name in extras(cluster) if cluster.pods[name].agent is not None]
        made |= set(fresh)
        for name in fresh:
            cluster.kill_pod(name)
    assert made
    assert len(made) <= 32, f"{len(made)} extras were made in a quarter of an hour: two a minute at most"
    assert cluster.status.phase is Phase.RUNNING
    assert cluster.size == 2


def test_extras_have_the_lowest_priority_class_and_a_label() -> None:
    observed = build.running_job(
        2, job_spec=build.spec(workers={"replicas": 2, "maxReplicas": 3}, elasticity=TAKES, trainer={"steps": 10**6})
    )
    (manifest,) = make_plan(observed).created_manifests
    assert manifest["spec"].get("priorityClassName") == "idle-nodes"
    assert manifest["metadata"]["labels"]["trainium.dev/extra"] == "true"


@pytest.mark.parametrize(
    ("replicas", "most", "batch", "best"), [(4, 8, 8, 8), (4, 7, 8, 4), (3, 5, 12, 4), (2, 2, 8, 2)]
)
def test_the_largest_size_is_one_that_saves_a_pass(replicas: int, most: int, batch: int, best: int) -> None:
    job = build.spec(
        workers={"replicas": replicas, "maxReplicas": most}, trainer={"batch": {"globalSize": batch}}, elasticity=TAKES
    )
    assert decide_size(job).max_size == best


def test_a_template_cannot_mark_a_worker_as_an_extra() -> None:
    template = {"metadata": {"labels": {"trainium.dev/extra": "true", "team": "a"}}}
    cluster = FakeCluster(build.spec(workers={"replicas": 2, "template": template}), 2)
    cluster.run(10)
    assert cluster.size == 2
    assert extras(cluster) == []
    assert {pod.manifest["metadata"]["labels"]["team"] for pod in cluster.pods.values()} == {"a"}

"""A requested deletion of a pod is no failure, whichever client requests it."""

import pytest

from tests.unit.plan import plan_builders as build
from tests.unit.plan.plan_cluster import FakeCluster, start_cluster
from tests.unit.plan.plan_results import make_plan
from trainium_contract.faults.causes import Cause
from trainium_operator.plan.model.observed import NodeReadiness, PodPhase


def start_job(spares: int) -> FakeCluster:
    return start_cluster(build.spec(workers={"replicas": 3, "spares": spares}, trainer={"steps": 10**6}), 6, 40)


def delete(cluster: FakeCluster, name: str) -> None:
    """Delete a pod as `kubectl delete` does."""
    cluster._delete(name, cluster.pods[name].view.uid, None)


@pytest.mark.parametrize("spares", [0, 1])
@pytest.mark.parametrize("who", ["member", "spare"])
def test_a_pod_deleted_by_a_user_is_replaced_without_a_failure_record(who: str, spares: int) -> None:
    cluster = start_job(spares)
    names = [pod.view.name for pod in cluster.members()] if who == "member" else sorted(cluster.pods)[3:]
    for name in names[:1]:
        delete(cluster, name)
        phases = set()
        for _ in range(40):
            cluster.run(1)
            phases |= {pod.view.phase for pod in cluster.pods.values() if pod.view.name == name}
        assert PodPhase.FAILED in phases, "the API server showed how it ended"
    assert cluster.status.phase == "Running"
    assert [record for record in cluster.status.failures if record.cause is not Cause.PREEMPTED] == []
    assert cluster.status.avoided_nodes == ()
    assert len(cluster.pods) == 3 + spares


def test_repeated_deletions_never_delay_new_pods() -> None:
    cluster = start_job(1)
    for _ in range(12):
        delete(cluster, next(pod.view.name for pod in cluster.members()))
        cluster.run(20)
        assert cluster.status.phase == "Running"
        assert len(cluster.pods) == 4
    assert [record for record in cluster.status.failures if record.cause is not Cause.PREEMPTED] == []


def test_replacements_are_created_before_failed_pods_are_deleted() -> None:
    observed = build.running_job(4, spares=1)
    for number in range(5):
        observed = build.with_pod(observed, build.pod(number, phase=PodPhase.FAILED, reason="Error", exit_code=137))
    kinds = [kind for kind in make_plan(observed).action_kinds if kind.endswith("Pod")]
    assert kinds == ["CreatePod"] * kinds.count("CreatePod") + ["DeletePod"] * 5
    assert kinds.count("CreatePod") >= 4


def test_a_pod_that_may_hold_devices_is_deleted_before_its_replacement() -> None:
    observed = build.running_job(
        4, agents={1: build.training_agent(1, silent=60)}, nodes={"node-1": build.node("node-1", NodeReadiness.UNKNOWN)}
    )
    assert [kind for kind in make_plan(observed).action_kinds if kind.endswith("Pod")] == ["DeletePod", "CreatePod"]

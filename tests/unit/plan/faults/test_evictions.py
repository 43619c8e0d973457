"""Whose limit a kubelet evicted a pod for: the pod's own is the user's, the node's makes the node avoided."""

from dataclasses import replace
from typing import Any

import pytest

from tests.unit.plan import plan_builders as build
from tests.unit.plan.plan_cluster import FakeCluster
from tests.unit.plan.plan_results import make_plan
from trainium_contract.faults.causes import Cause
from trainium_contract.status.conditions import Phase
from trainium_operator.plan.model.observed import PodPhase
from trainium_operator.plan.model.reasons import Reason

OWN = (
    'Usage of EmptyDir volume "scratch" exceeds the limit "1Gi". ',
    'Container worker exceeded its local ephemeral storage limit "2Gi". ',
    "Pod ephemeral local storage usage exceeds the total limit of containers 2Gi. ",
)
NODE = (
    "The node was low on resource: ephemeral-storage. Threshold quantity: 1Gi, available: 9Mi. ",
    "The node was low on resource: inodes. ",
    "The node was low on resource: memory. Threshold quantity: 100Mi, available: 52Mi. ",
    "The node was low on resource: pids. Threshold quantity: 1310, available: 1200. ",
    "The node had condition: [DiskPressure]. ",
)
LEAVING: dict[str, Any] = {"reason": "Evicted", "disrupted": True, "disruption": "TerminationByKubelet"}
"""The kubelet writes reason and message first, and the phase when the containers have ended."""
ENDED = {**LEAVING, "phase": PodPhase.FAILED, "exit_code": 143}


@pytest.mark.parametrize("message", OWN)
@pytest.mark.parametrize("state", [LEAVING, ENDED], ids=["leaving", "ended"])
def test_a_member_over_its_own_limit_is_counted_for_the_user(state: Any, message: str) -> None:
    result = make_plan(build.with_pod(build.running_job(4), build.pod(1, **state, message=message)))
    entry = result.newest_entry
    assert (entry.cause, entry.pod) == (Cause.LOCAL_STORAGE, "demo-w-1")
    assert message.strip() in entry.message
    assert [(record.cause, record.node) for record in result.status.failures] == [(Cause.LOCAL_STORAGE, "")]


@pytest.mark.parametrize("message", NODE)
@pytest.mark.parametrize("state", [LEAVING, ENDED], ids=["leaving", "ended"])
def test_a_member_evicted_for_its_nodes_limit_returns_on_another_node(state: Any, message: str) -> None:
    result = make_plan(build.with_pod(build.running_job(4), build.pod(1, **state, message=message)))
    assert result.newest_entry.cause is Cause.HOST
    assert message.strip() in result.newest_entry.message
    assert result.status.avoided_nodes == ("node-1",)


@pytest.mark.parametrize(
    ("message", "cause", "node"), [(OWN[0], Cause.LOCAL_STORAGE, ""), (NODE[0], Cause.HOST, "node-4")]
)
def test_a_spare_that_is_evicted_is_counted_alike(message: str, cause: Cause, node: str) -> None:
    spare = build.pod(4, **ENDED, message=message)
    result = make_plan(build.with_pod(build.running_job(4, spares=1), spare))
    assert [(record.cause, record.pod, record.node) for record in result.status.failures] == [(cause, "demo-w-4", node)]


def test_a_program_that_prints_such_a_message_is_not_evicted() -> None:
    ended = build.pod(1, phase=PodPhase.FAILED, reason="Error", exit_code=137, message=OWN[0])
    assert make_plan(build.with_pod(build.running_job(4), ended)).newest_entry.cause is Cause.POD_LOST


class FillingCluster(FakeCluster):
    """A cluster whose kubelets evict each worker some time after its start, because it fills its volume."""

    filled_after = 20.0

    def _run_kubelets(self) -> None:
        super()._run_kubelets()
        for pod in self.pods.values():
            if pod.view.phase is PodPhase.RUNNING and self.now >= pod.view.created + self.filled_after:
                pod.view = replace(pod.view, **{**ENDED, "message": OWN[0], "finished": self.now})


def test_a_job_whose_workers_always_exceed_their_limit_ends_with_the_volume_and_the_limit() -> None:
    cluster = FillingCluster(build.spec(workers={"replicas": 2}, trainer={"steps": 10**6}), 4)
    cluster.run(7200, 0.5)
    status = cluster.status
    assert status.phase is Phase.FAILED
    assert status.restarts.total <= 12
    verdict = next(condition for condition in status.conditions if condition.type == "Failed")
    assert verdict.reason == Reason.BUDGET_EXHAUSTED
    assert 'EmptyDir volume "scratch" exceeds the limit "1Gi"' in verdict.message
    assert "sizeLimit" in verdict.message

"""Pods that a kubelet or an admission rejects at once, or whose container cannot be created."""

from dataclasses import replace

import pytest

from tests.unit.plan import plan_builders as build
from tests.unit.plan.plan_cluster import FakeCluster
from tests.unit.plan.plan_results import get_condition
from trainium_contract.status.conditions import ConditionType, Phase
from trainium_contract.status.start_failures import StartFailuresStatus
from trainium_operator.plan.model.observed import PodPhase
from trainium_operator.plan.pods.refused_pods import find_next_creation

TICK = 0.5


class RefusingCluster(FakeCluster):
    """A cluster whose kubelets reject every pod while `reason` is set."""

    reason = ""
    exit_code: int | None = None
    created_at: tuple[float, ...] = ()
    """Creation time of each pod, in order."""

    def _run_kubelets(self) -> None:
        for pod in self.pods.values():
            if self.reason and pod.view.node and pod.view.phase is PodPhase.PENDING:
                pod.view = replace(
                    pod.view, phase=PodPhase.FAILED, reason=self.reason, exit_code=self.exit_code, finished=self.now
                )
        super()._run_kubelets()

    def _create(self, manifest: object) -> None:
        super()._create(manifest)  # type: ignore[arg-type]
        self.created_at = (*self.created_at, self.now)


def create_cluster(*, replicas: int = 2, nodes: int = 4) -> RefusingCluster:
    return RefusingCluster(build.spec(workers={"replicas": replicas}, trainer={"steps": 10**6}), nodes)


def start_training_cluster() -> RefusingCluster:
    cluster = create_cluster()
    cluster.run(40, TICK)
    assert cluster.status.phase is Phase.RUNNING
    cluster.created_at = ()
    return cluster


@pytest.mark.parametrize("reason", ["UnexpectedAdmissionError", "OutOfcpu", "Evicted", "CreateContainerConfigError"])
def test_creations_back_off_while_pods_are_refused(reason: str) -> None:
    cluster = create_cluster()
    cluster.reason = reason
    cluster.run(60, TICK)
    assert len(cluster.created_at) <= 12
    ready = get_condition(cluster.status, ConditionType.PODS_READY)
    assert "6 times in a row" in ready.message
    cluster.run(1800, TICK)
    assert len(cluster.created_at) <= 12 + 2 * 9
    assert cluster.status.phase is Phase.PENDING, "the job did not fail"


def test_creations_back_off_while_containers_cannot_start() -> None:
    cluster = start_training_cluster()
    cluster.reason, cluster.exit_code = "StartError", 128
    assert cluster.kill_pod(cluster.members()[0].view.name)
    cluster.run(60, TICK)
    assert 2 < len(cluster.created_at) <= 6


def test_a_lost_worker_is_replaced_at_once_despite_first_refusals() -> None:
    cluster = start_training_cluster()
    cluster.reason = "UnexpectedAdmissionError"
    assert cluster.kill_pod(cluster.members()[0].view.name)
    killed_at = cluster.now
    cluster.run(2 * TICK, TICK)
    cluster.reason = ""
    cluster.run(30, TICK)
    assert cluster.status.phase is Phase.RUNNING
    assert cluster.created_at[-1] <= killed_at + 3 * TICK


def test_the_backoff_ends_with_a_reporting_pod() -> None:
    cluster = create_cluster()
    cluster.reason = "OutOfcpu"
    cluster.run(20, TICK)
    assert cluster.status.start_failures.rounds > 2
    cluster.reason = ""
    cluster.run(60, TICK)
    assert cluster.status.phase is Phase.RUNNING
    assert cluster.status.start_failures.rounds == 0
    cluster.reason = "OutOfcpu"
    assert cluster.kill_pod(cluster.members()[0].view.name)
    cluster.run(4, TICK)
    assert cluster.status.start_failures.rounds in (1, 2), "earlier rounds do not count"


@pytest.mark.parametrize("remedy", ["the job is corrected", "it is suspended and resumed"])
def test_the_backoff_ends_when_the_job_is_changed(remedy: str) -> None:
    cluster = create_cluster()
    cluster.reason = "CreateContainerConfigError"
    cluster.run(60, TICK)
    rounds = cluster.status.start_failures.rounds
    assert rounds > 4
    cluster.reason = ""
    if remedy == "the job is corrected":
        cluster.generation += 1
        cluster.dirty = True
    else:
        cluster.spec = cluster.spec.replaced(suspend=True)
        cluster.run(2, TICK)
        cluster.spec = cluster.spec.replaced(suspend=False)
    count = len(cluster.created_at)
    cluster.run(2, TICK)
    assert len(cluster.created_at) == count + 2


def test_a_restarted_operator_continues_the_backoff() -> None:
    cluster = create_cluster()
    cluster.reason = "OutOfcpu"
    cluster.run(30, TICK)
    for _ in range(10):
        cluster.crash_operator()
        cluster.run(3, TICK)
    assert len(cluster.created_at) <= 12


def test_refusals_within_a_batch_are_one_round() -> None:
    cluster = create_cluster(replicas=8, nodes=24)
    cluster.reason = "OutOfcpu"
    cluster.run(60, TICK)
    assert cluster.status.start_failures.rounds == 6
    assert len(cluster.created_at) == 8 + 5 * 4, "8 in the first batch, 4 in each later one"


def test_an_edited_backoff_is_bounded() -> None:
    status = start_training_cluster().status
    for rounds, time in ((10**9, 10.0), (3, 10**12), (-5, 10.0), (10**9, None)):
        edited = status.replaced(start_failures=StartFailuresStatus(rounds=rounds, at=time))
        assert find_next_creation(edited, 100.0) <= 400.0


class PartlyRefusingCluster(RefusingCluster):
    """A cluster in which only the nodes in `bad_nodes` reject pods."""

    bad_nodes: frozenset[str] = frozenset()

    def _run_kubelets(self) -> None:
        active_reason, self.reason = self.reason, ""
        for pod in self.pods.values():
            if active_reason and pod.view.node in self.bad_nodes and pod.view.phase is PodPhase.PENDING:
                pod.view = replace(pod.view, phase=PodPhase.FAILED, reason=active_reason, finished=self.now)
        super()._run_kubelets()
        self.reason = active_reason


def create_partly_refusing_cluster(replicas: int, nodes: int, bad_nodes: int) -> PartlyRefusingCluster:
    cluster = PartlyRefusingCluster(build.spec(workers={"replicas": replicas}, trainer={"steps": 10**6}), nodes)
    cluster.reason, cluster.bad_nodes = "UnexpectedAdmissionError", frozenset(sorted(cluster.nodes)[:bad_nodes])
    return cluster


def test_refused_workers_are_probed_in_small_batches_that_grow_on_success() -> None:
    cluster = create_cluster(replicas=80, nodes=80)
    cluster.reason = "UnexpectedAdmissionError"
    cluster.run(12, TICK)
    assert 80 < len(cluster.created_at) <= 80 + 4 * 4
    cluster.reason = ""
    cluster.created_at = ()
    cluster.run(40, TICK)
    assert cluster.status.phase is Phase.RUNNING
    batches = [cluster.created_at.count(time) for time in sorted(set(cluster.created_at))]
    assert batches[:3] == [4, 16, 60]
    assert sum(batches[3:]) <= 16, "pods that were to avoid nodes that the job needs"


@pytest.mark.parametrize("bad_nodes", [1, 2])
def test_a_node_that_refuses_twice_is_avoided_and_named(bad_nodes: int) -> None:
    cluster = create_partly_refusing_cluster(8, 8 + bad_nodes, bad_nodes)
    cluster.run(60, TICK)
    assert cluster.status.phase is Phase.RUNNING
    assert len(cluster.created_at) <= 8 + 4 * bad_nodes
    assert set(cluster.status.avoided_nodes) == cluster.bad_nodes
    assert {node.node: node.times for node in cluster.status.start_failures.nodes} == dict.fromkeys(
        cluster.bad_nodes, 2
    )
    cluster.run(700, 10.0)
    assert cluster.status.avoided_nodes == (), "the refusals have expired"


def test_at_most_a_quarter_of_refusing_nodes_is_avoided() -> None:
    cluster = create_cluster(replicas=8, nodes=8)
    cluster.reason = "OutOfcpu"
    cluster.run(120, TICK)
    assert len(cluster.status.avoided_nodes) <= 2
    ready = get_condition(cluster.status, ConditionType.PODS_READY)
    assert "new pods avoid node-" in ready.message


def test_a_refusing_node_is_used_if_there_is_no_other() -> None:
    cluster = create_partly_refusing_cluster(2, 2, 1)
    cluster.run(30, TICK)
    assert cluster.status.avoided_nodes
    cluster.reason = ""
    cluster.run(330, TICK)
    assert cluster.status.phase is Phase.RUNNING


def test_unschedulable_pods_do_not_block_a_batch() -> None:
    cluster = create_cluster(replicas=8, nodes=8)
    cluster.reason = "OutOfcpu"
    cluster.run(2, TICK)
    cluster.reason = ""
    cluster.nodes.clear()
    cluster.run(60, TICK)
    unscheduled_pods = [pod for pod in cluster.pods.values() if not pod.view.node]
    assert len(unscheduled_pods) == 8, "a cluster autoscaler counts them"

"""Jobs in the queues of a real Kueue: waiting, borrowing, preemption, and the loss curve through all of it.

It has its own control plane, with the real controller and its webhooks beside it. Two teams share four nodes: each owns
two and may borrow the other's. The nodes are tainted, so a pod without its flavor's toleration would find none.
"""

import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.testing.cluster.installed import install_operator
from tests.testing.cluster.jobs import Job
from tests.testing.cluster.shared_cluster import SharedCluster
from trainium_devcluster.binaries import KUEUE_PROGRAMS, is_cached
from trainium_devcluster.cluster import Cluster, create_node_specs, create_system_node, create_system_values

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(900)]

TEAMS = ("elastic", "rigid")
POOL = "blue"
QUEUES = {
    "apiVersion": "v1",
    "kind": "List",
    "items": [
        {
            "apiVersion": "kueue.x-k8s.io/v1beta2",
            "kind": "ResourceFlavor",
            "metadata": {"name": POOL},
            "spec": {
                "nodeLabels": {"pool": POOL},
                "tolerations": [{"key": "pool", "operator": "Equal", "value": POOL, "effect": "NoSchedule"}],
            },
        },
        *(
            {
                "apiVersion": "kueue.x-k8s.io/v1beta2",
                "kind": "ClusterQueue",
                "metadata": {"name": team},
                "spec": {
                    "cohortName": "teams",
                    "namespaceSelector": {},
                    "preemption": {"reclaimWithinCohort": "Any"},
                    "resourceGroups": [
                        {
                            "coveredResources": ["cpu"],
                            "flavors": [{"name": POOL, "resources": [{"name": "cpu", "nominalQuota": 2}]}],
                        }
                    ],
                },
            }
            for team in TEAMS
        ),
        *({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": team}} for team in TEAMS),
        *(
            {
                "apiVersion": "kueue.x-k8s.io/v1beta2",
                "kind": "LocalQueue",
                "metadata": {"name": "training", "namespace": team},
                "spec": {"clusterQueue": team},
            }
            for team in TEAMS
        ),
    ],
}
# Quota of processors: 0.19.2 preempts no workload for the resource `pods` alone.
WORKER = {"spec": {"containers": [{"name": "worker", "resources": {"requests": {"cpu": "1"}}}]}}
# More steps than any machine makes before a queue has decided: a test ends such a job, or lets it rest.
ENDLESS = "trainer: {steps: 100000}"
QUEUED = "scheduling: {queueName: training}"


@pytest.fixture(scope="module")
def teams(request: pytest.FixtureRequest) -> Iterator[SharedCluster]:
    if request.config.getoption("--cluster") != "local":
        pytest.skip("needs a Kueue of its own, which the development cluster brings")
    if not is_cached(KUEUE_PROGRAMS):
        pytest.skip("Kueue is not built; `trainium-devcluster binaries --kueue` builds it once, in some minutes")
    pool = create_node_specs(4, cpu="4", memory="8Gi", labels={"pool": POOL}, taints=(f"pool={POOL}:NoSchedule",))
    plain = create_node_specs(2, cpu="4", memory="8Gi", prefix="plain")
    with (
        tempfile.TemporaryDirectory(prefix="trainium-kueue-") as folder,
        Cluster.start(nodes=[*pool, *plain, create_system_node()], kueue=True) as devcluster,
    ):
        cluster = SharedCluster(
            "local", devcluster.list_variables(), Path(folder), {"workerTemplate": WORKER}, devcluster
        )
        cluster.kubectl("apply", "-f", "-", stdin=json.dumps(QUEUES))
        install_operator(cluster, {"statusIntervalSeconds": 1, "kueue": {"enabled": True}} | create_system_values())
        yield cluster


@dataclass
class Reference:
    """The same endless job on two nodes without a queue; it trains as far as a test needs."""

    job: Job

    def losses(self, step: int) -> dict[int, float]:
        self.job.suspend(yes=False)
        self.job.wait_for_step(step)
        self.job.suspend()
        self.job.wait_for_phase("Suspended")
        return self.job.read_losses()


@pytest.fixture(scope="module")
def reference(teams: SharedCluster) -> Reference:
    return Reference(Job(teams, "default", "reference", f"{{{ENDLESS}, suspend: true}}").apply())


def workloads(cluster: SharedCluster, namespace: str) -> dict[str, dict[str, str]]:
    """Return the conditions by Workload."""
    return {
        item["metadata"]["name"]: {
            condition["type"]: condition["status"] for condition in (item.get("status") or {}).get("conditions") or ()
        }
        for item in cluster.get("workloads", "-n", namespace)["items"]
    }


def admitted_condition(status: dict[str, Any]) -> tuple[str, str]:
    """Return status and reason of the condition Admitted."""
    return next(
        (condition["status"], condition["reason"])
        for condition in status["conditions"]
        if condition["type"] == "Admitted"
    )


def has_size(size: int) -> Callable[[dict[str, Any]], bool]:
    """Return a condition: the job trains with this number of workers."""
    return lambda status: status.get("phase") == "Running" and status.get("readyReplicas") == size


def assert_same_losses(job: Job, reference: Reference) -> None:
    """Assert that the losses up to the current step equal those of the undisturbed job."""
    job.log.refresh()
    losses = job.read_losses()
    undisturbed = reference.losses(max(losses))
    assert sorted(losses) == list(range(1, max(losses) + 1))
    assert max(abs(losses[step] - undisturbed[step]) for step in losses) < 1e-5


def test_an_elastic_job_borrows_shrinks_on_preemption_and_grows_back(
    teams: SharedCluster, reference: Reference
) -> None:
    elastic = Job(teams, "elastic", "elastic", f"{{{ENDLESS}, {QUEUED}, workers: {{replicas: 4, minReplicas: 2}}}}")
    elastic.apply().wait_until("training on four nodes, two of them borrowed", has_size(4))
    assert {pod["spec"]["nodeSelector"]["pool"] for pod in elastic.list_pods()} == {POOL}
    assert workloads(teams, "elastic").keys() == {"elastic-quota-0", "elastic-quota-1", "elastic-quota-2"}
    first = elastic.list_uids()

    rigid = Job(teams, "rigid", "rigid", f"{{{QUEUED}}}").apply()
    elastic.wait_until("training on its own two nodes", has_size(2))
    assert {member["podUid"] for member in elastic.list_members()} < first, "the remaining pods were not restarted"
    rigid.wait_for_phase("Completed")
    rigid.wait_until(
        "its Workload is finished", lambda _: workloads(teams, "rigid")["rigid-quota-0"].get("Finished") == "True"
    )

    status = elastic.wait_until("training on four nodes again", has_size(4))
    elastic.wait_for_step(elastic.log.newest + 10)
    elastic.suspend()
    elastic.wait_for_phase("Suspended")
    assert status["restarts"]["total"] == 0, "a preemption is no failure"
    assert any("the queue grants 2 of 4" in entry["message"] for entry in status["history"])
    assert elastic.list_uids() == set()
    elastic.wait_until("its Workloads are deleted", lambda _: not workloads(teams, "elastic"))
    assert_same_losses(elastic, reference)
    elastic.delete()


def test_an_evicted_rigid_job_saves_waits_and_resumes(teams: SharedCluster, reference: Reference) -> None:
    borrower = Job(teams, "elastic", "borrower", f"{{{ENDLESS}, {QUEUED}, workers: {{replicas: 4}}}}").apply()
    borrower.wait_until("training on four nodes", has_size(4))
    borrower.wait_for_step(20)

    owner = Job(teams, "rigid", "owner", f"{{{QUEUED}}}").apply()
    status = borrower.wait_until(
        "no pod is left", lambda status: admitted_condition(status)[1] == "Evicted" and not borrower.list_pods()
    )
    assert status["phase"] == "Pending"
    owner.wait_for_phase("Completed")

    status = borrower.wait_until("training on four nodes again", has_size(4))
    borrower.wait_for_step(borrower.log.newest + 10)
    borrower.suspend()
    borrower.wait_for_phase("Suspended")
    assert status["restarts"]["total"] == 0
    assert any(event.startswith("Evicted:") for event in borrower.list_events())
    assert_same_losses(borrower, reference)
    borrower.delete()


def test_a_job_waits_in_its_queue_until_another_is_suspended(teams: SharedCluster) -> None:
    first = Job(teams, "rigid", "first", f"{{{ENDLESS}, {QUEUED}, workers: {{replicas: 3}}}}").apply()
    first.wait_until("training on three nodes, one of them borrowed", has_size(3))
    second = Job(teams, "rigid", "second", f"{{{QUEUED}}}").apply()
    status = second.wait_until(
        "Kueue reports insufficient quota", lambda status: "insufficient" in json.dumps(status.get("conditions"))
    )
    assert admitted_condition(status) == ("False", "WaitingForQueue")
    assert not second.list_pods()

    first.suspend()
    second.wait_for_phase("Completed")
    assert "first-quota-0" not in workloads(teams, "rigid"), "a suspended job has no Workload"
    first.suspend(yes=False)
    first.wait_until("training again", has_size(3))
    first.delete()

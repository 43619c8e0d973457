"""What others in a cluster refuse, change or take away, on a real API server: a job trains on, and names it."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

import pytest

from tests.testing.cluster.installed import second_release
from tests.testing.cluster.jobs import Job
from tests.testing.cluster.policies import apply_objects, build_refusal, build_rule
from tests.testing.suite.timeouts import scaled, until

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.testing.cluster.shared_cluster import SharedCluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

LONG = "trainer: {steps: 100000}"
OBSERVED_SECONDS = 10.0


def count_requests(cluster: SharedCluster, verb: str, *resources: str) -> int:
    """Return how many requests of a verb the API server has answered; those of others are few."""
    lines = cluster.kubectl("get", "--raw", "/metrics").splitlines()
    wanted = [f'resource="{resource}"' for resource in resources]
    counted = [
        line
        for line in lines
        if line.startswith("apiserver_request_total{") and f'verb="{verb}"' in line and any(w in line for w in wanted)
    ]
    return round(sum(float(line.rpartition(" ")[2]) for line in counted))


def observe_requests(cluster: SharedCluster, verb: str, *resources: str) -> int:
    before = count_requests(cluster, verb, *resources)
    time.sleep(OBSERVED_SECONDS)
    return count_requests(cluster, verb, *resources) - before


def until_condition(job: Job, kind: str, reason: str, seconds: float = 90) -> str:
    """Return the message of the condition once it has the reason."""
    job.until(f"{kind} is {reason}", lambda _: job.condition(kind).get("reason") == reason, seconds)
    return str(job.condition(kind)["message"])


def until_refused(cluster: SharedCluster, namespace: str, message: str) -> None:
    probe = ("create", "configmap", "probe", "-n", namespace, "--dry-run=server")
    until(lambda: message in cluster.run("kubectl", *probe).stderr, "the policy is in force", pause=0.2)


def test_a_job_trains_where_annotations_are_removed_and_each_object_needs_a_label(
    operator: SharedCluster, namespace: str
) -> None:
    refusal = "every object needs the label team"
    created = [
        build_rule("", "pods", "configmaps", operations=["CREATE"]),
        build_rule("policy", "poddisruptionbudgets", operations=["CREATE"]),
        build_rule("networking.k8s.io", "networkpolicies", operations=["CREATE"]),
    ]
    policy = build_refusal(
        namespace, "has(object.metadata.labels) && 'team' in object.metadata.labels", refusal, *created
    )
    job = Job(operator, namespace, "job", LONG, labels={"team": "ml"})
    with apply_objects(operator, *policy), job.removed_annotations():
        until_refused(operator, namespace, refusal)
        unlabelled = Job(operator, namespace, "unlabelled", LONG).apply()
        message = until_condition(unlabelled, "PodsReady", "CreationRefused")
        assert re.search(rf"(ConfigMap unlabelled-config|Pod unlabelled-w-N): .*{refusal}", message)
        unlabelled.delete("--wait=false")

        job.apply()
        job.until_step(5)
        message = until_condition(job, "Reconciled", "ObjectChanged")
        assert "metadata.annotations[trainium.dev/content-hash] is missing; a policy or webhook" in message
        assert "is stored other than requested" in job.why()
        assert observe_requests(operator, "PATCH", "configmaps", "poddisruptionbudgets") <= 3 * OBSERVED_SECONDS
    job.until("as requested", lambda _: job.condition("Reconciled").get("status") == "True", 330)


def test_a_refused_budget_delays_no_replacement_and_is_no_protection(operator: SharedCluster, namespace: str) -> None:
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "no-budgets", "namespace": namespace},
        "spec": {"hard": {"count/poddisruptionbudgets.policy": "0"}},
    }
    with apply_objects(operator, quota):
        job = Job(operator, namespace, "job", LONG).apply()
        job.until_step(5)
        message = until_condition(job, "DisruptionAllowed", "WriteFailed")
        assert job.condition("DisruptionAllowed")["status"] == "Unknown"
        assert "a drain may evict workers at any time: PodDisruptionBudget job: exceeded quota" in message
        lost = job.members()[0]["podName"]
        operator.kubectl("delete", "pod", lost, "-n", namespace, "--force", "--grace-period=0")
        assert job.until_recovered()["recoveredSeconds"] < scaled(25)
        assert observe_requests(operator, "POST", "poddisruptionbudgets") <= 2


def test_a_scheduler_that_does_not_exist_is_named(operator: SharedCluster, namespace: str) -> None:
    change = f"{LONG}\nworkers: {{template: {{spec: {{schedulerName: volcano}}}}}}"
    job = Job(operator, namespace, "job", change).apply()
    message = until_condition(job, "PodsReady", "Unschedulable")
    assert re.search(
        r"no scheduler has looked at job-w-\d.* does the scheduler volcano .* run in this cluster", message
    )
    assert "does the scheduler volcano" in job.why()


def test_a_pod_without_its_label_and_orphans_are_named_with_their_nodes(
    operator: SharedCluster, namespace: str
) -> None:
    job = Job(operator, namespace, "job", f"workers: {{spares: 1}}\n{LONG}").apply()
    job.until("the spare is warm", lambda status: status.get("spares") == 1)
    members = {member["podName"] for member in job.members()}
    (spare,) = {pod["metadata"]["name"] for pod in job.pods()} - members
    operator.kubectl("label", "pod", spare, "-n", namespace, "trainium.dev/role-")
    assert f"pod {spare} is not a worker of this job" in until_condition(job, "Reconciled", "StrayPods")
    operator.kubectl("delete", "pod", spare, "-n", namespace, "--force", "--grace-period=0")
    job.until("as requested", lambda _: job.condition("Reconciled").get("status") == "True")

    taken = job.members()[0]
    operator.kubectl("label", "pod", taken["podName"], "-n", namespace, "trainium.dev/role-")
    message = until_condition(job, "Reconciled", "StrayPods")
    assert f"pod {taken['podName']} is not a worker of this job" in message
    assert f"its label trainium.dev/role was removed or changed, and keeps node {taken['nodeName']}" in message
    assert taken["podName"] in job.why()
    assert "lost the labels of a worker" in job.until_recovered()["message"]
    operator.kubectl("delete", "pod", taken["podName"], "-n", namespace, "--force", "--grace-period=0")
    job.until("as requested", lambda _: job.condition("Reconciled").get("status") == "True")

    job.delete("--cascade=orphan")
    orphans = [pod["metadata"]["name"] for pod in job.pods()]
    job.apply()
    message = until_condition(job, "Reconciled", "StrayPods")
    assert f"pod {orphans[0]} is not a worker of this job, because no TrainingJob controls it" in message


def test_a_worker_over_its_own_limit_of_storage_counts_and_ends_the_job(
    operator: SharedCluster, namespace: str
) -> None:
    limit = 'Usage of EmptyDir volume "scratch" exceeds the limit "1Gi". '
    budget = "recovery: {budgets: {process: {maxFailures: 1}}}"
    job = Job(operator, namespace, "job", f"workers: {{spares: 1}}\n{LONG}\n{budget}").apply()
    job.until("the spare is warm", lambda status: status.get("spares") == 1)
    job.write_eviction(job.members()[0]["podName"], limit)
    entry = job.until_recovered()
    assert (entry["cause"], limit.strip() in entry["message"]) == ("LocalStorage", True)
    assert not job.status().get("avoidedNodes")
    job.until_step(job.log.newest + 5)
    job.write_eviction(job.members()[0]["podName"], limit)
    job.until_phase("Failed")
    verdict = job.condition("Failed")
    assert verdict["reason"] == "BudgetExhausted"
    assert limit.strip() in verdict["message"]
    assert "sizeLimit" in job.why()


def test_a_second_release_leaves_the_jobs_of_the_first_alone(new_job: Callable[..., Job]) -> None:
    job = new_job(change=LONG)
    job.until_step(5)
    uids, generation = job.uids(), job.status()["membership"]["generation"]
    with second_release(job.cluster) as release:
        job.until("the event", lambda _: any("ServedElsewhere" in event for event in job.events()))
        (event,) = [event for event in job.events() if "ServedElsewhere" in event]
        assert f"serves namespace {job.namespace}, and release {release}" in event
        job.until_step(job.log.newest + 50)
        assert (job.uids(), job.status()["membership"]["generation"]) == (uids, generation)
        assert not job.history()

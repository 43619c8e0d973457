"""Drains against the real eviction API: refused while too much work is at risk, let through and healed afterwards."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.testing.suite.timeouts import scaled, until

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable

    from tests.testing.cluster.jobs import Job

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

# No checkpoint is due within the test, so the time since the first step is the age of what would be lost.
AT_RISK = (
    "trainer: {steps: 100000}\ncheckpoint: {durable: {everySteps: 100000, everySeconds: 86400}}\n"
    "recovery: {disruption: {maxDurableAgeSeconds: 1}}"
)


def evict(job: Job, pod: str) -> subprocess.CompletedProcess[str]:
    """Send a POST to the eviction API, as `kubectl drain` and autoscalers do."""
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": job.namespace}}
    path = f"/api/v1/namespaces/{job.namespace}/pods/{pod}/eviction"
    return job.cluster.run("kubectl", "create", "--raw", path, "-f", "-", stdin=json.dumps(body))


def disruption(status: dict[str, Any]) -> dict[str, Any]:
    found = [condition for condition in status.get("conditions") or [] if condition["type"] == "DisruptionAllowed"]
    return found[0] if found else {"status": "", "message": ""}


def until_budget(job: Job, allowed: int) -> None:
    """Wait until the disruption controller has counted the pods against the newest budget."""
    budgets: list[dict[str, Any]] = []

    def is_budget_current() -> bool:
        budgets[:] = job.cluster.get("poddisruptionbudgets", "-n", job.namespace)["items"]
        status = budgets[0].get("status", {}) if budgets else {}
        seen = status.get("observedGeneration") == budgets[0]["metadata"]["generation"] if budgets else False
        return bool(seen) and status["disruptionsAllowed"] == allowed

    until(is_budget_current, lambda: str(budgets), 40)


@pytest.mark.long
def test_an_eviction_is_refused_while_the_durable_checkpoint_is_old(
    new_job: Callable[..., Job],
) -> None:
    job = new_job(change=AT_RISK)
    job.wait_for_step(5)
    status = job.wait_until("a refusal in status", lambda status: disruption(status)["status"] == "False")
    assert "maxDurableAgeSeconds (1)" in disruption(status)["message"]
    until_budget(job, 0)
    victim, before = job.list_members()[1]["podName"], job.list_uids()

    refused = evict(job, victim)

    assert refused.returncode != 0
    assert "disruption budget" in refused.stderr
    assert job.list_uids() == before

    allowed = {"spec": {"recovery": {"disruption": {"maxDurableAgeSeconds": 3600}}}}
    job.cluster.kubectl(
        "patch", "trainingjob", job.name, "-n", job.namespace, "--type=merge", "-p", json.dumps(allowed)
    )
    until_budget(job, 1)
    let_through = evict(job, victim)

    assert let_through.returncode == 0, let_through.stderr
    entry = job.wait_for_recovery()
    assert (entry["cause"], entry["stepsLost"]) == ("Preempted", 0)
    assert job.read_status().get("failures") in (None, []), "an eviction counts as no failure"


@pytest.mark.long
def test_a_drained_node_loses_no_step(new_job: Callable[..., Job]) -> None:
    job = new_job(change="trainer: {steps: 100000}\nworkers: {spares: 1}")
    job.wait_until("a warm spare", lambda status: status.get("spares") == 1 and job.log.newest >= 5)
    until_budget(job, 1)
    node = job.list_members()[1]["nodeName"]
    with job.cluster.cordon_nodes(node):
        job.cluster.kubectl(
            "drain",
            node,
            f"--pod-selector=trainium.dev/job-name={job.name}",
            "--delete-emptydir-data",
            "--ignore-daemonsets",
            "--force",
            f"--timeout={scaled(60):.0f}s",
        )
        entry = job.wait_for_recovery()
        assert (entry["response"], entry["cause"], entry["stepsLost"]) == ("Spare", "Preempted", 0)
        assert node not in {member["nodeName"] for member in job.list_members()}


@pytest.mark.long
def test_a_finished_job_is_deleted_after_its_ttl(new_job: Callable[..., Job]) -> None:
    job = new_job(
        change="trainer: {steps: 20}\nttlSecondsAfterFinished: 5\ncleanPodPolicy: None\nworkers: {replicas: 1}"
    )
    job.wait_for_phase("Completed")

    def has_ended() -> bool:
        return not job.cluster.get("trainingjobs", "-n", job.namespace)["items"] and not job.list_pods()

    until(has_ended, "the job is deleted after its ttlSecondsAfterFinished", 40)

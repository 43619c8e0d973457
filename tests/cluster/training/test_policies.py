"""A budget that a quota refuses, and evictions, of jobs that train."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from tests.testing.cluster.jobs import Job
from tests.testing.cluster.policies import apply_objects, count_requests
from tests.testing.suite.timeouts import scaled
from trainium_operator.plan.faults.failure_budgets import ONE_INCIDENT_SECONDS

if TYPE_CHECKING:
    from tests.testing.cluster.shared_cluster import SharedCluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

LONG = "trainer: {steps: 100000}"
OBSERVED_SECONDS = 10.0


def test_a_refused_budget_delays_no_replacement_and_is_no_protection(operator: SharedCluster, namespace: str) -> None:
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "no-budgets", "namespace": namespace},
        "spec": {"hard": {"count/poddisruptionbudgets.policy": "0"}},
    }
    with apply_objects(operator, quota):
        job = Job(operator, namespace, "job", LONG).apply()
        job.wait_for_step(5)
        job.wait_until(
            "the condition", lambda _: job.find_condition("DisruptionAllowed").get("reason") == "WriteFailed"
        )
        condition = job.find_condition("DisruptionAllowed")
        assert condition["status"] == "Unknown"
        assert "a drain may evict workers at any time: PodDisruptionBudget job: exceeded quota" in condition["message"]
        lost = job.list_members()[0]["podName"]
        operator.kubectl("delete", "pod", lost, "-n", namespace, "--force", "--grace-period=0")
        assert job.wait_for_recovery()["recoveredSeconds"] < scaled(25)
        before = count_requests(operator, "POST", "poddisruptionbudgets")
        time.sleep(OBSERVED_SECONDS)
        assert count_requests(operator, "POST", "poddisruptionbudgets") - before <= 2
        assert "PodDisruptionBudget job: exceeded quota" in job.why()


def test_a_worker_over_its_own_limit_of_storage_counts_and_ends_the_job(
    operator: SharedCluster, namespace: str
) -> None:
    limit = 'Usage of EmptyDir volume "scratch" exceeds the limit "1Gi". '
    budget = "recovery: {budgets: {process: {maxFailures: 1}}}"
    job = Job(operator, namespace, "job", f"workers: {{spares: 1}}\n{LONG}\n{budget}").apply()
    job.wait_for_step(3)
    job.wait_until("the spare is warm", lambda status: status.get("spares") == 1)
    job.write_eviction(job.list_members()[0]["podName"], limit)
    entry = job.wait_for_recovery()
    assert (entry["cause"], limit.strip() in entry["message"]) == ("LocalStorage", True)
    assert not job.read_status().get("avoidedNodes")
    time.sleep(ONE_INCIDENT_SECONDS)  # what fails within this time of the first counts as one failure
    job.write_eviction(job.list_members()[0]["podName"], limit)
    job.wait_for_phase("Failed")
    verdict = job.find_condition("Failed")
    assert verdict["reason"] == "BudgetExhausted"
    assert limit.strip() in verdict["message"]
    assert "sizeLimit" in job.why()

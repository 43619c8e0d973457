"""A job is deleted with `--cascade=orphan`, by the cluster's own garbage collector, and applied again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.testing.cluster.jobs import Job

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]
LEFT = (("configmap", "job-config"), ("configmap", "job-membership"), ("poddisruptionbudget", "job"))


def find_owners(job: Job, kind: str, name: str) -> list[str]:
    items = job.cluster.get(kind, "-n", job.namespace)["items"]
    named = (item["metadata"] for item in items if item["metadata"]["name"] == name)
    return [reference["uid"] for metadata in named for reference in metadata.get("ownerReferences", ())]


def test_a_job_takes_over_what_an_earlier_one_of_its_name_left_and_names_its_pods(new_job: Callable[..., Job]) -> None:
    job = new_job(change="trainer: {steps: 100000}")
    job.wait_for_step(3)
    job.wait_until("the budget is there", lambda _: find_owners(job, *LEFT[2]))
    old = [member["podName"] for member in job.list_members()]
    job.cluster.kubectl("delete", "trn", job.name, "-n", job.namespace, "--cascade=orphan")
    assert not any(find_owners(job, *left) for left in LEFT), "the garbage collector has removed the owners"
    job.apply()

    def names_pods(status: dict[str, Any]) -> bool:
        messages = {condition["type"]: condition["message"] for condition in status.get("conditions", ())}
        return all(f"pod {name} is not a worker of this job" in messages.get("Reconciled", "") for name in old)

    job.wait_until("the pods are named", names_pods)
    uid = job.cluster.get("trn", job.name, "-n", job.namespace)["metadata"]["uid"]
    for left in LEFT:
        job.wait_until(f"{left} is the new job's", lambda _, left=left: find_owners(job, *left) == [uid])
    assert [text for text in job.list_events() if "job-membership was left by an earlier job of this name" in text]
    job.cluster.kubectl("delete", "pod", *old, "-n", job.namespace, "--wait=false")
    job.wait_for_phase("Running")

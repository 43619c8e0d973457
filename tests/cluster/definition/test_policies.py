"""Test what others in a cluster refuse, change or take away before a job trains, on a real API server without nodes."""

from __future__ import annotations

import json
import re
import time
from typing import TYPE_CHECKING, Any, Self

import pytest

from tests.testing.cluster.policies import apply_objects, build_mutation, build_refusal, build_rule, count_requests
from tests.testing.operator.local_operator import run_local_operator
from tests.testing.suite.timeouts import scaled, until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cluster.definition.conftest import Api

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

SYSTEM, SECOND, JOBS = "policies-system", "policies-second", "policies-jobs"
SETTINGS = "ui.enabled=true,watchNodes=false,replicas=1"
OBSERVED_SECONDS = 10.0
REMOVED_ANNOTATION = "metadata.annotations[trainium.dev/content-hash] is missing; a policy or webhook"


@pytest.fixture(scope="module")
def served(crd_api: Api, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """Return the API server, with an operator that serves all namespaces."""
    if crd_api.is_existing:
        pytest.skip("this test installs an operator, which an existing cluster does not allow")
    crd_api.make_namespaces(SYSTEM, SECOND, JOBS)
    # Operators of earlier tests would be served first until their registrations expire.
    crd_api.run("kubectl", "delete", "lease", "trainium-operators", "-n", "kube-system", "--ignore-not-found")
    with run_local_operator(crd_api, tmp_path_factory.mktemp("first"), "first", SYSTEM, SETTINGS):
        yield crd_api
    crd_api.delete_namespaces(SYSTEM, SECOND, JOBS)


class PendingJob:
    """A job whose pods wait for nodes."""

    def __init__(self, api: Api, name: str, labels: dict[str, str] | None = None, **pod: Any) -> None:
        self.api, self.name = api, name
        workers = {"replicas": 2, "accelerator": {"device": "cpu"}, "template": {"spec": pod}}
        self.manifest = {
            "apiVersion": "trainium.dev/v1alpha1",
            "kind": "TrainingJob",
            "metadata": {"name": name, "namespace": JOBS, "labels": labels or {}},
            "spec": {"workers": workers, "trainer": {"data": {"source": "/nowhere.txt"}, "steps": 100}},
        }

    def __enter__(self) -> Self:
        self.apply()
        return self

    def __exit__(self, *_: object) -> None:
        self.api.kubectl("delete", "trn", self.name, "-n", JOBS, "--ignore-not-found")

    def apply(self) -> None:
        self.api.kubectl("apply", "-n", JOBS, "-f", "-", stdin=json.dumps(self.manifest))

    def get(self, *what: str) -> Any:
        return json.loads(self.api.kubectl("get", *what, "-n", JOBS, "-o", "json"))

    def pods(self) -> list[dict[str, Any]]:
        items = self.get("pods")["items"]
        return [pod for pod in items if pod["metadata"]["name"].startswith(f"{self.name}-w-")]

    def condition(self, kind: str) -> dict[str, Any]:
        conditions = self.get("trn", self.name).get("status", {}).get("conditions", ())
        return next((condition for condition in conditions if condition["type"] == kind), {})

    def until_reason(self, kind: str, reason: str, seconds: float = 60) -> str:
        """Return the message of the condition once it has the reason."""
        found: dict[str, Any] = {}

        def has_reason() -> bool:
            found.clear()
            found.update(self.condition(kind))
            return found.get("reason") == reason

        until(has_reason, lambda: f"{kind} is {reason}: {found}", seconds, pause=0.3)
        return str(found["message"])

    def until_reconciled(self, seconds: float = 60) -> None:
        until(lambda: self.condition("Reconciled").get("status") == "True", "Reconciled", seconds, pause=0.3)


def test_every_object_of_a_job_has_its_labels_and_a_refusal_names_the_object(served: Api) -> None:
    refusal = "every object needs the label team"
    created = [build_rule("", "pods", "configmaps", operations=["CREATE"])]
    policy = build_refusal(JOBS, "has(object.metadata.labels) && 'team' in object.metadata.labels", refusal, *created)
    probe = ("kubectl", "create", "configmap", "probe", "-n", JOBS, "--dry-run=server")
    with apply_objects(served.access, *policy):
        until(lambda: refusal in served.run(*probe).stderr, "the policy is in force", pause=0.2)
        with PendingJob(served, "unlabelled") as job:
            message = job.until_reason("PodsReady", "CreationRefused")
            assert re.search(rf"(ConfigMap unlabelled-config|Pod unlabelled-w-N): .*{refusal}", message)
        with PendingJob(served, "labelled", {"team": "ml"}) as job:
            until(lambda: len(job.pods()) == 2, "its pods", 60, pause=0.3)
            assert {pod["metadata"]["labels"]["team"] for pod in job.pods()} == {"ml"}
            assert job.get("configmap", "labelled-config")["metadata"]["labels"]["team"] == "ml"


def test_removed_annotations_are_named_and_not_written_without_end(served: Api) -> None:
    patch = 'JSONPatch{op: "remove", path: "/metadata/annotations"}'
    policy = build_mutation(JOBS, patch, build_rule("", "configmaps"), condition="has(object.metadata.annotations)")
    probe = ("annotate", "configmap", "kube-root-ca.crt", "-n", JOBS, "probe=1", "--overwrite", "--dry-run=server")
    with apply_objects(served.access, *policy):
        until(lambda: '"probe"' not in served.kubectl(*probe, "-o", "json"), "the policy is in force", pause=0.2)
        with PendingJob(served, "stripped") as job:
            message = job.until_reason("Reconciled", "ObjectChanged")
            assert REMOVED_ANNOTATION in message
            before = count_requests(served.access, "PATCH", "configmaps")
            time.sleep(OBSERVED_SECONDS)
            assert count_requests(served.access, "PATCH", "configmaps") - before <= 4
            assert len(job.pods()) == 2


def test_a_scheduler_that_does_not_exist_is_named(served: Api) -> None:
    with PendingJob(served, "gone", schedulerName="volcano") as job:
        message = job.until_reason("PodsReady", "Unschedulable", 90)
        assert re.search(
            r"no scheduler has looked at gone-w-\d.* does the scheduler volcano .*run in this clust", message
        )


def test_a_pod_without_its_role_and_orphans_are_named_until_they_are_deleted(served: Api) -> None:
    with PendingJob(served, "stray") as job:
        until(lambda: len(job.pods()) == 2, "its pods", 60, pause=0.3)
        name = job.pods()[0]["metadata"]["name"]
        for label in ("trainium.dev/role", "trainium.dev/job-name"):
            served.kubectl("label", "pod", name, "-n", JOBS, f"{label}-")
            message = job.until_reason("Reconciled", "StrayPods")
            assert f"pod {name} is not a worker of this job, because its label {label}" in message
            served.kubectl("delete", "pod", name, "-n", JOBS, "--force", "--grace-period=0")
            job.until_reconciled(90)
            name = job.pods()[0]["metadata"]["name"]

        orphans = [pod["metadata"]["name"] for pod in job.pods()]
        served.kubectl("delete", "trn", "stray", "-n", JOBS, "--cascade=orphan")
        job.apply()
        message = job.until_reason("Reconciled", "StrayPods")
        for orphan in orphans:
            assert f"pod {orphan} is not a worker of this job, because no TrainingJob controls it" in message
            served.kubectl("delete", "pod", orphan, "-n", JOBS, "--force", "--grace-period=0")
        job.until_reconciled(90)


def test_a_second_release_leaves_the_jobs_of_the_first_alone(
    served: Api, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with PendingJob(served, "first") as job:
        until(lambda: len(job.pods()) == 2, "its pods", 60, pause=0.3)
        uids = {pod["metadata"]["uid"] for pod in job.pods()}
        with run_local_operator(served, tmp_path_factory.mktemp("second"), "second", SECOND, SETTINGS):
            expected = (
                f"release {SYSTEM}/first-trainium-operator of the operator serves namespace {JOBS}, "
                f"and release {SECOND}/second-trainium-operator does not"
            )
            until(lambda: expected in served.kubectl("get", "events", "-n", JOBS, "-o", "json"), "the event", 60)
            time.sleep(scaled(OBSERVED_SECONDS))
            assert {pod["metadata"]["uid"] for pod in job.pods()} == uids

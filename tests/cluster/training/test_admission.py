"""Pods that admission policies of others change, and creations, volumes and init containers that others refuse."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.testing.suite.timeouts import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.testing.cluster.jobs import Job
    from tests.testing.cluster.shared_cluster import SharedCluster

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(600)]

PROXY = (
    'Object.spec.containers{name: "mesh-proxy", image: "mesh/proxy:1", '
    'command: ["python3", "-c", "import time; time.sleep(1000000)"]}'
)
SIDECAR = """
workers: {template: {spec: {initContainers: [{name: mesh-proxy, image: x, restartPolicy: Always,
  command: [python3, -c, "import time; time.sleep(1000000)"]}]}}}
"""
IMAGE = "/spec/containers/0/image"
PATCHES = {
    "first": f'JSONPatch{{op: "add", path: "/spec/containers/0", value: {PROXY}}}',
    "last": f'JSONPatch{{op: "add", path: "/spec/containers/-", value: {PROXY}}}',
    "mirror": f'JSONPatch{{op: "replace", path: "{IMAGE}", value: "mirror.example.com/" + '
    "object.spec.containers[0].image}",
    "grace": 'JSONPatch{op: "add", path: "/spec/terminationGracePeriodSeconds", value: 2}',
}


@pytest.fixture
def changed_pods(operator: SharedCluster, namespace: str) -> Iterator[Callable[[str], None]]:
    """Install a policy that changes each new pod of the namespace."""
    kinds = ("mutatingadmissionpolicy", "mutatingadmissionpolicybinding")

    def install(name: str) -> None:
        rules = [{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}]
        policy = {
            "matchConstraints": {
                "resourceRules": rules,
                "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
            },
            "failurePolicy": "Fail",
            "reinvocationPolicy": "Never",
            "mutations": [{"patchType": "JSONPatch", "jsonPatch": {"expression": f"[{PATCHES[name]}]"}}],
        }
        meta = {"apiVersion": "admissionregistration.k8s.io/v1", "metadata": {"name": namespace}}
        for body in (
            {**meta, "kind": "MutatingAdmissionPolicy", "spec": policy},
            {**meta, "kind": "MutatingAdmissionPolicyBinding", "spec": {"policyName": namespace}},
        ):
            operator.kubectl("apply", "-f", "-", stdin=json.dumps(body))
        probe = ("run", "probe", "-n", namespace, "--image=probe", "--dry-run=server", "-o", "json")

        def is_changed() -> bool:
            spec = json.loads(operator.kubectl(*probe))["spec"]
            return len(spec["containers"]) > 1 or "mirror" in str(spec) or spec["terminationGracePeriodSeconds"] == 2

        until(is_changed, "the policy is in force", pause=0.2)

    yield install
    for kind in kinds:
        operator.kubectl("delete", kind, namespace, "--ignore-not-found")


def worker_images(job: Job) -> set[str]:
    return {
        container["image"]
        for pod in job.list_pods()
        for container in pod["spec"]["containers"]
        if container["name"] == "worker"
    }


@pytest.mark.parametrize("change", ["first", "last", "native"])
def test_a_replaced_worker_keeps_its_image_and_sidecar(
    changed_pods: Callable[[str], None], new_job: Callable[..., Job], change: str
) -> None:
    if change != "native":
        changed_pods(change)
    job = new_job(change=f"trainer: {{steps: 100000}}\n{SIDECAR if change == 'native' else ''}")
    job.wait_for_step(3)
    (image,) = worker_images(job)
    job.cluster.kubectl("delete", "pod", job.list_members()[0]["podName"], "-n", job.namespace, "--wait=false")
    job.wait_for_recovery()
    assert worker_images(job) == {image}
    assert not job.read_status().get("outdatedPods")
    assert not [text for text in job.list_events() if "TemplateChanged" in text]


def test_rewritten_images_do_not_make_pods_outdated(
    changed_pods: Callable[[str], None], new_job: Callable[..., Job]
) -> None:
    changed_pods("mirror")
    job = new_job(change="workers: {replicas: 1, spares: 1}\ntrainer: {steps: 100000}")
    job.wait_for_step(3)
    job.wait_until("the spare is warm", lambda status: status.get("spares") == 1)
    uids = job.list_uids()
    job.wait_for_step(30)
    assert all(image.startswith("mirror.example.com/") for image in worker_images(job))
    assert job.list_uids() == uids
    assert not job.read_status().get("outdatedPods")


def test_limits_and_a_grace_period_that_the_cluster_sets_are_reported_and_followed(
    changed_pods: Callable[[str], None], new_job: Callable[..., Job], operator: SharedCluster, namespace: str
) -> None:
    changed_pods("grace")
    defaults = {"limits": [{"type": "Container", "default": {"cpu": "200m"}, "defaultRequest": {"cpu": "100m"}}]}
    meta = {"name": "defaults", "namespace": namespace}
    limit_range = {"apiVersion": "v1", "kind": "LimitRange", "metadata": meta, "spec": defaults}
    operator.kubectl("apply", "-f", "-", stdin=json.dumps(limit_range))
    try:
        job = new_job(change="workers: {replicas: 1}\ntrainer: {steps: 100000}")
        job.wait_for_step(3)
        changes = [text for text in job.list_events() if text.startswith("PodsChanged")]
        assert any("have 1 s to save when they are stopped" in text for text in changes), changes
        assert any("limits that the job does not set: cpu 200m" in text for text in changes), changes
        assert [member["graceSeconds"] for member in job.list_members()] == [1.0]
    finally:
        operator.kubectl("delete", "limitrange", "defaults", "-n", namespace)


def pods_ready(status: dict[str, Any]) -> str:
    ready = [condition for condition in status.get("conditions", []) if condition["type"] == "PodsReady"]
    return f"{ready[0]['reason']}: {ready[0]['message']}" if ready else ""


FAILING_INIT_CONTAINER = (
    "{name: fetch, image: x, command: [python3, -c, 'import sys; print(\"no route\"); sys.exit(7)']}"
)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        pytest.param(
            "workers: {template: {spec: {volumes: [{name: shared-cache, secret: {secretName: not-there}}]}}}",
            "FailedMount",
            id="a volume of a missing Secret",
        ),
        pytest.param(
            f"workers: {{template: {{spec: {{initContainers: [{FAILING_INIT_CONTAINER}]}}}}}}",
            "init container fetch ended with exit code 7: no route",
            id="an init container that fails",
        ),
        pytest.param(
            "workers: {template: {spec: {serviceAccountName: not-there}}}",
            "CreationRefused: 0 of 2 workers are registered. The API server refuses to create what the job needs: "
            "error looking up service account",
            id="a service account that is missing",
        ),
    ],
)
def test_the_condition_names_the_reason_of_waiting_workers(
    new_job: Callable[..., Job], change: str, sentence: str
) -> None:
    job = new_job(change=change)
    status = job.wait_until(sentence, lambda status: sentence in pods_ready(status))
    assert not status.get("avoidedNodes")
    refused = [text for text in job.list_events() if "WriteFailed" in text]
    assert len(refused) <= 1

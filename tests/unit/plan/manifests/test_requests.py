"""Memory, CPU and /dev/shm that a worker pod asks for, and what people set instead."""

from dataclasses import replace
from typing import Any

import pytest

from tests.unit.plan import plan_builders as build
from tests.unit.plan.plan_builders import SETTINGS
from tests.unit.plan.pod_manifests import worker_pod
from trainium_operator.plan.features.kueue.workload import build_workload
from trainium_operator.plan.manifests.worker_pod import (
    build_pod_template,
    compute_template_hash,
)

TRN1 = {"accelerator": {"instanceType": "trn1.32xlarge"}}


def pod_spec(settings: Any = SETTINGS, **changes: Any) -> Any:
    given = {"trainer": {"batch": {"globalSize": 128}}, **changes}
    return worker_pod(build.spec(**given), settings)["spec"]


def resources(pod: Any) -> Any:
    return pod["containers"][0].get("resources", {})


def shared_memory(pod: Any) -> Any:
    return next(volume for volume in pod["volumes"] if volume["name"] == "shared-memory")


def with_template(container: dict[str, Any] | None = None, **pod: Any) -> dict[str, Any]:
    containers = [{"name": "worker", **container}] if container else []
    return {**TRN1, "template": {"spec": {**({"containers": containers} if containers else {}), **pod}}}


def test_no_worker_has_qos_class_best_effort() -> None:
    for workers in ({"accelerator": {"device": "cpu"}}, TRN1):
        assert {"memory", "cpu"} <= resources(pod_spec(workers=workers))["requests"].keys()
        assert "memory" not in resources(pod_spec(workers=workers)).get("limits", {}), "an estimate must not end a run"
        assert shared_memory(pod_spec(workers=workers))["emptyDir"]["sizeLimit"].endswith("Mi")


@pytest.mark.parametrize("kind", ["requests", "limits"])
def test_a_resource_in_the_jobs_template_is_kept(kind: str) -> None:
    resources_of_pod = resources(pod_spec(workers=with_template({"resources": {kind: {"memory": "1Gi"}}})))
    assert resources_of_pod[kind]["memory"] == "1Gi"
    assert resources_of_pod["requests"].get("memory", "1Gi") == "1Gi", "a request above the limit would be refused"
    assert resources_of_pod["requests"]["cpu"] == "33", "the template does not set it"


def test_a_template_with_resources_of_the_whole_pod_gets_no_more() -> None:
    manifest = pod_spec(workers=with_template(resources={"requests": {"memory": "9Gi"}}))
    assert manifest["resources"] == {"requests": {"memory": "9Gi"}}
    assert "memory" not in resources(manifest)["requests"]


def test_a_limit_of_the_shared_memory_in_the_template_is_kept() -> None:
    volume = {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": "5Gi"}}
    assert shared_memory(pod_spec(workers=with_template(volumes=[volume]))) == volume
    other = {"name": "shared-memory", "hostPath": {"path": "/dev/shm"}}
    assert shared_memory(pod_spec(workers=with_template(volumes=[other]))) == other


def test_the_template_of_the_job_overrides_the_charts() -> None:
    container = {"resources": {"requests": {"cpu": "2", "memory": "3Gi"}}}
    chart = {
        "metadata": {"labels": {"team": "infra", "trainium.dev/job-name": "stolen"}},
        "spec": {"containers": [container], "priorityClassName": "low"},
    }
    view = build.job(
        build.spec(
            workers=with_template({"resources": {"requests": {"cpu": "7"}}}), trainer={"batch": {"globalSize": 128}}
        )
    )
    body = build_pod_template(view, replace(SETTINGS, worker_template=chart))
    requests = resources(body["spec"])["requests"]
    assert (requests["cpu"], requests["memory"]) == ("7", "3Gi")
    assert body["spec"]["priorityClassName"] == "low"
    assert body["metadata"]["labels"]["team"] == "infra"
    assert body["metadata"]["labels"]["trainium.dev/job-name"] == "demo", "labels of the operator cannot be overridden"


def test_the_pods_of_a_job_are_the_same_at_every_size() -> None:
    few, many = (
        build.job(build.spec(workers={**TRN1, "replicas": count}, trainer={"batch": {"globalSize": 128}}))
        for count in (2, 4)
    )
    assert compute_template_hash(few, SETTINGS) == compute_template_hash(many, SETTINGS)


def test_computed_requests_do_not_change_the_template_hash() -> None:
    view = build.job(build.spec(workers=TRN1, trainer={"batch": {"globalSize": 128}}))
    key = "trainium.dev/template-hash"
    with_needs, without = (build_pod_template(view, SETTINGS, with_estimates=estimated) for estimated in (True, False))
    assert with_needs["spec"] != without["spec"]
    assert with_needs["metadata"]["annotations"][key] == without["metadata"]["annotations"][key]


def test_a_workload_requests_only_resources_of_the_template() -> None:
    """Kueue refuses a workload that asks for a resource which its queue does not name."""

    def queued_requests(workers: dict[str, Any]) -> Any:
        view = build.job(
            build.spec(workers=workers, trainer={"batch": {"globalSize": 128}}, scheduling={"queueName": "q"})
        )
        pod = build_workload(view, SETTINGS, part=0, workers=4)["spec"]["podSets"][0]["template"]["spec"]
        return resources(pod).get("requests", {})

    assert {"memory", "cpu"} & queued_requests(TRN1).keys() == set()
    assert queued_requests(with_template({"resources": {"requests": {"cpu": "2"}}}))["cpu"] == "2"

"""Objects with false owners, foreign objects with the names of a job's objects, and jobs of other controllers."""

import asyncio
import base64
import tracemalloc
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest

from tests.testing.api.fake_api_server import FakeApiServer
from tests.testing.api.objects import owner_reference, terminated_status, training_job, worker_pod
from tests.testing.suite.virtual_time import in_virtual_time, run_pending_tasks
from tests.testing.virtual.fake_workers import Workers
from tests.testing.virtual.operator_process import OperatorProcess, until, wall_clock
from tests.testing.virtual.replicas import Scenario
from trainium_contract.status.internal import unpack_internal
from trainium_contract.wire.recorded_membership import MEMBERSHIP_KEY
from trainium_operator.cluster.api.resources import (
    CONFIG_MAPS,
    DISRUPTION_BUDGETS,
    EVENTS,
    JOBS,
    NETWORK_POLICIES,
    PODS,
    Resource,
)
from trainium_operator.cluster.coordinator_adapters import WorkerPods
from trainium_operator.http.errors import ForbiddenError, PodDeletedError
from trainium_operator.plan.model import names
from trainium_operator.settings import Settings


def reference_to_job(cluster: FakeApiServer, **changes: Any) -> dict[str, Any]:
    uid = cluster.get(JOBS, "default", "llama")["metadata"]["uid"]
    return {**owner_reference(uid=uid), **changes}


def failed_pod(name: str, namespace: str, reference: dict[str, Any], label: str = "llama") -> dict[str, Any]:
    """Return a pod that has ended with the trainer's exit code for a user's error."""
    status = {"phase": "Failed", "containerStatuses": [terminated_status(exitCode=64, message="mine")]}
    labels = names.build_selector_labels(label)
    return worker_pod(name, owner=reference, status=status, namespace=namespace, labels=labels)


@asynccontextmanager
async def training_scenario() -> AsyncIterator[tuple[FakeApiServer, OperatorProcess, Workers]]:
    async with Scenario(training_job("llama"), nodes=3, total_steps=10_000) as scenario:
        await scenario.wait_for_steps(seconds=60)
        yield scenario.cluster, scenario.process, scenario.workers


@pytest.mark.parametrize(
    ("namespace", "changes", "label"),
    [
        ("elsewhere", {}, "llama"),
        ("default", {"kind": "ReplicaSet"}, "llama"),
        ("default", {"apiVersion": "batch/v1"}, "llama"),
        ("default", {"name": "other"}, "llama"),
        ("default", {"name": "other"}, "other"),
        ("default", {"controller": False}, "llama"),
        ("default", {"uid": "an-earlier-one"}, "llama"),
    ],
)
@in_virtual_time
async def test_a_pod_with_a_false_owner_is_ignored(namespace: str, changes: dict[str, Any], label: str) -> None:
    async with training_scenario() as (cluster, process, workers):
        step = workers.step
        cluster.add(PODS, failed_pod(f"{label}-w-7", namespace, reference_to_job(cluster, **changes), label))
        await asyncio.sleep(20)
        status = unpack_internal(cluster.get(JOBS, "default", "llama")["status"])
        assert (status["phase"], status["membership"]["generation"]) == ("Running", 1)
        assert status.get("failures", []) == []
        assert cluster.names(PODS, "default")[:2] == ["llama-w-0", "llama-w-1"]
        assert workers.step >= step + 20
        await process.runtime.reconciler.caches.pods.refresh()
        job = process.runtime.caches.jobs.store.get(("default", "llama"))
        assert job is not None
        assert job.view is not None
        seen = process.runtime.reconciler.observer.observe(job.view)
        assert [pod.name for pod in seen.pods] == ["llama-w-0", "llama-w-1"]


@in_virtual_time
async def test_an_agent_of_another_namespace_is_refused() -> None:
    async with training_scenario() as (cluster, process, _workers):
        foreign = cluster.add(PODS, failed_pod("llama-w-7", "elsewhere", reference_to_job(cluster)))
        uid = foreign["metadata"]["uid"]
        await run_pending_tasks()
        token = cluster.issuer.token("llama-w-7", uid, "elsewhere")
        with pytest.raises(ForbiddenError, match="the TrainingJob of pod llama-w-7 no longer exists"):
            await process.runtime.coordinator._authenticator.identify(f"Bearer {token}")


@in_virtual_time
async def test_a_pod_without_its_owner_leaves_the_job() -> None:
    async with training_scenario() as (cluster, process, _workers):
        cluster.change(PODS, "default", "llama-w-1", lambda raw: raw["metadata"].update(ownerReferences=[]))
        await run_pending_tasks()
        assert ("default", "llama-w-1") not in process.runtime.caches.pods.store.snapshot()


TAKEN_NAMES = [(CONFIG_MAPS, "llama-config", "PodsReady"), (DISRUPTION_BUDGETS, "llama", "DisruptionAllowed")]


@pytest.mark.parametrize(("resource", "name", "kind"), TAKEN_NAMES, ids=["configuration", "budget"])
@in_virtual_time
async def test_a_foreign_object_with_a_taken_name_is_unchanged_and_reported(
    resource: Resource, name: str, kind: str
) -> None:
    scenario = Scenario(nodes=3, total_steps=10_000)
    cluster = scenario.cluster
    foreign = cluster.add(resource, {"metadata": {"name": name}, "data": {"mine": "x"}, "spec": {"minAvailable": 1}})
    cluster.add(JOBS, training_job("llama"))
    async with scenario:
        await until(lambda: scenario.condition(kind).get("reason") == "NameTaken", "the name is reported", 120)
        assert f"{name} exists and does not belong to this job" in scenario.condition(kind)["message"]
        await asyncio.sleep(120)
        assert scenario.condition(kind)["reason"] == "NameTaken"
        assert cluster.get(resource, "default", name) == foreign
        assert len([write for write in cluster.writes if write.path.endswith(resource.plural)]) < 60
        cluster.remove(JOBS, "default", "llama")
        assert cluster.get(resource, "default", name) == foreign, "it outlives the job"
        cluster.add(JOBS, training_job("llama"))
        await until(lambda: scenario.condition(kind).get("reason") == "NameTaken", "the name is reported again", 120)
        cluster.remove(resource, "default", name)
        await until(
            lambda: scenario.condition(kind).get("reason") in ("AllReady", "DisruptionAllowed"),
            "the job creates its object",
            180,
        )
        assert cluster.get(resource, "default", name)["metadata"]["ownerReferences"]


@in_virtual_time
async def test_a_job_of_another_controller_is_ignored() -> None:
    cluster = FakeApiServer(wall_clock)
    raw = training_job("llama")
    raw["spec"]["managedBy"] = "acme.io/scheduler"
    raw["spec"]["ofAnotherVersion"] = {"that": ["this operator", 1, "cannot read"]}
    cluster.add(JOBS, raw)
    cluster.add(PODS, failed_pod("llama-w-0", "default", reference_to_job(cluster)))
    before = cluster.get(JOBS, "default", "llama")
    process = OperatorProcess(cluster)
    await process.start()
    await asyncio.sleep(700)  # also past a resync and a list
    assert cluster.get(JOBS, "default", "llama") == before
    assert cluster.names(PODS) == ["llama-w-0"]
    assert not [key for key in cluster.objects if key[0] == EVENTS.plural]
    caches = process.runtime.caches
    uid = cluster.get(PODS, "default", "llama-w-0")["metadata"]["uid"]
    workers = WorkerPods(caches.pods.store, caches.jobs.store, is_current=lambda: True)
    assert workers.find_job("default", "llama-w-0", uid) is None, "its job exists"
    no_jobs: Any = SimpleNamespace(get=lambda _key: None)
    without_jobs = WorkerPods(caches.pods.store, no_jobs, is_current=lambda: True)
    assert without_jobs.find_job("default", "llama-w-0", "of an earlier pod") is None
    with pytest.raises(PodDeletedError):
        without_jobs.find_job("default", "llama-w-0", uid)
    incomplete = WorkerPods(caches.pods.store, no_jobs, is_current=lambda: False)
    assert incomplete.find_job("default", "llama-w-0", uid) is None, "not all objects were read yet"
    await process.kill()


@cache
def gzip_bomb(mebibytes: int) -> str:
    """Return gzip in Base64, as in a ConfigMap, that unpacks to so many MiB."""
    packer = zlib.compressobj(9, zlib.DEFLATED, zlib.MAX_WBITS | 16)
    parts = [packer.compress(b" " * 2**20) for _ in range(mebibytes)]
    return base64.b64encode(b"".join([*parts, packer.flush()])).decode()


@pytest.mark.parametrize("namespace", ["default", "elsewhere"])
@in_virtual_time
async def test_a_compression_bomb_in_a_record_is_not_unpacked(namespace: str) -> None:
    """In the namespace of the job, a user can overwrite the record itself."""

    async with training_scenario() as (cluster, process, workers):
        packed, step = {MEMBERSHIP_KEY: gzip_bomb(128)}, workers.step
        assert len(packed[MEMBERSHIP_KEY]) < 2**20
        metadata = {
            "name": "llama-membership",
            "namespace": namespace,
            "labels": names.build_object_labels("llama", "membership"),
            "ownerReferences": [reference_to_job(cluster)],
        }
        tracemalloc.start()
        if namespace == "default":
            bad = {"data": {}, "binaryData": packed}
            cluster.change(CONFIG_MAPS, "default", "llama-membership", lambda raw: raw.update(bad))
        else:
            cluster.add(CONFIG_MAPS, {"metadata": metadata, "binaryData": packed})
        await asyncio.sleep(20)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert most < 64 * 2**20
        assert workers.step >= step + 15
        assert cluster.get(JOBS, "default", "llama")["status"]["phase"] == "Running"
        assert process.runtime.find_live_problem() == ""


SETTINGS = Settings(job_network_policy=True, operator_labels="app=operator")
LEFT = (
    (CONFIG_MAPS, "llama-config"),
    (CONFIG_MAPS, "llama-membership"),
    (DISRUPTION_BUDGETS, "llama"),
    (NETWORK_POLICIES, "llama-workers"),
)


@in_virtual_time
async def test_objects_that_an_orphaning_deletion_left_become_those_of_the_next_job() -> None:
    async with Scenario(training_job("llama"), nodes=6, settings=SETTINGS) as scenario:
        cluster = scenario.cluster
        await until(lambda: scenario.condition("DisruptionAllowed").get("status") == "True", "all are created", 120)
        for resource, name in LEFT:
            cluster.change(resource, "default", name, lambda raw: raw["metadata"].pop("ownerReferences"))
        cluster.change(CONFIG_MAPS, "default", "llama-membership", lambda raw: raw.update(data={"status": "{}"}))
        for name in cluster.names(PODS):
            cluster.change(PODS, "default", name, lambda raw: raw["metadata"].pop("ownerReferences"))
        old = cluster.get(JOBS, "default", "llama")["metadata"]["uid"]
        cluster.remove(JOBS, "default", "llama")
        new = cluster.add(JOBS, training_job("llama"))["metadata"]["uid"]
        await until(lambda: scenario.status().get("phase") == "Running", "the next job trains", 120)
        for resource, name in LEFT:
            metadata = cluster.get(resource, "default", name)["metadata"]
            assert [owner["uid"] for owner in metadata["ownerReferences"]] == [new], name
            assert metadata["annotations"][names.ANNOTATION_JOB_UID] == new
        assert "status" not in cluster.get(CONFIG_MAPS, "default", "llama-membership").get("data", {})
        notes = [raw["message"] for key, raw in cluster.objects.items() if key[0] == EVENTS.plural]
        for resource, name in LEFT:
            origin = f"{resource.kind} {name} was left by an earlier job of this name (uid {old})"
            assert f"{origin} and becomes this job's" in notes


@pytest.mark.parametrize("change", [{"labels": {}}, {"annotations": {}}], ids=["labels", "annotations"])
@in_virtual_time
async def test_an_object_that_is_not_provably_of_an_earlier_job_is_left_alone(change: dict[str, Any]) -> None:
    scenario = Scenario(nodes=3)
    labels, annotations = names.build_object_labels("llama", "configuration"), {names.ANNOTATION_JOB_UID: "earlier"}
    metadata = {"name": "llama-config", "labels": labels, "annotations": annotations, **change}
    left = scenario.cluster.add(CONFIG_MAPS, {"metadata": metadata, "data": {"mine": "x"}})
    scenario.cluster.add(JOBS, training_job("llama"))
    async with scenario:
        await until(lambda: scenario.condition("PodsReady").get("reason") == "NameTaken", "the name is reported", 120)
        assert scenario.cluster.get(CONFIG_MAPS, "default", "llama-config") == left


@in_virtual_time
async def test_a_job_names_the_object_of_an_earlier_job_that_it_waits_for() -> None:
    scenario = Scenario(nodes=3)
    metadata = {"name": "llama-config", "ownerReferences": [owner_reference(uid="earlier")]}
    scenario.cluster.add(CONFIG_MAPS, {"metadata": metadata})
    scenario.cluster.add(JOBS, training_job("llama"))
    async with scenario:
        sentence = "ConfigMap llama-config belongs to an earlier job of this name; waiting until it is deleted"
        await until(lambda: sentence in scenario.condition("PodsReady").get("message", ""), "the sentence", 120)
        scenario.cluster.remove(CONFIG_MAPS, "default", "llama-config")
        await until(lambda: scenario.status().get("phase") == "Running", "it trains", 120)

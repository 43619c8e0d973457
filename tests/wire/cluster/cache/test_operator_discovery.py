"""Gang APIs that come and go, network layers of nodes, and the writes that follow, on the fake API server."""

import asyncio
from typing import Any

import pytest

from tests.testing.api.fake_api_server import FakeApiServer, http_error
from tests.testing.api.objects import training_job
from tests.testing.suite.virtual_time import in_virtual_time, run_virtual
from tests.testing.virtual.operator_process import OperatorProcess, until, wall_clock
from trainium_operator.cluster.api.client import Api
from trainium_operator.cluster.api.resources import JOBS, NODES, PODS, SECRETS, TEMPLATES, WORKLOADS, Resource
from trainium_operator.cluster.cache.discovery import (
    REFRESH_SECONDS,
    Discovery,
    discover_gang_apis,
    is_served,
)
from trainium_operator.plan.model.names import LAYERS
from trainium_operator.plan.model.observed import GangApi

NATIVE_136 = {"scheduling.k8s.io/v1": ("PriorityClass",), "scheduling.k8s.io/v1alpha2": ("PodGroup", "Workload")}


def discover(served: dict[str, tuple[str, ...]]) -> dict[GangApi, str]:
    cluster = FakeApiServer()
    cluster.served = served
    return run_virtual(discover_gang_apis(Api(cluster)))


@pytest.mark.parametrize(
    ("served", "expected"),
    [
        ({}, {}),
        ({"scheduling.k8s.io/v1": ("PriorityClass",)}, {}),
        ({"scheduling.k8s.io/v1alpha1": ("Workload",)}, {GangApi.WORKLOAD_REF: "scheduling.k8s.io/v1alpha1"}),
        (NATIVE_136, {GangApi.SCHEDULING_GROUP: "scheduling.k8s.io/v1alpha2"}),
        (
            {**NATIVE_136, "scheduling.k8s.io/v1beta1": ("PodGroup", "Workload")},
            {GangApi.SCHEDULING_GROUP: "scheduling.k8s.io/v1beta1"},
        ),
        ({"scheduling.x-k8s.io/v1alpha1": ("PodGroup",)}, {GangApi.COSCHEDULING: "scheduling.x-k8s.io/v1alpha1"}),
        ({"kueue.x-k8s.io/v1beta2": ("LocalQueue", "Workload")}, {}),
        ({"scheduling.k8s.io/v9": ("PodGroup",)}, {}),
    ],
)
def test_only_supported_versions_of_gang_apis_are_used(
    served: dict[str, tuple[str, ...]], expected: dict[GangApi, str]
) -> None:
    assert discover(served) == expected


@pytest.mark.parametrize(
    ("resource", "served", "expected"),
    [
        (WORKLOADS, {}, False),
        (WORKLOADS, {"kueue.x-k8s.io/v1beta1": ("Workload",)}, False),
        (WORKLOADS, {"kueue.x-k8s.io/v1beta2": ("LocalQueue",)}, False),
        (WORKLOADS, {"kueue.x-k8s.io/v1beta2": ("LocalQueue", "Workload")}, True),
        (TEMPLATES, {}, False),
        (TEMPLATES, {"resource.k8s.io/v1beta1": ("ResourceClaimTemplate",)}, False),
        (TEMPLATES, {"resource.k8s.io/v1": ("DeviceClass",)}, False),
        (TEMPLATES, {"resource.k8s.io/v1": ("DeviceClass", "ResourceClaimTemplate")}, True),
    ],
)
def test_an_api_is_used_only_in_its_supported_version(
    resource: Resource, served: dict[str, tuple[str, ...]], expected: bool
) -> None:
    cluster = FakeApiServer()
    cluster.served = served
    assert run_virtual(is_served(Api(cluster), resource)) is expected


def test_an_unreachable_api_group_does_not_hide_others() -> None:
    cluster = FakeApiServer()
    cluster.served = {"scheduling.x-k8s.io/v1alpha1": ("PodGroup",), **NATIVE_136}
    cluster.faults.append(lambda _, path: http_error(404, "NotFound") if "x-k8s" in path else None)
    assert run_virtual(discover_gang_apis(Api(cluster))) == {GangApi.SCHEDULING_GROUP: "scheduling.k8s.io/v1alpha2"}


def test_gang_apis_are_found_without_access_to_the_namespace() -> None:
    cluster = FakeApiServer()
    cluster.served = NATIVE_136
    cluster.faults.append(lambda _, path: http_error(403, "Forbidden") if path.endswith("kube-system") else None)
    discovery = Discovery(Api(cluster), None, on_change=lambda: None)
    run_virtual(discovery.refresh())
    assert discovery.cluster == ""
    assert discovery.gang_apis == {GangApi.SCHEDULING_GROUP: "scheduling.k8s.io/v1alpha2"}
    assert discovery.known.is_set()


def make_discovery(cluster: FakeApiServer, changes: list[Any]) -> Discovery:
    discovery = Discovery(Api(cluster), None, on_change=lambda: changes.append(dict(discovery.gang_apis)))
    return discovery


@in_virtual_time
async def test_an_api_that_is_installed_later_is_noticed_and_logged_once() -> None:
    # Once more at the start, when the cluster's own name is known.
    cluster, changes = FakeApiServer(), list[Any]()
    running = asyncio.create_task(make_discovery(cluster, changes).run())
    await asyncio.sleep(1)
    cluster.served = NATIVE_136
    await asyncio.sleep(3 * REFRESH_SECONDS)
    running.cancel()
    assert changes == [{}, {GangApi.SCHEDULING_GROUP: "scheduling.k8s.io/v1alpha2"}]


@in_virtual_time
async def test_an_unreachable_api_server_leaves_the_last_state() -> None:
    cluster, changes = FakeApiServer(), list[Any]()
    cluster.served = NATIVE_136
    cluster.down = True
    discovery = make_discovery(cluster, changes)
    running = asyncio.create_task(discovery.run())
    await asyncio.sleep(60)
    early = discovery.known.is_set()
    cluster.down = False
    await asyncio.sleep(60)
    cluster.down = True
    await asyncio.sleep(3 * REFRESH_SECONDS)
    running.cancel()
    known = discovery.gang_apis
    assert not early, "nothing may be planned before it is known"
    assert len(changes) == 1
    assert known == {GangApi.SCHEDULING_GROUP: "scheduling.k8s.io/v1alpha2"}


@in_virtual_time
async def test_forbidden_discovery_means_no_gang_apis() -> None:
    cluster = FakeApiServer()
    cluster.faults.append(lambda _, path: http_error(403, "Forbidden") if path == "/apis" else None)
    discovery = make_discovery(cluster, [])
    await discovery.refresh()
    assert (discovery.known.is_set(), discovery.gang_apis) == (True, {})


async def start_process(cluster: FakeApiServer) -> OperatorProcess:
    cluster.add(SECRETS, {"metadata": {"name": "trainium-operator-coordinator-tls", "namespace": "system"}})
    process = OperatorProcess(cluster)
    await process.runtime.elector.acquire()
    await process.runtime.certificate_keeper.refresh(write=True)
    await process.runtime.discovery.refresh()
    await process.start()
    return process


def test_worker_pods_receive_the_uid_of_the_operators_namespace_as_the_cluster() -> None:
    async def scenario() -> FakeApiServer:
        cluster = FakeApiServer(wall_clock)
        cluster.add(JOBS, training_job(replicas=1))
        process = await start_process(cluster)
        await until(lambda: bool(cluster.names(PODS)), "a pod", 60)
        await process.kill()
        return cluster

    cluster = run_virtual(scenario())
    pod = cluster.get(PODS, "default", cluster.names(PODS)[0])
    assert {"name": "TRAINIUM_CLUSTER", "value": "cluster-1"} in pod["spec"]["containers"][0]["env"]


def test_a_pod_group_is_created_before_its_pods() -> None:
    async def scenario() -> FakeApiServer:
        cluster = FakeApiServer(wall_clock)
        cluster.served = NATIVE_136
        cluster.add(NODES, {"metadata": {"name": "node-0", "labels": {LAYERS[2]: "r0"}}})
        cluster.add(JOBS, training_job(spares=1))
        process = await start_process(cluster)
        await until(lambda: len(cluster.names(PODS)) > 1, "pods", 60)
        await process.kill()
        return cluster

    cluster = run_virtual(scenario())
    writes = [write for write in cluster.writes if "/podgroups/" in write.path or write.path.endswith("/pods")]
    assert "/apis/scheduling.k8s.io/v1alpha2/namespaces/default/podgroups/" in writes[0].path
    name = writes[0].body["metadata"]["name"]
    assert {write.body["spec"]["schedulingGroup"]["podGroupName"] for write in writes[1:]} == {name}
    terms = writes[1].body["spec"]["affinity"]["podAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert [term["podAffinityTerm"]["topologyKey"] for term in terms] == [LAYERS[2]], "the layer that a node carries"


def test_a_refused_pod_group_creates_no_pods() -> None:
    async def scenario() -> FakeApiServer:
        cluster = FakeApiServer(wall_clock)
        cluster.served = NATIVE_136
        cluster.faults.append(lambda _, path: http_error(403, "Forbidden", "no") if "/podgroups/" in path else None)
        cluster.add(JOBS, training_job())
        process = await start_process(cluster)
        await asyncio.sleep(60)
        await process.kill()
        return cluster

    assert run_virtual(scenario()).names(PODS) == []

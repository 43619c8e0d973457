"""Slices, claims and pods as Kubernetes 1.36 writes them, read into small views, and the count of what is free."""

import copy
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.testing.api.fake_api_server import FakeApiServer
from tests.testing.operator.job_views import job_spec, job_view
from tests.testing.suite.any_json import SLOW_ALLOWED, as_json, mutated_values
from trainium_operator.cluster.api.client import Api
from trainium_operator.cluster.cache import device_views
from trainium_operator.cluster.cache.dra import Dra
from trainium_operator.cluster.cache.inventory import Inventory
from trainium_operator.cluster.cache.store import Entry, IndexedCache
from trainium_operator.plan.model.devices import DeviceTaint
from trainium_operator.plan.model.observed import ApiState

SLICE: dict[str, Any] = {
    "apiVersion": "resource.k8s.io/v1",
    "kind": "ResourceSlice",
    "metadata": {"name": "n-0-neuron", "resourceVersion": "311", "uid": "ff92ffc3"},
    "spec": {
        "driver": "neuron.aws.com",
        "nodeName": "n-0",
        "pool": {"generation": 1, "name": "n-0", "resourceSliceCount": 1},
        "devices": [
            {
                "attributes": {"deviceId": {"int": 0}, "instanceType": {"string": "trn1.32xlarge"}},
                "name": "neurondevice0",
                "taints": [
                    {
                        "effect": "NoExecute",
                        "key": "neuron.aws.com/unhealthy",
                        "timeAdded": "2026-11-23T12:38:47Z",
                        "value": "HBM",
                    }
                ],
            },
            {"attributes": {"deviceId": {"int": 1}}, "name": "neurondevice1"},
        ],
    },
}
CLAIM: dict[str, Any] = {
    "metadata": {
        "name": "demo-w-0-neuron-4nphx",
        "namespace": "default",
        "resourceVersion": "9",
        "uid": "c",
        "ownerReferences": [
            {"apiVersion": "v1", "kind": "Pod", "name": "demo-w-0", "uid": "owner-uid", "controller": True}
        ],
    },
    "status": {
        "allocation": {
            "devices": {
                "results": [
                    {"device": "neurondevice1", "driver": "neuron.aws.com", "pool": "n-0", "request": "neuron"},
                    {"device": "efa0", "driver": "efa.networking.k8s.aws", "pool": "n-0", "request": "fabric"},
                ]
            }
        },
        "reservedFor": [{"name": "demo-w-0", "resource": "pods", "uid": "pod-uid"}],
    },
}
POD: dict[str, Any] = {
    "spec": {"resourceClaims": [{"name": "neuron", "resourceClaimTemplateName": "demo-devices-1"}]},
    "status": {
        "containerStatuses": [
            {
                "name": "worker",
                "allocatedResourcesStatus": [
                    {
                        "name": "claim:neuron/neuron",
                        "resources": [
                            {"resourceID": "neuron.aws.com/n-0/neurondevice0", "health": "Healthy"},
                            {"resourceID": "neuron.aws.com/n-0/neurondevice1", "health": "Unhealthy", "message": "HBM"},
                        ],
                    }
                ],
            }
        ]
    },
}


def test_a_resource_slice_lists_devices_and_taints() -> None:
    view = device_views.parse_slice(SLICE)
    taint = DeviceTaint("n-0/neurondevice0", "neuron.aws.com/unhealthy", "NoExecute", "HBM", 1795437527.0)
    assert (view.node, view.pool, view.generation) == ("n-0", "n-0", 1)
    assert view.devices == {"neurondevice0": (taint,), "neurondevice1": ()}
    assert list(view.free()) == ["neurondevice1"]


def test_a_resource_slice_of_another_driver_is_empty() -> None:
    raw = copy.deepcopy(SLICE)
    raw["spec"]["driver"] = "gpu.example.com"
    assert (device_views.parse_slice(raw).node, device_views.parse_slice(raw).devices) == ("", {})


def test_a_claim_belongs_to_the_pods_it_is_reserved_for() -> None:
    assert device_views.parse_claim(CLAIM) == device_views.ClaimView(("pod-uid",), (("n-0", "neurondevice1"),))
    assert device_views.parse_claim({"metadata": {}, "spec": {}}) == device_views.ClaimView((), ())


def test_a_claim_with_admin_access_holds_no_device() -> None:
    raw = copy.deepcopy(CLAIM)
    raw["status"]["allocation"]["devices"]["results"][0]["adminAccess"] = True
    assert device_views.parse_claim(raw).held == ()


def test_a_pod_names_its_claim_template_and_its_unhealthy_device() -> None:
    assert device_views.read_claim_template(POD) == "demo-devices-1"
    assert device_views.read_device_health(POD) == ("Unhealthy", "neuron.aws.com/n-0/neurondevice1: HBM")


def test_the_health_of_other_claims_and_of_unknown_devices_is_ignored() -> None:
    raw = copy.deepcopy(POD)
    (status,) = raw["status"]["containerStatuses"][0]["allocatedResourcesStatus"]
    status["resources"][1]["health"] = "Unknown"
    assert device_views.read_device_health(raw) is None
    status["resources"][1]["health"] = "Unhealthy"
    for other in ("claim:fabric/efa", "claim:neuron-fabric", "nvidia.com/gpu"):
        status["name"] = other
        assert device_views.read_device_health(raw) is None
    status["name"] = "claim:neuron"
    assert device_views.read_device_health(raw) is not None


def test_device_texts_and_lists_are_bounded() -> None:
    raw = copy.deepcopy(POD)
    raw["status"]["containerStatuses"][0]["allocatedResourcesStatus"][0]["resources"][1]["message"] = "x" * 10_000
    found = device_views.read_device_health(raw)
    assert found is not None
    assert len(found[1]) == device_views.MAX_TEXT_CHARACTERS
    many = copy.deepcopy(SLICE)
    many["spec"]["devices"] = [{"name": f"d{at}", "taints": [{"key": "k", "effect": "None"}] * 99} for at in range(999)]
    view = device_views.parse_slice(many)
    assert (len(view.devices), len(view.devices["d0"])) == (128, 16)


@SLOW_ALLOWED
@given(mutated_values(SLICE), mutated_values(CLAIM), mutated_values(POD))
def test_malformed_objects_raise_no_error(a_slice: Any, claim: Any, pod: Any) -> None:
    device_views.parse_slice(as_json(a_slice))
    device_views.parse_claim(as_json(claim))
    device_views.read_device_health(as_json(pod))
    device_views.read_claim_template(as_json(pod))


# --- what is free

NODES, DEVICES, PODS = ("n-0", "n-1"), ("d0", "d1", "d2"), ("p0", "p1", "p2")
TAINT = DeviceTaint("any", "k", "NoSchedule")
slices = st.builds(
    device_views.SliceView,
    node=st.sampled_from(("", *NODES)),
    pool=st.sampled_from(NODES),
    generation=st.integers(1, 2),
    devices=st.dictionaries(st.sampled_from(DEVICES), st.sampled_from(((), (TAINT,))), max_size=3),
).map(lambda view: device_views.SliceView(view.node, view.node, view.generation, view.devices if view.node else {}))
claims = st.builds(
    device_views.ClaimView,
    pods=st.lists(st.sampled_from(PODS), max_size=2, unique=True).map(tuple),
    held=st.lists(st.tuples(st.sampled_from(NODES), st.sampled_from(DEVICES)), max_size=2, unique=True).map(tuple),
)
changes = st.lists(
    st.tuples(st.just("slice"), st.sampled_from(("s0", "s1", "s2")), st.none() | slices)
    | st.tuples(st.just("claim"), st.sampled_from(("c0", "c1", "c2")), st.none() | claims),
    max_size=25,
)


def count_free_devices(known: dict[str, device_views.SliceView], held: set[tuple[str, str]]) -> dict[str, int]:
    found = {}
    for node in {view.node for view in known.values() if view.node}:
        there = [view for view in known.values() if view.node == node]
        newest = max(view.generation for view in there)
        free = [(view.pool, device) for view in there if view.generation == newest for device in view.free()]
        found[node] = sum(device not in held for device in free)
    return found


def taints_among(known: dict[str, device_views.SliceView], devices: list[tuple[str, str]]) -> int:
    newest = {
        node: max(view.generation for view in known.values() if view.node == node)
        for node in NODES
        if any(view.node == node for view in known.values())
    }
    return sum(
        len(view.devices.get(device, ()))
        for pool, device in devices
        for view in known.values()
        if view.node == pool and view.generation == newest[pool]
    )


@given(changes)
def test_free_devices_and_taints_equal_a_count_from_scratch(timeline: list[tuple[str, str, Any]]) -> None:
    by_slice: IndexedCache[device_views.SliceView] = IndexedCache()
    by_claim: IndexedCache[device_views.ClaimView] = IndexedCache()
    inventory = Inventory(by_slice, by_claim)
    for version, (kind, name, view) in enumerate(timeline, start=1):
        store: IndexedCache[Any] = by_slice if kind == "slice" else by_claim
        if view is None:
            store.remove(("", name), version)
        else:
            store.put(("", name), Entry(view, f"{name}-{version}", version))
    known = {key[1]: entry.view for key, entry in by_slice.snapshot().items()}
    held = {device for entry in by_claim.snapshot().values() for device in entry.view.held}
    assert {node: inventory.count_free_on(node) for node in inventory.list_nodes()} == count_free_devices(known, held)
    for pod in PODS:
        of_pod = [entry.view.held for entry in by_claim.snapshot().values() if pod in entry.view.pods]
        assert len(inventory.find_taints(pod)) == taints_among(known, [device for held in of_pod for device in held])


def test_taints_of_a_pod_are_those_of_the_devices_that_it_holds() -> None:
    by_slice: IndexedCache[device_views.SliceView] = IndexedCache()
    by_claim: IndexedCache[device_views.ClaimView] = IndexedCache()
    inventory = Inventory(by_slice, by_claim)
    by_claim.put(("default", "c"), Entry(device_views.ClaimView(("p",), (("n-0", "neurondevice0"),)), "c", 1))
    assert inventory.find_taints("p") == ()
    by_slice.put(("", "s"), Entry(device_views.parse_slice(SLICE), "s", 2))
    assert [taint.value for taint in inventory.find_taints("p")] == ["HBM"]
    by_claim.put(("default", "c"), Entry(device_views.ClaimView(("p",), (("n-0", "neurondevice1"),)), "c", 3))
    assert inventory.find_taints("p") == ()
    assert inventory.count_free_on("n-0") == 0, "one is tainted, the other is held"


async def test_only_nodes_that_could_take_a_worker_count_as_free() -> None:
    dra = Dra(Api(FakeApiServer()), enabled=True)
    view = job_view(job_spec(workers={"accelerator": {"device": "cpu", "claim": {"count": 2}}}))
    assert (dra.offered.state, dra.find_devices(view, (), bool)) == (ApiState.ABSENT, None)
    dra.offered.set_served(True)
    assert (dra.offered.state, dra.find_devices(view, (), bool)) == (ApiState.READING, None)
    for reflector in (dra.templates, dra.claims, dra.slices):
        reflector.synced.set()
    for at, (node, free) in enumerate((("a", 2), ("b", 2), ("c", 1)), start=1):
        devices = {f"d{number}": () if number < free else (TAINT,) for number in range(2)}
        dra.slices.store.put(("", node), Entry(device_views.SliceView(node, node, 1, devices), node, at))
    found = dra.find_devices(view, (), {"a", "c"}.__contains__)
    assert found is not None
    assert (found.free_nodes, found.nodes) == (("a",), 2), "b is cordoned, c has one free device"
    dra.offered.set_served(False)
    assert dra.find_devices(view, (), bool) is None

"""Fuzz target: every watched object as a tenant, a driver or a broken controller may have written it.

A case is a list of objects as the watch delivers them, with heartbeats of agents, the memory of bad machines, the Lease
and events.

Invariants:
- An object is cached as its kind, or left out.
- Each cached job has a plan that can be executed.
- The page of each job can be rendered, and is bounded.
"""

import asyncio
import base64
import gzip
import json
import logging
from typing import Any, cast

from pydantic import ValidationError

from tests.testing.api.objects import worker_pod
from tests.testing.api.recorded_jobs import recorded_object
from tests.testing.fuzz import objects
from tests.testing.fuzz.invariants import check_type, require
from tests.testing.fuzz.operator_harness import NAMESPACE, OPERATOR_NAMESPACE, OperatorHarness, add_server_metadata
from tests.testing.fuzz.schemas import edge_values, example
from trainium_contract.job import TrainingJobStatus
from trainium_contract.pages.job_page import render_live_job
from trainium_contract.pages.jobs_page import render_live_jobs
from trainium_contract.status.internal import pack_internal
from trainium_contract.views.events import build_event_views
from trainium_contract.wire.messages import HeartbeatRequest, Membership, RegisterRequest
from trainium_contract.wire.recorded_membership import MEMBERSHIP_KEY
from trainium_operator.cluster.api.client import Api
from trainium_operator.cluster.api.resources import CONFIG_MAPS, LEASES
from trainium_operator.cluster.cache.membership_record import read_membership
from trainium_operator.cluster.lease import LeaseElector, LeaseLostError
from trainium_operator.coordinator.state import FutureGenerationError, NotRegisteredError, OldGenerationError

Json = dict[str, Any]

MOST_OBJECTS = 400
LARGEST_PAGE = 4 << 20
"""Bytes of a page, for the few pods of a case."""
LARGEST_MEMORY = 1 << 20
_SMALL_STATUS = ("desired", "membership", "nextPodOrdinal", "conditions")
"""Fields of the status in cases of single objects; a small status makes them ten times as fast."""
EXPECTED = frozenset({"trainium_operator.cluster.cache.reflector"})
"""Loggers that may log an error: they report an object that cannot be read."""

logger = logging.getLogger(__name__)


class ClusterTarget:
    """See Target."""

    name = "cluster"
    expected = EXPECTED
    storable = True

    def seeds(self) -> list[Any]:
        """Return a training job with one object of each kind, and one case for each kind."""
        job = recorded_object("job")
        whole: Json = {
            "gang": "SchedulingGroup",
            "again": True,
            "pages": True,
            "objects": [
                {"kind": "TrainingJob", "object": job},
                {"kind": "ConfigMap", "object": _unpack_membership(recorded_object("membership"))},
                *({"kind": "Pod", "object": _worker(number)} for number in range(3)),
                *({"kind": kind, "object": obj} for kind, obj in _OBJECT_BY_KIND.items()),
            ],
            "received": [objects.HEARTBEAT],
            "memory": {"data": {"ip-10-0-0-1": objects.MACHINE, "accounted": {objects.JOB_UID: 1.8e9}}},
            "lease": objects.LEASE,
            "events": [objects.EVENT],
        }
        full = {"apiVersion": job["apiVersion"], "metadata": job["metadata"], "spec": job["spec"]}
        status = TrainingJobStatus.model_validate(example(TrainingJobStatus.model_json_schema(by_alias=True)))
        full["status"] = pack_internal(status)
        small = {**job, "status": {key: job["status"][key] for key in _SMALL_STATUS}}
        parts = [{"objects": [{"kind": "TrainingJob", "object": small}, other]} for other in whole["objects"][1:]]
        with_memory = {"objects": parts[0]["objects"], "memory": whole["memory"]}
        return [whole, with_memory, {"objects": [{"kind": "TrainingJob", "object": full}]}, *parts]

    def values(self) -> dict[str, list[Any]]:
        """Return further values by key."""
        values_by_key = edge_values(TrainingJobStatus.model_json_schema(by_alias=True))
        for key, values in edge_values(Membership.model_json_schema(by_alias=True)).items():
            values_by_key.setdefault(key, []).extend(values)
        values_by_key["kind"] = [*_OBJECT_BY_KIND, "TrainingJob", "ConfigMap"]
        for key in ("deleted", "again", "pages"):
            values_by_key[key] = [True]
        return values_by_key

    async def run_case(self, case: Any) -> None:
        """Run a case; raise an error for a broken invariant."""
        if not isinstance(case, dict):
            return
        operator = OperatorHarness(_text(case.get("gang")))
        await operator.open()
        for item in _objects_of(case, "objects"):
            kind = _text(item.get("kind"))
            if kind in operator.kinds():
                operator.deliver(kind, _pack_membership(item.get("object")), deleted=item.get("deleted") is True)
        for item in _objects_of(case, "received"):
            _receive_heartbeat(operator, item)
        operator.check_views()
        await _reconcile_fleet_memory(operator, case.get("memory"))
        plans = operator.plan_jobs()
        if case.get("again") is True:
            for job, plan in plans:
                operator.apply_plan(job, plan)
            operator.plan_jobs()
        if "lease" in case:
            await _acquire_lease(operator, case["lease"])
        if case.get("pages") is True or "events" in case:
            _render_pages(operator, _objects_of(case, "events"))


_OBJECT_BY_KIND: dict[str, Json] = {
    "Pod": objects.POD,
    "Node": objects.NODE,
    "PodDisruptionBudget": objects.BUDGET,
    "NetworkPolicy": objects.POLICY,
    "Workload": objects.WORKLOAD,
    "ResourceFlavor": objects.FLAVOR,
    "PriorityClass": objects.PRIORITY,
    "ResourceClaimTemplate": objects.CLAIM_TEMPLATE,
    "ResourceClaim": objects.CLAIM,
    "ResourceSlice": objects.SLICE,
}


def _unpack_membership(record: Json) -> Json:
    """Return the ConfigMap with its membership as JSON, which can be mutated."""
    membership = read_membership(record)
    assert membership is not None
    return {**record, "binaryData": {MEMBERSHIP_KEY: membership.to_wire()}}


def _pack_membership(raw: Any) -> Any:
    """Return the object with its binary data compressed as in a ConfigMap; texts stay as they are."""
    data = raw.get("binaryData") if isinstance(raw, dict) else None
    if not isinstance(data, dict):
        return raw
    texts = {key: json.dumps(inner).encode() for key, inner in data.items() if not isinstance(inner, str)}
    packed = {key: base64.b64encode(gzip.compress(text, 1)).decode() for key, text in texts.items()}
    return {**raw, "binaryData": {**data, **packed}}


def _worker(number: int) -> Json:
    """Return a running pod of the recorded job."""
    status = {"phase": "Running", "podIP": f"10.0.0.{number}", "conditions": [{"type": "Ready", "status": "True"}]}
    metadata = {**objects.OWNED, "uid": f"uid-{number}", "annotations": {}, "creationTimestamp": "2027-01-15T08:00:00Z"}
    return worker_pod(f"llama-w-{number}", owner=objects.OWNER, node="n", status=status, **metadata)


def _receive_heartbeat(operator: OperatorHarness, message: Json) -> None:
    """Receive a heartbeat for the pods of each job; the coordinator target checks authentication."""
    for observed in operator.observe_jobs():
        job_names = {"namespace": observed.job.namespace, "job": observed.job.name}
        for pod in observed.pods[:4]:
            names = {**job_names, "podName": pod.name, "podUid": pod.uid}
            operator.state.register(observed.job.id, RegisterRequest.model_validate({**objects.REGISTER, **names}))
            try:
                heartbeat = HeartbeatRequest.model_validate({**message, **names})
                operator.state.record_heartbeat(observed.job.id, heartbeat)
            except (ValidationError, OldGenerationError, FutureGenerationError, NotRegisteredError):
                continue


async def _reconcile_fleet_memory(operator: OperatorHarness, memory: Any) -> None:
    """Read an edited memory of the fleet, plan with it and write it."""
    if isinstance(memory, dict):
        data = memory.get("data")
        texts = {
            # JSON is YAML too, and accepts unpaired surrogates.
            key: text if isinstance(text, str) else json.dumps(text)
            for key, text in (data.items() if isinstance(data, dict) else ())
        }
        if sum(map(len, texts.values())) > LARGEST_MEMORY:
            return
        raw = add_server_metadata({**memory, "data": texts}, kind="ConfigMap", namespaced=True, version=1)
        operator.api.objects[CONFIG_MAPS.plural] = raw
    await operator.fleet.prime()
    if memory is not None:
        await operator.fleet._reconcile()
        await operator.fleet._reconcile()  # reads the written memory
    check_type(operator.fleet.view)
    for written in operator.api.written:
        size = sum(map(len, (written.get("data") or {}).values()))
        require(size <= 2 * LARGEST_MEMORY, f"a memory of {size} bytes")


async def _acquire_lease(operator: OperatorHarness, lease: Any) -> None:
    """Acquire, renew and release the Lease as another holder may have left it."""
    operator.api.objects[LEASES.plural] = add_server_metadata(lease, kind="Lease", namespaced=True, version=1)
    elector = LeaseElector(
        cast("Api", operator.api), OPERATOR_NAMESPACE, "trainium-operator", "ours", wall_clock=operator.clock
    )
    await elector._try_acquire()
    await asyncio.sleep(60.0)
    if await elector._try_acquire():
        try:
            await elector._renew()
        except LeaseLostError:
            return
        await elector.release()


def _render_pages(operator: OperatorHarness, events: list[Json]) -> None:
    """Render the list of jobs and the page of each."""
    operator.job_page_data.sample()
    views = build_event_views(events)
    rows = operator.job_page_data.list_rows(NAMESPACE)
    pages = [render_live_jobs(rows, operator.now, where="namespace team", root="/ui")]
    for key in list(operator.caches.jobs.store.snapshot()):
        report = operator.job_page_data.prepare_report(*key, pods=True, members=True)
        if report is not None:
            pages.append(
                render_live_job(report(now=operator.now, events=views, notes=()), operator.now, jobs="/ui/team")
            )
    for page in pages:
        require(len(page) <= LARGEST_PAGE, f"a page of {len(page)} characters")
        page.encode()


def _objects_of(case: Json, key: str) -> list[Json]:
    items = case.get(key)
    return [item for item in items[:MOST_OBJECTS] if isinstance(item, dict)] if isinstance(items, list) else []


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""

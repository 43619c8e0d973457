"""Every watched object as a tenant, a driver or a broken controller may have written it: views, plans and pages.

A case is a list of objects as the watch delivers them, with messages of agents, the memory of bad machines, the Lease
and events. Invariants: an object is kept as the kind that it names, or left out; each job that is kept is planned, and
the plan can be executed; a page of each job can be rendered, with bounded markup.
"""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import logging
from typing import TYPE_CHECKING, Any, cast

from pydantic import ValidationError

from tests.testing.api.recorded_jobs import recorded
from tests.testing.fuzz import objects
from tests.testing.fuzz.invariants import check_type, require
from tests.testing.fuzz.schemas import edges, everything
from tests.testing.fuzz.world import NAMESPACE, OPERATOR_NAMESPACE, World, stored
from trainium_contract.job import TrainingJobStatus
from trainium_contract.pages.job_page import live_job_html
from trainium_contract.pages.jobs_page import live_jobs_html
from trainium_contract.views.events import event_views
from trainium_contract.wire.messages import HeartbeatRequest, Membership, RegisterRequest
from trainium_contract.wire.recorded_membership import MEMBERSHIP_KEY
from trainium_operator.cluster.api.resources import CONFIG_MAPS, LEASES
from trainium_operator.cluster.cache.membership_record import membership_of
from trainium_operator.cluster.lease import LeaseElector, LeaseLostError
from trainium_operator.coordinator.state import FutureGenerationError, NotRegisteredError, OldGenerationError

if TYPE_CHECKING:
    from trainium_operator.cluster.api.client import Api

Json = dict[str, Any]

MOST_OBJECTS = 400
LARGEST_PAGE = 4 << 20
"""Bytes; of the few pods of a case."""
LARGEST_MEMORY = 1 << 20
_FEW = ("desired", "membership", "nextPodOrdinal", "conditions")
"""Of a job's status in the cases of single objects, which are ten times as many for it."""
EXPECTED = frozenset({"trainium_operator.cluster.cache.reflector"})
"""Loggers that may log an error: they report an object that cannot be read."""

logger = logging.getLogger(__name__)


class ClusterTarget:
    """See Target."""

    name = "cluster"
    expected = EXPECTED
    storable = True

    def seeds(self) -> list[Any]:
        """A job that trains beside one of every other object, and each of them by itself."""
        job = recorded("job")
        whole: Json = {
            "gang": "SchedulingGroup",
            "again": True,
            "pages": True,
            "objects": [
                {"kind": "TrainingJob", "object": job},
                {"kind": "ConfigMap", "object": _unpacked(recorded("membership"))},
                *({"kind": "Pod", "object": _worker(number)} for number in range(3)),
                *({"kind": kind, "object": found} for kind, found in _ONE_OF_EACH.items()),
            ],
            "received": [objects.HEARTBEAT],
            "memory": {"data": {"ip-10-0-0-1": objects.MACHINE, "accounted": {objects.JOB_UID: 1.8e9}}},
            "lease": objects.LEASE,
            "events": [objects.EVENT],
        }
        full = {"apiVersion": job["apiVersion"], "metadata": job["metadata"], "spec": job["spec"]}
        full["status"] = everything(TrainingJobStatus.model_json_schema(by_alias=True))
        small = {**job, "status": {key: job["status"][key] for key in _FEW}}
        parts = [{"objects": [{"kind": "TrainingJob", "object": small}, each]} for each in whole["objects"][1:]]
        remembered = {"objects": parts[0]["objects"], "memory": whole["memory"]}
        return [whole, remembered, {"objects": [{"kind": "TrainingJob", "object": full}]}, *parts]

    def values(self) -> dict[str, list[Any]]:
        """Further values by key."""
        found = edges(TrainingJobStatus.model_json_schema(by_alias=True))
        for key, values in edges(Membership.model_json_schema(by_alias=True)).items():
            found.setdefault(key, []).extend(values)
        found["kind"] = [*_ONE_OF_EACH, "TrainingJob", "ConfigMap"]
        for key in ("deleted", "again", "pages"):
            found[key] = [True]
        return found

    async def run_case(self, case: Any) -> None:
        """Raises whatever should not happen."""
        if not isinstance(case, dict):
            return
        world = World(_text(case.get("gang")))
        await world.open()
        for each in _list(case, "objects"):
            kind = _text(each.get("kind"))
            if kind in world.kinds():
                world.see(kind, _packed(each.get("object")), deleted=each.get("deleted") is True)
        for each in _list(case, "received"):
            _receive(world, each)
        world.check_views()
        await _remember(world, case.get("memory"))
        plans = world.planned()
        if case.get("again") is True:
            for job, made in plans:
                world.obey(job, made)
            world.planned()
        if "lease" in case:
            await _lead(world, case["lease"])
        if case.get("pages") is True or "events" in case:
            _show(world, _list(case, "events"))


_ONE_OF_EACH: dict[str, Json] = {
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


def _unpacked(record: Json) -> Json:
    """The ConfigMap with its membership in a form that can be changed."""
    membership = membership_of(record)
    assert membership is not None
    return {**record, "binaryData": {MEMBERSHIP_KEY: membership.to_wire()}}


def _packed(raw: Any) -> Any:
    """The object with its binary data as a ConfigMap holds it; what is a text already stays as it is."""
    data = raw.get("binaryData") if isinstance(raw, dict) else None
    if not isinstance(data, dict):
        return raw
    texts = {key: json.dumps(inner).encode() for key, inner in data.items() if not isinstance(inner, str)}
    packed = {key: base64.b64encode(gzip.compress(text, 1)).decode() for key, text in texts.items()}
    return {**raw, "binaryData": {**data, **packed}}


def _worker(number: int) -> Json:
    """A pod of the recorded job that runs."""
    metadata = {**objects.OWNED, "name": f"llama-w-{number}", "uid": f"uid-{number}", "annotations": {}}
    return {
        "metadata": {**metadata, "creationTimestamp": "2027-01-15T08:00:00Z"},
        "spec": {"nodeName": "n", "containers": [{"name": "worker", "image": "trainer:1"}]},
        "status": {
            "phase": "Running",
            "podIP": f"10.0.0.{number}",
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }


def _receive(world: World, message: Json) -> None:
    """Receive a message of an agent of the job's pods; another target checks whether it may send it."""
    for job in world.observed():
        ours = {"namespace": job.job.namespace, "job": job.job.name}
        for pod in job.pods[:4]:
            names = {**ours, "podName": pod.name, "podUid": pod.uid}
            world.state.register(job.job.id, RegisterRequest.model_validate({**objects.REGISTER, **names}))
            try:
                heartbeat = HeartbeatRequest.model_validate({**message, **names})
                world.state.heartbeat(job.job.id, heartbeat)
            except (ValidationError, OldGenerationError, FutureGenerationError, NotRegisteredError):
                continue


async def _remember(world: World, memory: Any) -> None:
    """The fleet's memory as somebody edited it, read, planned with and written again."""
    if isinstance(memory, dict):
        data = memory.get("data")
        texts = {
            # JSON is YAML too, and takes halves of surrogate pairs.
            key: text if isinstance(text, str) else json.dumps(text)
            for key, text in (data.items() if isinstance(data, dict) else ())
        }
        if sum(map(len, texts.values())) > LARGEST_MEMORY:
            return
        raw = stored({**memory, "data": texts}, kind="ConfigMap", namespaced=True, version=1)
        world.api.objects[CONFIG_MAPS.plural] = raw
    await world.fleet.prime()
    if memory is not None:
        await world.fleet._reconcile()
        await world.fleet._reconcile()  # what was written is read again
    check_type(world.fleet.view)
    for written in world.api.written:
        size = sum(map(len, (written.get("data") or {}).values()))
        require(size <= 2 * LARGEST_MEMORY, f"a memory of {size} bytes")


async def _lead(world: World, lease: Any) -> None:
    """Read, wait for and take the Lease as another holder may have left it."""
    world.api.objects[LEASES.plural] = stored(lease, kind="Lease", namespaced=True, version=1)
    elector = LeaseElector(
        cast("Api", world.api), OPERATOR_NAMESPACE, "trainium-operator", "ours", wall_clock=world.clock
    )
    await elector._try_acquire()
    await asyncio.sleep(60.0)
    if await elector._try_acquire():
        try:
            await elector._renew()
        except LeaseLostError:
            return
        await elector.release()


def _show(world: World, events: list[Json]) -> None:
    """The pages of all jobs and of each."""
    world.shown.sample()
    found = event_views(events)
    rows = world.shown.rows(NAMESPACE)
    pages = [live_jobs_html(rows, world.now, where="namespace team", root="/ui")]
    for key in list(world.caches.jobs.store.snapshot()):
        report = world.shown.report(*key, pods=True, members=True)
        if report is not None:
            pages.append(live_job_html(report(now=world.now, events=found, notes=()), world.now, jobs="/ui/team"))
    for page in pages:
        require(len(page) <= LARGEST_PAGE, f"a page of {len(page)} characters")
        page.encode()


def _list(case: Json, key: str) -> list[Json]:
    found = case.get(key)
    return [each for each in found[:MOST_OBJECTS] if isinstance(each, dict)] if isinstance(found, list) else []


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""

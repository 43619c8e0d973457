"""The caches, observer and plan of the operator with the objects of a case, without servers and without time.

Invariant: `add_server_metadata` changes only fields that the API server writes or validates: names, uid and version.
"""

import asyncio
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

from tests.testing.api.objects import bind_pod
from tests.testing.fuzz.invariants import check_plan, check_type, require
from trainium_contract.api_server.errors import NotFoundError
from trainium_operator.cluster.api.client import Api
from trainium_operator.cluster.api.resources import Resource
from trainium_operator.cluster.cache.caches import make_caches
from trainium_operator.cluster.cache.kueue_views import set_conditions
from trainium_operator.cluster.cache.reflector import Lister
from trainium_operator.cluster.cache.store import Entry, Key
from trainium_operator.cluster.fleet.fleet_reconciler import FleetReconciler
from trainium_operator.cluster.job_pages import JobPageData
from trainium_operator.cluster.queue.observe import Observer, enqueue_on_change
from trainium_operator.cluster.queue.pod_warnings import PodWarnings
from trainium_operator.cluster.queue.refusal_backoff import RefusalBackoff
from trainium_operator.cluster.queue.waiting_gangs import WaitingGangs
from trainium_operator.cluster.queue.work_queue import PlanRateLimiter, WorkQueue
from trainium_operator.cluster.queue.write_outcomes import WriteOutcomes
from trainium_operator.coordinator.state import CoordinatorState
from trainium_operator.plan.model.actions import (
    Action,
    ApplyObject,
    ApplyOptional,
    ApplyWorkload,
    CreatePod,
    DeletePod,
    Plan,
    PublishMembership,
    SetQuotaConditions,
)
from trainium_operator.plan.model.observed import GangApi, JobView, Observed
from trainium_operator.plan.plan import plan
from trainium_operator.settings import Settings

Json = dict[str, Any]

NOW = 1_800_000_000.0
NAMESPACE = "team"
OPERATOR_NAMESPACE = "trainium-system"
MOST_CREATED_PODS = 6
"""Limit of pods that are created of one plan, as if the operator crashed between two writes."""
LONGEST_SENTENCE = 4096
"""Characters: messages cut what they quote."""
EMPTY_VIEW = 4096
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_NAME_OF_JOB = re.compile(r"[a-z]([-a-z0-9]{0,48}[a-z0-9])?")
"""Names that the rules of the definition accept."""
_UID = re.compile(r"[-a-zA-Z0-9]{1,64}")
_GANGS = {
    "SchedulingGroup": {GangApi.SCHEDULING_GROUP: "scheduling.k8s.io/v1beta1"},
    "WorkloadRef": {GangApi.WORKLOAD_REF: "scheduling.k8s.io/v1alpha1"},
    "Coscheduling": {GangApi.COSCHEDULING: "scheduling.x-k8s.io/v1alpha1"},
}
SETTINGS = Settings(
    kueue=True,
    dra=True,
    job_network_policy=True,
    operator_labels="app=trainium-operator",
    extra_priority_class="idle-nodes",
)


class StaticApiServer:
    """An API server that returns given objects and accepts every write."""

    def __init__(self) -> None:
        self.objects: dict[str, Json] = {}
        """One object by the plural of its kind."""
        self.written: list[Json] = []

    async def list_page(self, _resource: Resource, _namespace: str = "", **_query: Any) -> Json:
        return {"items": [], "metadata": {"resourceVersion": "1"}}

    async def get(self, resource: Resource, _namespace: str, name: str, **_how: Any) -> Json:
        obj = self.objects.get(resource.plural)
        if obj is None:
            raise NotFoundError(f"{resource.plural} {name}")
        return obj

    async def create(self, resource: Resource, namespace: str, body: Json, **how: Any) -> Json:
        return await self.replace(resource, namespace, "", body, **how)

    async def replace(self, resource: Resource, _namespace: str, _name: str, body: Json, **_how: Any) -> Json:
        self.written.append(body)
        self.objects[resource.plural] = body
        return body

    async def merge(self, _resource: Resource, _namespace: str, _name: str, body: Json, **_how: Any) -> Json:
        self.written.append(body)
        return body


class OperatorHarness:
    """The operator without servers: `open` it, `deliver` objects, and call `plan_jobs`, in an event loop."""

    def __init__(self, gang: str = "") -> None:
        """`gang`: the gang API that the cluster serves, a key of `_GANGS`."""
        self.now = NOW
        self.api = StaticApiServer()
        api = cast("Api", self.api)
        self.caches = make_caches(api, SETTINGS, self.clock)
        self.queue: WorkQueue[Key] = WorkQueue()
        self.state = CoordinatorState(self.clock)
        limiter = PlanRateLimiter(self.queue)
        self.fleet = FleetReconciler(
            api,
            self.caches,
            asyncio.Event(),
            namespace=OPERATOR_NAMESPACE,
            name="memory",
            may_taint=lambda: True,
            wall_clock=self.clock,
            on_change=lambda: None,
        )
        self.observer = Observer(
            caches=self.caches,
            agents=self.state,
            ca_bundle=lambda: "-----BEGIN CERTIFICATE-----\n",
            wall_clock=self.clock,
            refusal_backoff=RefusalBackoff(self.clock),
            warnings=PodWarnings(api, self.caches.pods, self.clock),
            outcomes=WriteOutcomes(self.clock),
            fleet=self.fleet.get_current_view,
            gangs=WaitingGangs(self.caches.jobs, self.caches.pods, wake=limiter.put),
            served_since=lambda: 0.0,
        )
        enqueue_on_change(self.caches, self.queue, limiter)
        self.job_page_data = JobPageData(api, self.caches, self.clock)
        self._gang = gang
        self._version = 100
        self._listers: dict[str, Lister[Any]] = {
            "TrainingJob": self.caches.jobs,
            "Pod": self.caches.pods,
            "Node": cast("Lister[Any]", self.caches.nodes),
            **{kind: self.caches.children[kind] for kind in ("ConfigMap", "PodDisruptionBudget", "NetworkPolicy")},
            "Workload": self.caches.kueue.workloads,
            "ResourceFlavor": self.caches.kueue.flavors,
            "PriorityClass": self.caches.kueue.priorities,
            "ResourceClaimTemplate": self.caches.dra.templates,
            "ResourceClaim": self.caches.dra.claims,
            "ResourceSlice": self.caches.dra.slices,
        }

    def clock(self) -> float:
        """Return the time in Unix seconds."""
        return self.now

    async def open(self) -> None:
        """List all kinds once; the lists are empty."""
        for lister in self._listers.values():
            await lister.refresh()
        for discovery in (self.caches.kueue.offered, self.caches.dra.offered):
            discovery.set_served(True)
        self.state.start_serving()
        self.state.since -= 1000.0

    def kinds(self) -> tuple[str, ...]:
        """Return the watched kinds."""
        return tuple(self._listers)

    def deliver(self, kind: str, raw: Any, *, deleted: bool = False) -> Json:
        """Deliver an object to the watch of its kind as the API server would store it, and return that."""
        lister = self._listers[kind]
        self._version += 1
        stored = add_server_metadata(raw, kind=kind, namespaced=lister.resource.namespaced, version=self._version)
        lister.observe(stored, deleted=deleted)
        entry = lister.store.get_entry((stored["metadata"].get("namespace", ""), stored["metadata"]["name"]))
        if entry is not None and kind not in ("TrainingJob", "ConfigMap"):
            size = len(repr(entry.view))
            require(size <= 4 * len(json.dumps(stored)) + EMPTY_VIEW, f"a view of {size} characters of a {kind}")
        return stored

    def snapshot(self) -> dict[str, dict[Key, Entry[Any]]]:
        """Return the cached entries by kind."""
        return {kind: lister.store.snapshot() for kind, lister in self._listers.items()}

    def restore(self, entries: dict[str, dict[Key, Entry[Any]]]) -> None:
        """Load entries of another harness."""
        for kind, entries_by_key in entries.items():
            for key, entry in entries_by_key.items():
                self._listers[kind].store.put(key, entry)
                self._version = max(self._version, entry.version)

    def check_views(self) -> None:
        """Check the types of all cached views. Raises InvariantError."""
        for lister in self._listers.values():
            for entry in lister.store.snapshot().values():
                check_type(entry.view)
        for job in self.caches.jobs.store.snapshot().values():
            error_length = len(job.view.error)
            require(error_length <= LONGEST_SENTENCE, f"{error_length} characters about an unreadable job")
            require((error_length == 0) == (job.view.view is not None), "an unreadable job without a reason")

    def observe_jobs(self) -> Iterator[Observed]:
        """Yield the observation of each readable job."""
        for entry in self.caches.jobs.store.snapshot().values():
            if entry.view.view is not None:
                yield self.observer.observe(entry.view.view)

    def plan_jobs(self) -> list[tuple[JobView, Plan]]:
        """Return the plan of each job. Raises InvariantError for a plan that cannot be executed."""
        settings = replace(
            SETTINGS.build_plan_settings(OPERATOR_NAMESPACE),
            gang_apis=_GANGS.get(self._gang, {}),
            cluster="cluster-uid",
            topology_layers=frozenset({"topology.kubernetes.io/zone"}),
            kueue=self.caches.kueue.offered.state,
            dra=self.caches.dra.offered.state,
        )
        plans = []
        for observed in self.observe_jobs():
            job_plan = plan(observed, settings)
            workers = observed.job.spec.workers
            most_pods = max(workers.replicas, workers.max_replicas or 0) + workers.spares
            check_plan(job_plan, most_pods + len(observed.pods))
            plans.append((observed.job, job_plan))
        return plans

    def apply_plan(self, job: JobView, job_plan: Plan) -> None:
        """Execute a plan as API server and kubelets would, with its first pods only."""
        self.deliver("TrainingJob", self._as_stored(job, job_plan))
        pods = 0
        for action in job_plan.actions:
            if isinstance(action, CreatePod):
                pods += 1
                if pods > MOST_CREATED_PODS:
                    continue
            self._execute(job, action)

    def _as_stored(self, job: JobView, job_plan: Plan) -> Json:
        metadata = {"name": job.name, "namespace": job.namespace, "uid": job.uid, "generation": job.generation}
        return {"metadata": metadata, "spec": job.spec.to_wire(), "status": job_plan.status.to_wire()}

    def _execute(self, job: JobView, action: Action) -> None:
        match action:
            case CreatePod(manifest):
                self.deliver("Pod", _start_pod(manifest))
            case DeletePod(name):
                self.deliver("Pod", {"metadata": {"name": name, "namespace": job.namespace}}, deleted=True)
            case PublishMembership(membership, manifest):
                self.deliver("ConfigMap", manifest)
                self.state.publish(job.id, membership)
            case ApplyObject(manifest) | ApplyOptional(manifest) | ApplyWorkload(manifest):
                if manifest["kind"] in self._listers:
                    self.deliver(manifest["kind"], manifest)
            case SetQuotaConditions():
                set_conditions((), action.conditions, "2027-01-15T08:00:00Z")
            case _:
                pass


def add_server_metadata(raw: Any, *, kind: str, namespaced: bool, version: int) -> Json:
    """Return the object as the API server stores it, with name, namespace, uid and version."""
    body = raw if isinstance(raw, dict) else {}
    metadata = body.get("metadata")
    metadata = dict(metadata) if isinstance(metadata, dict) else {}
    if not _matches(_NAME_OF_JOB if kind == "TrainingJob" else _NAME, metadata.get("name")):
        metadata["name"] = "llama-w-0" if kind == "Pod" else "llama"
    if not _matches(_UID, metadata.get("uid")):
        metadata["uid"] = f"uid-of-{metadata['name']}"
    if not namespaced:
        metadata.pop("namespace", None)
    elif not (_matches(_NAME, metadata.get("namespace")) and len(metadata["namespace"]) < 64):
        metadata["namespace"] = NAMESPACE
    return {**body, "kind": kind, "metadata": {**metadata, "resourceVersion": str(version)}}


def _matches(pattern: re.Pattern[str], value: Any) -> bool:
    return isinstance(value, str) and pattern.fullmatch(value) is not None


def _start_pod(manifest: Json) -> Json:
    """Return the pod as started by the kubelet of a separate node."""
    name = manifest["metadata"]["name"]
    number = int(name.rpartition("-")[2]) % 250 + 1
    started = {**manifest, "spec": {**manifest["spec"]}}
    bind_pod(f"node-{number}", number)(started)
    return started

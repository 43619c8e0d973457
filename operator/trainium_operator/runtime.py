"""The operator's parts, wired together; `main` runs them.

Invariant: agents are answered from `serving` on; everything that decides or writes is gated by `leading`, and each
write by the Lease itself (`acting`). Decisions go by a clock that does not jump; certificates, tokens and the Lease
show the machine's.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from trainium_contract.wire.log_line import LogFormat
from trainium_contract.wire.worker_env import LABEL_JOB, LABEL_ROLE, ROLE_WORKER
from trainium_operator.clock import SteadyClock
from trainium_operator.cluster.api.client import Api
from trainium_operator.cluster.api.errors import ApiError
from trainium_operator.cluster.api.resources import (
    ACCESS_REVIEWS,
    CONFIG_MAPS,
    DISRUPTION_BUDGETS,
    JOBS,
    LEASES,
    NETWORK_POLICIES,
    NODES,
    PODS,
    TOKEN_REVIEWS,
)
from trainium_operator.cluster.cache.discovery import Discovery
from trainium_operator.cluster.cache.dra import Dra
from trainium_operator.cluster.cache.kueue import Kueue
from trainium_operator.cluster.cache.namespaces import EVERYWHERE, Namespaces
from trainium_operator.cluster.cache.reflector import Lister, Reflector
from trainium_operator.cluster.cache.store import IndexedCache
from trainium_operator.cluster.cache.views import child_record, job_record, node_view, pod_view
from trainium_operator.cluster.coordinator_ports import KubernetesSecret, Reviewer, WorkerPods
from trainium_operator.cluster.execute.deletion_limit import ForceDeleteLimiter
from trainium_operator.cluster.execute.events import EventRecorder
from trainium_operator.cluster.execute.executor import Executor
from trainium_operator.cluster.execute.policy_writes import PolicyWrites
from trainium_operator.cluster.execute.undeclared_fields import UndeclaredFields
from trainium_operator.cluster.fleet.fleet_reconciler import FleetMeter, FleetReconciler
from trainium_operator.cluster.job_pages import JobPageData
from trainium_operator.cluster.lease import LeaseElector, LeaseTimes
from trainium_operator.cluster.queue.creation_backoff import CreationBackoff
from trainium_operator.cluster.queue.observe import Caches, Observer, enqueue_on_change
from trainium_operator.cluster.queue.pace import Pace
from trainium_operator.cluster.queue.pod_warnings import PodWarnings
from trainium_operator.cluster.queue.waiting_gangs import WaitingGangs
from trainium_operator.cluster.queue.work_queue import WorkQueue
from trainium_operator.cluster.reconciler import Reconciler
from trainium_operator.cluster.release import OwnedObject, Release
from trainium_operator.coordinator.authentication import Authenticator
from trainium_operator.coordinator.certificate_keeper import CertificateKeeper
from trainium_operator.coordinator.certificates import server_names
from trainium_operator.coordinator.probe import Prober
from trainium_operator.coordinator.server import CoordinatorServer
from trainium_operator.coordinator.state import CoordinatorState
from trainium_operator.endpoints.access import Access
from trainium_operator.endpoints.servers import EndpointServer, Exposition, ProbeServer
from trainium_operator.http.tls import CertificateFolder
from trainium_operator.monitoring.metrics import Metrics
from trainium_operator.plan.model.observed import PlanSettings
from trainium_operator.plan.plan import plan

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from trainium_operator.cluster.api.resources import Resource
    from trainium_operator.cluster.api.transport import Transport
    from trainium_operator.cluster.cache.store import Entry, Key
    from trainium_operator.cluster.cache.views import ChildRecord, JobRecord
    from trainium_operator.coordinator.state import ProbeTarget
    from trainium_operator.plan.model.actions import Plan
    from trainium_operator.plan.model.observed import Observed, PodView
    from trainium_operator.settings import Settings

WATCH_STALE_SECONDS = 180.0
"""A watch that is silent this long although the API server answers is broken (bookmarks come each minute)."""
STUCK_SECONDS = 900.0
CATCH_UP_SECONDS = 1.0
"""Between two tries to list what the last leader left."""

logger = logging.getLogger(__name__)


class Runtime:
    """All parts of one operator process."""

    def __init__(
        self,
        settings: Settings,
        transport: Transport,
        *,
        namespace: str,
        identity: str,
        wall_clock: Callable[[], float] = time.time,
        lease_transport: Transport | None = None,
    ) -> None:
        """`lease_transport` serves the Lease alone, so that no other request can keep it waiting."""
        self.settings = settings
        self.serving = asyncio.Event()
        """Agents are answered: the Lease is ours, and the newest memberships are known."""
        self.leading = asyncio.Event()
        """Jobs are planned: everything else is known too."""
        self.metrics = Metrics(named_jobs=settings.named_jobs)
        self.api_last_seen = 0.0
        self.api = Api(transport, on_request=self._on_request)
        self.queue: WorkQueue[Key] = WorkQueue(most_slow=max(1, settings.workers // 2))
        self.pace = Pace(self.queue)
        clock = SteadyClock(wall_clock, asyncio.get_running_loop().time)
        self.caches = make_caches(self.api, settings, clock, on_change=self._apis_changed)
        self.state = CoordinatorState(clock)
        self._stopped = False
        self.recorder = EventRecorder(self.api, identity, wall_clock=wall_clock)
        lease_api = Api(lease_transport or transport, on_request=self._on_request)
        times = LeaseTimes.of(
            duration=settings.lease_duration, renew_deadline=settings.lease_renew_deadline, retry=settings.lease_retry
        )
        self.elector = LeaseElector(
            lease_api,
            namespace,
            settings.lease_name,
            identity,
            wall_clock=wall_clock,
            times=times,
            owners=lambda: self.release.owners_of(LEASES),
        )
        self.acting = Api(transport, on_request=self._on_request, may_write=self.elector.may_act)
        self.release = Release(
            self.acting,
            self.leading,
            namespace=namespace,
            deployment=settings.deployment,
            owned_objects=(
                OwnedObject(LEASES, settings.lease_name),
                OwnedObject(CONFIG_MAPS, settings.memory_name, kept=settings.keep_memory),
            ),
        )
        services = filter(None, (settings.coordinator_service, settings.ui_service))
        self.keeper = CertificateKeeper(
            KubernetesSecret(self.api, namespace, settings.secret_name),
            tuple(dict.fromkeys(name for service in services for name in server_names(service, namespace))),
            wall_clock=wall_clock,
            on_new_bundle=self.enqueue_all,
        )
        token_reviewer = Reviewer(self.api, TOKEN_REVIEWS)
        self.coordinator = CoordinatorServer(
            self.state,
            Authenticator(
                token_reviewer.review,
                WorkerPods(self.caches.pods.store, self.caches.jobs.store, is_current=self.leading.is_set),
                wall_clock=clock,
            ),
            is_serving=self.serving.is_set,
            notify=self._notify,
            until_serving=self._until_serving,
            on_message=self.metrics.message,
            on_news=self.metrics.heartbeat_changed,
        )
        self.prober = Prober(
            self.state, is_serving=self.leading.is_set, notify=self._notify, address_of=self._address_of
        )
        exposition = Exposition(self._exposition, clock)
        self.health = ProbeServer(
            live=self.live_problem, ready=self.ready_problem, metrics=None if settings.secure_metrics else exposition
        )
        self.mounted = CertificateFolder(settings.https_certificate) if settings.https_certificate else None
        """The certificate of the HTTPS port, where it is not the coordinator's."""
        self.shown = JobPageData(self.api, self.caches, clock) if settings.ui else None
        self.readers: EndpointServer | None = None
        if settings.serves_readers:
            access = Access(token_reviewer.review, Reviewer(self.api, ACCESS_REVIEWS).review, wall_clock=clock)
            self.readers = EndpointServer(
                access,
                exposition if settings.secure_metrics else None,
                jobs=self.shown,
                clock=clock,
                on_answer=self.metrics.read,
            )
        self.plan_settings = plan_settings(settings, namespace)
        nodes = self.caches.nodes.store if self.caches.nodes is not None else None
        self.discovery = Discovery(self.api, nodes, on_change=self._discovered)
        self.fleet = FleetReconciler(
            self.acting,
            self.caches,
            self.leading,
            namespace=namespace,
            name=settings.memory_name,
            taints_nodes=settings.taint_nodes,
            wall_clock=clock,
            on_change=self.enqueue_all,
            owners=lambda: self.release.owners_of(CONFIG_MAPS),
        )
        creation_backoff, policies = CreationBackoff(clock), PolicyWrites(clock)
        warnings = PodWarnings(self.api, self.caches.pods, clock)
        observer = Observer(
            self.caches,
            self.state,
            ca_bundle=lambda: self.keeper.ca_bundle,
            creation_backoff=creation_backoff,
            warnings=warnings,
            policy_refusal=policies.refusal,
            wall_clock=clock,
            fleet=self.fleet.current,
            gangs=WaitingGangs(self.caches.jobs, self.caches.pods, wake=self.pace.put),
        )
        self.reconciler = Reconciler(
            queue=self.queue,
            caches=self.caches,
            observer=observer,
            plan=self._plan,
            executor=Executor(
                self.acting,
                self.caches,
                self.recorder,
                self.state,
                creation_backoff,
                ForceDeleteLimiter(clock),
                UndeclaredFields(clock),
                policies,
            ),
            recorder=self.recorder,
            meter=FleetMeter(self.metrics, self.fleet),
            pace=self.pace,
            warnings=warnings,
        )
        enqueue_on_change(self.caches, self.queue, self.pace)
        self.caches.namespaces.listen(self._enqueue_all_of)
        self.caches.jobs.store.listen(self._forget_job)
        self.caches.pods.store.listen(self._forget_pod)

    async def take_over(self) -> None:
        """Answer agents once their memberships are known, and plan once everything is; call with the Lease held.

        Objects that the last leader wrote are read again, for watches may lag; agents do not wait for the long lists.
        """
        since = asyncio.get_running_loop().time()
        await self.caches.synced()
        await self._retried(lambda: self.caches.catch_up(since, records_only=True))
        await self.keeper.tls.loaded.wait()
        self._begin_serving()
        await self._retried(lambda: self.caches.catch_up(since))
        await self._retried(self.fleet.prime)
        await self.discovery.known.wait()
        self._note_optional_apis()
        self._begin_leading()

    async def _retried(self, reading: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await reading()
            except ApiError as error:
                logger.warning("listing what the last leader left: %s", error)
                await asyncio.sleep(CATCH_UP_SECONDS)
            else:
                return

    def _begin_serving(self) -> None:
        if self._stopped:
            return
        for entry in self.caches.jobs.store.snapshot().values():
            view = entry.view.view
            record = self.caches.membership_of(view) if view is not None else None
            if view is not None and record is not None and record.membership is not None:
                self.state.publish(view.id, record.membership)
        self.state.start_serving()
        self.serving.set()

    def _begin_leading(self) -> None:
        if self._stopped:
            return
        self.leading.set()
        self.metrics.leader.set(1)
        self.enqueue_all()

    def stop_leading(self) -> None:
        """Answer no agent and start no plan any more, for good."""
        self._stopped = True
        self.serving.clear()
        self.leading.clear()
        self.metrics.leader.set(0)
        self.queue.close()

    def enqueue_all(self) -> None:
        """Have every job planned."""
        for key in self.caches.jobs.store.snapshot():
            self.queue.put(key)

    def _enqueue_all_of(self, namespace: str) -> None:
        for key in self.caches.jobs.store.snapshot():
            if namespace in ("", key[0]):
                self.queue.put(key)

    def live_problem(self) -> str:
        """Return why a restart would help; empty when it would not."""
        now = asyncio.get_running_loop().time()
        if now - self.api_last_seen > WATCH_STALE_SECONDS:
            return ""  # the API server is away: a restart would only lose the state of agents
        for reflector in self.caches.reflectors():
            if reflector.synced.is_set() and now - reflector.last_seen > WATCH_STALE_SECONDS:
                return f"the watch of {reflector.resource.plural} has been silent for {now - reflector.last_seen:.0f} s"
        busy = self.reconciler.busy_seconds()
        return f"a worker has been busy with one job for {busy:.0f} s" if busy > STUCK_SECONDS else ""

    def ready_problem(self) -> str:
        """Return what is missing before this replica could act."""
        if not self.caches.jobs.synced.is_set():
            return "trainingjobs are not listed yet"
        missing = [each.resource.plural for each in self.caches.reflectors() if not each.synced.is_set()]
        return f"not listed yet: {', '.join(missing)}" if missing else ""

    def _until_serving(self) -> Awaitable[object] | None:
        # An agent comes to a follower only when the leader does not answer it, or when it is new.
        self.elector.nudge()
        return self.serving.wait() if self.elector.is_pending() else None

    def _plan(self, observed: Observed) -> Plan:
        return plan(observed, self.plan_settings)

    def _discovered(self) -> None:
        """Apply changed API discovery: every plan may depend on it."""
        found = self.discovery
        self.caches.kueue.offered.is_served(found.kueue)
        self.caches.dra.offered.is_served(found.claims)
        kueue, dra = self.caches.kueue.offered.state, self.caches.dra.offered.state
        before = self.plan_settings
        changed = (found.gang_apis, kueue, dra) != (before.gang_apis, before.kueue, before.dra)
        self.plan_settings = replace(
            self.plan_settings,
            gang_apis=found.gang_apis,
            topology_layers=found.topology_layers,
            cluster=found.cluster,
            kueue=kueue,
            dra=dra,
        )
        if changed:
            self.enqueue_all()

    def _apis_changed(self) -> None:
        """Kueue's objects or those of claimed devices are read now, or a flavor has changed."""
        self._note_optional_apis()
        self.enqueue_all()

    def _note_optional_apis(self) -> None:
        kueue, dra = self.caches.kueue.offered.state, self.caches.dra.offered.state
        self.plan_settings = replace(self.plan_settings, kueue=kueue, dra=dra)

    def _on_request(self, verb: str, status: int, seconds: float) -> None:
        if 0 < status < 500:
            self.api_last_seen = asyncio.get_running_loop().time()
        self.metrics.request(verb, status, seconds)

    def _notify(self, namespace: str, job: str, at_once: bool) -> None:
        key = (namespace, job)
        if at_once:
            self.pace.put(key)
            return
        record = self.caches.jobs.store.get(key)
        workers = record.view.status.desired if record is not None and record.view is not None else 0
        self.queue.put_after(key, self.plan_settings.status_interval(workers))

    def _address_of(self, target: ProbeTarget) -> str:
        entry = self.caches.pods.store.entry((target.namespace, target.pod))
        known = entry is not None and entry.uid == target.pod_uid and entry.owner == target.job_id
        return entry.view.ip if entry is not None and known else ""

    def _forget_job(self, _key: Key, old: Entry[JobRecord] | None, new: Entry[JobRecord] | None) -> None:
        if old is not None and (new is None or new.uid != old.uid):
            self.state.forget_job(old.view.id)
            self.metrics.forget(old.uid)

    def _forget_pod(self, _key: Key, old: Entry[PodView] | None, new: Entry[PodView] | None) -> None:
        if old is not None and old.owner is not None and (new is None or new.uid != old.uid):
            self.state.forget_pod(old.owner, old.uid)

    def _exposition(self) -> bytes:
        self.metrics.queue_depth.set(len(self.queue))
        self.metrics.agents.set(self.state.agent_count())
        self.metrics.served({state.value: count for state, count in self.caches.namespaces.counts().items()})
        self.metrics.events_dropped.set(self.recorder.dropped)
        self.metrics.fleet(self.fleet.machines, frozen=bool(self.fleet.view.frozen))
        if self.caches.nodes is not None:
            self.metrics.nodes(entry.view for entry in self.caches.nodes.store.snapshot().values())
        return self.metrics.exposition()


def make_caches(
    api: Api,
    settings: Settings,
    clock: Callable[[], float] = time.time,
    *,
    on_change: Callable[[], None] = lambda: None,
) -> Caches:
    """Create empty caches of what the settings allow; `on_change` follows changes that concern all jobs."""
    served = settings.namespaces
    namespaces = Namespaces(served or EVERYWHERE, clock=clock)
    with_separate_pool = bool(served)
    jobs = Reflector if with_separate_pool else Lister
    labels = f"{LABEL_ROLE}={ROLE_WORKER}"
    return Caches(
        jobs=jobs(api, JOBS, IndexedCache(by_namespace=with_separate_pool), job_record, namespaces=namespaces),
        pods=Reflector(
            api,
            PODS,
            IndexedCache(by_namespace=with_separate_pool),
            pod_view,
            namespaces=namespaces,
            labels=labels,
            of_jobs=True,
        ),
        config_maps=_children(api, CONFIG_MAPS, namespaces),
        nodes=Reflector(api, NODES, IndexedCache(), node_view) if settings.watch_nodes else None,
        disruption_budgets=_children(api, DISRUPTION_BUDGETS, namespaces),
        kueue=Kueue(api, enabled=settings.kueue, namespaces=served, on_change=on_change),
        dra=Dra(api, enabled=settings.dra, namespaces=served, on_change=on_change),
        namespaces=namespaces,
        # They have separate states of namespaces: one where they cannot be read is served like the others.
        network_policies=_children(api, NETWORK_POLICIES, Namespaces(served or EVERYWHERE))
        if settings.job_network_policy
        else None,
    )


def _children(api: Api, resource: Resource, namespaces: Namespaces) -> Reflector[ChildRecord]:
    store: IndexedCache[ChildRecord] = IndexedCache(by_namespace=not namespaces.single)
    return Reflector(api, resource, store, child_record, namespaces=namespaces, labels=LABEL_JOB, of_jobs=True)


def plan_settings(settings: Settings, namespace: str) -> PlanSettings:
    """Return the part of the settings that plans depend on."""
    address = f"{settings.coordinator_service}.{namespace}.svc:{settings.coordinator_port}"
    return PlanSettings(
        image=settings.trainer_image,
        coordinator=settings.coordinator_address or address,
        status_interval_seconds=settings.status_interval,
        image_pull_policy=settings.image_pull_policy,
        image_pull_secrets=tuple(name for name in settings.image_pull_secrets.split(",") if name),
        worker_user=settings.worker_user,
        worker_template=settings.template,
        extra_priority_class=settings.extra_priority_class,
        worker_ingress=settings.worker_ingress(namespace),
        worker_log_format=LogFormat(settings.worker_log_format),
    )

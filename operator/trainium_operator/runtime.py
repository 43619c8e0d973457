"""Wire the operator's parts together; `main` runs them.

Invariant: agents are answered from `serving` on. Everything that decides or writes is gated by `leading`, and each
write by the Lease and by the registration of this release (`acting`). Decisions use a clock that does not jump;
certificates, tokens and the Lease use the machine's.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from trainium_contract.api_server import errors
from trainium_contract.status.conditions import Phase
from trainium_operator.clock import SteadyClock
from trainium_operator.cluster import coordinator_adapters, job_pages, lease, owner_references, reconciler, releases
from trainium_operator.cluster.api import client, resources
from trainium_operator.cluster.cache import caches, discovery, store, views
from trainium_operator.cluster.execute import events, executor, owner_check, status_writes
from trainium_operator.cluster.fleet import fleet_reconciler
from trainium_operator.cluster.queue import (
    observe,
    pod_warnings,
    refusal_backoff,
    waiting_gangs,
    work_queue,
    write_outcomes,
)
from trainium_operator.coordinator import (
    authentication,
    certificate_keeper,
    certificates,
    probe,
    server,
    state,
    token_verifier,
)
from trainium_operator.endpoints import access, servers
from trainium_operator.http import tls
from trainium_operator.monitoring import metrics
from trainium_operator.plan.plan import plan

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from trainium_contract.job import TrainingJobStatus
    from trainium_operator.cluster.api.transport import Transport
    from trainium_operator.plan.model.actions import Plan
    from trainium_operator.plan.model.names import JobId
    from trainium_operator.plan.model.observed import JobView, Observed, PodView
    from trainium_operator.settings import Settings

WATCH_STALE_SECONDS = 180.0
"""A watch that is silent this long while the API server answers is broken (bookmarks come each minute)."""
STUCK_SECONDS = 900.0
CATCH_UP_SECONDS = 1.0
"""Pause between two attempts to list the previous leader's objects."""

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
        """`lease_transport` serves the Lease alone, so that no other request delays it."""
        self.settings = settings
        self._namespace, self._identity, self._wall_clock = namespace, identity, wall_clock
        self._plan_clock = SteadyClock(wall_clock, asyncio.get_running_loop().time)
        self.serving = asyncio.Event()
        """Set while agents are answered: this process holds the Lease, and the newest memberships are known."""
        self.leading = asyncio.Event()
        """Set while jobs are planned: everything else is known too."""
        self._stopped = False
        self.api_last_seen = 0.0
        self.metrics = metrics.Metrics(named_jobs=settings.named_jobs)
        create_api = partial(client.Api, on_request=self._record_request, labels=settings.labels)
        self.api = create_api(transport)
        self.queue: work_queue.WorkQueue[store.Key] = work_queue.WorkQueue(most_slow=max(1, settings.workers // 2))
        self.plan_rate_limiter = work_queue.PlanRateLimiter(self.queue)
        self.caches = caches.make_caches(self.api, settings, self._plan_clock, on_change=self._handle_api_change)
        self.recorder = events.EventRecorder(self.api, identity, wall_clock=wall_clock)

        self.elector = self._create_elector(create_api(lease_transport or transport))
        self.releases = self._create_releases()
        self.acting = create_api(transport, may_write=lambda: self.elector.may_act() and self.releases.may_write())
        self.owner_references = self._create_owner_reference_reconciler()

        self.state = state.CoordinatorState(self._plan_clock)
        self.certificate_keeper = self._create_certificate_keeper()
        self.token_verifier = token_verifier.TokenVerifier(partial(coordinator_adapters.read_token_keys, self.api))
        self.coordinator = self._create_coordinator()
        self.prober = probe.Prober(
            self.state, is_serving=self.leading.is_set, notify=self._notify, find_address=self._find_address
        )

        exposition = servers.Exposition(self._render_metrics, self._plan_clock)
        self.health = servers.ProbeServer(
            live=self.find_live_problem,
            ready=self.find_ready_problem,
            metrics=None if settings.secure_metrics else exposition,
        )
        self.https_certificate = (
            tls.CertificateFolder(settings.https_certificate) if settings.https_certificate else None
        )
        """The certificate of the HTTPS port, if it is not the coordinator's."""
        self.job_page_data = job_pages.JobPageData(self.api, self.caches, self._plan_clock) if settings.ui else None
        self.readers = self._create_readers(exposition) if settings.serves_readers else None

        self.plan_settings = settings.build_plan_settings(namespace)
        nodes = self.caches.nodes.store if self.caches.nodes is not None else None
        self.discovery = discovery.Discovery(self.api, nodes, on_change=self._apply_discovery)
        self.fleet = self._create_fleet_reconciler()
        self.reconciler = self._create_reconciler()
        self._listen_to_caches()

    def _listen_to_caches(self) -> None:
        observe.enqueue_on_change(self.caches, self.queue, self.plan_rate_limiter)
        self.caches.namespaces.listen(self._enqueue_namespace)
        self.caches.jobs.store.listen(self._forget_job)
        self.caches.pods.store.listen(self._forget_pod)

    def _create_elector(self, api: client.Api) -> lease.LeaseElector:
        settings = self.settings
        return lease.LeaseElector(
            api,
            self._namespace,
            settings.lease_name,
            self._identity,
            wall_clock=self._wall_clock,
            times=lease.LeaseTimes.of(
                duration=settings.lease_duration,
                renew_deadline=settings.lease_renew_deadline,
                retry=settings.lease_retry,
            ),
            owners=lambda: self.owner_references.list_owners(resources.LEASES),
        )

    def _create_releases(self) -> releases.Releases:
        return releases.Releases(
            self.api,
            f"{self._namespace}/{self.settings.lease_name}",
            self.settings.namespaces,
            taints_nodes=self.settings.taint_nodes,
            wall_clock=self._wall_clock,
            plan_clock=self._plan_clock,
            times=releases.RegistrationTimes.of(self.settings.lease_duration),
            on_change=self.enqueue_all,
        )

    def _create_owner_reference_reconciler(self) -> owner_references.OwnerReferenceReconciler:
        settings = self.settings
        memory = owner_references.OwnedObject(
            resources.CONFIG_MAPS, settings.memory_name, survives_uninstall=settings.keep_memory
        )
        return owner_references.OwnerReferenceReconciler(
            self.acting,
            self.leading,
            namespace=self._namespace,
            deployment=settings.deployment,
            owned_objects=(owner_references.OwnedObject(resources.LEASES, settings.lease_name), memory),
        )

    def _create_certificate_keeper(self) -> certificate_keeper.CertificateKeeper:
        services = filter(None, (self.settings.coordinator_service, self.settings.ui_service))
        server_names = (
            name for service in services for name in certificates.list_server_names(service, self._namespace)
        )
        return certificate_keeper.CertificateKeeper(
            coordinator_adapters.KubernetesSecret(self.api, self._namespace, self.settings.secret_name),
            tuple(dict.fromkeys(server_names)),
            wall_clock=self._wall_clock,
            on_new_bundle=self.enqueue_all,
        )

    def _create_coordinator(self) -> server.CoordinatorServer:
        worker_pods = coordinator_adapters.WorkerPods(
            self.caches.pods.store, self.caches.jobs.store, is_current=self.leading.is_set
        )
        return server.CoordinatorServer(
            self.state,
            authentication.Authenticator(self.token_verifier.verify, worker_pods.find_job),
            is_serving=self.serving.is_set,
            notify=self._notify,
            until_serving=self._wait_until_serving,
            on_message=self.metrics.record_message,
            on_change=self.metrics.record_heartbeat_change,
            has_failed=self._has_failed,
        )

    def _create_readers(self, exposition: servers.Exposition) -> servers.EndpointServer:
        authorizer = access.Access(
            coordinator_adapters.Reviewer(self.api, resources.TOKEN_REVIEWS).review,
            coordinator_adapters.Reviewer(self.api, resources.ACCESS_REVIEWS).review,
            wall_clock=self._plan_clock,
        )
        return servers.EndpointServer(
            authorizer,
            exposition if self.settings.secure_metrics else None,
            jobs=self.job_page_data,
            clock=self._plan_clock,
            on_answer=self.metrics.record_read,
        )

    def _create_fleet_reconciler(self) -> fleet_reconciler.FleetReconciler:
        return fleet_reconciler.FleetReconciler(
            self.acting,
            self.caches,
            self.leading,
            namespace=self._namespace,
            name=self.settings.memory_name,
            may_taint=self.releases.may_taint,
            wall_clock=self._plan_clock,
            on_change=self.enqueue_all,
            owners=lambda: self.owner_references.list_owners(resources.CONFIG_MAPS),
        )

    def _create_reconciler(self) -> reconciler.Reconciler:
        clock = self._plan_clock
        backoff, outcomes = refusal_backoff.RefusalBackoff(clock), write_outcomes.WriteOutcomes(clock)
        warnings = pod_warnings.PodWarnings(self.api, self.caches.pods, clock)
        owners = owner_check.OwnerCheck(self.acting, self.recorder, backoff)
        statuses = status_writes.StatusWrites(
            self.acting, self.caches, self.recorder, owners, clock, on_refused=self.metrics.refused_statuses.inc
        )
        observer = observe.Observer(
            caches=self.caches,
            agents=self.state,
            ca_bundle=lambda: self.certificate_keeper.ca_bundle,
            refusal_backoff=backoff,
            warnings=warnings,
            outcomes=outcomes,
            wall_clock=clock,
            fleet=self.fleet.get_current_view,
            gangs=waiting_gangs.WaitingGangs(self.caches.jobs, self.caches.pods, wake=self.plan_rate_limiter.put),
            served_since=lambda: self.releases.changed_at,
        )
        action_executor = executor.Executor(
            self.acting, self.caches, self.recorder, self.state, backoff, outcomes, statuses, owners, clock
        )
        return reconciler.Reconciler(
            queue=self.queue,
            caches=self.caches,
            observer=observer,
            plan=self._plan,
            executor=action_executor,
            statuses=statuses,
            recorder=self.recorder,
            on_reconciled=self.metrics.record_reconcile,
            on_planned=self._handle_plan,
            rate_limiter=self.plan_rate_limiter,
            warnings=warnings,
            release=self.releases.release,
            find_server=self.releases.find_server,
        )

    async def hold(self) -> None:
        """Hold the Lease and the registration of this release. Raises LeaseLostError, in an exception group."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.elector.hold())
            group.create_task(self.releases.run())

    async def take_over(self) -> None:
        """Answer agents once their memberships are known, and plan once everything is; call with the Lease held.

        Objects that the previous leader wrote are read again, because watches may lag; agents do not wait for the long
        lists.
        """
        since = asyncio.get_running_loop().time()
        await self.caches.wait_until_synced()
        await self._retry(lambda: self.caches.catch_up(since, records_only=True))
        await self.certificate_keeper.tls.loaded.wait()
        self._begin_serving()
        await self._retry(lambda: self.caches.catch_up(since))
        await self._retry(self.fleet.prime)
        await self.discovery.known.wait()
        await self.releases.known.wait()
        self._apply_api_states()
        self._begin_leading()

    async def _retry(self, reading: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await reading()
            except errors.ApiError as error:
                logger.warning("listing what the last leader left: %s", error)
                await asyncio.sleep(CATCH_UP_SECONDS)
            else:
                return

    def _begin_serving(self) -> None:
        if self._stopped:
            return
        for entry in self.caches.jobs.store.snapshot().values():
            view = entry.view.view
            record = self.caches.find_membership(view) if view is not None else None
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
        """Stop answering agents and starting plans, permanently."""
        self._stopped = True
        self.serving.clear()
        self.leading.clear()
        self.metrics.leader.set(0)
        self.queue.close()

    def enqueue_all(self) -> None:
        """Enqueue every job."""
        for key in self.caches.jobs.store.snapshot():
            self.queue.put(key)

    def _enqueue_namespace(self, namespace: str) -> None:
        for key in self.caches.jobs.store.snapshot():
            if namespace in ("", key[0]):
                self.queue.put(key)

    def find_live_problem(self) -> str:
        """Return why a restart would help; empty if it would not."""
        now = asyncio.get_running_loop().time()
        if now - self.api_last_seen > WATCH_STALE_SECONDS:
            return ""  # the API server is away: a restart would only lose the state of agents
        for reflector in self.caches.list_reflectors():
            if reflector.synced.is_set() and now - reflector.last_seen > WATCH_STALE_SECONDS:
                return f"the watch of {reflector.resource.plural} has been silent for {now - reflector.last_seen:.0f} s"
        busy = self.reconciler.measure_busy_seconds()
        return f"a worker has been busy with one job for {busy:.0f} s" if busy > STUCK_SECONDS else ""

    def find_ready_problem(self) -> str:
        """Return what is missing before this replica could act."""
        if not self.caches.jobs.synced.is_set():
            return "trainingjobs are not listed yet"
        missing = [
            reflector.resource.plural for reflector in self.caches.list_reflectors() if not reflector.synced.is_set()
        ]
        if missing:
            return f"not listed yet: {', '.join(missing)}"
        return "" if self.token_verifier.has_keys else self.token_verifier.problem

    def _wait_until_serving(self) -> Awaitable[object] | None:
        # An agent connects to a follower only if the leader does not answer, or if it is new.
        self.elector.read_soon()
        return self.serving.wait() if self.elector.is_pending() else None

    def _plan(self, observed: Observed) -> Plan:
        return plan(observed, self.plan_settings)

    def _apply_discovery(self) -> None:
        """Apply changed API discovery, because every plan may depend on it."""
        apis = self.discovery
        self.caches.kueue.offered.set_served(apis.kueue)
        self.caches.dra.offered.set_served(apis.claims)
        before = self.plan_settings
        self.plan_settings = replace(
            before, gang_apis=apis.gang_apis, topology_layers=apis.topology_layers, cluster=apis.cluster
        )
        self._apply_api_states()
        now = self.plan_settings
        if (now.gang_apis, now.kueue, now.dra) != (before.gang_apis, before.kueue, before.dra):
            self.enqueue_all()

    def _handle_api_change(self) -> None:
        """Enqueue all jobs: objects of Kueue or claimed devices are now read, or a flavor has changed."""
        self._apply_api_states()
        self.enqueue_all()

    def _apply_api_states(self) -> None:
        kueue, dra = self.caches.kueue.offered.state, self.caches.dra.offered.state
        self.plan_settings = replace(self.plan_settings, kueue=kueue, dra=dra)

    def _record_request(self, verb: str, status: int, seconds: float) -> None:
        if 0 < status < 500:
            self.api_last_seen = asyncio.get_running_loop().time()
        self.metrics.record_request(verb, status, seconds)

    def _notify(self, namespace: str, job: str, at_once: bool) -> None:
        key = (namespace, job)
        if at_once:
            self.plan_rate_limiter.put(key)
            return
        record = self.caches.jobs.store.get(key)
        workers = record.view.status.desired if record is not None and record.view is not None else 0
        self.queue.put_after(key, self.plan_settings.compute_status_interval(workers))

    def _find_address(self, target: state.ProbeTarget) -> str:
        entry = self.caches.pods.store.get_entry((target.namespace, target.pod))
        is_same_pod = entry is not None and entry.uid == target.pod_uid and entry.owner == target.job_id
        return entry.view.ip if entry is not None and is_same_pod else ""

    def _has_failed(self, job_id: JobId) -> bool:
        record = self.caches.jobs.store.get((job_id.namespace, job_id.name))
        view = record.view if record is not None else None
        return view is not None and view.id == job_id and view.status.phase is Phase.FAILED

    def _forget_job(
        self, _key: store.Key, old: store.Entry[views.JobRecord] | None, new: store.Entry[views.JobRecord] | None
    ) -> None:
        if old is not None and (new is None or new.uid != old.uid):
            self.state.forget_job(old.view.id)
            self.metrics.forget(old.uid)

    def _forget_pod(self, _key: store.Key, old: store.Entry[PodView] | None, new: store.Entry[PodView] | None) -> None:
        if old is not None and old.owner is not None and (new is None or new.uid != old.uid):
            self.state.forget_pod(old.owner, old.uid)

    def _handle_plan(self, job: JobView, status: TrainingJobStatus) -> None:
        self.metrics.record_plan(job, status)
        if status.all_failures != job.status.all_failures:
            self.fleet.wake()

    def _render_metrics(self) -> bytes:
        self.metrics.queue_depth.set(len(self.queue))
        self.metrics.agents.set(self.state.count_agents())
        self.metrics.set_served_namespaces(
            {state.value: count for state, count in self.caches.namespaces.count_by_state().items()}
        )
        self.metrics.events_dropped.set(self.recorder.dropped)
        self.metrics.set_fleet(self.fleet.machines, frozen=bool(self.fleet.view.frozen))
        if self.caches.nodes is not None:
            self.metrics.set_nodes(entry.view for entry in self.caches.nodes.store.snapshot().values())
        return self.metrics.render()

"""Build one job's frozen `Observed` from the caches, and map changes in the caches to the jobs that they concern."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from trainium_operator.cluster.api.resources import NETWORK_POLICIES
from trainium_operator.plan.model import names
from trainium_operator.plan.model.names import LABEL_INSTANCE_TYPE
from trainium_operator.plan.model.observed import (
    STARTING_REASONS,
    FleetView,
    NodeReadiness,
    NodeView,
    Observed,
    PodPhase,
)
from trainium_operator.plan.report.write_throttle import is_only_progress_change

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from trainium_operator.cluster.cache.caches import Caches
    from trainium_operator.cluster.cache.device_views import SliceView
    from trainium_operator.cluster.cache.store import Entry, Key
    from trainium_operator.cluster.cache.views import ChildRecord, JobRecord
    from trainium_operator.cluster.queue.pod_warnings import PodWarnings
    from trainium_operator.cluster.queue.refusal_backoff import RefusalBackoff
    from trainium_operator.cluster.queue.waiting_gangs import WaitingGangs
    from trainium_operator.cluster.queue.work_queue import PlanRateLimiter, WorkQueue
    from trainium_operator.cluster.queue.write_outcomes import WriteOutcomes
    from trainium_operator.coordinator.state import CoordinatorState
    from trainium_operator.plan.model.observed import JobView, PodView


@dataclass(frozen=True, slots=True, kw_only=True)
class Observer:
    """Builds `Observed`."""

    caches: Caches
    agents: CoordinatorState
    ca_bundle: Callable[[], str]
    wall_clock: Callable[[], float]
    refusal_backoff: RefusalBackoff
    warnings: PodWarnings
    outcomes: WriteOutcomes
    fleet: Callable[[], FleetView]
    gangs: WaitingGangs
    served_since: Callable[[], float]
    """Since when this release serves what it serves (Unix seconds)."""

    def observe(self, job: JobView, *, status_written: float = 0.0) -> Observed:
        """Observe one job as it is cached now, without children and pods of an earlier job of the same name.

        `status_written` is when this process last wrote the job's status; 0 when it has not.
        """
        caches = self.caches
        pods = tuple(sorted(caches.pods.store.list_owned_by(job.id).values(), key=lambda pod: pod.ordinal))
        children = {
            f"{kind}/{name}": self.outcomes.find_requested(job, f"{kind}/{name}", record)
            for kind, reflector in caches.children.items()
            for (_, name), record in reflector.store.list_owned_by(job.id).items()
        }
        membership, policies = caches.find_membership(job), caches.children.get(NETWORK_POLICIES.kind)
        pods, other_pods = self.warnings.add_warnings(job, pods), self._list_other_pods(job)
        return Observed(
            job=job,
            pods=pods,
            nodes=self._list_nodes(
                {pod.node for pod in (*pods, *(other_pods or ())) if pod.node}
                | _list_member_nodes(membership)
                | set(job.status.avoided_nodes)
            ),
            agents=dict(self.agents.list_agents(job.id)),
            membership=membership.membership if membership else None,
            published=self.agents.get_published_generation(job.id),
            children=children,
            ca_bundle=self.ca_bundle(),
            # Agents of unknown pods could not send anything, so their silence counts only from then on.
            coordinator_since=max(
                self.agents.since, caches.namespaces.get_sync_time(job.namespace), self.served_since()
            ),
            now=self.wall_clock(),
            create_after=self.refusal_backoff.get_blocked_until(job.uid),
            creation_refusal=self.refusal_backoff.find_refusal(job.uid),
            name_conflicts=self.refusal_backoff.list_name_conflicts(job.uid),
            policies_listed=policies is not None and policies.answered,
            refusals=self.outcomes.list_refusals(job.uid),
            strays=tuple(
                stray
                for (namespace, _), stray in sorted(caches.pods.strays.items())
                if (namespace, stray.job) == (job.namespace, job.name)
            ),
            other_pods=other_pods,
            endpoints=self.agents.get_endpoints(job.id),
            fleet=self.fleet().select_for_namespace(job.namespace),
            quota=caches.kueue.find_quota(job),
            nodes_wanted_by_gangs=self.gangs.count_wanted_nodes(job),
            devices=caches.dra.find_devices(job, pods, self._build_node_check(job)),
            status_written=status_written,
        )

    def _list_other_pods(self, job: JobView) -> tuple[PodView, ...] | None:
        if not self.caches.other_pods.answered:
            return None
        pods = self.caches.other_pods.store.list_owned_by(job.id).values()
        return tuple(sorted(pods, key=lambda pod: (pod.role, pod.ordinal)))

    def _build_node_check(self, job: JobView) -> Callable[[str], bool]:
        """Return a check whether a worker of the job could run on a node: ready, not cordoned, of the job's type."""
        nodes, wanted = self.caches.nodes, job.spec.workers.accelerator.instance_type

        def is_usable(name: str) -> bool:
            view = nodes.store.get(("", name)) if nodes is not None else NodeView(name=name)
            if view is None or not view.schedulable or view.ready is not NodeReadiness.TRUE:
                return False
            return wanted in (None, view.labels.get(LABEL_INSTANCE_TYPE, wanted))

        return is_usable

    def _list_nodes(self, wanted: set[str]) -> dict[str, NodeView]:
        if self.caches.nodes is None:
            # Nodes are not watched; only pods and heartbeats show failures.
            return {name: NodeView(name=name) for name in wanted}
        store = self.caches.nodes.store
        views = ((name, store.get(("", name))) for name in wanted)
        return {name: view for name, view in views if view is not None}


def _list_member_nodes(record: ChildRecord | None) -> set[str]:
    membership = record.membership if record is not None else None
    return set() if membership is None else {member.node_name for member in membership.members}


class _JobsByNode:
    """The jobs that have pods on a node."""

    def __init__(self) -> None:
        self._jobs: dict[str, dict[Key, Key]] = {}
        """By node and pod."""

    def list_jobs(self, node: str) -> Collection[Key]:
        """Return the job of each pod on this node."""
        return self._jobs.get(node, {}).values()

    def handle_pod_change(self, key: Key, old: Entry[PodView] | None, new: Entry[PodView] | None) -> None:
        """Record on which node the pod is now."""
        if old is not None and (new is None or new.view.node != old.view.node):
            jobs = self._jobs.get(old.view.node, {})
            jobs.pop(key, None)
            if not jobs:
                self._jobs.pop(old.view.node, None)
        if new is not None and new.view.node and new.owner is not None:
            self._jobs.setdefault(new.view.node, {})[key] = (new.owner.namespace, new.owner.name)


def enqueue_on_change(caches: Caches, queue: WorkQueue[Key], limiter: PlanRateLimiter) -> None:
    """Enqueue a job whenever something that its plan can see has changed."""
    jobs_by_node = _JobsByNode()

    def handle_job_change(key: Key, old: Entry[JobRecord] | None, new: Entry[JobRecord] | None) -> None:
        if old is None or new is None or not _is_unchanged_for_plans(old.view, new.view):
            queue.put(key)

    def handle_child_change(_key: Key, old: Entry[Any] | None, new: Entry[Any] | None) -> None:
        if (job := _find_changed_job(old, new)) is not None:
            limiter.put(job)

    def handle_owned_change(_key: Key, old: Entry[Any] | None, new: Entry[Any] | None) -> None:
        entry = new or old
        if entry is not None and entry.owner is not None:
            limiter.put((entry.owner.namespace, entry.owner.name))

    def handle_pod_change(_key: Key, old: Entry[PodView] | None, new: Entry[PodView] | None) -> None:
        if (job := _find_changed_job(old, new)) is None:
            return
        namespace, name = job
        has_generation = caches.config_maps.store.get((namespace, names.format_membership_name(name))) is not None
        # Until the first generation nothing trains, and the exact count of started pods is not urgent.
        limiter.put(job, urgent=has_generation or not _is_only_start(old, new))

    def handle_node_change(key: Key, old: Entry[NodeView] | None, new: Entry[NodeView] | None) -> None:
        if old is not None and new is not None and old.view == new.view:
            return
        for job in jobs_by_node.list_jobs(key[1]):
            limiter.put(job)

    def handle_slice_change(_key: Key, old: Entry[SliceView] | None, new: Entry[SliceView] | None) -> None:
        if old is not None and new is not None and old.view == new.view:
            return
        for node in {entry.view.node for entry in (old, new) if entry is not None}:
            for job in jobs_by_node.list_jobs(node):
                limiter.put(job)

    caches.jobs.store.listen(handle_job_change)
    caches.pods.listen_to_strays(limiter.put)
    caches.pods.store.listen(jobs_by_node.handle_pod_change)
    caches.pods.store.listen(handle_pod_change)
    for reflector in caches.children.values():
        reflector.store.listen(handle_child_change)
    caches.other_pods.store.listen(jobs_by_node.handle_pod_change)
    caches.other_pods.store.listen(handle_child_change)
    caches.kueue.workloads.store.listen(handle_owned_change)
    caches.dra.templates.store.listen(handle_owned_change)
    caches.dra.slices.store.listen(handle_slice_change)
    if caches.nodes is not None:
        caches.nodes.store.listen(handle_node_change)


def _find_changed_job(
    old: Entry[PodView] | Entry[ChildRecord] | None, new: Entry[PodView] | Entry[ChildRecord] | None
) -> Key | None:
    """Return the job whose plan sees a difference; None if there is none."""
    entry = new or old
    if entry is None or entry.owner is None or (old is not None and new is not None and old.view == new.view):
        return None
    return entry.owner.namespace, entry.owner.name


def _is_only_start(old: Entry[PodView] | None, new: Entry[PodView] | None) -> bool:
    """Return whether the only change is that a pod was created, bound to a node or started, as expected."""
    if new is None or new.view.deleting or new.view.disrupted or new.view.unschedulable_message:
        return False
    if new.view.reason and new.view.reason not in STARTING_REASONS:
        return False
    if old is None or old.view.phase is PodPhase.PENDING:
        return new.view.phase in (PodPhase.PENDING, PodPhase.RUNNING)
    return replace(old.view, ip=new.view.ip) == new.view  # a kubelet reports a start in steps


def _is_unchanged_for_plans(old: JobRecord, new: JobRecord) -> bool:
    """Return whether a plan would see nothing new: plans write the progress, which they know from the agents."""
    if old == new:
        return True
    if old.view is None or new.view is None:
        return False
    moved = replace(old.view, status=new.view.status, resource_version=new.view.resource_version)
    return moved == new.view and is_only_progress_change(old.view.status, new.view.status)

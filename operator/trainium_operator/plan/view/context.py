"""Sort the observation into workers and members (`PlanContext`), and define the hooks of optional features (`Feature`).

Kueue, claimed devices, gang scheduling, network policies, idle nodes and roles are optional. Each is one file or folder
of `plan.features` and one line of `features.registry`; nothing outside asks whether it is there.

Ranks of two versions of the trainer must not meet, nor agents of two versions, because their messages during the start
have no version. So a job keeps the image of an earlier default until no worker of it runs, unless the job names one.

Guarantees:
- `PlanContext` never changes during a plan.
- A plan calls the hooks of the features that its job uses, and of no other.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from trainium_contract.faults.causes import Cause
from trainium_contract.faults.node_polarity import Severity
from trainium_contract.wire.messages import HeartbeatRequest, Member, Membership, Progress, WorkerPhase
from trainium_operator.plan.faults.failure_budgets import AVOID_NODE_SECONDS
from trainium_operator.plan.manifests.worker_needs import WORKER_CONTAINER
from trainium_operator.plan.manifests.worker_pod import set_worker_name
from trainium_operator.plan.model.actions import Action, ApplyObject, ApplyOptional, PolicyResult
from trainium_operator.plan.model.cached_property import cached_property
from trainium_operator.plan.model.observed import SILENCE_REPORTED_SECONDS, JobView, Observed, PlanSettings, PodPhase
from trainium_operator.plan.model.reasons import Reason
from trainium_operator.plan.view.node_problems import find_problems_by_pod
from trainium_operator.plan.view.progress import sort_by_steps
from trainium_operator.plan.view.units import select_whole_units
from trainium_operator.plan.view.workers import (
    Worker,
    assess_workers_contact,
    build_workers,
    has_lost_contact,
    set_contact,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from trainium_contract.job import TrainingJobSpec, TrainingJobStatus
    from trainium_contract.status.public import PublicStatus
    from trainium_operator.plan.faults.node_signals import NodeProblem
    from trainium_operator.plan.model.grant import Grant
    from trainium_operator.plan.view.size import SizeDecision

Json = dict[str, Any]

_STEADY_SECONDS = 60.0
"""A program without steps counts as started when all of its processes have run this long."""


@dataclass(frozen=True, slots=True)
class PodSet:
    """Pods besides the workers for which a queue needs quota."""

    name: str
    count: int
    body: Json
    """Pod template."""


@dataclass(frozen=True, kw_only=True)
class PlanContext:
    """The input of every policy of one plan. It has no slots, because its properties are cached."""

    observed: Observed
    settings: PlanSettings
    size: SizeDecision
    workers: Mapping[str, Worker]
    """By pod uid, ascending by ordinal."""
    current: Membership | None
    """The current generation; None before the first and while the job is suspended."""
    members: tuple[tuple[Member, Worker | None], ...]
    """The members of the current generation, by rank, each with its worker unless its pod is gone."""
    non_members: tuple[Worker, ...]
    """Workers that are not in the current generation, by ordinal."""
    heartbeats: tuple[tuple[Member, HeartbeatRequest], ...]
    """The newest heartbeats of the members that report to be in the current generation."""
    node_problems: Mapping[str, NodeProblem]
    """The worst problem of the node of each worker, by pod uid; see `node_problems`."""
    problems_count_at: tuple[float, ...] = ()
    """When problems of nodes that are too recent to count will count (Unix seconds)."""
    lost_contact: str = ""
    """Why silence is no evidence now, as a sentence; see `workers`. Empty while workers merely start."""
    grant: Grant | None = None
    """A queue's grant to the job; None for a job without a queue."""
    features: tuple[Feature, ...] = ()
    """The optional features that the job uses."""

    @property
    def job(self) -> JobView:
        """The job."""
        return self.observed.job

    @property
    def now(self) -> float:
        """Return the time of the observation in Unix seconds."""
        return self.observed.now

    @property
    def status_interval(self) -> float:
        """Return the shortest time in seconds between two status writes that only report progress."""
        return self.settings.compute_status_interval(self.job.status.desired)

    @cached_property
    def member_uids(self) -> frozenset[str]:
        """Return the pod uids of the current generation."""
        return frozenset(member.pod_uid for member, _ in self.members)

    @property
    def unit_nodes(self) -> int:
        """Return the number of nodes that are placed, lost and replaced together."""
        return self.job.spec.workers.accelerator.count_nodes_per_unit()

    @cached_property
    def joinable(self) -> tuple[Worker, ...]:
        """Return the workers that can join at once, on good nodes, also those that only complete a unit, by ordinal."""
        return tuple(worker for worker in self.non_members if worker.warm and not is_unfit(self, worker))

    @cached_property
    def candidates(self) -> tuple[Worker, ...]:
        """Return the workers that can join at once, on good nodes, in whole units, by ordinal."""
        return select_whole_units(self.joinable, self.unit_nodes)

    @cached_property
    def reports(self) -> tuple[Progress, ...]:
        """Return what the members report of their progress, by rank, without members that report none."""
        return tuple(heartbeat.progress for _, heartbeat in self.heartbeats if heartbeat.progress is not None)

    @cached_property
    def newest_progress(self) -> Progress | None:
        """Return the newest report of the lowest rank once it trains; of a program, that of the rank with steps."""
        for _, heartbeat in sort_by_steps(self.job.spec, self.heartbeats):
            if heartbeat.progress is not None:
                has_trained = heartbeat.phase in (WorkerPhase.TRAINING, WorkerPhase.FINISHED, WorkerPhase.YIELDED)
                return heartbeat.progress if has_trained else None
        return None

    @cached_property
    def has_reported_steps(self) -> bool:
        """Return whether the job has ever reported a step."""
        return any(report.step > 0 for report in self.reports) or self.job.status.progress.step > 0

    @property
    def has_progress(self) -> bool:
        """Return whether the job has ever made a step, or a program without steps has run for a while."""
        return self.has_reported_steps or bool(self.job.status.start_time)

    @cached_property
    def is_settled(self) -> bool:
        """Return whether every member trains in the current generation."""
        if self.current is None:
            return False
        training = sum(heartbeat.phase is WorkerPhase.TRAINING for _, heartbeat in self.heartbeats)
        return training == len(self.current.members)

    @cached_property
    def steady_time(self) -> float | None:
        """Return when a program without steps counts as started (Unix seconds); None while it does not run."""
        if self.job.spec.workload.reports_each_step or self.has_reported_steps or not self.is_settled:
            return None
        started_at = [min(report.started, self.now) for report in self.reports]
        return max(started_at, default=self.now) + _STEADY_SECONDS

    @property
    def has_stepped(self) -> bool:
        """Return whether the current generation has made a step, or is past the last one."""
        if self.steady_time is not None:
            return self.now >= self.steady_time
        for _, heartbeat in self.heartbeats:
            progress = heartbeat.progress
            if progress is None or heartbeat.phase not in (WorkerPhase.TRAINING, WorkerPhase.FINISHED):
                continue
            if not progress.training or progress.step > (progress.resume_step or 0):
                return True
        return False

    @cached_property
    def last_step(self) -> int:
        """Return the last step that a member reported in the current generation, else the status's; -1 for none."""
        return max([*(report.step for report in self.reports), self.job.status.progress.step]) or -1


def _keep_status(_context: PlanContext, status: TrainingJobStatus) -> PolicyResult:
    return PolicyResult(status=status)


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """Hooks of one optional feature; a hook that is not set changes nothing."""

    name: str
    is_used: Callable[[Observed, PlanSettings], bool]
    """Return whether the job uses the feature, or has an object of it to remove."""
    admit: Callable[[Observed, PlanSettings], Grant | None] = lambda _observed, _settings: None
    """Return the queue's grant; None for a job without a queue."""
    pod_fields: Callable[[JobView], tuple[Json, Json]] = lambda _job: ({}, {})
    """Return fields of each pod's spec, and of the resources of the worker container."""
    node_problems: Callable[[Observed, Worker], Iterable[NodeProblem]] = lambda _observed, _worker: ()
    """Return problems of the devices of a worker."""
    reconcile_before_pods: Callable[[PlanContext, TrainingJobStatus], PolicyResult] = _keep_status
    resize: Callable[[PlanContext, TrainingJobStatus, frozenset[str]], PolicyResult] = (
        lambda _context, status, _failed: PolicyResult(status=status)
    )
    """Return the status with the size to work towards, without the pods of members that failed (by uid)."""
    find_creation_blocker: Callable[[PlanContext], tuple[Reason, str] | None] = lambda _context: None
    """Return why no worker can be created now; None if workers can."""
    is_start_blocked: Callable[[PlanContext], bool] = lambda _context: False
    """Return whether warm workers wait for something before their first generation."""
    list_pod_sets: Callable[[PlanContext], tuple[PodSet, ...]] = lambda _context: ()
    """Return the pods besides the workers for which a queue needs quota."""
    count_pods: Callable[[PlanContext], int] = lambda _context: 0
    """Return the number of pods besides the workers that hold nodes of the job's quota."""
    find_waiting_cause: Callable[[PlanContext], str] = lambda _context: ""
    """Return the key in the ledger for time without steps now; empty if nothing is waited for."""
    place_pod_set: Callable[[PlanContext, str, list[Json]], list[Json]] = lambda _context, _name, manifests: manifests
    """Return the new pods of a pod set of `list_pod_sets`, where the queue admitted them."""
    describe_capacity: Callable[[PlanContext], str] = lambda _context: ""
    """Return a sentence for pods that cannot be scheduled."""
    place_pods: Callable[[PlanContext, PublicStatus, list[Json]], tuple[tuple[Action, ...], list[Json]]] = (
        lambda _context, _status, manifests: ((), manifests)
    )
    """Return the objects to apply before new workers, and the workers where a queue or a group places them."""
    creates_as_a_whole: Callable[[PlanContext, PublicStatus], bool] = lambda _context, _status: False
    """Return whether a new pod gets no node before all of its group exist."""
    is_misplaced: Callable[[PlanContext, PublicStatus, Worker], bool] = lambda _context, _status, _worker: False
    """Return whether a pod waits in a group that can no longer get it onto a node."""
    describe_wait: Callable[[PlanContext], str] = lambda _context: ""
    """Return how workers wait for their nodes, as the rest of a sentence."""
    reconcile: Callable[[PlanContext, TrainingJobStatus], PolicyResult] = _keep_status
    """Called after the pods."""
    finish: Callable[[PlanContext, TrainingJobStatus], PolicyResult] = _keep_status
    """Called for a job that has ended."""
    finalize: Callable[[PlanContext, TrainingJobStatus], PolicyResult] = _keep_status
    """Called last in each plan, also in that of a job that has ended."""


def build_context(
    observed: Observed, settings: PlanSettings, size: SizeDecision, features: tuple[Feature, ...]
) -> PlanContext:
    """Sort an observation. A membership of size 0 in the status means that the recorded one was given up."""
    current = observed.membership if observed.job.status.membership.size > 0 else None
    workers = build_workers(observed)
    contact = assess_workers_contact(workers.values(), observed.fleet.frozen)
    workers = set_contact(workers, contact)
    recorded_members = current.members if current is not None else ()
    uids = {member.pod_uid for member in recorded_members}
    problems = find_problems_by_pod(observed, workers, [feature.node_problems for feature in features])
    return PlanContext(
        observed=observed,
        settings=replace(settings, pod_fields=tuple(feature.pod_fields for feature in features)),
        size=size,
        workers=workers,
        current=current,
        members=tuple((member, workers.get(member.pod_uid)) for member in recorded_members),
        non_members=tuple(worker for uid, worker in workers.items() if uid not in uids),
        heartbeats=() if current is None else select_current_heartbeats(observed, current),
        node_problems=problems.by_pod,
        problems_count_at=problems.problems_count_at + _find_confirmation_times(observed, workers),
        lost_contact=contact.lost if has_lost_contact(workers.values(), observed.coordinator_since) else "",
        grant=next(filter(None, (feature.admit(observed, settings) for feature in features)), None),
        features=features,
    )


def _find_confirmation_times(observed: Observed, workers: Mapping[str, Worker]) -> tuple[float, ...]:
    """Return when the silence of workers whose nodes seem to be gone will confirm it (Unix seconds)."""
    return tuple(
        observed.now + SILENCE_REPORTED_SECONDS - worker.silent_seconds
        for worker in workers.values()
        if worker.node is None and worker.pod.node and worker.recently_seen
    )


def select_current_heartbeats(observed: Observed, current: Membership) -> tuple[tuple[Member, HeartbeatRequest], ...]:
    """Return the newest heartbeats of this generation's members that report to be in it, by rank."""
    heartbeats = []
    for member in current.members:
        agent = observed.agents.get(member.pod_uid)
        if agent is not None and agent.heartbeat is not None and agent.heartbeat.generation == current.generation:
            heartbeats.append((member, agent.heartbeat))
    return tuple(heartbeats) if observed.job.spec.workload.reports_each_step else _share_phases(heartbeats)


def _share_phases(
    heartbeats: list[tuple[Member, HeartbeatRequest]],
) -> tuple[tuple[Member, HeartbeatRequest], ...]:
    """Treat members whose ranks report no steps as training with the one that reports them."""
    stepping_attempts = {
        heartbeat.attempt
        for _, heartbeat in heartbeats
        if heartbeat.phase is WorkerPhase.TRAINING and heartbeat.progress is not None and heartbeat.progress.step > 0
    }
    return tuple(
        (member, heartbeat.replaced(phase=WorkerPhase.TRAINING))
        if heartbeat.phase is WorkerPhase.LOADING and heartbeat.attempt in stepping_attempts
        else (member, heartbeat)
        for member, heartbeat in heartbeats
    )


def list_joiners(context: PlanContext) -> tuple[Worker, ...]:
    """Return workers that can join at once, those on suspected nodes last."""
    return tuple(sorted(context.candidates, key=lambda worker: (is_second_choice(context, worker), worker.pod.ordinal)))


def list_healthy_joiners(context: PlanContext) -> tuple[Worker, ...]:
    """Return newcomers that a job may grow onto by itself, without those on a node that was too slow recently."""
    since = context.now - AVOID_NODE_SECONDS
    records = context.job.status.failures
    slow_nodes = {
        record.node for record in records if record.cause is Cause.STRAGGLER and record.node and record.at > since
    }
    return tuple(worker for worker in list_joiners(context) if worker.pod.node not in slow_nodes)


def is_unfit(context: PlanContext, worker: Worker) -> bool:
    """Return whether a worker must not get a rank because its node is bad, or in quarantine."""
    problem = context.node_problems.get(worker.pod.uid)
    if problem is not None and problem.severity >= Severity.DRAIN:
        return True
    return worker.pod.node in list_quarantined_nodes(context)


def is_second_choice(context: PlanContext, worker: Worker) -> bool:
    """Return whether another worker is preferred because of a problem of its node."""
    if worker.pod.uid in context.node_problems or worker.pod.node in context.job.status.avoided_nodes:
        return True
    return worker.heartbeat is not None and any(not check.passed for check in worker.heartbeat.checks)


def list_quarantined_nodes(context: PlanContext) -> frozenset[str]:
    """Return nodes in quarantine, as far as this job applies it."""
    fleet = context.observed.fleet
    return fleet.quarantined if context.job.spec.health.quarantine.enabled and not fleet.frozen else frozenset()


def describe_creation_refusal(context: PlanContext) -> tuple[Reason, str] | None:
    """Return why the API server creates nothing for the job now; None if it does, or if a name is in use."""
    if not context.observed.creation_refusal or context.observed.name_conflicts:
        return None
    return Reason.CREATION_REFUSED, (
        f"The API server refuses to create what the job needs: {context.observed.creation_refusal.rstrip('. ')}. "
        "Correct what it names; the operator tries again by itself, at least once a minute"
    )


def reconcile_object(
    context: PlanContext,
    status: TrainingJobStatus,
    manifest: Json,
    action: type[ApplyObject | ApplyOptional] = ApplyOptional,
) -> PolicyResult:
    """Return the write of an object that is not as requested, or when it may be written again."""
    write_at = context.observed.find_next_write(manifest)
    if write_at is None:
        return PolicyResult(status=status)
    if context.now < write_at:
        return PolicyResult(status=status, requeue_at=(write_at,))
    return PolicyResult(status=status, actions=(action(manifest),))


def is_start_blocked(context: PlanContext) -> bool:
    """Return whether warm workers wait for something else before their first generation."""
    return any(feature.is_start_blocked(context) for feature in context.features)


def count_other_pods(context: PlanContext) -> int:
    """Return the number of pods besides the workers that hold nodes of the job's quota."""
    return sum(feature.count_pods(context) for feature in context.features)


def find_creation_blocker(context: PlanContext) -> tuple[Reason, str] | None:
    """Return why a feature of the job allows no new pod now, and what to do; None if pods can be created."""
    return next(filter(None, (feature.find_creation_blocker(context) for feature in context.features)), None)


def pin_running_image(observed: Observed, settings: PlanSettings) -> PlanSettings:
    """Return the settings with the image of the running workers: of the lowest rank, else of the oldest pod.

    It is the agent's image where the training container has another one.
    """
    running = {pod.uid: pod.image for pod in observed.pods if pod.phase is PodPhase.RUNNING and pod.image}
    if not running or _names_image(observed.job.spec):
        return settings
    members = observed.membership.members if observed.membership is not None else ()
    member_images = (running[member.pod_uid] for member in members if member.pod_uid in running)
    image = next(member_images, None) or next(iter(running.values()))
    if not observed.job.spec.workload.has_agent:
        return settings if image == settings.agent_image else replace(settings, agent_image=image)
    return settings if image == settings.image else replace(settings, image=image)


def _names_image(spec: TrainingJobSpec) -> bool:
    """Return whether the job names the worker's image, in the field for it or in its template."""
    containers = (set_worker_name(spec.workers.template).get("spec") or {}).get("containers")
    listed = containers if isinstance(containers, list) else []
    worker = (
        container for container in listed if isinstance(container, dict) and container.get("name") == WORKER_CONTAINER
    )
    return bool(spec.image) or any(container.get("image") for container in worker)

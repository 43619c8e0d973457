"""Policy: use idle nodes beyond the requested ones, and give them up first. `elasticity.idleNodes: Take`.

The scheduler decides what is idle: the job requests extra workers of the lowest priority, up to `workers.maxReplicas`.
If another worker needs an extra's node, the scheduler preempts the extra; like a notice on its node, that is a planned
departure, which saves first.

The job grows onto extras only to a size that saves a pass, after its rest (`find_growth_resume_time`), and only where
the remaining steps repay the growth and the way back. It also waits until the extras have been there for as long as
that takes to repay: their stay is unknown, so this is the ski rental problem, and the loss is at most twice the least
possible.

Invariants: a job that lacks requested workers requests no extras. Nothing waits for extras. Extras that find no node,
or save no pass, are deleted after a while and requested again at growing intervals.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainium_contract.job import IdleNodesStatus, TrainingJobStatus
from trainium_contract.spec.elasticity import IdleNodes
from trainium_contract.status.conditions import ConditionType
from trainium_operator.backoff import compute_backoff
from trainium_operator.plan.membership.growth import estimate_compile_seconds, find_growth_resume_time, is_worth_growing
from trainium_operator.plan.model.actions import PolicyResult
from trainium_operator.plan.model.conditions import is_true
from trainium_operator.plan.model.observed import PodPhase
from trainium_operator.plan.view.context import Feature, PlanContext, list_healthy_joiners
from trainium_operator.plan.view.progress import is_past_steps, measure_resize_seconds

if TYPE_CHECKING:
    from collections.abc import Collection

    from trainium_contract.status.public import PublicStatus
    from trainium_operator.plan.model.observed import Observed, PlanSettings
    from trainium_operator.plan.view.workers import Worker

_FIRST_PAUSE_SECONDS = 60.0
_MAX_PAUSE_SECONDS = 600.0
_NO_EXTRAS = IdleNodesStatus()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Limits:
    """Limits of the job in nodes, beyond the requested ones."""

    base: int
    """Requested nodes."""
    max_size: int
    """The best size that the job may have."""
    usable: int
    """Extras that train or can join at once, at most as many as a queue grants."""
    available: int
    """Workers that train or can join at once."""

    def find_best_size(self, context: PlanContext, workers: int) -> int:
        """Return the best size for that many workers, of which `usable` may be extras; at least the requested size."""
        return max(self.base, context.size.find_legal_size(min(workers, self.base + self.usable, self.max_size)))


def use_idle_nodes(context: PlanContext, status: TrainingJobStatus, failed: frozenset[str]) -> PolicyResult:
    """Return the status with the size to work towards and the extras to keep.

    `status.desired` is the requested size, `failed` has the pod uids of members that failed.
    """
    if context.current is None or not status.desired:
        return PolicyResult(status=status.replaced(idle_nodes=_NO_EXTRAS))
    usable = list_usable_extras(context, failed)
    limits = _Limits(
        base=status.desired,
        max_size=_find_max_size(context, status),
        usable=len(usable)
        if context.grant is None
        else max(0, min(len(usable), context.grant.workers - status.desired)),
        available=len(context.member_uids - failed) + len(list_healthy_joiners(context)),
    )
    target, requeue_at = _choose_size(context, status, limits, failed)
    idle, later = _choose_extras(context, status, limits, failed)
    idle = idle.replaced(taken=target - limits.base)
    return PolicyResult(status=status.replaced(desired=target, idle_nodes=idle), requeue_at=requeue_at + later)


def _find_max_size(context: PlanContext, status: PublicStatus) -> int:
    """Return the best size that the job may have; the requested one while others wait for nodes, or it for quota."""
    takes = context.job.spec.elasticity.idle_nodes is IdleNodes.TAKE and bool(context.settings.extra_priority_class)
    if not takes or context.observed.nodes_wanted_by_gangs or status.desired < context.size.desired:
        return status.desired
    return max(status.desired, context.size.max_size)


def _choose_size(
    context: PlanContext, status: PublicStatus, limits: _Limits, failed: frozenset[str]
) -> tuple[int, tuple[float, ...]]:
    """Return the size to work towards, and when to check again (Unix seconds)."""
    if failed:
        return limits.find_best_size(context, limits.available), ()
    present = len(context.members)
    smaller, larger = limits.find_best_size(context, present), limits.find_best_size(context, limits.available)
    if larger <= max(smaller, present) or not _is_training_steadily(context, status):
        return smaller, ()
    grow_at = _find_growth_time(context, status, present, larger)
    if grow_at is None:
        return smaller, ()
    return (smaller, (grow_at,)) if context.now < grow_at else (larger, ())


def _find_growth_time(context: PlanContext, status: PublicStatus, present: int, size: int) -> float | None:
    """Return when to grow beyond the requested size (Unix seconds); None if the remaining steps do not repay it."""
    resize_seconds = measure_resize_seconds(status) or 0.0
    if not is_worth_growing(
        context, status, present, size, extra_seconds=resize_seconds + estimate_compile_seconds(context, status, size)
    ):
        return None
    speed = context.size.compute_speed(present, size)
    since = max(
        (worker.agent.first_seen for worker in list_usable_extras(context, ()) if worker.agent), default=context.now
    )
    repaid_at = since + resize_seconds / (1 - speed) if 0 < speed < 1 else since
    return max(repaid_at, find_growth_resume_time(context, status))


def _choose_extras(
    context: PlanContext, status: TrainingJobStatus, limits: _Limits, failed: frozenset[str]
) -> tuple[IdleNodesStatus, tuple[float, ...]]:
    """Return the number of extras to keep or to request, and when to check again (Unix seconds)."""
    idle, limit = status.idle_nodes, limits.max_size - limits.base
    if limit <= 0:
        return _NO_EXTRAS, ()
    alive = [worker for worker in context.workers.values() if worker.pod.extra and worker.alive]
    bound_extras = sum(bool(worker.pod.node) for worker in alive)
    useful_extras = context.size.find_legal_size(min(limits.base + bound_extras, limits.max_size)) - limits.base
    useful_bound = max(0, min(useful_extras, bound_extras))
    if any(worker.pod.extra and _has_failed(worker) for worker in context.non_members):
        return _give_up_request(context, idle, useful_bound)  # another one would fail there too, and it is not urgent
    if idle.asked_at is not None:
        return _await_extras(context, idle, min(idle.wanted, limit), bound_extras, useful_bound)
    succeeded = limits.usable >= useful_bound > context.job.status.idle_nodes.taken
    idle = idle.replaced(wanted=useful_bound, failed_requests=0 if succeeded else idle.failed_requests)
    if (
        useful_bound >= limit
        or failed
        or len(context.members) < limits.base
        or not _is_training_steadily(context, status)
    ):
        return idle, ()
    present = len(context.members)
    resize_seconds = measure_resize_seconds(status) or 0.0
    if not is_worth_growing(context, status, present, limits.max_size, extra_seconds=resize_seconds):
        return idle, ()
    since = max(idle.retry_at or 0.0, find_growth_resume_time(context, status), context.observed.create_after)
    if context.now < since:
        return idle, (since,)
    return idle.replaced(wanted=limit, asked_at=context.now, retry_at=None), (
        context.now + _compute_timeout_seconds(context),
    )


def _await_extras(
    context: PlanContext, idle: IdleNodesStatus, wanted: int, bound_extras: int, useful_bound: int
) -> tuple[IdleNodesStatus, tuple[float, ...]]:
    """Return the next state while extras are requested: they have nodes, are pending, or cannot be had."""
    assert idle.asked_at is not None
    if bound_extras >= wanted:
        return idle.replaced(wanted=useful_bound, asked_at=None), ()
    deadline = idle.asked_at + _compute_timeout_seconds(context)
    return (
        (idle.replaced(wanted=wanted), (deadline,))
        if context.now < deadline
        else _give_up_request(context, idle, useful_bound)
    )


def _give_up_request(
    context: PlanContext, idle: IdleNodesStatus, useful_bound: int
) -> tuple[IdleNodesStatus, tuple[float, ...]]:
    """Keep the extras that exist, and request more after a growing pause."""
    failed_requests = idle.failed_requests + 1
    pause = compute_backoff(_FIRST_PAUSE_SECONDS, _MAX_PAUSE_SECONDS, failed_requests)
    retry_at = context.now + pause
    return IdleNodesStatus(wanted=useful_bound, failed_requests=failed_requests, retry_at=retry_at), (retry_at,)


def _has_failed(worker: Worker) -> bool:
    return not worker.pod.deleting and (worker.has_given_up or worker.pod.phase is PodPhase.FAILED)


def _compute_timeout_seconds(context: PlanContext) -> float:
    """Return how long extras may wait for a node (seconds): as long as the job waits for requested capacity."""
    return float(context.job.spec.recovery.rescale_after_seconds)


def _is_training_steadily(context: PlanContext, status: PublicStatus) -> bool:
    """Return whether all members train, no size was requested, and steps remain."""
    finished = any(worker is not None and worker.finished for _, worker in context.members)
    return (
        context.is_settled
        and not finished
        and not is_true(status, ConditionType.RESIZING)
        and not is_past_steps(status)
    )


def list_usable_extras(context: PlanContext, lost: Collection[str]) -> tuple[Worker, ...]:
    """Return extras that train or can join at once; `lost` are pod uids of members that do not count."""
    members = [worker for _, worker in context.members if worker is not None and worker.pod.uid not in lost]
    return tuple(worker for worker in (*members, *list_healthy_joiners(context)) if worker.pod.extra)


def _is_used(observed: Observed, _settings: PlanSettings) -> bool:
    takes = observed.job.spec.elasticity.idle_nodes is IdleNodes.TAKE
    return takes or observed.job.status.idle_nodes != _NO_EXTRAS or any(pod.extra for pod in observed.pods)


FEATURE = Feature(name="idle nodes", is_used=_is_used, resize=use_idle_nodes)

"""Policy: use idle nodes beyond the requested ones, and give them up first. `elasticity.idleNodes: Take`.

The scheduler decides what is idle: the job requests extra workers of the lowest priority, up to `workers.maxReplicas`.
If another worker needs an extra's node, the scheduler preempts the extra; like a notice on its node, that is a planned
departure, which saves first.

The job grows onto extras only to a size that saves a pass, after its rest (`growth_resumes_at`), and only where the
remaining steps repay the growth and the way back. It also waits until the extras have been there for as long as that
takes to repay: their stay is unknown, so this is the ski rental problem, and the loss is at most twice the least
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
from trainium_operator.plan.membership.growth import compile_seconds, growth_resumes_at, is_worth_growing
from trainium_operator.plan.model.actions import PolicyResult
from trainium_operator.plan.model.conditions import is_true
from trainium_operator.plan.model.observed import PodPhase
from trainium_operator.plan.view.facts import Facts, healthy_joiners
from trainium_operator.plan.view.progress import is_settled, past_steps, resize_cost_seconds

if TYPE_CHECKING:
    from collections.abc import Collection

    from trainium_contract.status.public import PublicStatus
    from trainium_operator.plan.diagnose.loss import Loss
    from trainium_operator.plan.view.workers import Worker

_FIRST_PAUSE_SECONDS = 60.0
_LONGEST_PAUSE_SECONDS = 600.0
_NEVER = IdleNodesStatus()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Limits:
    """Limits of the job in nodes, beyond the requested ones."""

    base: int
    """Requested nodes."""
    most: int
    """The best size that the job may have."""
    usable: int
    """Extras that train or can join at once, at most as many as a queue grants."""
    available: int
    """Workers that train or can join at once."""

    def beyond(self, facts: Facts, workers: int) -> int:
        """Return the best size for that many workers, of which `usable` may be extras; at least the requested size."""
        return max(self.base, facts.size.legal_at_most(min(workers, self.base + self.usable, self.most)))


def use_idle_nodes(facts: Facts, status: TrainingJobStatus, losses: tuple[Loss, ...]) -> PolicyResult:
    """Return the status with the size to work towards and the extras to keep.

    `status.desired` is the requested size.
    """
    if facts.current is None or not status.desired:
        return PolicyResult(status=status.replaced(idle_nodes=_NEVER))
    lost = {loss.member.pod_uid for loss in losses}
    usable = extras_usable(facts, lost)
    limits = _Limits(
        base=status.desired,
        most=_most(facts, status),
        usable=len(usable) if facts.grant is None else max(0, min(len(usable), facts.grant.workers - status.desired)),
        available=len(facts.member_uids - lost) + len(healthy_joiners(facts)),
    )
    target, requeue_at = _target(facts, status, limits, losses)
    idle, later = _target_extras(facts, status, limits, losses)
    idle = idle.replaced(taken=target - limits.base)
    return PolicyResult(status=status.replaced(desired=target, idle_nodes=idle), requeue_at=requeue_at + later)


def _most(facts: Facts, status: PublicStatus) -> int:
    """Return the best size that the job may have; the requested one while others wait for nodes, or it for quota."""
    takes = facts.job.spec.elasticity.idle_nodes is IdleNodes.TAKE and bool(facts.settings.extra_priority_class)
    if not takes or facts.observed.nodes_wanted_by_gangs or status.desired < facts.size.desired:
        return status.desired
    return max(status.desired, facts.size.most)


def _target(
    facts: Facts, status: PublicStatus, limits: _Limits, losses: tuple[Loss, ...]
) -> tuple[int, tuple[float, ...]]:
    """Return the size to work towards, and when to check again (Unix seconds)."""
    if losses:
        return limits.beyond(facts, limits.available), ()
    present = len(facts.members)
    kept, larger = limits.beyond(facts, present), limits.beyond(facts, limits.available)
    if larger <= max(kept, present) or not _trains_on(facts, status):
        return kept, ()
    grow_at = _grow_at(facts, status, present, larger)
    if grow_at is None:
        return kept, ()
    return (kept, (grow_at,)) if facts.now < grow_at else (larger, ())


def _grow_at(facts: Facts, status: PublicStatus, present: int, size: int) -> float | None:
    """Return when to grow beyond the requested size (Unix seconds); None if the remaining steps do not repay it."""
    price = resize_cost_seconds(status) or 0.0
    if not is_worth_growing(facts, status, present, size, beside=price + compile_seconds(facts, status, size)):
        return None
    speed = facts.size.speed(present, size)
    there = max((worker.agent.first_seen for worker in extras_usable(facts, ()) if worker.agent), default=facts.now)
    repaid = there + price / (1 - speed) if 0 < speed < 1 else there
    return max(repaid, growth_resumes_at(facts, status))


def _target_extras(
    facts: Facts, status: TrainingJobStatus, limits: _Limits, losses: tuple[Loss, ...]
) -> tuple[IdleNodesStatus, tuple[float, ...]]:
    """Return the number of extras to keep or to request, and when to check again (Unix seconds)."""
    idle, limit = status.idle_nodes, limits.most - limits.base
    if limit <= 0:
        return _NEVER, ()
    alive = [worker for worker in facts.workers.values() if worker.pod.extra and worker.alive]
    bound = sum(bool(worker.pod.node) for worker in alive)
    useful = facts.size.legal_at_most(min(limits.base + bound, limits.most)) - limits.base
    held = max(0, min(useful, bound))
    if any(worker.pod.extra and _failed(worker) for worker in facts.outsiders):
        return _give_up_request(facts, idle, held)  # another one would fail there too, and it is not urgent
    if idle.asked_at is not None:
        return _asking(facts, idle, min(idle.wanted, limit), bound, held)
    found = limits.usable >= held > facts.job.status.idle_nodes.taken
    idle = idle.replaced(wanted=held, failed_requests=0 if found else idle.failed_requests)
    if held >= limit or losses or len(facts.members) < limits.base or not _trains_on(facts, status):
        return idle, ()
    present = len(facts.members)
    price = resize_cost_seconds(status) or 0.0
    if not is_worth_growing(facts, status, present, limits.most, beside=price):
        return idle, ()
    since = max(idle.retry_at or 0.0, growth_resumes_at(facts, status), facts.observed.create_after)
    if facts.now < since:
        return idle, (since,)
    return idle.replaced(wanted=limit, asked_at=facts.now, retry_at=None), (facts.now + _timeout(facts),)


def _asking(
    facts: Facts, idle: IdleNodesStatus, wanted: int, bound: int, held: int
) -> tuple[IdleNodesStatus, tuple[float, ...]]:
    """Return the next state while extras are requested: they have nodes, are pending, or cannot be had."""
    assert idle.asked_at is not None
    if bound >= wanted:
        return idle.replaced(wanted=held, asked_at=None), ()
    over = idle.asked_at + _timeout(facts)
    return (idle.replaced(wanted=wanted), (over,)) if facts.now < over else _give_up_request(facts, idle, held)


def _give_up_request(facts: Facts, idle: IdleNodesStatus, held: int) -> tuple[IdleNodesStatus, tuple[float, ...]]:
    """Keep the extras that exist, and request more after a growing pause."""
    times = idle.failed_requests + 1
    pause = min(_LONGEST_PAUSE_SECONDS, _FIRST_PAUSE_SECONDS * 2.0 ** min(times - 1, 16))
    retry_at = facts.now + pause
    return IdleNodesStatus(wanted=held, failed_requests=times, retry_at=retry_at), (retry_at,)


def _failed(worker: Worker) -> bool:
    return not worker.pod.deleting and (worker.gave_up or worker.pod.phase is PodPhase.FAILED)


def _timeout(facts: Facts) -> float:
    """Return how long extras may wait for a node (seconds): as long as the job waits for requested capacity."""
    return float(facts.job.spec.recovery.rescale_after_seconds)


def _trains_on(facts: Facts, status: PublicStatus) -> bool:
    """Return whether all members train, no size was requested, and steps remain."""
    finished = any(worker is not None and worker.finished for _, worker in facts.members)
    return is_settled(facts) and not finished and not is_true(status, ConditionType.RESIZING) and not past_steps(status)


def extras_usable(facts: Facts, lost: Collection[str]) -> tuple[Worker, ...]:
    """Return extras that train or can join at once; `lost` are pod uids of members that do not count."""
    members = [worker for _, worker in facts.members if worker is not None and worker.pod.uid not in lost]
    return tuple(worker for worker in (*members, *healthy_joiners(facts)) if worker.pod.extra)

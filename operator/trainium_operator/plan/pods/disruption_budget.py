"""Policy: set how many workers a drain may evict now, as a PodDisruptionBudget; none while too much work is at risk.

An eviction saves before it leaves, but a drain that goes wrong, or meets a fault, falls back to the newest durable
checkpoint. So none is allowed while that is older than `recovery.disruption.maxDurableAgeSeconds`, or while the job
recovers. The budget counts pods that must stay (`minAvailable`, an integer): `maxUnavailable` would make the disruption
controller read the job's scale, which excludes spares, and allow one more for each of them.

Invariants: there is no budget before the first step, so nothing is refused then. The object changes only when the
decision does. It does not affect pods that this operator deletes itself, as at the end and on a suspension.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainium_contract.job import CleanPodPolicy, TrainingJobStatus
from trainium_contract.rfc3339 import format_rfc3339, parse_rfc3339
from trainium_contract.status.conditions import ConditionType
from trainium_contract.status.interruptions import RecoveryResponse
from trainium_operator.plan.manifests.owned_object import build_owned_object
from trainium_operator.plan.model import names
from trainium_operator.plan.model.actions import PolicyResult
from trainium_operator.plan.model.conditions import find_condition, is_terminal, set_condition
from trainium_operator.plan.model.reasons import Reason
from trainium_operator.plan.view.context import PlanContext, reconcile_object
from trainium_operator.plan.view.progress import is_past_steps

if TYPE_CHECKING:
    from trainium_contract.status.public import PublicStatus
    from trainium_operator.plan.model.observed import JobView

KIND = "PodDisruptionBudget"
MIN_AVAILABLE_FORBIDDING_EVICTION = 2**31 - 1
"""`minAvailable` of a budget that allows no eviction, however many pods there are."""


def build_budget(job: JobView, min_available: int) -> dict[str, Any]:
    """Return the budget that keeps at least `min_available` workers; pods that are not ready may always be evicted."""
    spec = {
        "minAvailable": min_available,
        "selector": {"matchLabels": names.build_selector_labels(job.name)},
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
    }
    return build_owned_object(job, "policy/v1", KIND, job.name, {"spec": spec}, "disruption")


@dataclass(frozen=True, slots=True)
class _Decision:
    is_allowed: bool
    reason: str
    requeue_at: tuple[float, ...] = ()
    """When the decision changes by time alone (Unix seconds)."""


def limit_disruptions(context: PlanContext, status: TrainingJobStatus) -> PolicyResult:
    """Report whether a disruption is allowed now, and update the budget; call when the status is complete."""
    ended = is_terminal(status)
    if ended and context.job.spec.clean_pod_policy is not CleanPodPolicy.NONE:
        return PolicyResult(status=status)
    applied = context.observed.children.get(f"{KIND}/{context.job.name}")
    if applied is None and (ended or not status.start_time):
        return PolicyResult(status=status)
    kind, min_available, requeue_at = ConditionType.DISRUPTION_ALLOWED, 0, tuple[float, ...]()
    if not ended:
        decision = _decide_disruption(context, status)
        min_available, requeue_at = _count_min_available(context, status, decision), decision.requeue_at
        reason = Reason.DISRUPTION_ALLOWED if decision.is_allowed else Reason.DISRUPTION_REFUSED
        status = set_condition(status, kind, decision.is_allowed, reason, decision.reason, now=context.now)
    if context.job.spec.suspend and not ended:
        return PolicyResult(status=status, requeue_at=requeue_at)
    manifest = build_budget(context.job, min_available)
    refusal = context.observed.refusals.get(f"{KIND}/{context.job.name}")
    if refusal is not None and not ended and context.observed.find_next_write(manifest) is not None:
        text = f"a drain may evict workers at any time: {refusal.sentence}"
        status = set_condition(status, kind, None, refusal.reason, text, now=context.now)
    return PolicyResult(status=status, requeue_at=requeue_at).combine(reconcile_object(context, status, manifest))


def _count_min_available(context: PlanContext, status: PublicStatus, decision: _Decision) -> int:
    if context.job.spec.suspend or context.current is None:
        return 0
    if not decision.is_allowed:
        return MIN_AVAILABLE_FORBIDDING_EVICTION
    spares = len(context.candidates)
    # Each worker that leaves may be of another unit.
    return max(0, status.membership.size + spares - max(1, spares // context.unit_nodes))


def _decide_disruption(context: PlanContext, status: PublicStatus) -> _Decision:
    if context.job.spec.suspend or context.current is None:
        return _Decision(True, "the job holds no work that is not saved")
    # A restart in place is short and not worth two writes.
    brief_responses = (RecoveryResponse.RESIZE, RecoveryResponse.GROW, RecoveryResponse.IN_PLACE)
    recovering = [entry for entry in status.history if entry.is_open and entry.response not in brief_responses]
    if recovering:
        return _Decision(False, f"the job recovers: {recovering[-1].message}")
    return _decide_by_checkpoints(context, status)


def _decide_by_checkpoints(context: PlanContext, status: PublicStatus) -> _Decision:
    """Return whether the newest durable checkpoint is recent enough, and when it will no longer be."""
    limit = context.job.spec.recovery.disruption.max_durable_age_seconds
    if not context.job.spec.workload.checkpoint_folder:
        return _Decision(True, "the program's checkpoints are not known (spec.program.checkpoints is not set)")
    if not context.job.spec.workload.keeps_checkpoints:
        return _Decision(True, "the job keeps no durable checkpoints (spec.checkpoint.storage is not set)")
    if is_past_steps(status) and status.checkpoint.durable_step >= status.progress.step:
        return _Decision(True, "every step is done and saved")
    since = max(
        _parse_time(status.checkpoint.durable_time),
        _parse_time(status.start_time),
        _find_resumption_time(context.job.status),
    )
    step = status.checkpoint.durable_step
    newest = f"step {step}, known since {format_rfc3339(since)}" if step >= 0 else f"none since {format_rfc3339(since)}"
    if context.now >= since + limit:
        reason = f"the newest durable checkpoint ({newest}) is older than maxDurableAgeSeconds ({limit})"
        return _Decision(False, reason)
    reason = f"durable checkpoints are younger than maxDurableAgeSeconds ({limit})"
    return _Decision(True, reason, (since + limit,))


def _find_resumption_time(status: PublicStatus) -> float:
    """Return when the job was last resumed: earlier work was saved then."""
    suspended = find_condition(status, ConditionType.SUSPENDED)
    return 0.0 if suspended is None else _parse_time(suspended.last_transition_time)


def _parse_time(text: str) -> float:
    return parse_rfc3339(text) or 0.0

"""Policy: set how many workers a drain may evict now, as a PodDisruptionBudget; none while too much work is at risk.

An eviction saves before it leaves, but a drain that goes wrong, or meets a fault, falls back to the newest durable
checkpoint. So none is allowed while that is older than `recovery.disruption.maxDurableAgeSeconds`, or while the job
recovers. The budget counts pods that must stay (`minAvailable`, an integer): `maxUnavailable` would make the disruption
controller read the job's scale, which excludes spares, and allow one more for each of them.

Invariants: there is no budget before the first step, so nothing is refused then. The object changes only when the
answer does. It does not affect pods that this operator deletes itself, as at the end and on a suspension.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainium_contract.job import CleanPodPolicy, TrainingJobStatus
from trainium_contract.status.conditions import ConditionType
from trainium_contract.status.interruptions import Rung
from trainium_operator.plan.manifests.owned_object import owned_object
from trainium_operator.plan.model import names
from trainium_operator.plan.model.actions import ApplyObject, PolicyResult
from trainium_operator.plan.model.conditions import find_condition, is_terminal, with_condition
from trainium_operator.plan.model.reasons import Reason
from trainium_operator.plan.model.text import parse_rfc3339, rfc3339
from trainium_operator.plan.view.progress import past_steps

if TYPE_CHECKING:
    from trainium_contract.status.public import PublicStatus
    from trainium_operator.plan.model.observed import JobView
    from trainium_operator.plan.view.facts import Facts

KIND = "PodDisruptionBudget"
ALL_STAY = 2**31 - 1
"""`minAvailable` of a budget that allows no eviction, however many pods there are."""


def budget_manifest(job: JobView, stay: int) -> dict[str, Any]:
    """Return the budget that keeps at least `stay` workers; pods that are not ready may always be evicted."""
    spec = {
        "minAvailable": stay,
        "selector": {"matchLabels": names.selector_labels(job.name)},
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
    }
    return owned_object(job, "policy/v1", KIND, job.name, {"spec": spec}, "disruption")


@dataclass(frozen=True, slots=True)
class _Judgement:
    allowed: bool
    why: str
    requeue_at: tuple[float, ...] = ()
    """When the answer changes by time alone (Unix seconds)."""


def limit_disruptions(facts: Facts, status: TrainingJobStatus) -> PolicyResult:
    """Report whether a disruption is allowed now, and update the budget; call when the status is complete."""
    ended = is_terminal(status)
    if ended and facts.job.spec.clean_pod_policy is not CleanPodPolicy.NONE:
        return PolicyResult(status=status)
    applied = facts.observed.children.get(f"{KIND}/{facts.job.name}")
    if applied is None and (ended or not status.start_time):
        return PolicyResult(status=status)
    stay, requeue_at = 0, tuple[float, ...]()
    if not ended:
        judgement = _judge(facts, status)
        stay, requeue_at = _must_stay(facts, status, judgement), judgement.requeue_at
        reason = Reason.DISRUPTION_ALLOWED if judgement.allowed else Reason.DISRUPTION_REFUSED
        kind = ConditionType.DISRUPTION_ALLOWED
        status = with_condition(status, kind, judgement.allowed, reason, judgement.why, now=facts.now)
    if facts.job.spec.suspend and not ended:
        return PolicyResult(status=status, requeue_at=requeue_at)
    taken = facts.observed.name_conflicts.get(f"{KIND}/{facts.job.name}")
    if taken is not None and not ended:
        kind = ConditionType.DISRUPTION_ALLOWED
        status = with_condition(status, kind, None, Reason.NAME_TAKEN, taken, now=facts.now)
    if taken is not None and facts.now < facts.observed.create_after:
        return PolicyResult(status=status, requeue_at=(*requeue_at, facts.observed.create_after))
    manifest = budget_manifest(facts.job, stay)
    if applied == manifest["metadata"]["annotations"][names.ANNOTATION_CONTENT_HASH]:
        return PolicyResult(status=status, requeue_at=requeue_at)
    return PolicyResult(status=status, actions=(ApplyObject(manifest),), requeue_at=requeue_at)


def _must_stay(facts: Facts, status: PublicStatus, judgement: _Judgement) -> int:
    if facts.job.spec.suspend or facts.current is None:
        return 0
    if not judgement.allowed:
        return ALL_STAY
    spares = len(facts.candidates)
    return max(0, status.membership.size + spares - max(1, spares))


def _judge(facts: Facts, status: PublicStatus) -> _Judgement:
    if facts.job.spec.suspend or facts.current is None:
        return _Judgement(True, "the job holds no work that is not saved")
    # A restart in place is short and not worth two writes.
    brief = (Rung.RESIZE, Rung.GROW, Rung.IN_PLACE)
    recovering = [entry for entry in status.history if entry.is_open and entry.rung not in brief]
    if recovering:
        return _Judgement(False, f"the job recovers: {recovering[-1].message}")
    return _judge_checkpoints(facts, status)


def _judge_checkpoints(facts: Facts, status: PublicStatus) -> _Judgement:
    """Return whether the newest durable checkpoint is recent enough, and when it will no longer be."""
    limit = facts.job.spec.recovery.disruption.max_durable_age_seconds
    program = facts.job.spec.program
    if program is not None and program.checkpoints is None:
        return _Judgement(True, "the program's checkpoints are not known (spec.program.checkpoints is not set)")
    if program is None and not facts.job.spec.checkpoint.storage.kept:
        return _Judgement(True, "the job keeps no durable checkpoints (spec.checkpoint.storage is not set)")
    if past_steps(status) and status.checkpoint.durable_step >= status.progress.step:
        return _Judgement(True, "every step is done and saved")
    since = max(_time(status.checkpoint.durable_time), _time(status.start_time), _resumed(facts.job.status))
    step = status.checkpoint.durable_step
    newest = f"step {step}, known since {rfc3339(since)}" if step >= 0 else f"none since {rfc3339(since)}"
    if facts.now >= since + limit:
        old = f"the newest durable checkpoint ({newest}) is older than maxDurableAgeSeconds ({limit})"
        return _Judgement(False, old)
    young = f"durable checkpoints are younger than maxDurableAgeSeconds ({limit})"
    return _Judgement(True, young, (since + limit,))


def _resumed(status: PublicStatus) -> float:
    """Return when the job was last resumed: earlier work was saved then."""
    found = find_condition(status, ConditionType.SUSPENDED)
    return 0.0 if found is None else _time(found.last_transition_time)


def _time(text: str) -> float:
    return parse_rfc3339(text) or 0.0

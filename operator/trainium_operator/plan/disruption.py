"""Policy: how many workers a drain may evict now, as a PodDisruptionBudget; none while too much work is at risk.

An eviction saves before it leaves, but a drain that goes wrong, or meets a fault, falls back to the newest durable
checkpoint. So none is let through while that is older than `recovery.disruption.maxDurableAgeSeconds`, or while the job
recovers. The budget counts pods that must stay (`minAvailable`, an integer): `maxUnavailable` would have the disruption
controller ask the job's scale, which knows nothing of spares, and let one through for each of them.

Invariants: there is no budget before the first step, so nothing is refused then; the object changes only when the
answer does. Pods that this operator deletes itself, as at the end and on a suspension, are none of its business.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainium_contract.job import CleanPodPolicy, ConditionType, Rung
from trainium_operator.plan import names
from trainium_operator.plan.children import owned_object
from trainium_operator.plan.conditions import find_condition, is_terminal
from trainium_operator.plan.model import ApplyObject
from trainium_operator.plan.reasons import Reason
from trainium_operator.plan.times import parse_rfc3339, rfc3339

if TYPE_CHECKING:
    from trainium_contract.job import TrainingJobStatus
    from trainium_operator.plan.facts import Draft, Facts
    from trainium_operator.plan.model import JobView

KIND = "PodDisruptionBudget"
ALL_STAY = 2**31 - 1
"""`minAvailable` of a budget that lets nothing through, however many pods there are."""


def budget(job: JobView, stay: int) -> dict[str, Any]:
    """The budget that keeps at least `stay` workers; pods that are not ready may always be evicted."""
    spec = {
        "minAvailable": stay,
        "selector": {"matchLabels": names.selector_labels(job.name)},
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
    }
    return owned_object(job, "policy/v1", KIND, job.name, {"spec": spec}, "disruption")


def limit_disruptions(facts: Facts, draft: Draft) -> None:
    """Say whether a disruption is allowed now, and bring the budget in line; call when the status is complete."""
    ended = is_terminal(draft.status)
    if ended and facts.job.spec.clean_pod_policy is not CleanPodPolicy.NONE:
        return
    applied = facts.observed.children.get(f"{KIND}/{facts.job.name}")
    if applied is None and (ended or not draft.status.start_time):
        return
    stay = 0 if ended else _must_stay(facts, draft)
    if facts.job.spec.suspend and not ended:
        return
    manifest = budget(facts.job, stay)
    if applied != manifest["metadata"]["annotations"][names.ANNOTATION_CONTENT_HASH]:
        draft.actions.append(ApplyObject(manifest))


def _must_stay(facts: Facts, draft: Draft) -> int:
    status = draft.status
    if facts.job.spec.suspend or facts.current is None:
        _say(draft, True, "the job holds no work that is not saved")
        return 0
    recovering = [entry for entry in status.history if _is_open_fault(entry.recovered_seconds, entry.rung)]
    if recovering:
        _say(draft, False, f"the job recovers: {recovering[-1].message}")
        return ALL_STAY
    if _is_stale(facts, draft):
        return ALL_STAY
    spares = len(facts.candidates)
    return max(0, status.membership.size + spares - max(1, spares))


def _is_open_fault(recovered_seconds: float | None, rung: Rung) -> bool:
    """A restart in place is over in a moment and needs all pods that there are; it is not worth two writes."""
    return recovered_seconds is None and rung not in (Rung.RESIZE, Rung.GROW, Rung.STOP, Rung.IN_PLACE)


def _is_stale(facts: Facts, draft: Draft) -> bool:
    """Whether the newest durable checkpoint is too old; sets the time at which it will be."""
    status, limit = draft.status, facts.job.spec.recovery.disruption.max_durable_age_seconds
    if not facts.job.spec.checkpoint.storage.kept:
        _say(draft, True, "the job keeps no durable checkpoints (spec.checkpoint.storage is not set)")
        return False
    since = max(_time(status.checkpoint.durable_time), _time(status.start_time), _resumed(facts.job.status))
    step = status.checkpoint.durable_step
    newest = f"step {step}, known since {rfc3339(since)}" if step >= 0 else f"none since {rfc3339(since)}"
    if facts.now >= since + limit:
        _say(draft, False, f"the newest durable checkpoint ({newest}) is older than maxDurableAgeSeconds ({limit})")
        return True
    draft.deadlines.append(since + limit)
    _say(draft, True, f"durable checkpoints are younger than maxDurableAgeSeconds ({limit})")
    return False


def _say(draft: Draft, allowed: bool, why: str) -> None:
    reason = Reason.DISRUPTION_ALLOWED if allowed else Reason.DISRUPTION_REFUSED
    draft.condition(ConditionType.DISRUPTION_ALLOWED, allowed, reason, why)


def _resumed(status: TrainingJobStatus) -> float:
    """When the job was last resumed: what it had done before was saved then."""
    found = find_condition(status, ConditionType.SUSPENDED)
    return 0.0 if found is None else _time(found.last_transition_time)


def _time(text: str) -> float:
    return parse_rfc3339(text) or 0.0

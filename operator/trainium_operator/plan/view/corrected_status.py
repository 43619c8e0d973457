"""Policy: correct the status where the operator has better information, before any other policy reads it.

An operator with a fast clock, another manager or a person may have written it. A future time counts as now: otherwise
deadlines, back-offs and throttles would wait until the clock has caught up, possibly for hours. The membership is the
recorded one, unless a newer one was decided. The newest durable checkpoint is the one that members reported.

Guarantees:
- A corrected status is written at once, whatever else is throttled.
- The status that this operator wrote last needs no correction.
"""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from trainium_contract.base import ContractModel
from trainium_contract.rfc3339 import format_rfc3339, parse_rfc3339
from trainium_contract.status.public import MembershipStatus, PublicStatus
from trainium_contract.status.start_failures import StartFailuresStatus
from trainium_operator.plan.model.conditions import is_terminal

if TYPE_CHECKING:
    from trainium_contract.job import TrainingJobStatus
    from trainium_contract.wire.messages import Membership
    from trainium_operator.plan.model.observed import Observed
    from trainium_operator.plan.view.size import SizeDecision

ModelT = TypeVar("ModelT", bound=ContractModel)

_TOLERANCE_SECONDS = 2.0
_MAX_PAUSE_SECONDS = 900.0
"""No policy delays a retry for longer than this, so a later time was not written by this clock."""


def correct_status(observed: Observed, size: SizeDecision) -> Observed:
    """Return the observation with a corrected status."""
    job = observed.job
    status = _adopt_recorded_membership(_clamp_times(job.status, observed.now), observed, size)
    checkpoint = status.checkpoint
    if 0 <= status.committed_step != checkpoint.durable_step:
        status = status.replaced(checkpoint=checkpoint.replaced(durable_step=status.committed_step))
    return observed if status is job.status else replace(observed, job=replace(job, status=status))


def _adopt_recorded_membership(status: TrainingJobStatus, observed: Observed, size: SizeDecision) -> TrainingJobStatus:
    recorded, reported = observed.membership, status.membership
    if recorded is None or is_terminal(status):
        return status
    newer = reported.generation > recorded.generation
    if (newer or reported.size == 0) and not _has_all_members(observed, recorded):
        return status
    if newer and not _was_never_decided(status, observed, recorded):
        return status
    attempt, count = 0, len(recorded.members)
    if reported.generation == recorded.generation:
        agents = (observed.agents.get(member.pod_uid) for member in recorded.members)
        heartbeats = (agent.heartbeat for agent in agents if agent is not None)
        attempts = [
            heartbeat.attempt
            for heartbeat in heartbeats
            if heartbeat is not None and heartbeat.generation == recorded.generation
        ]
        attempt = min(reported.attempt, max(attempts)) if len(attempts) == count else reported.attempt
    if (reported.generation, reported.attempt, reported.size) == (recorded.generation, attempt, count):
        return status
    parallel = size.compute_data_parallel(count)
    return status.replaced(
        membership=MembershipStatus(generation=recorded.generation, attempt=attempt, size=count, data_parallel=parallel)
    )


def _has_all_members(observed: Observed, recorded: Membership) -> bool:
    """Return whether every member still has its pod: the plan that gives a generation up deletes all of them."""
    present = {pod.uid for pod in observed.pods if not pod.deleting}
    return all(member.pod_uid in present for member in recorded.members)


def _was_never_decided(status: PublicStatus, observed: Observed, recorded: Membership) -> bool:
    """Return whether no operator decided on the newer generation in the status, and no agent is in it.

    A decision is in the history, with its time, in the same write as the number.
    """
    if any(
        entry.generation == recorded.generation and entry.decided_at is not None and entry.recovered_seconds is None
        for entry in status.history
    ):
        return False
    agent_generations = (
        agent.heartbeat.generation for agent in observed.agents.values() if agent.heartbeat is not None
    )
    return max((observed.published, *agent_generations)) <= recorded.generation


def _clamp_times(status: TrainingJobStatus, now: float) -> TrainingJobStatus:
    """Replace future times; return the same object if there are none."""
    clamped = _clamp(status, now, "waiting_since", "leaving_since")
    parts = {
        "activity": _clamp(status.activity, now, "since"),
        "failures": _clamp_each(status.failures, now, "at"),
        "history": _clamp_each(status.history, now, "failed_at", "decided_at"),
        "goodput": _clamp(status.goodput, now, "accounted_until"),
        "gang": _clamp(_clamp(status.gang, now, "holding_since"), now, "retry_at", allowed=_MAX_PAUSE_SECONDS),
        "idle_nodes": _clamp(_clamp(status.idle_nodes, now, "asked_at"), now, "retry_at", allowed=_MAX_PAUSE_SECONDS),
    }
    changed: dict[str, Any] = {name: part for name, part in parts.items() if part is not getattr(status, name)}
    if _is_future(parse_rfc3339(status.progress.updated), now):
        changed["progress"] = status.progress.replaced(updated=format_rfc3339(now))
    if _is_future(status.start_failures.at, now):
        # A pause that starts now in each plan would never end.
        changed["start_failures"] = StartFailuresStatus(next_ordinal=status.start_failures.next_ordinal)
    return clamped.replaced(**changed) if changed else clamped


def _clamp(model: ModelT, now: float, *times: str, allowed: float = 0.0) -> ModelT:
    """Return the model with those of its times set to `now` that are more than `allowed` seconds ahead."""
    changed = {name: now for name in times if _is_future(getattr(model, name), now + allowed)}
    return model.replaced(**changed) if changed else model


def _clamp_each(models: tuple[ModelT, ...], now: float, *times: str) -> tuple[ModelT, ...]:
    clamped = tuple(_clamp(model, now, *times) for model in models)
    return models if all(map(operator.is_, clamped, models)) else clamped


def _is_future(at: float | None, now: float) -> bool:
    return at is not None and at > now + _TOLERANCE_SECONDS

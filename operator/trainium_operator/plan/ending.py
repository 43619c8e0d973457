"""Policy: the two ends of a job, complete and failed. Both are sticky and release what the job no longer needs.

Invariants: a job is complete only when every member finished; a terminal condition never changes back; nothing that may
still write is killed when a job completes, and the pods that tell what happened are kept for their logs unless the job
says otherwise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_contract.job import CleanPodPolicy, ConditionType, Interruption, Phase, Rung
from trainium_operator.plan.conditions import is_true
from trainium_operator.plan.history import HISTORY_LENGTH, last_step
from trainium_operator.plan.pods import delete
from trainium_operator.plan.reasons import Reason
from trainium_operator.plan.times import rfc3339

if TYPE_CHECKING:
    from trainium_operator.plan.facts import Draft, Facts
    from trainium_operator.plan.verdicts import StopVerdict


def all_finished(facts: Facts) -> bool:
    """Whether every member of the generation in force has finished."""
    return facts.current is not None and all(worker is not None and worker.finished for _, worker in facts.members)


def complete(facts: Facts, draft: Draft) -> None:
    """The job has reached its end."""
    steps = facts.job.spec.trainer.steps
    draft.condition(ConditionType.COMPLETE, True, Reason.COMPLETED, f"all {steps} steps are done")
    draft.update(phase=Phase.COMPLETED)
    _close(facts, draft, Reason.COMPLETED)
    clean_up(facts, draft)


def stop(facts: Facts, draft: Draft, verdict: StopVerdict) -> None:
    """The job has failed for good."""
    draft.condition(ConditionType.FAILED, True, verdict.reason, verdict.message)
    draft.update(phase=Phase.FAILED, verdict=verdict.message)
    entry = Interruption(
        generation=draft.status.membership.generation,
        attempt=draft.status.membership.attempt,
        time=rfc3339(facts.now),
        cause=verdict.cause,
        rung=Rung.STOP,
        node=verdict.node,
        pod=verdict.pod,
        message=verdict.message,
        step_before=last_step(facts),
    )
    draft.update(history=(*draft.status.history, entry)[-HISTORY_LENGTH:])
    _close(facts, draft, verdict.reason)
    clean_up(facts, draft)


def clean_up(facts: Facts, draft: Draft) -> None:
    """Release what an ended job does not need, as `cleanPodPolicy` says; the members of a completed job end first."""
    policy = facts.job.spec.clean_pod_policy
    if policy is CleanPodPolicy.NONE:
        return
    completed = is_true(draft.status, ConditionType.COMPLETE)
    for uid, worker in facts.workers.items():
        ending = completed and uid in facts.member_uids and not worker.node_bad
        if policy is CleanPodPolicy.ALL if worker.ended else not ending:
            delete(draft, worker, force=worker.node_bad)


def _close(facts: Facts, draft: Draft, reason: Reason) -> None:
    for kind in (ConditionType.RUNNING, ConditionType.RECOVERING, ConditionType.RESIZING, ConditionType.PODS_READY):
        draft.condition(kind, False, reason, "the job has ended")
    draft.update(
        completion_time=rfc3339(facts.now),
        ready_replicas=0,
        spares=0,
        waiting_since=None,
        goodput=draft.status.goodput.model_copy(update={"accounted_until": None}),
    )

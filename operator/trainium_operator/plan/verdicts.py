"""Policy: when a job stops for good, and the sentence that says why and what to do.

Invariants: a verdict is about the user's program, data or configuration, or an exhausted budget; no node is blamed by
it. What only happens to single workers (a lost node, an eviction) is never a verdict by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainium_contract.exit_codes import Cause, ExitCode, Response, verdict_of
from trainium_operator.plan.budgets import exhausted_budget
from trainium_operator.plan.causes import died_by_itself
from trainium_operator.plan.model import PodPhase
from trainium_operator.plan.reasons import Reason
from trainium_operator.plan.sentences import sentence

if TYPE_CHECKING:
    from trainium_contract.messages import ProcessFailure
    from trainium_operator.plan.facts import Draft, Facts
    from trainium_operator.plan.workers import Worker

START_ATTEMPTS = 2
"""Worker pods that may fail before any step before the job is taken to be at fault."""

_REASONS: dict[int, Reason] = {
    ExitCode.USER_ERROR: Reason.USER_ERROR,
    ExitCode.NUMERICAL: Reason.NUMERICAL,
    ExitCode.OUT_OF_MEMORY: Reason.OUT_OF_MEMORY,
}
_ADVICE: dict[Reason, str] = {
    Reason.USER_ERROR: "Correct the configuration, the data or the image and create the job again; it resumes from "
    "its newest checkpoint.",
    Reason.NUMERICAL: "Lower the learning rate, look at the data of that step, or raise "
    "spec.trainer.nonFiniteTolerance; a new job of the same name resumes from the newest checkpoint.",
    Reason.OUT_OF_MEMORY: "Lower spec.trainer.batch.microSize or the sequence length, raise tensor parallelism or "
    "shard the state (spec.trainer.dataParallel: FullySharded).",
    Reason.WORKERS_DO_NOT_START: "Look at the pod's log (kubectl logs); correct the image, the command or the "
    "template.",
    Reason.BUDGET_EXHAUSTED: "See status.history for what failed; correct it or raise the budget, and create the job "
    "again; it resumes from its newest checkpoint.",
    Reason.NO_LEGAL_SIZE: "",
    Reason.INVALID_SPEC: "",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StopVerdict:
    """Why the job ends."""

    reason: Reason
    cause: Cause
    message: str
    pod: str = ""
    node: str = ""


def reach_verdict(facts: Facts) -> StopVerdict | None:
    """The verdict that follows from what workers report or from the spec, if there is one."""
    return (
        _impossible_size(facts)
        or _reported_by_a_process(facts)
        or _reported_by_an_outsider(facts)
        or _reported_by_a_pod(facts)
        or _crashes_before_any_step(facts)
        or _workers_do_not_start(facts)
    )


def start_failures(facts: Facts) -> tuple[Worker, ...]:
    """Workers that ended by their own program before the job made any step; kept as evidence and for their logs."""
    if has_progress(facts):
        return ()
    return tuple(worker for worker in facts.outsiders if _failed(worker) and died_by_itself(worker.pod))


def has_progress(facts: Facts) -> bool:
    """Whether the job has ever made a step."""
    reported = any(beat.progress is not None and beat.progress.step > 0 for _, beat in facts.beats)
    return reported or facts.job.status.progress.step > 0


def _verdict(reason: Reason, cause: Cause, message: str, pod: str = "", node: str = "") -> StopVerdict:
    text = sentence(f"{message.rstrip('. ')}. {_ADVICE[reason]}".strip())
    return StopVerdict(reason=reason, cause=cause, message=text, pod=pod, node=node)


def _impossible_size(facts: Facts) -> StopVerdict | None:
    """Only a job that has never run ends for it; a running one keeps its size."""
    if facts.size.desired > 0 or facts.observed.membership is not None:
        return None
    return StopVerdict(reason=facts.size.reason, cause=Cause.USER_CODE, message=facts.size.message)


def _reported_by_a_process(facts: Facts) -> StopVerdict | None:
    """The first failure, by its own clock, that asks to stop; of the generation in force."""
    found: list[tuple[float, ProcessFailure, str, str]] = []
    for member, beat in facts.beats:
        failures = (*beat.failures, *((beat.verdict,) if beat.verdict else ()))
        found += [
            (failure.at, failure, member.pod_name, member.node_name)
            for failure in failures
            if failure.generation == beat.generation and verdict_of(failure.exit_code).response is Response.STOP
        ]
    if not found:
        return None
    _, failure, pod, node = min(found, key=lambda item: (item[0], item[1].rank))
    return _of_failure(failure, pod, node)


def _reported_by_an_outsider(facts: Facts) -> StopVerdict | None:
    """A worker whose preflight found what no other node can mend: a configuration that cannot be read."""
    for worker in facts.outsiders:
        failure = worker.heartbeat.verdict if worker.gave_up and worker.heartbeat is not None else None
        if failure is not None and verdict_of(failure.exit_code).response is Response.STOP:
            return _of_failure(failure, worker.pod.name, worker.pod.node)
    return None


def _of_failure(failure: ProcessFailure, pod: str, node: str) -> StopVerdict:
    verdict = verdict_of(failure.exit_code)
    where = f"rank {failure.rank} of pod {pod} on node {node}"
    after = f" after step {failure.step}" if failure.step > 0 else ""
    message = f"{verdict.sentence}: {where}{after}, exit code {failure.exit_code}: {failure.message or 'no output'}"
    return _verdict(_REASONS[failure.exit_code], verdict.cause, message[0].upper() + message[1:], pod, node)


def _reported_by_a_pod(facts: Facts) -> StopVerdict | None:
    for worker in facts.workers.values():
        code = worker.pod.exit_code
        if _failed(worker) and code is not None and verdict_of(code).response is Response.STOP:
            pod, verdict = worker.pod, verdict_of(code)
            message = f"{verdict.sentence}: pod {pod.name} on node {pod.node} ended with code {code}: {pod.message}"
            return _verdict(_REASONS[code], verdict.cause, message[0].upper() + message[1:], pod.name, pod.node)
    return None


def _crashes_before_any_step(facts: Facts) -> StopVerdict | None:
    """An agent gave up on processes that crash before their first step, in a job that has never made one."""
    if has_progress(facts):
        return None
    for member, beat in facts.beats:
        failure = beat.verdict
        if failure is None or failure.step > 0:
            continue
        if verdict_of(failure.exit_code).cause is not Cause.CRASH:
            continue
        message = (
            f"The training process crashed before its first step and again after a restart: rank {failure.rank} of "
            f"pod {member.pod_name} on node {member.node_name}, exit code {failure.exit_code}: "
            f"{failure.message or 'no output'}"
        )
        return _verdict(Reason.USER_ERROR, Cause.USER_CODE, message, member.pod_name, member.node_name)
    return None


def _workers_do_not_start(facts: Facts) -> StopVerdict | None:
    failed = start_failures(facts)
    if len(failed) < START_ATTEMPTS:
        return None
    pod = failed[-1].pod
    message = (
        f"{len(failed)} worker pods ended before they could train, the last {pod.name} on node {pod.node} with exit "
        f"code {pod.exit_code} ({pod.reason or 'Error'}): {pod.message or 'no message'}"
    )
    return _verdict(Reason.WORKERS_DO_NOT_START, Cause.USER_CODE, message, pod.name, pod.node)


def budget_verdict(facts: Facts, draft: Draft) -> StopVerdict | None:
    """The verdict that follows from the failures counted so far, those of this plan included."""
    message = exhausted_budget(draft.status.failures, facts.job.spec.recovery, facts.now)
    if message is None:
        return None
    last = draft.status.failures[-1]
    return _verdict(Reason.BUDGET_EXHAUSTED, last.cause, message, last.pod)


def _failed(worker: Worker) -> bool:
    return worker.pod.phase is PodPhase.FAILED and not worker.pod.deleting

"""Policy: decide when a job stops for good, with a sentence that states why and what to do.

Invariants: a verdict is about the user's program, data or configuration, or an exhausted budget; it blames no node. A
failure of single workers (a lost node, an eviction) is never a verdict by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainium_contract.exit_codes import SIGNAL_BASE, is_killed
from trainium_contract.faults.causes import Cause
from trainium_contract.faults.classify import (
    classify_exit_code,
    get_cause_row,
    match_kernel_line,
    match_rules,
    select_kernel_lines,
)
from trainium_contract.faults.responses import Response
from trainium_contract.program_output import LINE_BREAK
from trainium_contract.status.interruptions import PLANNED_RESPONSES, RecoveryResponse
from trainium_contract.wire.nonfinite_origin import parse_nonfinite_rank
from trainium_operator.plan.diagnose.pod_failures import has_failed_by_itself
from trainium_operator.plan.diagnose.process_failures import (
    classify_process_failure,
    find_give_up_failure,
    format_signs,
)
from trainium_operator.plan.faults.failure_budgets import describe_exhausted_budget
from trainium_operator.plan.faults.node_signals import find_stopping_signal
from trainium_operator.plan.model.observed import PodPhase
from trainium_operator.plan.model.reasons import Reason
from trainium_operator.plan.model.text import SENTENCE_LIMIT, format_sentence

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from trainium_contract.faults.classify import Classification
    from trainium_contract.job import TrainingJobStatus
    from trainium_contract.status.public import PublicStatus
    from trainium_contract.wire.messages import HeartbeatRequest, Member, ProcessFailure
    from trainium_operator.plan.view.context import PlanContext
    from trainium_operator.plan.view.workers import Worker

MAX_START_FAILURES = 2
"""Worker pods that may fail before any step until the job counts as the cause."""

_STOPPING_CAUSES = (Cause.USER_ERROR, Cause.NUMERICAL, Cause.OUT_OF_MEMORY, Cause.ACCELERATOR_RUNTIME)
"""Causes that are reasons of a verdict; any other stops a job only if a rule of the job names it."""
_ADVICE: dict[Reason, str] = {
    Reason.WORKERS_DO_NOT_START: "Look at the pod's log (kubectl logs); correct the image, the command or the "
    "template.",
    Reason.BUDGET_EXHAUSTED: "See status.history for what failed; correct it or raise the budget, and run the job "
    "again (kubectl trn retry).",
}

_CHECKPOINT_ADVICE = (
    "If it cannot read its newest checkpoint{}, a lost node has torn that file: remove it, and have the program write "
    "each checkpoint under a temporary name and rename it once it is complete, as spec.program.checkpoints.committed "
    "expects. Otherwise correct the program. Then run the job again (kubectl trn retry)."
)
_MIN_OUTPUT = 300
"""Characters that a verdict shows of the output, whatever else it contains."""
_COMPARED_CHARACTERS = 200
"""Characters of a program's error that are compared, because messages in the history are cut in the middle."""

_NEVER_STARTED_REASONS = frozenset({"StartError", "ContainerCannotRun"})
"""Reasons of a container whose program never started, so that its log is empty."""
_NEVER_STARTED_ADVICE = (
    "The program never ran, so there is no log: correct the image, or command, user and mounts of the template, and "
    "run the job again (kubectl trn retry)."
)


@dataclass(frozen=True, slots=True)
class _StoppingFailure:
    """A process failure that asks to stop the job."""

    classification: Classification
    heartbeat: HeartbeatRequest
    """The agent's heartbeat that reports it."""
    failure: ProcessFailure
    pod: str
    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StopVerdict:
    """Why the job ends."""

    reason: Reason
    cause: Cause
    message: str
    pod: str = ""
    node: str = ""


def reach_verdict(context: PlanContext) -> StopVerdict | None:
    """Return the verdict that follows from what workers report or from the spec, if there is one."""
    return (
        _judge_size(context)
        or _judge_processes(context)
        or _judge_preflights(context)
        or _judge_pods(context)
        or _judge_nodes(context)
        or _judge_crashes_before_any_step(context)
        or _judge_repeated_crash(context)
        or _judge_start_failures(context)
    )


def find_start_failures(context: PlanContext) -> tuple[Worker, ...]:
    """Return workers whose own program ended before the job made any step.

    They are kept as evidence and for their logs.
    """
    if context.has_progress:
        return ()
    return tuple(worker for worker in context.non_members if _has_failed(worker) and has_failed_by_itself(worker.pod))


def _build_verdict(
    reason: Reason,
    cause: Cause,
    message: str,
    *,
    failure: ProcessFailure | None = None,
    advice: str = "",
    pod: str = "",
    node: str = "",
) -> StopVerdict:
    """Return a verdict whose message starts with the observation and ends with the remedy, even when it is cut.

    The output of a failure is the observation, because most readers see only the start.
    """
    text = message[:1].upper() + message[1:]
    remedy = advice or _ADVICE.get(reason, "")
    has_error = failure is not None and failure.message != "" and failure.exit_code <= SIGNAL_BASE
    if failure is not None and not has_error:
        text = f"{text}: {failure.message or 'no output'}"
    separator = "\n" if "\n" in text else ". "  # lines of output stay apart from the remedy
    text = f"{text.rstrip('. ')}{separator}{remedy}".strip()
    if failure is not None and has_error:
        text = format_sentence(text, SENTENCE_LIMIT - _MIN_OUTPUT - len(LINE_BREAK))
        output = format_sentence(failure.message, SENTENCE_LIMIT - len(LINE_BREAK) - len(text))
        sentence = f"{output}{LINE_BREAK}{text}"
    else:
        sentence = format_sentence(text)
    return StopVerdict(reason=reason, cause=cause, message=sentence, pod=pod, node=node)


def _judge_size(context: PlanContext) -> StopVerdict | None:
    """Stop a job of an impossible size that has never run; a running one keeps its size."""
    if context.size.desired > 0 or context.observed.membership is not None:
        return None
    return StopVerdict(reason=context.size.reason, cause=Cause.USER_ERROR, message=context.size.message)


def _judge_processes(context: PlanContext) -> StopVerdict | None:
    """Return the verdict on the first failure in this generation, by its clock, that asks to stop."""
    stopping = [
        stopping
        for member, heartbeat in context.heartbeats
        for stopping in _list_stopping_failures(context, heartbeat, member.pod_name, member.node_name)
    ]
    if not stopping:
        return None
    first = min(stopping, key=lambda candidate: (candidate.failure.at, candidate.failure.rank))
    return _judge_origin(context, first, {candidate.failure.rank: candidate for candidate in stopping})


def _judge_origin(
    context: PlanContext, first: _StoppingFailure, by_rank: Mapping[int, _StoppingFailure]
) -> StopVerdict:
    """Return the verdict on the rank that the first report names.

    All ranks report a value that one of them has put into a sum.
    """
    classification, failure = first.classification, first.failure
    origin = parse_nonfinite_rank(failure.message) if classification.cause is Cause.NUMERICAL else None
    if origin is None or origin == failure.rank or context.current is None:
        return _judge_failure(first)
    if origin in by_rank:
        return _judge_failure(by_rank[origin])
    node_rank = origin // max(1, context.current.processes_per_node)
    if node_rank >= len(context.current.members):
        return _judge_failure(first)
    member = context.current.members[node_rank]
    message = (
        f"{classification.sentence}: rank {origin} of pod {member.pod_name} on node {member.node_name}, as rank "
        f"{failure.rank} of pod {first.pod} reports, {format_signs(failure)}: {failure.message}"
    )
    return _build_classified_verdict(classification, message, member.pod_name, member.node_name)


def _judge_preflights(context: PlanContext) -> StopVerdict | None:
    """Return the verdict on a preflight that found an error which no other node can fix: an invalid configuration."""
    for worker in context.non_members:
        heartbeat, given_up = worker.heartbeat, find_give_up_failure(context, worker)
        if heartbeat is not None and given_up is not None and given_up[1].response is Response.STOP:
            failure, classification = given_up
            return _judge_failure(
                _StoppingFailure(classification, heartbeat, failure, worker.pod.name, worker.pod.node)
            )
    return None


def _list_stopping_failures(
    context: PlanContext, heartbeat: HeartbeatRequest, pod: str, node: str
) -> Iterator[_StoppingFailure]:
    """Yield the failures of this generation that ask to stop.

    An agent gave up with one because the first response did not help.
    """
    rules = context.job.spec.recovery.rules
    for failure in heartbeat.failures:
        if failure.generation == heartbeat.generation:
            classification = classify_process_failure(heartbeat, failure, rules)
            if classification.response is Response.STOP:
                yield _StoppingFailure(classification, heartbeat, failure, pod, node)
    if heartbeat.verdict is not None and heartbeat.verdict.generation == heartbeat.generation:
        classification = classify_process_failure(heartbeat, heartbeat.verdict, rules)
        if classification.repeated is Response.STOP:
            yield _StoppingFailure(classification, heartbeat, heartbeat.verdict, pod, node)


def _judge_failure(stopping: _StoppingFailure) -> StopVerdict:
    classification, failure = stopping.classification, stopping.failure
    after = f" after step {failure.step}" if failure.step > 0 else ""
    events = select_kernel_lines(stopping.heartbeat.kernel, failure.at)
    lines = [line for line in events if match_kernel_line(line) is not None]
    kernel = f"; the node's kernel said: {lines[0]}" if lines else ""
    message = (
        f"{classification.sentence}: rank {failure.rank} of pod {stopping.pod} on node {stopping.node}{after}, "
        f"{format_signs(failure)}{kernel}"
    )
    return _build_classified_verdict(classification, message, stopping.pod, stopping.node, failure)


def get_verdict_reason(cause: Cause) -> Reason:
    """Return the reason of a verdict on a failure with this cause."""
    return Reason(cause.value) if cause in _STOPPING_CAUSES else Reason.STOPPED_BY_RULE


def _build_classified_verdict(
    classification: Classification, message: str, pod: str, node: str, failure: ProcessFailure | None = None
) -> StopVerdict:
    cause = classification.cause
    reason = get_verdict_reason(cause)
    advice = get_cause_row(cause).advice
    return _build_verdict(reason, cause, message, failure=failure, advice=advice, pod=pod, node=node)


def _judge_pods(context: PlanContext) -> StopVerdict | None:
    rules = context.job.spec.recovery.rules
    for worker in context.workers.values():
        pod = worker.pod
        if not _has_failed(worker):
            continue
        classification = match_rules(rules, code=pod.exit_code, reason=pod.reason, texts=(pod.message,))
        if classification is None and pod.exit_code is not None:
            classification = classify_exit_code(pod.exit_code)
        if classification is not None and classification.response is Response.STOP:
            code = "" if pod.exit_code is None else f" with code {pod.exit_code}"
            why = ": ".join(part for part in (pod.reason, pod.message) if part) or "no message"
            message = f"{classification.sentence}: pod {pod.name} on node {pod.node} ended{code}: {why}"
            return _build_classified_verdict(classification, message, pod.name, pod.node)
    return None


def _judge_nodes(context: PlanContext) -> StopVerdict | None:
    """Return the verdict on a node's condition or taint that a rule of the job makes a reason to stop."""
    rules = context.job.spec.recovery.rules
    for member, worker in context.members if rules else ():
        match = find_stopping_signal(worker.node, rules) if worker is not None and worker.node is not None else None
        if match is not None:
            problem, classification = match
            seen = f"{problem} {problem.message}".strip()
            message = f"{classification.sentence}: node {member.node_name} of pod {member.pod_name} has {seen}"
            return _build_classified_verdict(classification, message, member.pod_name, member.node_name)
    return None


def _judge_crashes_before_any_step(context: PlanContext) -> StopVerdict | None:
    """Return the verdict on processes that crash before their first step, in a job that has never made one."""
    if context.has_progress:
        return None
    for member, failure in _list_crashed_members(context):
        if failure.step > 0 or is_killed(failure.exit_code):
            continue
        text = "The training process crashed before its first step and again after a restart:"
        return _build_crash_verdict(text, member, failure, get_cause_row(Cause.USER_ERROR).advice)
    return None


def _build_crash_verdict(text: str, member: Member, failure: ProcessFailure, advice: str) -> StopVerdict:
    message = f"{text} rank {failure.rank} of pod {member.pod_name} on node {member.node_name}, {format_signs(failure)}"
    pod, node = member.pod_name, member.node_name
    return _build_verdict(
        Reason.USER_ERROR, Cause.USER_ERROR, message, failure=failure, advice=advice, pod=pod, node=node
    )


def _judge_repeated_crash(context: PlanContext) -> StopVerdict | None:
    """Return the verdict on a program that crashes as it did before its worker was replaced, without a new step since.

    A program that a signal ended gave no reason, so such crashes are never the same.
    """
    workload = context.job.spec.workload
    replaced = [
        entry
        for entry in context.job.status.history
        if entry.is_open and entry.cause is Cause.CRASH and entry.response is not RecoveryResponse.IN_PLACE
    ]
    if workload.explains_exits or not replaced:
        return None
    for member, failure in _list_crashed_members(context):
        if failure.exit_code > SIGNAL_BASE:
            continue
        error = failure.message.partition("\n")[0][:_COMPARED_CHARACTERS]
        output = format_sentence(f"({format_signs(failure)}); {error}")
        earlier = next(
            (entry for entry in replaced if output in entry.message and entry.node != member.node_name), None
        )
        if earlier is None:
            continue
        text = (
            f"The program crashed alike on two nodes without a new step in between: pod {earlier.pod} on node "
            f"{earlier.node}, then"
        )
        folder = workload.checkpoint_folder
        advice = _CHECKPOINT_ADVICE.format(f" in {folder}" if folder else "")
        return _build_crash_verdict(text, member, failure, advice)
    return None


def _list_crashed_members(context: PlanContext) -> Iterator[tuple[Member, ProcessFailure]]:
    """Yield the members whose agents gave up because of a crash."""
    for member, heartbeat in context.heartbeats:
        failure = heartbeat.verdict
        if failure is None:
            continue
        if classify_process_failure(heartbeat, failure, context.job.spec.recovery.rules).cause is Cause.CRASH:
            yield member, failure


def _judge_start_failures(context: PlanContext) -> StopVerdict | None:
    failed = find_start_failures(context)
    if len(failed) < MAX_START_FAILURES:
        return None
    pod = failed[-1].pod
    message = (
        f"{len(failed)} worker pods ended before they could train, the last {pod.name} on node {pod.node} with exit "
        f"code {pod.exit_code} ({pod.reason or 'Error'}): {pod.message or 'no message'}"
    )
    advice = _NEVER_STARTED_ADVICE if pod.reason in _NEVER_STARTED_REASONS else ""
    return _build_verdict(
        Reason.WORKERS_DO_NOT_START, Cause.USER_ERROR, message, advice=advice, pod=pod.name, node=pod.node
    )


def judge_budgets(context: PlanContext, status: TrainingJobStatus) -> StopVerdict | None:
    """Return the verdict that follows from the failures counted so far, including those of this plan."""
    message = describe_exhausted_budget(status.failures, context.job.spec.recovery, context.now)
    if message is None:
        return None
    last = status.failures[-1]
    node, seen = _find_last_output(context, status, last.pod)
    text = f"{message}. Last seen: {seen}" if seen else message
    advice = _ADVICE[Reason.BUDGET_EXHAUSTED]
    if last.cause in (Cause.LOCAL_STORAGE, Cause.OUT_OF_MEMORY):
        advice = f"{get_cause_row(last.cause).advice} {advice}"
    return _build_verdict(Reason.BUDGET_EXHAUSTED, last.cause, text, advice=advice, pod=last.pod, node=node)


def _find_last_output(context: PlanContext, status: PublicStatus, pod: str) -> tuple[str, str]:
    """Return node and last output of the pod that failed last, because its log is deleted with it."""
    faults = [entry for entry in status.history if entry.message and entry.response not in PLANNED_RESPONSES]
    named = next((entry for entry in reversed(faults) if entry.pod == pod), None)
    if named is not None:
        return named.node, named.message
    worker = next((candidate for candidate in context.workers.values() if pod and candidate.pod.name == pod), None)
    if worker is not None:
        given_up = worker.heartbeat.verdict if worker.heartbeat is not None else None
        output = given_up.message if given_up is not None else worker.pod.message
        if output:
            return worker.pod.node, output
    return "", faults[-1].message if faults else ""


def _has_failed(worker: Worker) -> bool:
    return worker.pod.phase is PodPhase.FAILED and not worker.pod.deleting

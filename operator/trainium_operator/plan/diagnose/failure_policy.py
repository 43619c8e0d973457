"""Policy: decide when a job stops for good, with a sentence that states why and what to do.

Invariants: a verdict is about the user's program, data or configuration, or an exhausted budget; it blames no node. A
failure of single workers (a lost node, an eviction) is never a verdict by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from trainium_contract.faults.causes import Cause
from trainium_contract.faults.classify import (
    classify_exit_code,
    get_cause_row,
    match_kernel_line,
    match_rules,
    select_kernel_lines,
)
from trainium_contract.faults.responses import Response
from trainium_contract.status.interruptions import Rung
from trainium_contract.wire.nonfinite_origin import parse_nonfinite_rank
from trainium_operator.plan.diagnose.process_failures import format_signs
from trainium_operator.plan.faults.exits import failed_by_itself, meaning_of_failure
from trainium_operator.plan.faults.failure_budgets import exhausted_budget
from trainium_operator.plan.faults.node_signals import stopping_sign
from trainium_operator.plan.model.observed import PodPhase
from trainium_operator.plan.model.reasons import Reason
from trainium_operator.plan.model.text import format_sentence
from trainium_operator.plan.view.progress import has_progress

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from trainium_contract.faults.classify import Verdict
    from trainium_contract.job import TrainingJobStatus
    from trainium_contract.status.public import PublicStatus
    from trainium_contract.wire.messages import HeartbeatRequest, Member, ProcessFailure
    from trainium_operator.plan.view.facts import Facts
    from trainium_operator.plan.view.workers import Worker

_Reported: TypeAlias = "tuple[Verdict, HeartbeatRequest, ProcessFailure, str, str]"
"""A failure that asks to stop: meaning, heartbeat, failure, pod, node."""
START_ATTEMPTS = 2
"""Worker pods that may fail before any step until the job counts as the cause."""

_REASONS: dict[Cause, Reason] = {
    Cause.USER_CODE: Reason.USER_ERROR,
    Cause.NUMERICAL: Reason.NUMERICAL,
    Cause.MEMORY: Reason.OUT_OF_MEMORY,
    Cause.RUNTIME: Reason.ACCELERATOR_RUNTIME,
}
"""Any other cause stops a job only if a rule of the job names it."""
_ADVICE: dict[Reason, str] = {
    Reason.WORKERS_DO_NOT_START: "Look at the pod's log (kubectl logs); correct the image, the command or the "
    "template.",
    Reason.BUDGET_EXHAUSTED: "See status.history for what failed; correct it or raise the budget, and run the job "
    "again (kubectl trn retry); it resumes from its newest checkpoint.",
}

_ADVICE_ON_CHECKPOINTS = (
    "If it cannot read its newest checkpoint{}, a lost node has torn that file: remove it, and have the program write "
    "each checkpoint under a temporary name and rename it once it is complete, as spec.program.checkpoints.committed "
    "expects. Otherwise correct the program. Then run the job again (kubectl trn retry)."
)
_SIGNAL_BASE = 128
_COMPARED_CHARACTERS = 200
"""Characters of a program's error that are compared, because messages in the history are cut in the middle."""

_NEVER_RAN = frozenset({"StartError", "ContainerCannotRun"})
"""Reasons of a container whose program never started, so that its log is empty."""
_NO_LOG = (
    "The program never ran, so there is no log: correct the image, or command, user and mounts of the template, and "
    "run the job again (kubectl trn retry)."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StopVerdict:
    """Why the job ends."""

    reason: Reason
    cause: Cause
    message: str
    pod: str = ""
    node: str = ""


def reach_verdict(facts: Facts) -> StopVerdict | None:
    """Return the verdict that follows from what workers report or from the spec, if there is one."""
    return (
        _impossible_size(facts)
        or _judge_processes(facts)
        or _judge_preflights(facts)
        or _judge_pods(facts)
        or _judge_nodes(facts)
        or _crashes_before_any_step(facts)
        or _crashes_alike_on_two_nodes(facts)
        or _workers_do_not_start(facts)
    )


def start_failures(facts: Facts) -> tuple[Worker, ...]:
    """Return workers whose own program ended before the job made any step.

    They are kept as evidence and for their logs.
    """
    if has_progress(facts):
        return ()
    return tuple(worker for worker in facts.outsiders if _has_failed(worker) and failed_by_itself(worker.pod))


def _verdict(
    reason: Reason, cause: Cause, message: str, *, advice: str = "", pod: str = "", node: str = ""
) -> StopVerdict:
    """Return a verdict whose message starts with the observation and ends with the remedy, even when it is cut."""
    text = f"{message.rstrip('. ')}. {advice or _ADVICE.get(reason, '')}".strip()
    return StopVerdict(
        reason=reason, cause=cause, message=format_sentence(text[0].upper() + text[1:]), pod=pod, node=node
    )


def _impossible_size(facts: Facts) -> StopVerdict | None:
    """Stop a job of an impossible size that has never run; a running one keeps its size."""
    if facts.size.desired > 0 or facts.observed.membership is not None:
        return None
    return StopVerdict(reason=facts.size.reason, cause=Cause.USER_CODE, message=facts.size.message)


def _judge_processes(facts: Facts) -> StopVerdict | None:
    """Return the verdict on the first failure in this generation, by its clock, that asks to stop."""
    failures = [
        (failure.at, failure.rank, (meaning, beat, failure, member.pod_name, member.node_name))
        for member, beat in facts.beats
        for failure, meaning in _stop_of_process(facts, beat)
    ]
    if not failures:
        return None
    first = min(failures, key=lambda item: item[:2])[2]
    return _judge_origin(facts, first, {rank: item for _, rank, item in failures})


def _judge_origin(facts: Facts, first: _Reported, by_rank: Mapping[int, _Reported]) -> StopVerdict:
    """Return the verdict on the rank that the first report names.

    All ranks report a value that one of them has put into a sum.
    """
    meaning, _, failure, pod, _ = first
    origin = parse_nonfinite_rank(failure.message) if meaning.cause is Cause.NUMERICAL else None
    if origin is None or origin == failure.rank or facts.current is None:
        return _judge_failure(*first)
    if origin in by_rank:
        return _judge_failure(*by_rank[origin])
    place = origin // max(1, facts.current.processes_per_node)
    if place >= len(facts.current.members):
        return _judge_failure(*first)
    member = facts.current.members[place]
    message = (
        f"{meaning.sentence}: rank {origin} of pod {member.pod_name} on node {member.node_name}, as rank "
        f"{failure.rank} of pod {pod} reports, {format_signs(failure)}: {failure.message}"
    )
    return _stop_verdict(meaning, message, member.pod_name, member.node_name)


def _judge_preflights(facts: Facts) -> StopVerdict | None:
    """Return the verdict on a preflight that found an error which no other node can fix: an invalid configuration."""
    for worker in facts.outsiders:
        beat = worker.heartbeat
        if beat is None or beat.verdict is None or not worker.gave_up:
            continue
        meaning = meaning_of_failure(beat, beat.verdict, facts.job.spec.recovery.rules)
        if meaning.response is Response.STOP:
            return _judge_failure(meaning, beat, beat.verdict, worker.pod.name, worker.pod.node)
    return None


def _stop_of_process(facts: Facts, beat: HeartbeatRequest) -> Iterator[tuple[ProcessFailure, Verdict]]:
    """Yield the failures of this generation that ask to stop.

    An agent gave up with one because the first response did not help.
    """
    rules = facts.job.spec.recovery.rules
    for failure in beat.failures:
        if failure.generation == beat.generation:
            meaning = meaning_of_failure(beat, failure, rules)
            if meaning.response is Response.STOP:
                yield failure, meaning
    if beat.verdict is not None and beat.verdict.generation == beat.generation:
        meaning = meaning_of_failure(beat, beat.verdict, rules)
        if meaning.repeated is Response.STOP:
            yield beat.verdict, meaning


def _judge_failure(
    meaning: Verdict, beat: HeartbeatRequest, failure: ProcessFailure, pod: str, node: str
) -> StopVerdict:
    after = f" after step {failure.step}" if failure.step > 0 else ""
    lines = [line for line in select_kernel_lines(beat.kernel, failure.at) if match_kernel_line(line) is not None]
    kernel = f"; the node's kernel said: {lines[0]}" if lines else ""
    message = (
        f"{meaning.sentence}: rank {failure.rank} of pod {pod} on node {node}{after}, {format_signs(failure)}: "
        f"{failure.message or 'no output'}{kernel}"
    )
    return _stop_verdict(meaning, message, pod, node)


def _stop_verdict(meaning: Verdict, message: str, pod: str, node: str) -> StopVerdict:
    reason = _REASONS.get(meaning.cause, Reason.STOPPED_BY_RULE)
    return _verdict(reason, meaning.cause, message, advice=get_cause_row(meaning.cause).advice, pod=pod, node=node)


def _judge_pods(facts: Facts) -> StopVerdict | None:
    rules = facts.job.spec.recovery.rules
    for worker in facts.workers.values():
        pod = worker.pod
        if not _has_failed(worker):
            continue
        ruled = match_rules(rules, code=pod.exit_code, reason=pod.reason, texts=(pod.message,))
        meaning = ruled or (None if pod.exit_code is None else classify_exit_code(pod.exit_code))
        if meaning is not None and meaning.response is Response.STOP:
            code = "" if pod.exit_code is None else f" with code {pod.exit_code}"
            why = ": ".join(part for part in (pod.reason, pod.message) if part) or "no message"
            message = f"{meaning.sentence}: pod {pod.name} on node {pod.node} ended{code}: {why}"
            return _stop_verdict(meaning, message, pod.name, pod.node)
    return None


def _judge_nodes(facts: Facts) -> StopVerdict | None:
    """Return the verdict on a node's condition or taint that a rule of the job makes a reason to stop."""
    rules = facts.job.spec.recovery.rules
    for member, worker in facts.members if rules else ():
        sign = stopping_sign(worker.node, rules) if worker is not None and worker.node is not None else None
        if sign is not None:
            message = f"{sign[0].sentence}: node {member.node_name} of pod {member.pod_name} has {sign[1]}"
            return _stop_verdict(sign[0], message, member.pod_name, member.node_name)
    return None


def _crashes_before_any_step(facts: Facts) -> StopVerdict | None:
    """Return the verdict on processes that crash before their first step, in a job that has never made one."""
    if has_progress(facts):
        return None
    for member, failure in _crashed_members(facts):
        if failure.step > 0:
            continue
        described = _describe_failure(member, failure)
        message = f"The training process crashed before its first step and again after a restart: {described}"
        advice = get_cause_row(Cause.USER_CODE).advice
        return _verdict(
            Reason.USER_ERROR, Cause.USER_CODE, message, advice=advice, pod=member.pod_name, node=member.node_name
        )
    return None


def _crashes_alike_on_two_nodes(facts: Facts) -> StopVerdict | None:
    """Return the verdict on a program that crashes as it did before its worker was replaced, without a new step since.

    A program that a signal ended gave no reason, so such crashes are never the same.
    """
    program = facts.job.spec.program
    replaced = [
        entry
        for entry in facts.job.status.history
        if entry.is_open and entry.cause is Cause.CRASH and entry.rung is not Rung.IN_PLACE
    ]
    if program is None or not replaced:
        return None
    for member, failure in _crashed_members(facts):
        if failure.exit_code > _SIGNAL_BASE:
            continue
        error = failure.message.partition("\n")[0][:_COMPARED_CHARACTERS]
        same = format_sentence(f"({format_signs(failure)}); {error}")
        before = next((entry for entry in replaced if same in entry.message and entry.node != member.node_name), None)
        if before is None:
            continue
        message = (
            f"The program crashed alike on two nodes without a new step in between: pod {before.pod} on node "
            f"{before.node}, then {_describe_failure(member, failure)}"
        )
        advice = _ADVICE_ON_CHECKPOINTS.format("" if program.checkpoints is None else f" in {program.checkpoints.path}")
        return _verdict(
            Reason.USER_ERROR, Cause.USER_CODE, message, advice=advice, pod=member.pod_name, node=member.node_name
        )
    return None


def _crashed_members(facts: Facts) -> Iterator[tuple[Member, ProcessFailure]]:
    """Yield the members whose agents gave up because of a crash."""
    for member, beat in facts.beats:
        failure = beat.verdict
        if failure is None:
            continue
        if meaning_of_failure(beat, failure, facts.job.spec.recovery.rules).cause is Cause.CRASH:
            yield member, failure


def _describe_failure(member: Member, failure: ProcessFailure) -> str:
    return (
        f"rank {failure.rank} of pod {member.pod_name} on node {member.node_name}, {format_signs(failure)}: "
        f"{failure.message or 'no output'}"
    )


def _workers_do_not_start(facts: Facts) -> StopVerdict | None:
    failed = start_failures(facts)
    if len(failed) < START_ATTEMPTS:
        return None
    pod = failed[-1].pod
    message = (
        f"{len(failed)} worker pods ended before they could train, the last {pod.name} on node {pod.node} with exit "
        f"code {pod.exit_code} ({pod.reason or 'Error'}): {pod.message or 'no message'}"
    )
    advice = _NO_LOG if pod.reason in _NEVER_RAN else ""
    return _verdict(Reason.WORKERS_DO_NOT_START, Cause.USER_CODE, message, advice=advice, pod=pod.name, node=pod.node)


def budget_verdict(facts: Facts, status: TrainingJobStatus) -> StopVerdict | None:
    """Return the verdict that follows from the failures counted so far, including those of this plan."""
    message = exhausted_budget(status.failures, facts.job.spec.recovery, facts.now)
    if message is None:
        return None
    last = status.failures[-1]
    node, seen = _last_output(facts, status, last.pod)
    text = f"{message}. Last seen: {seen}" if seen else message
    return _verdict(Reason.BUDGET_EXHAUSTED, last.cause, text, pod=last.pod, node=node)


def _last_output(facts: Facts, status: PublicStatus, pod: str) -> tuple[str, str]:
    """Return node and last output of the pod that failed last, because its log is deleted with it."""
    faults = [entry for entry in status.history if entry.message and entry.rung not in (Rung.RESIZE, Rung.GROW)]
    named = next((entry for entry in reversed(faults) if entry.pod == pod), None)
    if named is not None:
        return named.node, named.message
    worker = next((each for each in facts.workers.values() if pod and each.pod.name == pod), None)
    if worker is not None:
        given_up = worker.heartbeat.verdict if worker.heartbeat is not None else None
        output = given_up.message if given_up is not None else worker.pod.message
        if output:
            return worker.pod.node, output
    return "", faults[-1].message if faults else ""


def _has_failed(worker: Worker) -> bool:
    return worker.pod.phase is PodPhase.FAILED and not worker.pod.deleting

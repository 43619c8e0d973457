"""Find members that failed because of their processes' reports, and the member that caused an interruption.

The cause is, in this order: a member whose process failed for its own reason; one whose kernel log reports a fault at
that time; the only one with a report that a healthy node may also give because of another; the only one that lagged.

Guarantees:
- A member that only lost a peer or waited in a collective is never named, also when its agent gave up. If many members
  report the same time-out, none is named. If no cause is known, all start again and no node is suspected.
- No decision compares the clocks of two machines, except for the order of failures that each have their own reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from trainium_contract.faults.causes import Cause
from trainium_contract.faults.classify import (
    Classification,
    classify_exit,
    classify_sign,
    get_default_responses,
    match_kernel_line,
    select_kernel_lines,
)
from trainium_contract.faults.responses import Response
from trainium_operator.plan.diagnose.failed_member import FailedMember

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from trainium_contract.faults.rules import RecoveryRule
    from trainium_contract.wire.messages import HeartbeatRequest, Member, ProcessFailure, RestartRecord
    from trainium_operator.plan.view.context import PlanContext
    from trainium_operator.plan.view.workers import Worker


_MIN_MEMBERS_TO_COMPARE = 3
"""Minimum number of members whose last steps are compared to find one that lagged."""
_MIN_ATTEMPTS = 2
"""Attempts in which a member must be the only one with a report before it is not a coincidence."""
_AMBIGUOUS_CAUSES = (Cause.PEER_LOST, Cause.YIELDED, Cause.HANG)


def classify_process_failure(
    heartbeat: HeartbeatRequest, failure: ProcessFailure, rules: Sequence[RecoveryRule]
) -> Classification:
    """Classify the end of a process by its exit code, runtime status, output and kernel lines."""
    if not rules and not heartbeat.kernel:
        return _classify_exit_alone(failure.exit_code, failure.runtime_status, failure.output_line)
    return classify_exit(
        failure.exit_code,
        runtime_status=failure.runtime_status,
        output_line=failure.output_line,
        message=failure.message,
        kernel=select_kernel_lines(heartbeat.kernel, failure.at),
        rules=rules,
    )


@lru_cache(maxsize=1024)
def _classify_exit_alone(code: int, runtime_status: int | None, output_line: str) -> Classification:
    """Classify without rules and kernel lines, the usual case: a plan does so for each failure of 1,000 workers."""
    return classify_exit(code, runtime_status=runtime_status, output_line=output_line)


@dataclass(frozen=True, slots=True, kw_only=True)
class Culprit:
    """The member that caused the interruption."""

    member: Member
    cause: Cause
    why: str
    """The observation, as the end of a sentence whose subject is the member's process."""
    failure: ProcessFailure | None = None
    record: RestartRecord | None = None


@dataclass(frozen=True, slots=True)
class _Report:
    """One member's failure in the attempt."""

    member: Member
    failure: ProcessFailure
    meaning: Classification


def find_culprit(context: PlanContext, attempt: int, *, all_reported: bool) -> Culprit | None:
    """Return the culprit of this attempt's interruption; None if it is unknown.

    Comparisons of all reports wait until no report is missing.
    """
    records = {member.pod_uid: record for member, record in find_restarts(context, attempt + 1)}
    reports = tuple(_list_first_failures(context, attempt))
    certain = (
        _find_direct_failure(reports, records)
        or _find_kernel_fault(context, reports, records)
        or _find_recorded_cause(reports, records, context)
    )
    if certain is not None or not all_reported:
        return certain
    return _find_only_reporter(reports, records) or _find_laggard(reports, records)


def find_restarts(context: PlanContext, attempt: int) -> Iterator[tuple[Member, RestartRecord]]:
    """Yield the members' records of the restart that started `attempt` of the current generation."""
    for member, heartbeat in context.heartbeats:
        for record in heartbeat.restarts:
            if record.generation == heartbeat.generation and record.attempt == attempt:
                yield member, record


def find_repeated_sole_report(
    context: PlanContext, member: Member, heartbeat: HeartbeatRequest
) -> tuple[ProcessFailure, Classification] | None:
    """Return the newest failure that only this member reported in two attempts of the generation."""
    rules = context.job.spec.recovery.rules
    if len(heartbeat.failures) < _MIN_ATTEMPTS:
        return None
    suspicious = {
        failure.attempt
        for failure in heartbeat.failures
        if failure.generation == heartbeat.generation
        and _is_ambiguous(classify_process_failure(heartbeat, failure, rules))
    }
    if len(suspicious) < _MIN_ATTEMPTS:  # checked before the other members' reports
        return None
    culprits = [
        _find_only_reporter(tuple(_list_first_failures(context, attempt)), {}) for attempt in sorted(suspicious)
    ]
    failures = [
        culprit.failure for culprit in culprits if culprit is not None and culprit.member.pod_uid == member.pod_uid
    ]
    failure = failures[-1] if len(failures) >= _MIN_ATTEMPTS else None
    return None if failure is None else (failure, classify_process_failure(heartbeat, failure, rules))


def _list_first_failures(context: PlanContext, attempt: int) -> Iterator[_Report]:
    """Yield one failure of each member, the first one first."""
    rules = context.job.spec.recovery.rules
    for member, heartbeat in context.heartbeats:
        reports = [
            _Report(member, failure, classify_process_failure(heartbeat, failure, rules))
            for failure in heartbeat.failures
            if failure.generation == heartbeat.generation and failure.attempt == attempt
        ]
        reports = [report for report in reports if report.meaning.cause is not Cause.YIELDED]
        if reports:
            yield min(reports, key=lambda report: (report.meaning.indirect, report.failure.at))


def _is_ambiguous(classification: Classification) -> bool:
    """Return whether the failure may be the fault of the reporter or of another member."""
    return classification.indirect and classification.cause is not Cause.PEER_LOST


def _find_direct_failure(reports: tuple[_Report, ...], records: dict[str, RestartRecord]) -> Culprit | None:
    direct = [report for report in reports if not report.meaning.indirect]
    if not direct:
        return None
    return _build_culprit(
        min(direct, key=lambda report: (report.member.pod_uid not in records, report.failure.at)), records
    )


def _find_kernel_fault(
    context: PlanContext, reports: tuple[_Report, ...], records: dict[str, RestartRecord]
) -> Culprit | None:
    """Return a member whose processes only lost a peer, but whose kernel log reports a fault."""
    failed_at = {report.member.pod_uid: report.failure.at for report in reports}
    for member, heartbeat in context.heartbeats:
        record = records.get(member.pod_uid)
        at = failed_at.get(member.pod_uid, record.failed_at if record else None)
        if at is None or not heartbeat.kernel:
            continue
        for line in select_kernel_lines(heartbeat.kernel, at):
            sign = match_kernel_line(line)
            if sign is not None and sign.cause is not Cause.OUT_OF_MEMORY:
                sentence = classify_sign(sign).sentence
                why = f"was interrupted while its node's kernel said: {line} ({sentence})"
                return Culprit(member=member, cause=sign.cause, why=why, record=record)
    return None


def _find_recorded_cause(
    reports: tuple[_Report, ...], records: dict[str, RestartRecord], context: PlanContext
) -> Culprit | None:
    """Return a member that recorded a cause, whose failure is no longer among the newest.

    A hang without a failure is one of all ranks together, because a rank that stalls alone has one. A member whose
    cause asks for a replacement leaves instead of restarting, so a record with that cause is of another member.
    """
    indirect = {report.member.pod_uid for report in reports}
    for member, _ in context.heartbeats:
        record = records.get(member.pod_uid)
        if record is None or member.pod_uid in indirect or record.cause in _AMBIGUOUS_CAUSES:
            continue
        if get_default_responses(record.cause).first in _REPLACING_RESPONSES:
            continue
        return Culprit(member=member, cause=record.cause, why=f"stopped ({record.cause.value})", record=record)
    return None


def _find_only_reporter(reports: tuple[_Report, ...], records: dict[str, RestartRecord]) -> Culprit | None:
    ambiguous = [report for report in reports if _is_ambiguous(report.meaning)]
    return _build_culprit(ambiguous[0], records) if len(ambiguous) == 1 else None


def _find_laggard(reports: tuple[_Report, ...], records: dict[str, RestartRecord]) -> Culprit | None:
    """Return the only member that had completed fewer steps than all others, if enough members report."""
    if len(reports) < _MIN_MEMBERS_TO_COMPARE:
        return None
    ordered = sorted(reports, key=lambda report: report.failure.step)
    last, others = ordered[0], ordered[1:]
    if last.failure.step >= others[0].failure.step:
        return None
    why = f"lagged behind: it had completed step {last.failure.step}, the {len(others)} others {others[0].failure.step}"
    record = records.get(last.member.pod_uid)
    return Culprit(member=last.member, cause=Cause.HANG, why=why, failure=last.failure, record=record)


def _build_culprit(report: _Report, records: dict[str, RestartRecord]) -> Culprit:
    failure = report.failure
    why = f"{report.meaning.sentence} ({format_signs(failure)}); {failure.message}"
    return Culprit(
        member=report.member,
        cause=report.meaning.cause,
        why=why,
        failure=failure,
        record=records.get(report.member.pod_uid),
    )


def format_signs(failure: ProcessFailure) -> str:
    """`exit code 1, runtime status 1202`."""
    status = "" if failure.runtime_status is None else f", runtime status {failure.runtime_status}"
    return f"exit code {failure.exit_code}{status}"


_REPLACING_RESPONSES = (Response.REPLACE_NODE, Response.REPLACE_WORKER)


def detect_process_failure(context: PlanContext, member: Member, worker: Worker) -> FailedMember | None:
    """Return the failure of a member that gave up, or that reported a fault which only another node can fix."""
    heartbeat = worker.heartbeat
    if heartbeat is None or not (heartbeat.failures or heartbeat.verdict):
        return None
    given_up = find_give_up_failure(context, worker)
    if given_up is not None and not given_up[1].indirect:
        return _build_failed_member(context, member, worker, *given_up)
    node_failure = _find_replacing_failure(context, heartbeat)
    if node_failure is not None:
        return _build_failed_member(context, member, worker, *node_failure)
    repeated = find_repeated_sole_report(context, member, heartbeat)
    if repeated is None:
        return None
    failure, classification = repeated
    return _build_failed_member(
        context, member, worker, failure, classification, suffix=", and no other worker did, more than once"
    )


def find_culprits(context: PlanContext) -> list[FailedMember]:
    """Return the failure of the culprit if an agent gave up that had only lost its peers; empty without a known one."""
    for _, heartbeat in context.heartbeats:
        failure = heartbeat.verdict
        if (
            failure is None
            or not classify_process_failure(heartbeat, failure, context.job.spec.recovery.rules).indirect
        ):
            continue
        culprit = find_culprit(context, failure.attempt, all_reported=True)
        worker = context.workers.get(culprit.member.pod_uid) if culprit is not None else None
        if (
            culprit is None
            or worker is None
            or get_default_responses(culprit.cause).repeated is not Response.REPLACE_NODE
        ):
            return []
        message = f"pod {culprit.member.pod_name} on node {culprit.member.node_name}: {culprit.why}"
        return [
            FailedMember(
                member=culprit.member,
                worker=worker,
                cause=culprit.cause,
                failed_at=_find_last_seen(context, worker),
                message=message,
            )
        ]
    return []


def find_give_up_failure(context: PlanContext, worker: Worker) -> tuple[ProcessFailure, Classification] | None:
    """Return the failure that made a worker's agent give up, and its meaning."""
    heartbeat = worker.heartbeat
    if heartbeat is None or heartbeat.verdict is None or not worker.has_given_up:
        return None
    return heartbeat.verdict, classify_process_failure(heartbeat, heartbeat.verdict, context.job.spec.recovery.rules)


def find_stop_cause(context: PlanContext) -> Cause:
    """Return NETWORK if every agent that gave up lost only its peers, else CRASH."""
    rules = context.job.spec.recovery.rules
    verdicts = [
        classify_process_failure(heartbeat, heartbeat.verdict, rules)
        for _, heartbeat in context.heartbeats
        if heartbeat.verdict is not None
    ]
    return Cause.NETWORK if verdicts and all(classification.indirect for classification in verdicts) else Cause.CRASH


def _find_replacing_failure(
    context: PlanContext, heartbeat: HeartbeatRequest
) -> tuple[ProcessFailure, Classification] | None:
    """Return a failure in the current generation that asks for another worker at once."""
    if context.current is None:
        return None
    for failure in heartbeat.failures:
        if failure.generation == context.current.generation:
            classification = classify_process_failure(heartbeat, failure, context.job.spec.recovery.rules)
            if classification.response in _REPLACING_RESPONSES:
                return failure, classification
    return None


def _build_failed_member(
    context: PlanContext,
    member: Member,
    worker: Worker,
    failure: ProcessFailure,
    classification: Classification,
    *,
    suffix: str = "",
) -> FailedMember:
    message = (
        f"rank {failure.rank} of pod {worker.pod.name} on node {worker.pod.node}: {classification.sentence} "
        f"({format_signs(failure)}){suffix}; {failure.message}"
    )
    return FailedMember(
        member=member,
        worker=worker,
        cause=classification.cause,
        failed_at=_find_last_seen(context, worker),
        message=message,
        blames_node=classification.response is Response.REPLACE_NODE
        if classification.response in _REPLACING_RESPONSES
        else None,
    )


def _find_last_seen(context: PlanContext, worker: Worker) -> float:
    return worker.agent.last_seen if worker.agent is not None else context.now

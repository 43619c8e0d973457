"""Find members that failed because of what their processes report, and the member that caused an interruption.

A member whose process failed for a reason is the cause, then one whose kernel log reports a fault at that
time, then the only one that reports what a healthy node may report because of another, then the only one that lagged.

Guarantees:
- A member that only lost a peer or waited in a collective is never named, also when its agent gave up; of many that
  report the same time-out none is. If none is known, all start again and no node is suspected.
- No decision compares the clocks of two machines, except for the order of failures that each have their own reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainium_contract.faults.causes import Cause
from trainium_contract.faults.classify import (
    Verdict,
    classify_sign,
    default_responses,
    match_kernel_line,
    select_kernel_lines,
)
from trainium_contract.faults.responses import Response
from trainium_operator.plan.diagnose.loss import Loss
from trainium_operator.plan.faults.ends import meaning_of_failure

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainium_contract.wire.messages import HeartbeatRequest, Member, ProcessFailure, RestartRecord
    from trainium_operator.plan.view.facts import Facts
    from trainium_operator.plan.view.workers import Worker


_FEWEST_TO_COMPARE = 3
"""Members whose last steps are compared to find one that lagged behind."""
_TIMES = 2
"""Attempts in which a member must report something alone before that is no accident."""
_NOBODYS = (Cause.PEER_LOST, Cause.YIELDED, Cause.HANG)


@dataclass(frozen=True, slots=True, kw_only=True)
class Culprit:
    """The member that began it."""

    member: Member
    cause: Cause
    why: str
    """Observation, as the end of a sentence whose subject is the member's process."""
    failure: ProcessFailure | None = None
    record: RestartRecord | None = None


@dataclass(frozen=True, slots=True)
class _Report:
    """One member's failure in the attempt."""

    member: Member
    failure: ProcessFailure
    meaning: Verdict


def find_culprit(facts: Facts, attempt: int, *, all_reported: bool) -> Culprit | None:
    """Return who began the interruption of this attempt of the generation in force; None when nobody is known to.

    What only the comparison of all reports shows is looked at when no report is missing any more.
    """
    records = {member.pod_uid: record for member, record in records_of(facts, attempt + 1)}
    reports = tuple(_reports(facts, attempt))
    certain = (
        _own_failure(reports, records)
        or _kernel_event(facts, reports, records)
        or _own_account(reports, records, facts)
    )
    if certain is not None or not all_reported:
        return certain
    return _only_reporter(reports, records) or _laggard(reports, records)


def records_of(facts: Facts, attempt: int) -> Iterator[tuple[Member, RestartRecord]]:
    """Yield what the members recorded about the restart that started `attempt` of the generation in force."""
    for member, beat in facts.beats:
        for record in beat.restarts:
            if record.generation == beat.generation and record.attempt == attempt:
                yield member, record


def reported_alone(facts: Facts, member: Member, beat: HeartbeatRequest) -> tuple[ProcessFailure, Verdict] | None:
    """Return the newest failure that this member alone reported in two attempts of the generation."""
    rules = facts.job.spec.recovery.rules
    if len(beat.failures) < _TIMES:
        return None
    suspicious = {
        failure.attempt
        for failure in beat.failures
        if failure.generation == beat.generation and _is_ambiguous(meaning_of_failure(beat, failure, rules))
    }
    if len(suspicious) < _TIMES:  # checked before the other members are looked at
        return None
    found = [_only_reporter(tuple(_reports(facts, attempt)), {}) for attempt in sorted(suspicious)]
    alone = [each.failure for each in found if each is not None and each.member.pod_uid == member.pod_uid]
    failure = alone[-1] if len(alone) >= _TIMES else None
    return None if failure is None else (failure, meaning_of_failure(beat, failure, rules))


def _reports(facts: Facts, attempt: int) -> Iterator[_Report]:
    """Yield one failure of each member, one first."""
    rules = facts.job.spec.recovery.rules
    for member, beat in facts.beats:
        found = [
            _Report(member, failure, meaning_of_failure(beat, failure, rules))
            for failure in beat.failures
            if failure.generation == beat.generation and failure.attempt == attempt
        ]
        found = [report for report in found if report.meaning.cause is not Cause.YIELDED]
        if found:
            yield min(found, key=lambda report: (report.meaning.indirect, report.failure.at))


def _is_ambiguous(meaning: Verdict) -> bool:
    """Return whether it may be the reporter's fault, or another's."""
    return meaning.indirect and meaning.cause is not Cause.PEER_LOST


def _own_failure(reports: tuple[_Report, ...], records: dict[str, RestartRecord]) -> Culprit | None:
    own = [report for report in reports if not report.meaning.indirect]
    if not own:
        return None
    return _named(min(own, key=lambda report: (report.member.pod_uid not in records, report.failure.at)), records)


def _kernel_event(facts: Facts, reports: tuple[_Report, ...], records: dict[str, RestartRecord]) -> Culprit | None:
    """Return a member whose processes only lost a peer, but whose kernel log reports a fault."""
    failed_at = {report.member.pod_uid: report.failure.at for report in reports}
    for member, beat in facts.beats:
        record = records.get(member.pod_uid)
        at = failed_at.get(member.pod_uid, record.failed_at if record else None)
        if at is None or not beat.kernel:
            continue
        for line in select_kernel_lines(beat.kernel, at):
            sign = match_kernel_line(line)
            if sign is not None and sign.cause is not Cause.MEMORY:
                sentence = classify_sign(sign).sentence
                why = f"was interrupted while its node's kernel said: {line} ({sentence})"
                return Culprit(member=member, cause=sign.cause, why=why, record=record)
    return None


def _own_account(reports: tuple[_Report, ...], records: dict[str, RestartRecord], facts: Facts) -> Culprit | None:
    """Return a member that recorded a cause, whose failure is no longer among the newest.

    A hang without a failure is one of all ranks alike: any that stalled alone has one.
    """
    indirect = {report.member.pod_uid for report in reports}
    for member, _ in facts.beats:
        record = records.get(member.pod_uid)
        if record is None or member.pod_uid in indirect or record.cause in _NOBODYS:
            continue
        return Culprit(member=member, cause=record.cause, why=f"stopped ({record.cause.value})", record=record)
    return None


def _only_reporter(reports: tuple[_Report, ...], records: dict[str, RestartRecord]) -> Culprit | None:
    ambiguous = [report for report in reports if _is_ambiguous(report.meaning)]
    return _named(ambiguous[0], records) if len(ambiguous) == 1 else None


def _laggard(reports: tuple[_Report, ...], records: dict[str, RestartRecord]) -> Culprit | None:
    """Return the only member that had completed fewer steps than all others, when enough members report."""
    if len(reports) < _FEWEST_TO_COMPARE:
        return None
    ordered = sorted(reports, key=lambda report: report.failure.step)
    last, others = ordered[0], ordered[1:]
    if last.failure.step >= others[0].failure.step:
        return None
    why = f"lagged behind: it had completed step {last.failure.step}, the {len(others)} others {others[0].failure.step}"
    record = records.get(last.member.pod_uid)
    return Culprit(member=last.member, cause=Cause.HANG, why=why, failure=last.failure, record=record)


def _named(report: _Report, records: dict[str, RestartRecord]) -> Culprit:
    failure = report.failure
    why = f"{report.meaning.sentence} ({signs_of(failure)}); {failure.message}"
    return Culprit(
        member=report.member,
        cause=report.meaning.cause,
        why=why,
        failure=failure,
        record=records.get(report.member.pod_uid),
    )


def signs_of(failure: ProcessFailure) -> str:
    """`exit code 1, runtime status 1202`."""
    status = "" if failure.runtime_status is None else f", runtime status {failure.runtime_status}"
    return f"exit code {failure.exit_code}{status}"


_REPLACES = (Response.REPLACE_NODE, Response.REPLACE_WORKER)


def reported(facts: Facts, member: Member, worker: Worker) -> Loss | None:
    """Return a member whose agent gave up, or that reported a fault which only another node can fix."""
    beat = worker.heartbeat
    if beat is None or not (beat.failures or beat.verdict):
        return None
    given_up = given_up_with(facts, worker)
    if given_up is not None and not given_up[1].indirect:
        return _loss(facts, member, worker, *given_up)
    broken = _broken(facts, beat)
    if broken is not None:
        return _loss(facts, member, worker, *broken)
    alone = reported_alone(facts, member, beat)
    if alone is None:
        return None
    failure, meaning = alone
    return _loss(facts, member, worker, failure, meaning, again=", and no other worker did, more than once")


def accused(facts: Facts) -> list[Loss]:
    """Return the culprit where an agent gave up that had only lost its peers; empty when nobody is known to be."""
    for _, beat in facts.beats:
        failure = beat.verdict
        if failure is None or not meaning_of_failure(beat, failure, facts.job.spec.recovery.rules).indirect:
            continue
        culprit = find_culprit(facts, failure.attempt, all_reported=True)
        worker = facts.workers.get(culprit.member.pod_uid) if culprit is not None else None
        if culprit is None or worker is None or default_responses(culprit.cause).repeated is not Response.REPLACE_NODE:
            return []
        message = f"pod {culprit.member.pod_name} on node {culprit.member.node_name}: {culprit.why}"
        return [
            Loss(
                member=culprit.member,
                worker=worker,
                cause=culprit.cause,
                failed_at=_seen(facts, worker),
                message=message,
            )
        ]
    return []


def given_up_with(facts: Facts, worker: Worker) -> tuple[ProcessFailure, Verdict] | None:
    """Return the failure that made a worker's agent give up, and what it stands for."""
    beat = worker.heartbeat
    if beat is None or beat.verdict is None or not worker.gave_up:
        return None
    return beat.verdict, meaning_of_failure(beat, beat.verdict, facts.job.spec.recovery.rules)


def cause_of_standstill(facts: Facts) -> Cause:
    """Return the cause of a generation that stopped although no member reported a failure.

    When the agents state that they gave up because their peers were lost to them, that is what connects them.
    """
    rules = facts.job.spec.recovery.rules
    verdicts = [meaning_of_failure(beat, beat.verdict, rules) for _, beat in facts.beats if beat.verdict is not None]
    return Cause.NETWORK if verdicts and all(meaning.indirect for meaning in verdicts) else Cause.CRASH


def _broken(facts: Facts, beat: HeartbeatRequest) -> tuple[ProcessFailure, Verdict] | None:
    """Return a failure of the generation in force that asks for another worker at once."""
    if facts.current is None:
        return None
    for failure in beat.failures:
        if failure.generation == facts.current.generation:
            meaning = meaning_of_failure(beat, failure, facts.job.spec.recovery.rules)
            if meaning.response in _REPLACES:
                return failure, meaning
    return None


def _loss(
    facts: Facts, member: Member, worker: Worker, failure: ProcessFailure, meaning: Verdict, *, again: str = ""
) -> Loss:
    message = (
        f"rank {failure.rank} of pod {worker.pod.name} on node {worker.pod.node}: {meaning.sentence} "
        f"({signs_of(failure)}){again}; {failure.message}"
    )
    return Loss(
        member=member,
        worker=worker,
        cause=meaning.cause,
        failed_at=_seen(facts, worker),
        message=message,
        blames_node=meaning.response is Response.REPLACE_NODE if meaning.response in _REPLACES else None,
    )


def _seen(facts: Facts, worker: Worker) -> float:
    return worker.agent.last_seen if worker.agent is not None else facts.now

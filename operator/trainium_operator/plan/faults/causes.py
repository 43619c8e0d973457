"""Look-ups in the one table of faults (`fault_table`): sign -> cause, and cause -> blame, budget, suspicion, sentence.

Invariants: a user's error never suspects a node; an infrastructure fault never uses the process budget; the reporter
of a lost peer is never the culprit. Rows of the job (`spec.recovery.rules`) come before the built-in ones.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from trainium_contract.exit_codes import Cause, Response, Verdict, verdict_of
from trainium_contract.faults import lines_near, meaning_of, rule_verdict
from trainium_operator.plan.faults.fault_table import CAUSES, CONDITIONS, LABELS, POD_REASONS, TAINTS, Budget, CauseRow

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trainium_contract.messages import HeartbeatRequest, ProcessFailure
    from trainium_contract.recovery import RecoveryRule
    from trainium_operator.plan.model.observed import PodView

_ROWS: dict[Cause, CauseRow] = {row.cause: row for row in CAUSES}
_SEVERITY: dict[Cause, int] = {row.cause: index for index, row in enumerate(CAUSES)}


def row_of(cause: Cause) -> CauseRow:
    """The row of a cause."""
    return _ROWS[cause]


def budget_of(cause: Cause) -> Budget | None:
    """The budget that a failure of this cause uses; None when it is not counted."""
    return _ROWS[cause].budget


def suspects_node(cause: Cause) -> bool:
    """Whether a worker lost for this cause should come back on another node."""
    return _ROWS[cause].suspects_node


def severity(cause: Cause) -> int:
    """Rank among causes of losses at the same time; 0 names the interruption first."""
    return _SEVERITY[cause]


def cause_of_condition(kind: str, reason: str) -> Cause | None:
    """What a node condition of this type stands for while it is bad; None for types that are not in the table."""
    return CONDITIONS.get((kind, reason)) or CONDITIONS.get((kind, "*"))


def cause_of_taint(key: str) -> Cause | None:
    """What a taint says about its node; None for keys that are not in the table."""
    return _starred(TAINTS, key)


def cause_of_label(key: str, value: str) -> Cause | None:
    """What a node label says about its node; None for those that are not in the table."""
    return LABELS.get((key, value))


def meaning_of_failure(beat: HeartbeatRequest, failure: ProcessFailure, rules: Sequence[RecoveryRule]) -> Verdict:
    """What a process's end that a heartbeat tells of stands for: its code, runtime status, output and kernel lines."""
    if not rules and not beat.kernel:
        return _plain_meaning(failure.exit_code, failure.runtime_status)
    return meaning_of(
        failure.exit_code,
        runtime_status=failure.runtime_status,
        message=failure.message,
        kernel=lines_near(beat.kernel, failure.at),
        rules=rules,
    )


@lru_cache(maxsize=1024)
def _plain_meaning(code: int, runtime_status: int | None) -> Verdict:
    """Without rules and kernel lines, as almost always: every plan asks for each failure of each of 1,000 workers."""
    return meaning_of(code, runtime_status=runtime_status)


def meaning_of_pod(pod: PodView, rules: Sequence[RecoveryRule]) -> Verdict:
    """What a pod in phase Failed stands for."""
    ruled = rule_verdict(rules, code=pod.exit_code, reason=pod.reason, texts=(pod.message,))
    if ruled is not None:
        return ruled
    row = row_of(cause_of_failed_pod(pod))
    by_code = None if pod.exit_code is None else verdict_of(pod.exit_code)
    if by_code is not None and by_code.cause is row.cause:
        return by_code
    response = Response.REPLACE_NODE if row.suspects_node else Response.REPLACE_WORKER
    return Verdict(row.cause, row.blame, response, row.sentence)


def cause_of_failed_pod(pod: PodView) -> Cause:
    """Why a pod in phase Failed ended; an exit code outside the contract means that the agent itself died."""
    if pod.disrupted:
        return Cause.PREEMPTED
    by_reason = _starred(POD_REASONS, pod.reason)
    if by_reason is not None:
        return by_reason
    if pod.exit_code is None:
        return Cause.POD_LOST
    verdict = verdict_of(pod.exit_code)
    return Cause.POD_LOST if verdict.cause is Cause.CRASH else verdict.cause


def died_by_itself(pod: PodView) -> bool:
    """Whether a Failed pod ended by its own program, not by its node, the scheduler, an eviction or a signal."""
    by_reason = _starred(POD_REASONS, pod.reason)
    if pod.disrupted or pod.exit_code is None or by_reason not in (None, Cause.MEMORY, Cause.USER_CODE):
        return False
    by_signal = pod.exit_code > 128 and pod.reason != "OOMKilled"
    return not by_signal and verdict_of(pod.exit_code).response is not Response.RESTART_UNCOUNTED


def _starred(table: Mapping[str, Cause], text: str) -> Cause | None:
    """The row of this text, else of the longest beginning that is in the table with a star."""
    if text in table:
        return table[text]
    found = [key for key in table if key.endswith("*") and text.startswith(key[:-1])]
    return table[max(found, key=len)] if found else None

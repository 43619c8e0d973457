"""Policy: count failures within sliding windows, by who is to blame; more than the budget stops the job.

Invariants: failures of the infrastructure never use the process budget. Workers that are lost within seconds count as
one failure, however many they are. A budget refills as its window moves on.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainium_contract.faults.causes import Budget, Cause
from trainium_contract.faults.classify import get_budget, get_default_responses
from trainium_contract.faults.responses import Response
from trainium_operator.backoff import compute_backoff
from trainium_operator.plan.model.text import format_names

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from trainium_contract.spec.recovery import BudgetSpec, RecoverySpec
    from trainium_contract.status.internal import FailureRecord, InternalStatus

MAX_RECORDS = 128
AVOID_NODE_SECONDS = 3600.0
"""Time for which new workers avoid a node to which a failure was attributed."""
ONE_INCIDENT_SECONDS = 5.0
"""Failures within this time of the first are one; short enough that a pod that fails at every start still counts."""
_BACKOFF_WINDOW_SECONDS = 600.0
_FREE_FAILURES = 3
_FIRST_BACKOFF_SECONDS = 2.0
_MAX_BACKOFF_SECONDS = 300.0


def record_failure(
    failures: tuple[FailureRecord, ...], failure: FailureRecord, recovery: RecoverySpec
) -> tuple[FailureRecord, ...]:
    """Add the failure, and drop those outside every window."""
    budgets = recovery.budgets
    windows = (budgets.process, budgets.infrastructure, *budgets.by_cause.values())
    longest = max(budget.window_seconds for budget in windows)
    kept = [record for record in failures if record.at > failure.at - longest]
    return (*kept, failure)[-MAX_RECORDS:]


def is_recorded(cause: Cause, recovery: RecoverySpec) -> bool:
    """Return whether the status keeps failures of this cause.

    It does if a budget or the pause before new pods counts them.
    """
    return get_budget(cause) is not None or cause is Cause.STORAGE or cause in recovery.budgets.by_cause


def describe_exhausted_budget(failures: tuple[FailureRecord, ...], recovery: RecoverySpec, now: float) -> str | None:
    """Return a sentence about the first exhausted budget; None while all hold.

    A budget larger than the number of records that the status keeps is exhausted when all of them are in the window.
    """
    for budget in _list_budgets(recovery):
        window_seconds, max_failures = budget.limit.window_seconds, budget.limit.max_failures
        records = [record for record in failures if record.at > now - window_seconds and record.cause in budget.causes]
        count = _count_incidents(records)
        if count > min(max_failures, MAX_RECORDS - 1):
            noun = "failure" if count == 1 else "failures"
            return (
                f"{count} {budget.name} {noun} within {window_seconds} s, and spec.recovery.budgets.{budget.path} "
                f"allows {max_failures}: {_summarize_records(records)}"
            )
    return None


@dataclass(frozen=True, slots=True)
class _BudgetLimit:
    path: str
    """Path below `spec.recovery.budgets`."""
    name: str
    causes: frozenset[Cause]
    limit: BudgetSpec


def _list_budgets(recovery: RecoverySpec) -> Iterator[_BudgetLimit]:
    budgets = recovery.budgets
    for budget, limit in ((Budget.PROCESS, budgets.process), (Budget.INFRASTRUCTURE, budgets.infrastructure)):
        causes = frozenset(cause for cause in Cause if get_budget(cause) is budget)
        yield _BudgetLimit(budget.value, budget.value, causes, limit)
    for cause, limit in budgets.by_cause.items():
        yield _BudgetLimit(f"byCause.{cause.value}", cause.value, frozenset({cause}), limit)


def _count_incidents(records: Sequence[FailureRecord]) -> int:
    """Return the number of failures in these records.

    Several workers that fail within seconds are one; each restart in place is one.
    """
    lost_at = [record.at for record in records if _is_worker_lost(record)]
    count, incident_at = len(records) - len(lost_at), -ONE_INCIDENT_SECONDS
    for at in sorted(lost_at):
        if at >= incident_at + ONE_INCIDENT_SECONDS:
            count, incident_at = count + 1, at
    return count


def _is_worker_lost(record: FailureRecord) -> bool:
    return bool(record.node) or get_default_responses(record.cause).first is not Response.RESTART_IN_PLACE


def _summarize_records(records: Sequence[FailureRecord]) -> str:
    """Return where which failures happened, most frequent first."""
    causes = Counter(record.cause.value for record in records)
    pods = Counter(record.pod for record in records if record.pod)
    nodes = Counter(record.node for record in records if record.node)
    parts = [", ".join(f"{count} {cause}" for cause, count in causes.most_common())]
    if pods:
        parts.append(f"pods {format_names(_format_counts(pods))}, the last {records[-1].pod or 'unknown'}")
    if nodes:
        parts.append(f"suspected nodes {format_names(_format_counts(nodes))}")
    return "; ".join(parts)


def _format_counts(names: Counter[str]) -> tuple[str, ...]:
    return tuple(name if count == 1 else f"{name} ({count}x)" for name, count in names.most_common())


def find_backoff_end(failures: tuple[FailureRecord, ...], now: float) -> float:
    """Return when new pods may be created (Unix seconds); the first few failures in ten minutes cost no wait.

    The pause is for pods that fail repeatedly. Failures attributed to a node do not count, because new pods avoid it
    (and the fleet's circuit breaker limits their number), and neither do failures answered in place. Failures within
    seconds count once, or a job that loses all of its pods at once would wait for minutes.
    """
    since = now - _BACKOFF_WINDOW_SECONDS
    recent = [record for record in failures if record.at > since and not record.node and _is_worker_lost(record)]
    excess = _count_incidents(recent) - _FREE_FAILURES
    if excess <= 0:
        return now
    return recent[-1].at + compute_backoff(_FIRST_BACKOFF_SECONDS, _MAX_BACKOFF_SECONDS, excess)


def list_avoided_nodes(failures: tuple[FailureRecord, ...], now: float) -> tuple[str, ...]:
    """Return nodes that a failure in the last `AVOID_NODE_SECONDS` was attributed to, newest last; at most 32."""
    newest: dict[str, float] = {}
    for record in failures:
        if record.node and record.at > now - AVOID_NODE_SECONDS:
            newest[record.node] = max(record.at, newest.get(record.node, 0.0))
    return tuple(sorted(newest, key=lambda node: newest[node]))[-32:]


def has_record(memory: InternalStatus, pod: str) -> bool:
    """Return whether a failure of this pod is already counted."""
    return any(record.pod == pod for record in memory.failures)

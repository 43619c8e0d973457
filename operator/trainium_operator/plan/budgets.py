"""Policy: failures are counted within sliding windows, by who is to blame; more than the budget stops the job."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_contract.exit_codes import Cause
from trainium_contract.job import FailureRecord
from trainium_operator.plan.causes import Budget, budget_of

if TYPE_CHECKING:
    from trainium_contract.job import BudgetSpec, RecoverySpec, TrainingJobStatus

MAX_RECORDS = 128
_BACKOFF_WINDOW_SECONDS = 600.0
_FREE_FAILURES = 3
_LONGEST_BACKOFF_SECONDS = 300.0


def record_failure(
    failures: tuple[FailureRecord, ...], *, at: float, cause: Cause, pod: str, node: str, recovery: RecoverySpec
) -> tuple[FailureRecord, ...]:
    """The records with one more, without those that no window reaches any longer."""
    longest = max(recovery.budgets.process.window_seconds, recovery.budgets.infrastructure.window_seconds)
    kept = [record for record in failures if record.at > at - longest]
    return (*kept, FailureRecord(at=at, cause=cause, pod=pod, node=node))[-MAX_RECORDS:]


def exhausted_budget(failures: tuple[FailureRecord, ...], recovery: RecoverySpec, now: float) -> str | None:
    """A sentence about the first budget that is used up; None while all hold.

    A budget larger than the number of records that status keeps counts as used up when all of them are in the window.
    """
    for budget, allowed in (
        (Budget.PROCESS, recovery.budgets.process),
        (Budget.INFRASTRUCTURE, recovery.budgets.infrastructure),
    ):
        counted = [record for record in _within(failures, allowed, now) if budget_of(record.cause) is budget]
        if len(counted) > min(allowed.max_failures, MAX_RECORDS - 1):
            return (
                f"{len(counted)} {budget.value} failures within {allowed.window_seconds} s, and "
                f"spec.recovery.budgets.{budget.value} allows {allowed.max_failures}; the last was in pod "
                f"{counted[-1].pod or 'unknown'}"
            )
    return None


def backoff_until(failures: tuple[FailureRecord, ...], now: float) -> float:
    """When new pods may be created (Unix seconds); the first few failures in ten minutes cost no wait.

    Crashes that were answered in place suspect no node and need no pod, so they do not count here.
    """
    recent = [
        record.at
        for record in failures
        if record.at > now - _BACKOFF_WINDOW_SECONDS and (record.node or record.cause is not Cause.CRASH)
    ]
    excess = len(recent) - _FREE_FAILURES
    if excess <= 0:
        return now
    return recent[-1] + min(_LONGEST_BACKOFF_SECONDS, 2.0 ** min(excess, 16))


def avoided_nodes(failures: tuple[FailureRecord, ...], now: float, seconds: float) -> tuple[str, ...]:
    """Nodes that a failure of the last `seconds` was put down to, newest last; at most 32."""
    newest: dict[str, float] = {}
    for record in failures:
        if record.node and record.at > now - seconds:
            newest[record.node] = max(record.at, newest.get(record.node, 0.0))
    return tuple(sorted(newest, key=lambda node: newest[node]))[-32:]


def _within(failures: tuple[FailureRecord, ...], budget: BudgetSpec, now: float) -> list[FailureRecord]:
    return [record for record in failures if record.at > now - budget.window_seconds]


def has_record_of(status: TrainingJobStatus, pod: str) -> bool:
    """Whether a failure of this pod is counted already."""
    return any(record.pod == pod for record in status.failures)

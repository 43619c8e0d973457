"""Classify the end of a process or a pod by the contract's table of faults."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from trainium_contract.faults import classify
from trainium_contract.faults.causes import Cause
from trainium_contract.faults.responses import Response

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainium_contract.faults.classify import Verdict
    from trainium_contract.faults.rules import RecoveryRule
    from trainium_contract.wire.messages import HeartbeatRequest, ProcessFailure
    from trainium_operator.plan.model.observed import PodView


def meaning_of_failure(beat: HeartbeatRequest, failure: ProcessFailure, rules: Sequence[RecoveryRule]) -> Verdict:
    """Classify the end of a process by its exit code, runtime status, output and kernel lines."""
    if not rules and not beat.kernel:
        return _plain_meaning(failure.exit_code, failure.runtime_status, failure.output_line)
    return classify.classify_exit(
        failure.exit_code,
        runtime_status=failure.runtime_status,
        output_line=failure.output_line,
        message=failure.message,
        kernel=classify.select_kernel_lines(beat.kernel, failure.at),
        rules=rules,
    )


@lru_cache(maxsize=1024)
def _plain_meaning(code: int, runtime_status: int | None, output_line: str) -> Verdict:
    """Classify without rules and kernel lines, the usual case: a plan does so for each failure of 1,000 workers."""
    return classify.classify_exit(code, runtime_status=runtime_status, output_line=output_line)


def classify_pod_failure(pod: PodView, rules: Sequence[RecoveryRule]) -> Verdict:
    """Classify a pod in phase Failed."""
    return classify.classify_pod_failure(
        reason=pod.reason,
        code=pod.exit_code,
        disrupted=pod.disrupted,
        disruption=pod.disruption,
        message=pod.message,
        rules=rules,
    )


def cause_of_leaving(pod: PodView) -> Cause:
    """Return why a pod that was asked to leave must leave."""
    return classify.classify_disruption(pod.disruption) if pod.disrupted else Cause.PREEMPTED


def failed_by_itself(pod: PodView) -> bool:
    """Return whether a Failed pod ended by its own program, not by its node, the scheduler, an eviction or a signal."""
    by_reason = classify.find_pod_reason_cause(pod.reason)
    if pod.disrupted or pod.exit_code is None or by_reason not in (None, Cause.MEMORY, Cause.USER_CODE):
        return False
    by_signal = pod.exit_code > 128 and pod.reason != "OOMKilled"
    return not by_signal and classify.classify_exit_code(pod.exit_code).response is not Response.RESTART_UNCOUNTED

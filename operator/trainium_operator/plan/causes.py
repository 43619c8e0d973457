"""The one table of faults: what a pod's end or a process's exit means, whom it blames, and which budget it uses.

Invariants: a user's error never suspects a node; an infrastructure fault never uses the process budget; the reporter
of a lost peer is never the culprit.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from trainium_contract.exit_codes import Cause, Response, verdict_of

if TYPE_CHECKING:
    from trainium_operator.plan.model import PodView


class Budget(StrEnum):
    """Which of `spec.recovery.budgets` a failure uses."""

    PROCESS = "process"
    INFRASTRUCTURE = "infrastructure"


_BUDGETS: dict[Cause, Budget] = {
    Cause.CRASH: Budget.PROCESS,
    Cause.MEMORY: Budget.PROCESS,
    Cause.NODE_LOST: Budget.INFRASTRUCTURE,
    Cause.POD_LOST: Budget.INFRASTRUCTURE,
    Cause.DEVICE: Budget.INFRASTRUCTURE,
}

_SEVERITY: tuple[Cause, ...] = (
    Cause.DEVICE,
    Cause.MEMORY,
    Cause.CRASH,
    Cause.NODE_LOST,
    Cause.POD_LOST,
    Cause.STORAGE,
    Cause.PREEMPTED,
    Cause.CAPACITY,
    Cause.YIELDED,
    Cause.FINISHED,
    Cause.PEER_LOST,
)
"""When several workers are lost at once, the first of these names the interruption."""

_POD_REASONS: dict[str, Cause] = {
    "OOMKilled": Cause.MEMORY,
    "Evicted": Cause.PREEMPTED,
    "Preempting": Cause.PREEMPTED,
    "TerminationByKubelet": Cause.PREEMPTED,
    "DeletionByTaintManager": Cause.PREEMPTED,
    "EvictionByEvictionAPI": Cause.PREEMPTED,
    "PreemptionByScheduler": Cause.PREEMPTED,
    "NodeLost": Cause.NODE_LOST,
    "NodeShutdown": Cause.NODE_LOST,
    "Shutdown": Cause.NODE_LOST,
    "ContainerStatusUnknown": Cause.NODE_LOST,
    "Unknown": Cause.NODE_LOST,
    "DeletionByPodGC": Cause.NODE_LOST,
    "NodeAffinity": Cause.CAPACITY,
    "NodeName": Cause.CAPACITY,
    "OutOfcpu": Cause.CAPACITY,
    "OutOfmemory": Cause.CAPACITY,
    "OutOfpods": Cause.CAPACITY,
    "UnexpectedAdmissionError": Cause.CAPACITY,
}


def budget_of(cause: Cause) -> Budget | None:
    """The budget that a failure of this cause uses; None when it is not counted."""
    return _BUDGETS.get(cause)


def suspects_node(cause: Cause) -> bool:
    """Whether a worker lost for this cause should come back on another node."""
    return cause in (Cause.DEVICE, Cause.CRASH, Cause.NODE_LOST)


def severity(cause: Cause) -> int:
    """Rank among causes of losses at the same time; 0 names the interruption first."""
    return _SEVERITY.index(cause) if cause in _SEVERITY else len(_SEVERITY)


def cause_of_failed_pod(pod: PodView) -> Cause:
    """Why a pod in phase Failed ended; an exit code outside the contract means that the agent itself died."""
    if pod.disrupted:
        return Cause.PREEMPTED
    if pod.reason in _POD_REASONS:
        return _POD_REASONS[pod.reason]
    if pod.exit_code is None:
        return Cause.POD_LOST
    verdict = verdict_of(pod.exit_code)
    return Cause.POD_LOST if verdict.cause is Cause.CRASH else verdict.cause


def died_by_itself(pod: PodView) -> bool:
    """Whether a Failed pod ended by its own program, not by its node, the scheduler, an eviction or a signal."""
    if pod.disrupted or pod.exit_code is None or _POD_REASONS.get(pod.reason, Cause.MEMORY) is not Cause.MEMORY:
        return False
    by_signal = pod.exit_code > 128 and pod.reason != "OOMKilled"
    return not by_signal and verdict_of(pod.exit_code).response is not Response.RESTART_UNCOUNTED

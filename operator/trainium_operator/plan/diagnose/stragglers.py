"""Report members that are slower than the others, and replace one if a spare is free or training is faster without it.

The pace of a member is its own work in a step, without the wait for its peers, relative to the median member's. All
ranks wait for the slowest in each step. So without it a step is shorter by the excess of its work over that of the next
slowest, at the best size for one node less.

Guarantees:
- No member is replaced before it has been slow for `persistSteps`, for a load that all members bear, during an
  interruption, or while nodes may not be acted on. One member is replaced at a time.
- A member counts as slow until it is clearly not (hysteresis); differences too small to matter never count.
- Fewer nodes must be clearly faster by the ranks' measurements, and repay the change in the remaining steps.
"""

from __future__ import annotations

from statistics import median_low
from typing import TYPE_CHECKING

from trainium_contract.faults.causes import Cause
from trainium_contract.status.public import StragglerStatus
from trainium_operator.plan.diagnose.failed_member import FailedMember
from trainium_operator.plan.model.actions import Event, PolicyResult, build_event
from trainium_operator.plan.model.reasons import Reason
from trainium_operator.plan.view.context import PlanContext, is_second_choice
from trainium_operator.plan.view.progress import measure_resize_seconds

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trainium_contract.job import TrainingJobStatus
    from trainium_contract.spec.recovery import StragglerSpec


_MAX_LISTED = 8
_MIN_STEPS = 3
_MIN_EXCESS_SECONDS = 0.1
"""A member that costs less than this in a step is no straggler, whatever the ratio."""
_LOADED_SHARE = 0.2
"""Median share of processor time that the others wait for, from which the hosts count as loaded."""


def find_stragglers(context: PlanContext, status: TrainingJobStatus) -> PolicyResult:
    """Update the list, and report each member that has been slow for long, once."""
    if not _trains_steadily(context):
        return PolicyResult(status=status)
    spec, step = context.job.spec.recovery.stragglers, context.last_step
    listed = {entry.pod: entry for entry in status.stragglers}
    paces = _compute_relative_paces(context)
    stragglers: list[StragglerStatus] = []
    events: list[Event] = []
    requeue_at: list[float] = []
    for pod, (node, ratio) in paces.items():
        entry = listed.get(pod)
        if ratio < (spec.slowdown if entry is None else 1 + (spec.slowdown - 1) / 2):
            continue
        if entry is None:
            entry = StragglerStatus(pod=pod, node=node, since_step=step, slowdown=round(ratio, 2))
        elif step < entry.since_step:  # training went back to an earlier step
            entry = entry.replaced(since_step=step)
        if not entry.reported and step - entry.since_step >= spec.persist_steps:
            entry = entry.replaced(reported=True, slowdown=round(ratio, 2))
            message = _describe_straggler(entry, step) + _explain_retention(context, pod, spec)
            events.append(build_event(Reason.STRAGGLER_DETECTED, message, warning=True, pod=pod))
            requeue_at.append(context.now)  # it is reported first, and the next plan hands its rank over
        stragglers.append(entry)
    for pod, entry in listed.items():
        if entry.reported and pod in paces and all(straggler.pod != pod for straggler in stragglers):
            message = f"Pod {pod} on node {entry.node} keeps pace with the others again."
            events.append(build_event(Reason.STRAGGLER_RECOVERED, message, pod=pod))
    stragglers.sort(key=lambda entry: (-entry.reported, -entry.slowdown, entry.pod))
    status = status.replaced(stragglers=tuple(stragglers[:_MAX_LISTED]))
    return PolicyResult(status=status, events=tuple(events), requeue_at=tuple(requeue_at))


def find_straggler_handover(context: PlanContext) -> list[FailedMember]:
    """Return the failure of the slowest reported member if a spare takes over or training is faster without it."""
    spec = context.job.spec.recovery.stragglers
    slow = {entry.pod: entry for entry in context.job.status.stragglers if entry.reported}
    if not slow or not spec.evict or context.observed.fleet.frozen or not _trains_steadily(context):
        return []
    paces = {
        pod: ratio
        for pod, (_, ratio) in _compute_relative_paces(context).items()
        if pod in slow and ratio >= spec.slowdown
    }
    if not paces:
        return []
    slowest = max(paces, key=lambda pod: paces[pod])
    if _is_slowed_by_host_load(context, slowest, spec.slowdown):
        return []
    member, worker = next(pair for pair in context.members if pair[0].pod_name == slowest)
    if worker is None or worker.silent or worker.node_bad or worker.pod.deleting:
        return []
    entry = slow[slowest].replaced(slowdown=round(paces[slowest], 2))
    message = _describe_straggler(entry, context.last_step)
    has_replacement = any(not is_second_choice(context, candidate) for candidate in context.candidates)
    if not has_replacement and not is_faster_without_straggler(context):
        return []
    return [
        FailedMember(
            member=member,
            worker=worker,
            cause=Cause.STRAGGLER,
            failed_at=context.now,
            message=message if has_replacement else f"{message}; the others are faster without it",
            can_save=True,
            awaits_replacement=has_replacement,
        )
    ]


def _trains_steadily(context: PlanContext) -> bool:
    """Return whether all members train and no recovery or resize is in progress."""
    status = context.job.status
    if context.current is None or not context.is_settled or status.membership.generation != context.current.generation:
        return False
    if len(context.current.members) < status.desired:
        return False
    return not status.list_open_interruptions()


def _compute_relative_paces(context: PlanContext) -> Mapping[str, tuple[str, float]]:
    """Return pod -> (node, own work relative to the median member's); empty while too few report."""
    own_seconds = {
        member.pod_name: (member.node_name, heartbeat.timing.own_seconds)
        for member, heartbeat in context.heartbeats
        if heartbeat.timing is not None and heartbeat.timing.steps >= _MIN_STEPS
    }
    if len(own_seconds) < 2 or len(own_seconds) < len(context.heartbeats):
        return {}
    median_seconds = median_low([seconds for _, seconds in own_seconds.values()])
    if median_seconds <= 0:
        return {}
    return {
        pod: (node, seconds / median_seconds if seconds - median_seconds >= _MIN_EXCESS_SECONDS else 1.0)
        for pod, (node, seconds) in own_seconds.items()
    }


def _is_slowed_by_host_load(context: PlanContext, pod: str, slowdown: float) -> bool:
    """Return whether it is slow only because processors are scarce on all members' nodes.

    Another node is then no better: without the waits for a processor it would keep pace, and the others wait for theirs
    too.
    """
    timings = {
        member.pod_name: heartbeat.timing for member, heartbeat in context.heartbeats if heartbeat.timing is not None
    }
    waits = {name: timing.cpu_wait for name, timing in timings.items() if timing.cpu_wait is not None}
    others = [share for name, share in waits.items() if name != pod]
    if pod not in waits or len(others) < len(timings) - 1 or median_low(others) < _LOADED_SHARE:
        return False
    busy_seconds = {name: timings[name].own_seconds * (1.0 - share) for name, share in waits.items()}
    median_seconds = median_low(busy_seconds.values())
    return busy_seconds[pod] < slowdown * median_seconds or busy_seconds[pod] - median_seconds < _MIN_EXCESS_SECONDS


def _explain_retention(context: PlanContext, pod: str, spec: StragglerSpec) -> str:
    if not _is_slowed_by_host_load(context, pod, spec.slowdown):
        return ""
    return "; it waits for a processor, as the others do, so it is not replaced: look at what else runs on these nodes"


def _describe_straggler(entry: StragglerStatus, step: int) -> str:
    return (
        f"Pod {entry.pod} on node {entry.node} needs {entry.slowdown:g} times as long for its own work in a step as "
        f"the median worker, for {step - entry.since_step} steps"
    )


_MIN_SPEEDUP = 1.05
"""Minimum speed-up without it."""


def is_faster_without_straggler(context: PlanContext) -> bool:
    """Return whether the job is faster on fewer nodes than on all of them with the slowest one."""
    status, present = context.job.status, len(context.members)
    size = context.size.find_legal_size(present - 1)
    speed = context.size.compute_speed(size, present)
    timings = [heartbeat.timing for _, heartbeat in context.heartbeats if heartbeat.timing is not None]
    if not speed or len(timings) < max(2, present) or not _needs_no_compilation(context, size):
        return False
    second_slowest, slowest = sorted(timing.own_seconds for timing in timings)[-2:]
    step_seconds = max(timing.step_seconds for timing in timings)
    seconds_without_it = max(0.0, step_seconds - (slowest - second_slowest)) / speed
    if seconds_without_it * _MIN_SPEEDUP > step_seconds:
        return False
    resize_seconds, total = measure_resize_seconds(status), status.progress.total_steps
    if resize_seconds is None or not total:
        return True
    return max(0, total - status.progress.step) * (step_seconds - seconds_without_it) > 2 * resize_seconds


def _needs_no_compilation(context: PlanContext, size: int) -> bool:
    compiled = (*context.size.compiled_first, *context.job.status.compiled.sizes)
    return not context.job.spec.workload.compile_command or size in compiled

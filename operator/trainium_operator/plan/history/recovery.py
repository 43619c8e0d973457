"""Close interruptions at the first new step, or when the interrupted run is given up.

The agents' records are the best source of when training resumed and from which step; without one, the first heartbeat
with a new step counts. Seconds are from the failure to the first step that had not been completed before. After the
last step there is none: then the interruption ends when the ranks are again in a stage with no step left. For a program
that reports no steps it ends when the processes of all members run again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from trainium_contract.faults.causes import Cause
from trainium_contract.status.interruptions import PLANNED_RESPONSES, Interruption, RecoveryResponse
from trainium_contract.wire.messages import Progress, RestartRecord, WorkerPhase
from trainium_operator.plan.history.interruptions import open_interruption, replace_entry
from trainium_operator.plan.model.text import format_sentence
from trainium_operator.plan.view.context import select_current_heartbeats
from trainium_operator.plan.view.node_problems import is_clock_in_sync

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainium_contract.job import TrainingJobStatus
    from trainium_operator.plan.view.context import PlanContext

_UNSEEN_SECONDS = 10.0
"""The time of a fault is corrected only by this much or more, as after a time without an operator."""
_UNREPORTED_SECONDS = 60.0
"""Steps of this time may be missing in the last heartbeats before a fault."""


@dataclass(frozen=True, slots=True)
class _Resumption:
    at: float
    resume_step: int | None
    step_before: int
    stopped_at: float = 0.0
    """When the ranks stopped, if they trained on after the decision; 0 if unknown."""


def close_recovered(context: PlanContext, status: TrainingJobStatus) -> TrainingJobStatus:
    """Record when, from which step and at what cost training resumed, for each open interruption that is over."""
    status = _count_released_steps(context, status)
    for index, entry in enumerate(status.history):
        if not entry.is_open:
            continue
        if not context.job.spec.workload.reports_each_step:
            entry = entry.replaced(  # noqa: PLW2901
                step_before=max([entry.step_before, *_count_steps_before(context, entry)]),
                message=_describe_kill(context, entry),
            )
            status = replace_entry(status, index, entry)
            if _awaits_first_step(context, entry):
                continue
        resumption = (
            _find_recorded_resumption(context, entry)
            or _find_observed_resumption(context, entry)
            or _find_stepless_resumption(context, entry)
        )
        if resumption is None:
            continue
        if index < len(status.history) - 1:
            # The ranks stopped last for the newest interruption, not for this one.
            resumption = replace(resumption, stopped_at=0.0)
        status = replace_entry(status, index, _close_entry(entry, resumption, context.now))
    return status


_KILLED = (
    "processes did not end in the grace period after SIGTERM and were killed, and what they made meanwhile is computed "
    "again: have the program handle SIGTERM, or call should_stop()"
)


def _describe_kill(context: PlanContext, entry: Interruption) -> str:
    """Return the message of an interruption, with what its planned change cost if ranks ignored the request to stop."""
    if not _was_killed(context, entry.generation) or _KILLED in entry.message:
        return entry.message
    return format_sentence(f"{entry.message}; {_KILLED}")


def _was_killed(context: PlanContext, generation: int) -> bool:
    return any(heartbeat.killed_generation == generation > 0 for _, heartbeat in context.heartbeats)


def _awaits_first_step(context: PlanContext, entry: Interruption) -> bool:
    """Return whether a program's rank without a step still loads; ranks that report no steps run at once."""
    return not context.has_reported_steps and any(
        heartbeat.phase is WorkerPhase.LOADING
        or (heartbeat.generation, heartbeat.attempt) <= (entry.generation, entry.attempt)
        for _, heartbeat in context.heartbeats
    )


def _count_steps_before(context: PlanContext, entry: Interruption) -> list[int]:
    """Return the steps of ranks that an open interruption has not ended yet.

    A program may train until it is asked to stop, and repeats what it has not saved. An agent shows the last step of
    the previous generation until its ranks train in the new one.
    """
    return [
        heartbeat.progress.step
        for _, heartbeat in context.heartbeats
        if heartbeat.progress is not None
        and (
            (heartbeat.generation, heartbeat.attempt) <= (entry.generation, entry.attempt)
            or heartbeat.phase in (WorkerPhase.JOINING, WorkerPhase.LOADING)
        )
    ]


def close_lapsed(context: PlanContext, status: TrainingJobStatus) -> TrainingJobStatus:
    """Close open entries of the current generation if it was never left; call when no member is failed any more.

    A silent worker was seen again, a notice was withdrawn, or a person wrote the entry: no later generation closes it.
    """
    current = context.current
    if current is None or status.membership.generation != current.generation or not context.is_settled:
        return status
    attempt = max(heartbeat.attempt for _, heartbeat in context.heartbeats)
    for index, entry in enumerate(status.history):
        if not entry.is_open:
            continue
        is_current = (entry.generation, entry.attempt) >= (current.generation, attempt)
        if is_current and (
            context.last_step > entry.step_before or _are_ranks_past_steps(context) or context.steady_time is not None
        ):
            resumption = _Resumption(at=context.now, resume_step=entry.step_before, step_before=-1)
            status = replace_entry(status, index, _close_entry(entry, resumption, context.now))
    return status


def close_abandoned(context: PlanContext, status: TrainingJobStatus) -> TrainingJobStatus:
    """Close every open interruption: the time after a suspension is charged to no cause."""
    for index, entry in enumerate(status.history):
        if entry.is_open:
            seconds = round(max(0.0, context.now - (entry.failed_at or context.now)), 3)
            status = replace_entry(status, index, entry.replaced(recovered_seconds=seconds))
    return status


def release_generation(context: PlanContext, status: TrainingJobStatus) -> TrainingJobStatus:
    """Close every open interruption, and record the last step of ranks that ignored the request to save and leave."""
    status = close_abandoned(context, status)
    released = context.observed.membership
    if released is None:
        return status
    # The status gives the generation up at once, while its agents report until their pods end.
    context = replace(context, current=released, heartbeats=select_current_heartbeats(context.observed, released))
    if not _was_killed(context, released.generation):
        return status
    newest = status.history[-1] if status.history else None
    if newest is None or (newest.response, newest.generation) != (RecoveryResponse.SUSPEND, released.generation):
        message = f"all workers were released; {_KILLED}"
        status = open_interruption(
            context, status, cause=Cause.RESIZE, response=RecoveryResponse.SUSPEND, message=message
        )
        status = close_abandoned(context, status)
    entry = status.history[-1]
    step_before = max([entry.step_before, *_count_steps_before(context, entry)])
    return replace_entry(status, len(status.history) - 1, entry.replaced(step_before=step_before))


def _count_released_steps(context: PlanContext, status: TrainingJobStatus) -> TrainingJobStatus:
    """Record what the newest interruption cost if the job was released in it, once the next generation has resumed."""
    entry = status.history[-1] if status.history else None
    if entry is None or entry.is_open or entry.step_before < 0 or entry.resume_step is not None:
        return status
    resumed = [
        heartbeat.progress.resume_step
        for _, heartbeat in context.heartbeats
        if heartbeat.generation > entry.generation
        and heartbeat.progress is not None
        and heartbeat.progress.resume_step is not None
    ]
    if not resumed or entry.response is RecoveryResponse.STOP:
        return status
    step_before, resume_step = max(entry.step_before, min(resumed)), min(resumed)
    entry = entry.replaced(step_before=step_before, resume_step=resume_step, steps_lost=step_before - resume_step)
    return replace_entry(status, len(status.history) - 1, entry)


def _close_entry(entry: Interruption, resumed: _Resumption, now: float) -> Interruption:
    entry = _redate(entry, resumed, now)
    failed_at = entry.failed_at if entry.failed_at is not None else now
    # Where nobody reports the last step, the ranks had at least made the one that they resume from.
    step_before = max(entry.step_before, resumed.step_before, resumed.resume_step or 0)
    steps_lost = None if resumed.resume_step is None else step_before - resumed.resume_step
    return entry.replaced(
        recovered_seconds=round(min(max(0.0, resumed.at - failed_at), max(0.0, now - failed_at)), 3),
        step_before=step_before,
        resume_step=resumed.resume_step,
        steps_lost=steps_lost,
    )


def _redate(entry: Interruption, resumed: _Resumption, now: float) -> Interruption:
    """Date the failure to when the ranks stopped, if they trained on, or stopped long before it was noticed."""
    if entry.failed_at is None or not resumed.stopped_at:
        return entry
    stopped_at = min(resumed.stopped_at, resumed.at, now)
    trained_on = stopped_at > entry.failed_at and _is_planned(entry)
    if not trained_on and abs(stopped_at - entry.failed_at) < _UNSEEN_SECONDS:
        return entry
    unseen_seconds = max(0.0, entry.failed_at - stopped_at)
    return entry.replaced(
        failed_at=stopped_at,
        detected_seconds=None if entry.detected_seconds is None else round(entry.detected_seconds + unseen_seconds, 3),
    )


def _find_recorded_resumption(context: PlanContext, entry: Interruption) -> _Resumption | None:
    """Return the agents' record of the restart that ended this interruption."""
    records = [record for record in _list_later_records(context, entry) if record.resumed_at is not None]
    if not context.job.spec.workload.reports_each_step and context.has_reported_steps:
        # Ranks without steps count as resumed when they run again; the rank with the steps has the better time.
        records = [record for record in records if record.step_before >= 0]
    if not records:
        return None
    last = max(records, key=lambda record: record.resumed_at or 0.0)
    steps = [record.resume_step for record in records if record.resume_step is not None]
    return _Resumption(
        at=last.resumed_at or 0.0,
        resume_step=min(steps, default=None),
        step_before=max(record.step_before for record in records),
        stopped_at=last.failed_at if last.attempt == 0 else 0.0,
    )


def _list_later_records(context: PlanContext, entry: Interruption) -> Iterator[RestartRecord]:
    """Yield records of the current generation, if possible by agents whose clocks are in sync.

    Records of older generations are never completed.
    """
    heartbeats = [heartbeat for _, heartbeat in context.heartbeats]
    for heartbeat in [candidate for candidate in heartbeats if is_clock_in_sync(candidate)] or heartbeats:
        for record in heartbeat.restarts:
            is_later = (record.generation, record.attempt) > (entry.generation, entry.attempt)
            if is_later and record.generation == heartbeat.generation:
                yield record


def _find_observed_resumption(context: PlanContext, entry: Interruption) -> _Resumption | None:
    """Return the first heartbeat after the interruption with a new step, if no agent's record is pending."""
    if any(record.resumed_at is None for record in _list_later_records(context, entry)):
        return None
    for _, heartbeat in context.heartbeats:
        is_later = (heartbeat.generation, heartbeat.attempt) > (entry.generation, entry.attempt)
        progress = heartbeat.progress
        if not is_later or heartbeat.phase is not WorkerPhase.TRAINING or progress is None:
            continue
        # After a graceful change the ranks resume past the step that was known at the decision.
        if progress.step > max(entry.step_before, progress.resume_step or 0):
            has_valid_time = is_clock_in_sync(heartbeat) and progress.updated > (entry.failed_at or 0.0)
            at = _find_first_new_step_time(entry, progress) if has_valid_time else context.now
            stopped_at = _find_stop_time(context, entry, progress)
            return _Resumption(at=at, resume_step=progress.resume_step, step_before=-1, stopped_at=stopped_at)
        if not progress.training and progress.step >= entry.step_before:
            has_valid_time = is_clock_in_sync(heartbeat) and progress.stage_since > (entry.failed_at or 0.0)
            at = progress.stage_since if has_valid_time else context.now
            return _Resumption(at=at, resume_step=progress.resume_step, step_before=-1)
    return None


def _find_stepless_resumption(context: PlanContext, entry: Interruption) -> _Resumption | None:
    """Return when all members' processes of a program without steps ran again."""
    if context.steady_time is None:
        return None
    heartbeats = [
        heartbeat
        for _, heartbeat in context.heartbeats
        if (heartbeat.generation, heartbeat.attempt) > (entry.generation, entry.attempt)
    ]
    if len(heartbeats) < len(context.members):
        return None
    started = [
        heartbeat.progress.started
        for heartbeat in heartbeats
        if heartbeat.progress is not None and is_clock_in_sync(heartbeat)
    ]
    at = max(started, default=0.0)
    return _Resumption(at=at if at > (entry.failed_at or 0.0) else context.now, resume_step=None, step_before=-1)


def _find_first_new_step_time(entry: Interruption, progress: Progress) -> float:
    """Return when the first new step ended; a delayed plan sees only a later one.

    The steps since the ranks had loaded are assumed to be equally long.
    """
    resumed = progress.resume_step or 0
    first_new_step, steps_made = max(entry.step_before, resumed) + 1 - resumed, progress.step - resumed
    began_at = max(progress.loaded, entry.failed_at or 0.0)
    if not progress.loaded or steps_made <= first_new_step or progress.updated <= began_at:
        return progress.updated
    return began_at + (progress.updated - began_at) * first_new_step / steps_made


def _find_stop_time(context: PlanContext, entry: Interruption, progress: Progress) -> float:
    """Return when the ranks stopped, if they trained on: until a planned change, or on a bad node until one is free.

    Such steps were not lost. 0 if unknown.
    """
    size = next((account for account in context.job.status.goodput.sizes if account.size == len(context.members)), None)
    step_seconds = next(
        (each for _, heartbeat in context.heartbeats if heartbeat.timing and (each := heartbeat.timing.step_seconds)),
        size.step_seconds if size is not None else None,
    )
    steps_made = (progress.resume_step or 0) - entry.step_before
    if entry.failed_at is None or entry.step_before < 0 or steps_made <= 0 or not step_seconds:
        return 0.0
    if not _is_planned(entry) and steps_made * step_seconds < _UNREPORTED_SECONDS:
        return 0.0
    return min(entry.failed_at + steps_made * step_seconds, progress.started or progress.updated)


def _is_planned(entry: Interruption) -> bool:
    return entry.response in PLANNED_RESPONSES or entry.cause in (Cause.PREEMPTED, Cause.STRAGGLER)


def _are_ranks_past_steps(context: PlanContext) -> bool:
    """Return whether the ranks are in a stage after the last step, so that no step will show that they run again."""
    newest = context.newest_progress
    return newest is not None and not newest.training

"""Closing interruptions: at the first new step, or when what was interrupted is given up.

The agents' own records report best when training resumed and from which step; without one, the first heartbeat that
shows a new step does. Seconds are from the failure to the first step that had not been completed before. After the last
step there is none: then it is over when the ranks have come to a stage again with no step left to do. For a program
that reports no steps it is over when the processes of all members run again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainium_contract.faults.causes import Cause
from trainium_contract.status.interruptions import Interruption, Rung
from trainium_contract.wire.messages import Progress, RestartRecord, WorkerPhase
from trainium_operator.plan.history.interruptions import replace_entry
from trainium_operator.plan.view.node_problems import is_clock_in_sync
from trainium_operator.plan.view.progress import (
    has_reported_steps,
    is_settled,
    last_step,
    newest_progress,
    steady_at,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainium_contract.job import TrainingJobStatus
    from trainium_operator.plan.view.facts import Facts


@dataclass(frozen=True, slots=True)
class _Resumption:
    at: float
    resume_step: int | None
    step_before: int
    stopped_at: float = 0.0
    """When the ranks of a planned change stopped, as far as they trained on after it was decided; 0 for not known."""


def close_recovered(facts: Facts, status: TrainingJobStatus) -> TrainingJobStatus:
    """Fill in when, from where and at what price training went on, for each open interruption that is over."""
    for index, entry in enumerate(status.history):
        if not entry.is_open:
            continue
        if facts.job.spec.program is not None:
            entry = entry.replaced(step_before=max([entry.step_before, *_steps_before(facts, entry)]))  # noqa: PLW2901
            status = replace_entry(status, index, entry)
            if _awaits_first_step(facts, entry):
                continue
        resumed = _recorded(facts, entry) or _observed(facts, entry) or _without_steps(facts, entry)
        if resumed is None:
            continue
        status = replace_entry(status, index, _closed(entry, resumed, facts.now))
    return status


def _awaits_first_step(facts: Facts, entry: Interruption) -> bool:
    """Return whether a rank of a program that has made no step yet still loads; ranks that print none run at once."""
    return not has_reported_steps(facts) and any(
        beat.phase is WorkerPhase.LOADING or (beat.generation, beat.attempt) <= (entry.generation, entry.attempt)
        for _, beat in facts.beats
    )


def _steps_before(facts: Facts, entry: Interruption) -> list[int]:
    """Return the steps of ranks that an open interruption has not ended yet: a program may train on until it is asked.

    It repeats what it has not saved. An agent shows the last step of the generation before until ranks of it train.
    """
    return [
        beat.progress.step
        for _, beat in facts.beats
        if beat.progress is not None
        and ((beat.generation, beat.attempt) <= (entry.generation, entry.attempt) or beat.phase is WorkerPhase.LOADING)
    ]


def close_lapsed(facts: Facts, status: TrainingJobStatus) -> TrainingJobStatus:
    """End what is open on the generation in force although that was never left; call when nothing is lost any more.

    A silent worker spoke again, a notice was withdrawn, a hand wrote the entry: no later generation will close it.
    """
    current = facts.current
    if current is None or status.membership.generation != current.generation or not is_settled(facts):
        return status
    attempt = max(beat.attempt for _, beat in facts.beats)
    for index, entry in enumerate(status.history):
        if not entry.is_open:
            continue
        in_force = (entry.generation, entry.attempt) >= (current.generation, attempt)
        if in_force and (last_step(facts) > entry.step_before or _past_steps(facts) or steady_at(facts) is not None):
            resumed = _Resumption(at=facts.now, resume_step=entry.step_before, step_before=-1)
            status = replace_entry(status, index, _closed(entry, resumed, facts.now))
    return status


def close_abandoned(facts: Facts, status: TrainingJobStatus) -> TrainingJobStatus:
    """Close every open interruption: no cause is charged for the time after a suspension."""
    for index, entry in enumerate(status.history):
        if entry.is_open:
            seconds = round(max(0.0, facts.now - (entry.failed_at or facts.now)), 3)
            status = replace_entry(status, index, entry.replaced(recovered_seconds=seconds))
    return status


def _closed(entry: Interruption, resumed: _Resumption, now: float) -> Interruption:
    failed_at = entry.failed_at if entry.failed_at is not None else now
    failed_at = max(failed_at, min(resumed.stopped_at, resumed.at, now))
    step_before = max(entry.step_before, resumed.step_before)
    lost = None if resumed.resume_step is None else max(0, step_before - resumed.resume_step)
    return entry.replaced(
        failed_at=entry.failed_at if entry.failed_at is None else failed_at,
        recovered_seconds=round(min(max(0.0, resumed.at - failed_at), max(0.0, now - failed_at)), 3),
        step_before=step_before,
        resume_step=resumed.resume_step,
        steps_lost=lost,
    )


def _recorded(facts: Facts, entry: Interruption) -> _Resumption | None:
    """Return what the agents recorded about the restart that ended this interruption."""
    records = [record for record in _answers(facts, entry) if record.resumed_at is not None]
    if facts.job.spec.program is not None and has_reported_steps(facts):
        # Ranks that print no steps count as resumed when they run again; the rank with the steps knows better.
        records = [record for record in records if record.step_before >= 0]
    if not records:
        return None
    last = max(records, key=lambda record: record.resumed_at or 0.0)
    steps = [record.resume_step for record in records if record.resume_step is not None]
    return _Resumption(
        at=last.resumed_at or 0.0,
        resume_step=min(steps, default=None),
        step_before=max(record.step_before for record in records),
    )


def _answers(facts: Facts, entry: Interruption) -> Iterator[RestartRecord]:
    """Yield records of the generation in force, by agents whose clocks are in sync where possible.

    Those of older generations will never be completed.
    """
    beats = [beat for _, beat in facts.beats]
    for beat in [each for each in beats if is_clock_in_sync(each)] or beats:
        for record in beat.restarts:
            later = (record.generation, record.attempt) > (entry.generation, entry.attempt)
            if later and record.generation == beat.generation:
                yield record


def _observed(facts: Facts, entry: Interruption) -> _Resumption | None:
    """Return the first heartbeat after the interruption that shows a new step, where no agent's record is pending."""
    if any(record.resumed_at is None for record in _answers(facts, entry)):
        return None
    for _, beat in facts.beats:
        later = (beat.generation, beat.attempt) > (entry.generation, entry.attempt)
        progress = beat.progress
        if not later or beat.phase is not WorkerPhase.TRAINING or progress is None:
            continue
        # After a graceful change the ranks resume past the step that was known when it was decided.
        if progress.step > max(entry.step_before, progress.resume_step or 0):
            dated = is_clock_in_sync(beat) and progress.updated > (entry.failed_at or 0.0)
            at = _first_new_step(entry, progress) if dated else facts.now
            stopped_at = _stopped_at(facts, entry, progress)
            return _Resumption(at=at, resume_step=progress.resume_step, step_before=-1, stopped_at=stopped_at)
        if not progress.training and progress.step >= entry.step_before:
            dated = is_clock_in_sync(beat) and progress.stage_since > (entry.failed_at or 0.0)
            at = progress.stage_since if dated else facts.now
            return _Resumption(at=at, resume_step=progress.resume_step, step_before=-1)
    return None


def _without_steps(facts: Facts, entry: Interruption) -> _Resumption | None:
    """Return when the processes of all members of a program without steps were up again."""
    if steady_at(facts) is None:
        return None
    beats = [beat for _, beat in facts.beats if (beat.generation, beat.attempt) > (entry.generation, entry.attempt)]
    if len(beats) < len(facts.members):
        return None
    started = [beat.progress.started for beat in beats if beat.progress is not None and is_clock_in_sync(beat)]
    at = max(started, default=0.0)
    return _Resumption(at=at if at > (entry.failed_at or 0.0) else facts.now, resume_step=None, step_before=-1)


def _first_new_step(entry: Interruption, progress: Progress) -> float:
    """Return when the first new step ended: a plan that was late, as the API server was, sees only a later one.

    The steps since the ranks had loaded are taken to be equally long.
    """
    resumed = progress.resume_step or 0
    first, made = max(entry.step_before, resumed) + 1 - resumed, progress.step - resumed
    began = max(progress.loaded, entry.failed_at or 0.0)
    if not progress.loaded or made <= first or progress.updated <= began:
        return progress.updated
    return began + (progress.updated - began) * first / made


def _stopped_at(facts: Facts, entry: Interruption, progress: Progress) -> float:
    """Return when the ranks stopped: steps that they made after a planned change was decided were not lost."""
    if entry.rung not in (Rung.RESIZE, Rung.GROW) and entry.cause not in (Cause.PREEMPTED, Cause.STRAGGLER):
        return 0.0
    size = next((each for each in facts.job.status.goodput.sizes if each.size == len(facts.members)), None)
    seconds = next(
        (each for _, beat in facts.beats if beat.timing and (each := beat.timing.step_seconds)),
        size.step_seconds if size is not None else None,
    )
    made = (progress.resume_step or 0) - entry.step_before
    if entry.failed_at is None or entry.step_before < 0 or made <= 0 or not seconds:
        return 0.0
    return min(entry.failed_at + made * seconds, progress.started or progress.updated)


def _past_steps(facts: Facts) -> bool:
    """Return whether the ranks are in a stage after the last step, so that no step will report that they go on."""
    newest = newest_progress(facts)
    return newest is not None and not newest.training

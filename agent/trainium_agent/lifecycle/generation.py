"""The state machine of a generation on one pod: from state, event and time to state and actions.

An event is recorded at once; decisions are made when no task is running, in the order of the events. So nothing is
decided by half of a task's outcome; only an order to leave interrupts one.

Guarantees:
- At most one task is running, and no rank of an attempt is alive when the next one is joined.
- Each unrequested end is reported at most once, and never as a requested one.
- The agents pass the exit barrier at most once; an order to leave is never dropped.
- When the generation is over no rank is alive and nothing follows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from trainium_agent.lifecycle import actions as do
from trainium_agent.lifecycle import events as on
from trainium_agent.lifecycle.events import GenerationEnd, Order
from trainium_agent.lifecycle.state import (
    After,
    CountHang,
    Fail,
    GenerationLimits,
    LocalGeneration,
    Stage,
    Then,
)
from trainium_contract.exit_codes import ExitCode
from trainium_contract.faults.causes import Cause
from trainium_contract.wire.messages import WorkerPhase

if TYPE_CHECKING:
    from trainium_agent.exits.restart_policy import GenerationState

_POLL_SECONDS = 0.1
"""Seconds between two reads of counters of the store."""
_RECONNECT_SECONDS = 0.2
_YIELD_TIMEOUT_SECONDS = 5.0
_KILL_SECONDS = 30.0
_REPORT_STUCK_SECONDS = 2.5
"""A reported standstill is kept so long that a heartbeat carries it."""
_CLEAN_EXITS = (ExitCode.FINISHED, ExitCode.YIELDING)


_Answer = tuple[LocalGeneration, tuple[do.Action, ...]]


def step(limits: GenerationLimits, local: LocalGeneration, event: on.Event, now: float) -> _Answer:
    """Record the event and decide all that can be decided now."""
    if local.stage is Stage.OVER:
        return local, ()
    local, actions = _record(limits, local, event, now)
    while local.busy is None and local.stage is not Stage.OVER:
        decided = _decide(limits, local, now)
        if decided is None:
            break
        local, more = decided
        actions = (*actions, *more)
    if (
        local.stuck_reported_at is not None
        and local.stage is not Stage.RUNNING
        and now >= local.stuck_reported_at + _REPORT_STUCK_SECONDS
    ):
        return replace(local, stuck_reported_at=None), (*actions, do.ReportStuck(()))
    return local, actions


def wake_at(local: LocalGeneration) -> float | None:
    """Return when a Tick is wanted; None while only events lead on."""
    deadlines = []
    if local.stuck_reported_at is not None and local.stage is not Stage.RUNNING:
        deadlines.append(local.stuck_reported_at + _REPORT_STUCK_SECONDS)
    if local.busy is None:
        match local.stage:
            case Stage.RUNNING:
                deadlines.append(min(local.next_sample_at, local.deadline) if local.inquiring else local.next_sample_at)
            case Stage.ENDING | Stage.SAVING | Stage.STORE_LOST | Stage.BACKOFF | Stage.YIELDED | Stage.FINISHED:
                deadlines.append(local.deadline)
    return min(deadlines, default=None) if local.stage is not Stage.OVER else None


# Recording events.


def _record(limits: GenerationLimits, local: LocalGeneration, event: on.Event, now: float) -> _Answer:
    match event:
        case on.Notice.BEGIN:
            return replace(local, stage=Stage.JOINING), (do.EnterPhase(WorkerPhase.JOINING, 0),)
        case on.LeaveOrdered():
            order, superseded = max(local.order, event.order), max(local.superseded_by, event.superseded_by)
            return replace(local, order=order, superseded_by=superseded), (do.SimpleAction.INTERRUPT_TASK,)
        case on.RankEnded():
            if event.attempt != local.attempt:
                return local, ()
            return replace(local, ends=(*local.ends, event), pending=(*local.pending, event)), ()
        case on.SharedChanged():
            return replace(local, pending=_with_newest(local.pending, event)), ()
        case on.WaitingFor():
            return local, (do.ReportWaiting(event.nodes),) if local.order is Order.NONE else ()
        case on.Notice.TICK:
            return local, ()
        case _:
            assert local.busy is not None, f"{event} is no task's that is under way"
            return _result(limits, replace(local, busy=None), local.busy, event, now)


def _with_newest(
    pending: tuple[on.RankEnded | on.SharedChanged, ...], event: on.SharedChanged
) -> tuple[on.RankEnded | on.SharedChanged, ...]:
    """Replace a pending change of the shared state by the newest, at the place of the first."""
    if not any(isinstance(each, on.SharedChanged) for each in pending):
        return (*pending, event)
    return tuple(event if isinstance(each, on.SharedChanged) else each for each in pending)


def _result(limits: GenerationLimits, local: LocalGeneration, task: do.Task, result: on.Result, now: float) -> _Answer:
    match result:
        case on.Joined():
            if local.order is not Order.NONE:
                return local, ()
            attempt = result.state.attempt
            joined_state = replace(local, stage=Stage.STARTING, attempt=attempt, started=0, ends=(), signed=False)
            return _do(joined_state, do.StartRanks(result.port), do.EnterPhase(WorkerPhase.LOADING, attempt))
        case on.Outcome.INTERRUPTED | on.Outcome.DONE:
            return local, ()
        case on.Outcome.STOPPED:
            return (local, ()) if local.order is not Order.NONE else _stop(limits, local, now)
        case on.GaveUp():
            log = do.Log(f"giving up in place: {result.sentence}", severe=True)
            return _failed(local), (log, do.ReportNodeVerdict(result.code, result.sentence))
        case on.Started():
            return replace(
                local, stage=Stage.RUNNING, started=result.ranks, next_sample_at=now + limits.sample_seconds
            ), ()
        case on.EndsDiagnosed():
            return _ends_diagnosed(local, result, now)
        case on.StoreLost():
            return _store_lost(limits, local, task, result.reason, now)
        case on.RanksSampled():
            return _ranks_sampled(limits, local, result, now)
        case on.InquiryUpdated():
            local = replace(local, inquiring=result.open, deadline=now + _POLL_SECONDS)
            if result.stuck is None:
                return local, ()
            return replace(local, stuck_reported_at=now), (do.ReportStuck(result.stuck),)
        case on.HangFound():
            return _hang_found(limits, local, result, now)
        case on.HangCounted():
            return _follow(limits, local, result.after, now) or (local, ())
        case on.FinishChecked():
            if result.parted:
                return replace(local, stage=Stage.OVER, outcome=GenerationEnd.FINISHED, pending=()), ()
            return replace(local, deadline=now + _POLL_SECONDS), ()
        case on.YieldChecked():
            if result.after is None or result.after.attempt <= local.attempt:
                return replace(local, deadline=now + _POLL_SECONDS), ()
            return _start_next_attempt(local, result.after.attempt, Cause.YIELDED, None, now)


# What decided when no task is under way.


def _decide(limits: GenerationLimits, local: LocalGeneration, now: float) -> _Answer | None:
    match local.stage:
        case Stage.ENDING:
            return _ending(limits, local, now)
        case Stage.SAVING:
            return _saving(local, now)
        case Stage.NEW | Stage.STARTING | Stage.JUDGING | Stage.OVER:
            return None
    if local.order is not Order.NONE:
        return _leave(limits, local, now)
    match local.stage:
        case Stage.JOINING:
            return _do(local, do.SimpleTask.JOIN)
        case Stage.RUNNING | Stage.YIELDED | Stage.FINISHED:
            if local.pending:
                first, local = local.pending[0], replace(local, pending=local.pending[1:])
                return _answered(limits, local, first, now) or (local, ())
            return _running(local, now) if local.stage is Stage.RUNNING else _waiting(local, now)
        case Stage.STORE_LOST if now >= local.deadline and local.retry is not None:
            return _do(local, local.retry)
        case Stage.BACKOFF if now >= local.deadline:
            return replace(local, stage=Stage.JOINING), ()
        case _:
            return None


def _answered(
    limits: GenerationLimits, local: LocalGeneration, event: on.RankEnded | on.SharedChanged, now: float
) -> _Answer | None:
    return _ended(local, event, now) if isinstance(event, on.RankEnded) else _follow(limits, local, event.state, now)


def _running(local: LocalGeneration, now: float) -> _Answer | None:
    if local.overdue:
        return _do(replace(local, overdue=False), do.SimpleTask.OPEN_INQUIRY)
    if local.inquiring and now >= local.deadline:
        return _do(local, do.SimpleTask.CONCLUDE_INQUIRY)
    if now >= local.next_sample_at:
        return _do(local, do.SimpleTask.SAMPLE_RANKS)
    return None


def _waiting(local: LocalGeneration, now: float) -> _Answer | None:
    """Wait for the other pods: all local ranks have ended without a failure."""
    finished = local.stage is Stage.FINISHED
    if not local.signed:
        phase = WorkerPhase.FINISHED if finished else WorkerPhase.YIELDED
        return _do(replace(local, signed=True), do.SignExit(phase))
    if now < local.deadline:
        return None
    return _do(local, do.SimpleTask.CHECK_FINISHED if finished else do.SimpleTask.CHECK_YIELDED)


def _ended(local: LocalGeneration, end: on.RankEnded, now: float) -> _Answer | None:
    """Handle the end of a rank."""
    if end.asked or end.attempt != local.attempt:
        return None
    if end.code not in _CLEAN_EXITS:
        log = do.Log(f"rank {end.rank} ended with code {end.code} in attempt {end.attempt}")
        return _end(local, Then.JUDGE_ENDS, now, log)
    if local.alive or _failures(local):
        return None  # the others' ends, or the failure among them, lead on
    finished = local.all_ended_with(ExitCode.FINISHED)
    stage, phase = (Stage.FINISHED, WorkerPhase.FINISHED) if finished else (Stage.YIELDED, WorkerPhase.YIELDED)
    deadline = now if finished else now + _YIELD_TIMEOUT_SECONDS
    return replace(local, stage=stage, deadline=deadline), (
        do.SimpleAction.OBSERVE_PROGRESS,
        do.ReportTiming(None),
        do.EnterPhase(phase),
    )


def _failures(local: LocalGeneration) -> tuple[on.RankEnded, ...]:
    return tuple(end for end in local.ends if not end.asked and end.code not in _CLEAN_EXITS)


def _follow(limits: GenerationLimits, local: LocalGeneration, state: GenerationState, now: float) -> _Answer | None:
    """Handle a change of the shared state."""
    if state.stopped is not None:
        if state.stopped == ExitCode.HUNG:
            return _do(local, do.ReadFinding(state))
        return _stop(limits, local, now)
    if state.attempt > local.attempt:
        if local.stage is Stage.STORE_LOST:  # its standstill, counted at last
            return _start_next_attempt(local, state.attempt, Cause.HANG, None, now)
        if state.cause is Cause.HANG and state.attempt == local.attempt + 1:
            return _do(local, do.ReadFinding(state))
        cause = Cause.YIELDED if state.cause is Cause.YIELDED else Cause.PEER_LOST
        return _start_next_attempt(local, state.attempt, cause, None, now)
    if local.alive and state.attempt == local.attempt == state.asked_in and state.inquiry > local.answered:
        return _do(replace(local, answered=state.inquiry), do.AnswerQuestion(state))
    return None


# Failures and standstills.


def _ends_diagnosed(local: LocalGeneration, diagnosed: on.EndsDiagnosed, now: float) -> _Answer:
    if diagnosed.withdraw or diagnosed.after.stopped is not None:
        sentence = f"giving up in place: rank {diagnosed.rank} ended with code {diagnosed.code} ({diagnosed.sentence})"
        return _failed(local), (do.Log(sentence, severe=True), do.ReportVerdict(diagnosed.local_rank))
    again, reports = _start_next_attempt(local, diagnosed.after.attempt, diagnosed.cause, diagnosed.ended_at, now)
    if not diagnosed.backoff_seconds or local.order is not Order.NONE:
        return again, reports
    return replace(again, stage=Stage.BACKOFF, deadline=now + diagnosed.backoff_seconds), reports


def _ranks_sampled(limits: GenerationLimits, local: LocalGeneration, sampled: on.RanksSampled, now: float) -> _Answer:
    local = replace(local, next_sample_at=now + limits.sample_seconds, overdue=sampled.overdue)
    timed = do.ReportTiming(sampled.timing)
    if sampled.overdue or local.stuck_reported_at is None or now < local.stuck_reported_at + _REPORT_STUCK_SECONDS:
        return local, (timed,)
    return replace(local, stuck_reported_at=None), (timed, do.ReportStuck(()))


def _hang_found(limits: GenerationLimits, local: LocalGeneration, found: on.HangFound, now: float) -> _Answer:
    reports: tuple[do.Action, ...] = (
        do.ReportStuck(found.stuck),
        *(do.ReportHang(*culprit) for culprit in found.culprits),
    )
    local = replace(local, stuck_reported_at=now)
    if found.after.stopped is None:
        again, more = _start_next_attempt(local, found.after.attempt, found.cause, found.failed_at, now)
    elif found.cause is Cause.HANG and found.named:
        again, more = _end(local, Fail(do.ReportVerdict()), now)
    else:
        again, more = _stop(limits, local, now)
    return again, (*reports, *more)


def _store_lost(limits: GenerationLimits, local: LocalGeneration, task: do.Task, reason: str, now: float) -> _Answer:
    """Retry until the store answers or a newer generation arrives: the agent that hosts it is missing or hangs."""
    if task in (do.SimpleTask.OPEN_INQUIRY, do.SimpleTask.CONCLUDE_INQUIRY):
        return _end(local, CountHang(reason), now)
    assert isinstance(task, do.DiagnoseEnds | do.SimpleTask), f"{task} is quiet about a lost store"
    again = replace(task, reconnect=True) if isinstance(task, do.DiagnoseEnds) else task
    return _await_store(limits, local, again, reason, now)


def _await_store(
    limits: GenerationLimits,
    local: LocalGeneration,
    retry: do.DiagnoseEnds | do.SimpleTask,
    reason: str,
    now: float,
) -> _Answer:
    reports: tuple[do.Action, ...] = ()
    if local.stage is not Stage.STORE_LOST:
        sentence = f"the store of generation {limits.generation} is gone ({reason}); waiting for a newer one"
        reports = (do.Log(sentence), do.EnterPhase(WorkerPhase.JOINING))
    lost = replace(local, stage=Stage.STORE_LOST, retry=retry, deadline=now + _RECONNECT_SECONDS)
    return lost, (*reports, do.ReportWaiting((0,)))


def _stop(limits: GenerationLimits, local: LocalGeneration, now: float) -> _Answer:
    """Fail, because another agent gave up for all."""
    log = do.Log(f"generation {limits.generation} was stopped by another member", severe=True)
    return _end(local, Fail(), now, log)


def _failed(local: LocalGeneration) -> LocalGeneration:
    return replace(local, stage=Stage.FAILED, pending=(), inquiring=False, overdue=False)


# The end of an attempt, and of the generation.


def _start_next_attempt(
    local: LocalGeneration, attempt: int, cause: Cause, failed_at: float | None, now: float
) -> _Answer:
    """Start the next attempt; for a pod whose ranks did not fail the cause is a lost peer."""
    reports = (do.SimpleAction.OBSERVE_PROGRESS, do.ReportRestart(attempt, cause, failed_at))
    return _end(replace(local, inquiring=False, overdue=False), Then.JOIN_AGAIN, now, *reports)


def _end(local: LocalGeneration, after: After, now: float, *reports: do.Action) -> _Answer:
    return replace(local, stage=Stage.ENDING, after=after, deadline=now + _KILL_SECONDS), (
        *reports,
        do.ReportTiming(None),
        do.SimpleAction.KILL,
    )


def _ending(limits: GenerationLimits, local: LocalGeneration, now: float) -> _Answer | None:
    if local.alive:
        if now < local.deadline:
            return None
        # It is stuck in the kernel and holds its device, so that nothing can be started beside it.
        stuck = f"a training process did not end within {_KILL_SECONDS:.0f} s of SIGKILL"
        return replace(local, stage=Stage.OVER, pending=()), (do.FailPod(stuck),)
    failures = _failures(local)
    local = replace(local, pending=tuple(each for each in local.pending if isinstance(each, on.SharedChanged)))
    match local.after:
        case Then.JUDGE_ENDS:
            reports = tuple(do.ReportFailure(end.local_rank) for end in failures)
            judge = do.DiagnoseEnds(tuple(end.local_rank for end in failures))
            return _do(replace(local, stage=Stage.JUDGING), judge, *reports)
        case CountHang(reason):
            return _await_store(limits, local, do.SimpleTask.COUNT_UNANSWERED_HANG, reason, now)
        case Fail(verdict):
            return _failed(local), (verdict or do.EnterPhase(WorkerPhase.FAILED),)
        case Then.LEAVE_NOW:
            return replace(local, stage=Stage.OVER, pending=()), ()
        case _:
            return replace(local, stage=Stage.JOINING), ()


def _leave(limits: GenerationLimits, local: LocalGeneration, now: float) -> _Answer:
    if local.order is Order.IMMEDIATE:
        return _end(local, Then.LEAVE_NOW, now)
    saving = replace(local, stage=Stage.SAVING, deadline=now + limits.grace_seconds)
    leaving = local.order is Order.TERMINATE
    return _do(saving, do.Announce(leaving, local.superseded_by), do.RequestExit(memory_ends=leaving))


def _saving(local: LocalGeneration, now: float) -> _Answer | None:
    """Wait for the ranks while they can still save."""
    if local.order is Order.IMMEDIATE:
        return _end(local, Then.LEAVE_NOW, now)
    changes = [each.state for each in local.pending if isinstance(each, on.SharedChanged)]
    cannot_finish = any(state.broken or state.stopped is not None for state in changes)
    if local.alive and now < local.deadline and not cannot_finish:
        broken = any(end.code not in _CLEAN_EXITS for end in local.ends)
        return (
            _do(replace(local, broken_announced=True), do.SimpleTask.ANNOUNCE_BROKEN)
            if broken and not local.broken_announced
            else None
        )
    saved = replace(local, yielded=local.all_ended_with(ExitCode.YIELDING))
    return _end(saved, Then.LEAVE_NOW, now, do.SimpleAction.OBSERVE_PROGRESS)  # what they saved last


def _do(local: LocalGeneration, task: do.Task, *reports: do.Action) -> _Answer:
    return replace(local, busy=task), (*reports, do.RunTask(task))

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
"""What was reports of a standstill stays long enough for a heartbeat to carry it."""
_PEACEFUL = (ExitCode.FINISHED, ExitCode.YIELDING)


_Answer = tuple[LocalGeneration, tuple[do.Action, ...]]


def step(terms: GenerationLimits, life: LocalGeneration, event: on.Event, now: float) -> _Answer:
    """Record the event and decide all that can be decided now."""
    if life.stage is Stage.OVER:
        return life, ()
    life, actions = _record(terms, life, event, now)
    while life.busy is None and life.stage is not Stage.OVER:
        decided = _decide(terms, life, now)
        if decided is None:
            break
        life, more = decided
        actions = (*actions, *more)
    if (
        life.stuck_reported_at is not None
        and life.stage is not Stage.RUNNING
        and now >= life.stuck_reported_at + _REPORT_STUCK_SECONDS
    ):
        return replace(life, stuck_reported_at=None), (*actions, do.ReportStuck(()))
    return life, actions


def wake_at(life: LocalGeneration) -> float | None:
    """When a Tick is wanted; None while only events lead on."""
    dues = []
    if life.stuck_reported_at is not None and life.stage is not Stage.RUNNING:
        dues.append(life.stuck_reported_at + _REPORT_STUCK_SECONDS)
    if life.busy is None:
        match life.stage:
            case Stage.RUNNING:
                dues.append(min(life.next_sample_at, life.deadline) if life.inquiring else life.next_sample_at)
            case Stage.ENDING | Stage.SAVING | Stage.STORE_LOST | Stage.BACKOFF | Stage.YIELDED | Stage.FINISHED:
                dues.append(life.deadline)
    return min(dues, default=None) if life.stage is not Stage.OVER else None


# Recording events.


def _record(terms: GenerationLimits, life: LocalGeneration, event: on.Event, now: float) -> _Answer:
    match event:
        case on.Notice.BEGIN:
            return replace(life, stage=Stage.JOINING), (do.EnterPhase(WorkerPhase.JOINING, 0),)
        case on.LeaveOrdered():
            order, superseded = max(life.order, event.order), max(life.superseded_by, event.superseded_by)
            return replace(life, order=order, superseded_by=superseded), (do.SimpleAction.INTERRUPT_TASK,)
        case on.RankEnded():
            if event.attempt != life.attempt:
                return life, ()
            return replace(life, ends=(*life.ends, event), pending=(*life.pending, event)), ()
        case on.SharedChanged():
            return replace(life, pending=_with_newest(life.pending, event)), ()
        case on.WaitingFor():
            return life, (do.ReportWaiting(event.nodes),) if life.order is Order.NONE else ()
        case on.Notice.TICK:
            return life, ()
        case _:
            assert life.busy is not None, f"{event} is no task's that is under way"
            return _result(terms, replace(life, busy=None), life.busy, event, now)


def _with_newest(
    pending: tuple[on.RankEnded | on.SharedChanged, ...], event: on.SharedChanged
) -> tuple[on.RankEnded | on.SharedChanged, ...]:
    """One look at the shared state is enough, at the newest; at the place of the first."""
    if not any(isinstance(each, on.SharedChanged) for each in pending):
        return (*pending, event)
    return tuple(event if isinstance(each, on.SharedChanged) else each for each in pending)


def _result(terms: GenerationLimits, life: LocalGeneration, task: do.Task, result: on.Result, now: float) -> _Answer:
    match result:
        case on.Joined():
            if life.order is not Order.NONE:
                return life, ()
            attempt = result.state.attempt
            joined_state = replace(life, stage=Stage.STARTING, attempt=attempt, started=0, ends=(), signed=False)
            return _do(joined_state, do.StartRanks(result.port), do.EnterPhase(WorkerPhase.LOADING, attempt))
        case on.Outcome.INTERRUPTED | on.Outcome.DONE:
            return life, ()
        case on.Outcome.STOPPED:
            return (life, ()) if life.order is not Order.NONE else _stop(terms, life, now)
        case on.GaveUp():
            log = do.Log(f"giving up in place: {result.sentence}", severe=True)
            return _failed(life), (log, do.ReportNodeVerdict(result.code, result.sentence))
        case on.Started():
            return replace(
                life, stage=Stage.RUNNING, started=result.ranks, next_sample_at=now + terms.sample_seconds
            ), ()
        case on.EndsDiagnosed():
            return _ends_diagnosed(life, result, now)
        case on.StoreLost():
            return _store_lost(terms, life, task, result.reason, now)
        case on.RanksSampled():
            return _ranks_sampled(terms, life, result, now)
        case on.InquiryUpdated():
            life = replace(life, inquiring=result.open, deadline=now + _POLL_SECONDS)
            if result.stuck is None:
                return life, ()
            return replace(life, stuck_reported_at=now), (do.ReportStuck(result.stuck),)
        case on.HangFound():
            return _hang_found(terms, life, result, now)
        case on.HangCounted():
            return _follow(terms, life, result.after, now) or (life, ())
        case on.FinishChecked():
            if result.parted:
                return replace(life, stage=Stage.OVER, outcome=GenerationEnd.FINISHED, pending=()), ()
            return replace(life, deadline=now + _POLL_SECONDS), ()
        case on.YieldChecked():
            if result.after is None or result.after.attempt <= life.attempt:
                return replace(life, deadline=now + _POLL_SECONDS), ()
            return _start_next_attempt(life, result.after.attempt, Cause.YIELDED, None, now)


# What decided when no task is under way.


def _decide(terms: GenerationLimits, life: LocalGeneration, now: float) -> _Answer | None:
    match life.stage:
        case Stage.ENDING:
            return _ending(terms, life, now)
        case Stage.SAVING:
            return _saving(life, now)
        case Stage.NEW | Stage.STARTING | Stage.JUDGING | Stage.OVER:
            return None
    if life.order is not Order.NONE:
        return _leave(terms, life, now)
    match life.stage:
        case Stage.JOINING:
            return _do(life, do.SimpleTask.JOIN)
        case Stage.RUNNING | Stage.YIELDED | Stage.FINISHED:
            if life.pending:
                first, life = life.pending[0], replace(life, pending=life.pending[1:])
                return _answered(terms, life, first, now) or (life, ())
            return _running(life, now) if life.stage is Stage.RUNNING else _waiting(life, now)
        case Stage.STORE_LOST if now >= life.deadline and life.retry is not None:
            return _do(life, life.retry)
        case Stage.BACKOFF if now >= life.deadline:
            return replace(life, stage=Stage.JOINING), ()
        case _:
            return None


def _answered(
    terms: GenerationLimits, life: LocalGeneration, event: on.RankEnded | on.SharedChanged, now: float
) -> _Answer | None:
    return _ended(life, event, now) if isinstance(event, on.RankEnded) else _follow(terms, life, event.state, now)


def _running(life: LocalGeneration, now: float) -> _Answer | None:
    if life.overdue:
        return _do(replace(life, overdue=False), do.SimpleTask.OPEN_INQUIRY)
    if life.inquiring and now >= life.deadline:
        return _do(life, do.SimpleTask.CONCLUDE_INQUIRY)
    if now >= life.next_sample_at:
        return _do(life, do.SimpleTask.SAMPLE_RANKS)
    return None


def _waiting(life: LocalGeneration, now: float) -> _Answer | None:
    """All local ranks have ended in peace."""
    finished = life.stage is Stage.FINISHED
    if not life.signed:
        phase = WorkerPhase.FINISHED if finished else WorkerPhase.YIELDED
        return _do(replace(life, signed=True), do.SignExit(phase))
    if now < life.deadline:
        return None
    return _do(life, do.SimpleTask.CHECK_FINISHED if finished else do.SimpleTask.CHECK_YIELDED)


def _ended(life: LocalGeneration, end: on.RankEnded, now: float) -> _Answer | None:
    """Handle the end of a rank."""
    if end.asked or end.attempt != life.attempt:
        return None
    if end.code not in _PEACEFUL:
        log = do.Log(f"rank {end.rank} ended with code {end.code} in attempt {end.attempt}")
        return _end(life, Then.JUDGE_ENDS, now, log)
    if life.alive or _failures(life):
        return None  # the others' ends, or the failure among them, lead on
    finished = life.all_ended_with(ExitCode.FINISHED)
    stage, phase = (Stage.FINISHED, WorkerPhase.FINISHED) if finished else (Stage.YIELDED, WorkerPhase.YIELDED)
    deadline = now if finished else now + _YIELD_TIMEOUT_SECONDS
    return replace(life, stage=stage, deadline=deadline), (
        do.SimpleAction.OBSERVE_PROGRESS,
        do.ReportTiming(None),
        do.EnterPhase(phase),
    )


def _failures(life: LocalGeneration) -> tuple[on.RankEnded, ...]:
    return tuple(end for end in life.ends if not end.asked and end.code not in _PEACEFUL)


def _follow(terms: GenerationLimits, life: LocalGeneration, state: GenerationState, now: float) -> _Answer | None:
    """Handle a change of the shared state."""
    if state.stopped is not None:
        if state.stopped == ExitCode.HUNG:
            return _do(life, do.ReadFinding(state))
        return _stop(terms, life, now)
    if state.attempt > life.attempt:
        if life.stage is Stage.STORE_LOST:  # its standstill, counted at last
            return _start_next_attempt(life, state.attempt, Cause.HANG, None, now)
        if state.cause is Cause.HANG and state.attempt == life.attempt + 1:
            return _do(life, do.ReadFinding(state))
        cause = Cause.YIELDED if state.cause is Cause.YIELDED else Cause.PEER_LOST
        return _start_next_attempt(life, state.attempt, cause, None, now)
    if life.alive and state.attempt == life.attempt == state.asked_in and state.inquiry > life.answered:
        return _do(replace(life, answered=state.inquiry), do.AnswerQuestion(state))
    return None


# Failures and standstills.


def _ends_diagnosed(life: LocalGeneration, diagnosed: on.EndsDiagnosed, now: float) -> _Answer:
    if diagnosed.withdraw or diagnosed.after.stopped is not None:
        sentence = f"giving up in place: rank {diagnosed.rank} ended with code {diagnosed.code} ({diagnosed.sentence})"
        return _failed(life), (do.Log(sentence, severe=True), do.ReportVerdict(diagnosed.local_rank))
    again, reports = _start_next_attempt(life, diagnosed.after.attempt, diagnosed.cause, diagnosed.ended_at, now)
    if not diagnosed.backoff_seconds or life.order is not Order.NONE:
        return again, reports
    return replace(again, stage=Stage.BACKOFF, deadline=now + diagnosed.backoff_seconds), reports


def _ranks_sampled(terms: GenerationLimits, life: LocalGeneration, sampled: on.RanksSampled, now: float) -> _Answer:
    life = replace(life, next_sample_at=now + terms.sample_seconds, overdue=sampled.overdue)
    timed = do.ReportTiming(sampled.timing)
    if sampled.overdue or life.stuck_reported_at is None or now < life.stuck_reported_at + _REPORT_STUCK_SECONDS:
        return life, (timed,)
    return replace(life, stuck_reported_at=None), (timed, do.ReportStuck(()))


def _hang_found(terms: GenerationLimits, life: LocalGeneration, found: on.HangFound, now: float) -> _Answer:
    reports: tuple[do.Action, ...] = (
        do.ReportStuck(found.stuck),
        *(do.ReportHang(*culprit) for culprit in found.culprits),
    )
    life = replace(life, stuck_reported_at=now)
    if found.after.stopped is None:
        again, more = _start_next_attempt(life, found.after.attempt, found.cause, found.failed_at, now)
    elif found.cause is Cause.HANG and found.named:
        again, more = _end(life, Fail(do.ReportVerdict()), now)
    else:
        again, more = _stop(terms, life, now)
    return again, (*reports, *more)


def _store_lost(terms: GenerationLimits, life: LocalGeneration, task: do.Task, reason: str, now: float) -> _Answer:
    """Retry until the store answers or a newer generation arrives: the agent that hosts it is missing or hangs."""
    if task in (do.SimpleTask.OPEN_INQUIRY, do.SimpleTask.CONCLUDE_INQUIRY):
        return _end(life, CountHang(reason), now)
    assert isinstance(task, do.DiagnoseEnds | do.SimpleTask), f"{task} is quiet about a lost store"
    again = replace(task, reconnect=True) if isinstance(task, do.DiagnoseEnds) else task
    return _await_store(terms, life, again, reason, now)


def _await_store(
    terms: GenerationLimits,
    life: LocalGeneration,
    retry: do.DiagnoseEnds | do.SimpleTask,
    reason: str,
    now: float,
) -> _Answer:
    reports: tuple[do.Action, ...] = ()
    if life.stage is not Stage.STORE_LOST:
        sentence = f"the store of generation {terms.generation} is sentence ({reason}); waiting for a newer one"
        reports = (do.Log(sentence), do.EnterPhase(WorkerPhase.JOINING))
    lost = replace(life, stage=Stage.STORE_LOST, retry=retry, deadline=now + _RECONNECT_SECONDS)
    return lost, (*reports, do.ReportWaiting((0,)))


def _stop(terms: GenerationLimits, life: LocalGeneration, now: float) -> _Answer:
    """Another agent gave up for all."""
    log = do.Log(f"generation {terms.generation} was stopped by another member", severe=True)
    return _end(life, Fail(), now, log)


def _failed(life: LocalGeneration) -> LocalGeneration:
    return replace(life, stage=Stage.FAILED, pending=(), inquiring=False, overdue=False)


# The end of an attempt, and of the generation.


def _start_next_attempt(
    life: LocalGeneration, attempt: int, cause: Cause, failed_at: float | None, now: float
) -> _Answer:
    """Start the next attempt; for a pod whose ranks did not fail the cause is a lost peer."""
    reports = (do.SimpleAction.OBSERVE_PROGRESS, do.ReportRestart(attempt, cause, failed_at))
    return _end(replace(life, inquiring=False, overdue=False), Then.JOIN_AGAIN, now, *reports)


def _end(life: LocalGeneration, after: After, now: float, *reports: do.Action) -> _Answer:
    return replace(life, stage=Stage.ENDING, after=after, deadline=now + _KILL_SECONDS), (
        *reports,
        do.ReportTiming(None),
        do.SimpleAction.KILL,
    )


def _ending(terms: GenerationLimits, life: LocalGeneration, now: float) -> _Answer | None:
    if life.alive:
        if now < life.deadline:
            return None
        # It is stuck in the kernel and holds its device, so that nothing can be started beside it.
        stuck = f"a training process did not end within {_KILL_SECONDS:.0f} s of SIGKILL"
        return replace(life, stage=Stage.OVER, pending=()), (do.FailPod(stuck),)
    failures = _failures(life)
    life = replace(life, pending=tuple(each for each in life.pending if isinstance(each, on.SharedChanged)))
    match life.after:
        case Then.JUDGE_ENDS:
            reports = tuple(do.ReportFailure(end.local_rank) for end in failures)
            judge = do.DiagnoseEnds(tuple(end.local_rank for end in failures))
            return _do(replace(life, stage=Stage.JUDGING), judge, *reports)
        case CountHang(reason):
            return _await_store(terms, life, do.SimpleTask.COUNT_UNANSWERED_HANG, reason, now)
        case Fail(verdict):
            return _failed(life), (verdict or do.EnterPhase(WorkerPhase.FAILED),)
        case Then.LEAVE_NOW:
            return replace(life, stage=Stage.OVER, pending=()), ()
        case _:
            return replace(life, stage=Stage.JOINING), ()


def _leave(terms: GenerationLimits, life: LocalGeneration, now: float) -> _Answer:
    if life.order is Order.IMMEDIATE:
        return _end(life, Then.LEAVE_NOW, now)
    saving = replace(life, stage=Stage.SAVING, deadline=now + terms.grace_seconds)
    leaving = life.order is Order.TERMINATE
    return _do(saving, do.Announce(leaving, life.superseded_by), do.RequestExit(memory_ends=leaving))


def _saving(life: LocalGeneration, now: float) -> _Answer | None:
    """Wait for the ranks as long as it makes sense."""
    if life.order is Order.IMMEDIATE:
        return _end(life, Then.LEAVE_NOW, now)
    changes = [each.state for each in life.pending if isinstance(each, on.SharedChanged)]
    cannot_finish = any(state.broken or state.stopped is not None for state in changes)
    if life.alive and now < life.deadline and not cannot_finish:
        broken = any(end.code not in _PEACEFUL for end in life.ends)
        return (
            _do(replace(life, broken_announced=True), do.SimpleTask.ANNOUNCE_BROKEN)
            if broken and not life.broken_announced
            else None
        )
    saved = replace(life, yielded=life.all_ended_with(ExitCode.YIELDING))
    return _end(saved, Then.LEAVE_NOW, now, do.SimpleAction.OBSERVE_PROGRESS)  # what they saved last


def _do(life: LocalGeneration, task: do.Task, *reports: do.Action) -> _Answer:
    return replace(life, busy=task), (*reports, do.RunTask(task))

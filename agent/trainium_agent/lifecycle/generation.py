"""Decide the next state and actions of a generation on one pod from state, event and time.

An event is recorded at once; decisions are made when no task is running, in the order of the events. So no decision
uses a part of a task's result. Only an order to leave interrupts a task.

Guarantees:
- At most one task is running. When an attempt is joined, no process of an earlier one is alive.
- Each unrequested end is reported at most once, and a requested one never.
- The agents pass the exit barrier at most once; an order to leave is never dropped.
- When the generation is over, no rank is alive and no action follows. If it was left, no process that a rank has
  started is alive either.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from trainium_agent.lifecycle import actions, events
from trainium_agent.lifecycle.events import GenerationOutcome, Order
from trainium_agent.lifecycle.state import (
    CountHang,
    Fail,
    FollowUp,
    LocalGeneration,
    SimpleFollowUp,
    Stage,
)
from trainium_contract.exit_codes import ExitCode
from trainium_contract.faults.causes import Cause
from trainium_contract.wire.messages import WorkerPhase

if TYPE_CHECKING:
    from trainium_agent.exits.restart_policy import GenerationState

_POLL_SECONDS = 0.1
"""Seconds between two reads of the store's counters."""
_RECONNECT_SECONDS = 0.2
_YIELD_TIMEOUT_SECONDS = 5.0
_SETTLE_SECONDS = 1.0
"""A signal to every process of a container may end the ranks with 0 just before the agent receives its own."""
KILL_SECONDS = 30.0
_REPORT_STUCK_SECONDS = 2.5
"""A reported stall is kept until a heartbeat has carried it."""
_CLEAN_EXITS = (ExitCode.FINISHED, ExitCode.YIELDING)
_StepResult = tuple[LocalGeneration, tuple[actions.Action, ...]]


def step(local: LocalGeneration, event: events.Event, now: float) -> _StepResult:
    """Record the event and make all decisions that are possible now."""
    if local.stage is Stage.ENDED:
        return local, ()
    local, requested = _record(local, event, now)
    while local.running_task is None and local.stage is not Stage.ENDED:
        decided = _decide(local, now)
        if decided is None:
            break
        local, more = decided
        requested = (*requested, *more)
    if (
        local.stuck_reported_at is not None
        and local.stage is not Stage.RUNNING
        and now >= local.stuck_reported_at + _REPORT_STUCK_SECONDS
    ):
        return replace(local, stuck_reported_at=None), (*requested, actions.ReportStuck(()))
    return local, requested


def wake_at(local: LocalGeneration) -> float | None:
    """Return when a TICK is needed; None while only other events matter."""
    deadlines = []
    if local.stuck_reported_at is not None and local.stage is not Stage.RUNNING:
        deadlines.append(local.stuck_reported_at + _REPORT_STUCK_SECONDS)
    if local.running_task is None:
        match local.stage:
            case Stage.RUNNING:
                deadlines.append(local.next_sample_at)
                if local.has_open_inquiry:
                    deadlines.append(local.deadline)
            case Stage.KILLING | Stage.SAVING | Stage.STORE_LOST | Stage.BACKOFF | Stage.YIELDED | Stage.FINISHED:
                deadlines.append(local.deadline)
    return min(deadlines, default=None) if local.stage is not Stage.ENDED else None


# Recording events.


def _record(local: LocalGeneration, event: events.Event, now: float) -> _StepResult:
    match event:
        case events.SimpleEvent.BEGIN:
            return replace(local, stage=Stage.JOINING), (actions.EnterPhase(WorkerPhase.JOINING, 0),)
        case events.LeaveOrdered():
            order, superseded = max(local.order, event.order), max(local.superseded_by, event.superseded_by)
            return replace(local, order=order, superseded_by=superseded), (actions.SimpleAction.INTERRUPT_TASK,)
        case events.RankExited():
            if event.attempt != local.attempt:
                return local, ()
            return replace(local, exits=(*local.exits, event), pending=(*local.pending, event)), ()
        case events.SharedStateChanged():
            return replace(local, pending=_replace_state_change(local.pending, event)), ()
        case events.WaitingForNodes():
            return local, (actions.ReportWaiting(event.nodes),) if local.order is Order.NONE else ()
        case events.SimpleEvent.TICK:
            return local, ()
        case _:
            assert local.running_task is not None, f"{event} without a running task"
            return _handle_result(replace(local, running_task=None), local.running_task, event, now)


def _replace_state_change(
    pending: tuple[events.RankExited | events.SharedStateChanged, ...], event: events.SharedStateChanged
) -> tuple[events.RankExited | events.SharedStateChanged, ...]:
    """Replace a pending change of the shared state by the newest, at the position of the first."""
    if not any(isinstance(waiting, events.SharedStateChanged) for waiting in pending):
        return (*pending, event)
    return tuple(event if isinstance(waiting, events.SharedStateChanged) else waiting for waiting in pending)


def _handle_result(local: LocalGeneration, task: actions.Task, result: events.Result, now: float) -> _StepResult:
    match result:
        case events.AttemptJoined():
            if local.order is not Order.NONE:
                return local, ()
            attempt = result.state.attempt
            joined_state = replace(
                local, stage=Stage.STARTING, attempt=attempt, started=0, exits=(), entered_barrier=False
            )
            return _run_task(
                joined_state, actions.StartRanks(result.port), actions.EnterPhase(WorkerPhase.LOADING, attempt)
            )
        case events.SimpleResult.DONE if isinstance(task, actions.EnterExitBarrier) and local.order is Order.NONE:
            return local, (actions.EnterPhase(task.phase),)
        case events.SimpleResult.INTERRUPTED | events.SimpleResult.DONE:
            return local, ()
        case events.SimpleResult.STOPPED:
            return (local, ()) if local.order is not Order.NONE else _fail_stopped(local, now)
        case events.Unkillable(names):
            return _fail_unkillable(local, names)
        case events.PodGaveUp():
            log = actions.Log(f"giving up in place: {result.sentence}", severe=True)
            return _fail(local), (log, actions.ReportNodeVerdict(result.code, result.sentence))
        case events.RanksStarted():
            return replace(
                local, stage=Stage.RUNNING, started=result.ranks, next_sample_at=now + local.limits.sample_seconds
            ), ()
        case events.ExitsDiagnosed():
            return _handle_diagnosis(local, result, now)
        case events.StoreLost():
            return _handle_store_loss(local, task, result.reason, now)
        case events.RanksSampled():
            return _handle_sample(local, result, now)
        case events.InquiryUpdated():
            local = replace(local, has_open_inquiry=result.open, deadline=now + _POLL_SECONDS)
            if result.stuck is None:
                return local, ()
            return replace(local, stuck_reported_at=now), (actions.ReportStuck(result.stuck),)
        case events.HangFound():
            return _handle_hang(local, result, now)
        case events.HangCounted():
            return _handle_shared_state(local, result.state, now) or (local, ())
        case events.FinishChecked():
            if result.all_finished:
                return replace(local, stage=Stage.ENDED, outcome=GenerationOutcome.FINISHED, pending=()), ()
            return replace(local, deadline=now + _POLL_SECONDS), ()
        case events.YieldChecked():
            if result.state is None or result.state.attempt <= local.attempt:
                return replace(local, deadline=now + _POLL_SECONDS), ()
            return _start_next_attempt(local, result.state.attempt, Cause.YIELDED, None, now)


# Decisions, made when no task is running.


def _decide(local: LocalGeneration, now: float) -> _StepResult | None:
    match local.stage:
        case Stage.KILLING:
            return _decide_killing(local, now)
        case Stage.SAVING:
            return _decide_saving(local, now)
        case Stage.KILLED:
            return _follow_up(local, now)
        case Stage.NEW | Stage.STARTING | Stage.DIAGNOSING | Stage.ENDED:
            return None
    if local.order is not Order.NONE:
        return _start_leaving(local, now)
    match local.stage:
        case Stage.JOINING:
            return _run_task(local, actions.SimpleTask.JOIN)
        case Stage.RUNNING | Stage.YIELDED | Stage.FINISHED:
            if local.pending:
                event, local = local.pending[0], replace(local, pending=local.pending[1:])
                if isinstance(event, events.RankExited):
                    return _handle_exit(local, event, now) or (local, ())
                return _handle_shared_state(local, event.state, now) or (local, ())
            return _decide_running(local, now) if local.stage is Stage.RUNNING else _decide_waiting(local, now)
        case Stage.STORE_LOST if now >= local.deadline and local.retry is not None:
            return _run_task(local, local.retry)
        case Stage.BACKOFF if now >= local.deadline:
            return replace(local, stage=Stage.JOINING), ()
        case _:
            return None


def _decide_running(local: LocalGeneration, now: float) -> _StepResult | None:
    if local.overdue:
        return _run_task(replace(local, overdue=False), actions.SimpleTask.OPEN_INQUIRY)
    if local.has_open_inquiry and now >= local.deadline:
        return _run_task(local, actions.SimpleTask.CONCLUDE_INQUIRY)
    if now >= local.next_sample_at:
        return _run_task(local, actions.SimpleTask.SAMPLE_RANKS)
    return None


def _decide_waiting(local: LocalGeneration, now: float) -> _StepResult | None:
    """Wait for the other pods: all local ranks have ended without a failure."""
    is_finished = local.stage is Stage.FINISHED
    is_settled = not is_finished or now >= local.deadline
    if not local.entered_barrier and is_settled:
        phase = WorkerPhase.FINISHED if is_finished else WorkerPhase.YIELDED
        return _run_task(replace(local, entered_barrier=True), actions.EnterExitBarrier(phase))
    if now < local.deadline:
        return None
    return _run_task(local, actions.SimpleTask.CHECK_FINISHED if is_finished else actions.SimpleTask.CHECK_YIELDED)


def _handle_exit(local: LocalGeneration, end: events.RankExited, now: float) -> _StepResult | None:
    """Handle the end of a rank."""
    if end.requested or end.attempt != local.attempt:
        return None
    if end.code not in _CLEAN_EXITS:
        log = actions.Log(f"rank {end.rank} ended with code {end.code} in attempt {end.attempt}")
        return _end_attempt(local, SimpleFollowUp.DIAGNOSE_EXITS, now, log)
    if local.alive or _select_failed_exits(local):
        return None  # the ends of the other ranks, or a failure among them, decide
    all_finished = all(ended.code == ExitCode.FINISHED and not ended.requested for ended in local.exits)
    stage, seconds = (Stage.FINISHED, _SETTLE_SECONDS) if all_finished else (Stage.YIELDED, _YIELD_TIMEOUT_SECONDS)
    # The phase is reported when the exit barrier is entered, because the workload may not accept the end.
    return replace(local, stage=stage, deadline=now + seconds), (
        actions.SimpleAction.OBSERVE_PROGRESS,
        actions.ReportTiming(None),
    )


def _select_failed_exits(local: LocalGeneration) -> tuple[events.RankExited, ...]:
    return tuple(end for end in local.exits if not end.requested and end.code not in _CLEAN_EXITS)


def _handle_shared_state(local: LocalGeneration, state: GenerationState, now: float) -> _StepResult | None:
    """Handle a change of the shared state."""
    if state.stopped is not None:
        if state.stopped == ExitCode.HUNG:
            return _run_task(local, actions.ReadFinding(state))
        return _fail_stopped(local, now)
    if state.attempt > local.attempt:
        if local.stage is Stage.STORE_LOST:  # the hang of this attempt, counted now
            return _start_next_attempt(local, state.attempt, Cause.HANG, None, now)
        if state.cause is Cause.HANG and state.attempt == local.attempt + 1:
            return _run_task(local, actions.ReadFinding(state))
        cause = Cause.YIELDED if state.cause is Cause.YIELDED else Cause.PEER_LOST
        return _start_next_attempt(local, state.attempt, cause, None, now)
    if local.alive and state.attempt == local.attempt == state.inquiry_attempt and state.inquiry > local.answered:
        return _run_task(replace(local, answered=state.inquiry), actions.AnswerInquiry(state))
    return None


# Failures and hangs.


def _handle_diagnosis(local: LocalGeneration, diagnosed: events.ExitsDiagnosed, now: float) -> _StepResult:
    if diagnosed.withdraw or diagnosed.state.stopped is not None:
        sentence = f"giving up in place: rank {diagnosed.rank} ended with code {diagnosed.code} ({diagnosed.sentence})"
        return _fail(local), (actions.Log(sentence, severe=True), actions.ReportVerdict(diagnosed.local_rank))
    next_state, reports = _start_next_attempt(local, diagnosed.state.attempt, diagnosed.cause, diagnosed.ended_at, now)
    if not diagnosed.backoff_seconds or local.order is not Order.NONE:
        return next_state, reports
    return replace(next_state, stage=Stage.BACKOFF, deadline=now + diagnosed.backoff_seconds), reports


def _handle_sample(local: LocalGeneration, sampled: events.RanksSampled, now: float) -> _StepResult:
    local = replace(local, next_sample_at=now + local.limits.sample_seconds, overdue=sampled.overdue)
    report_timing = actions.ReportTiming(sampled.timing)
    if sampled.overdue or local.stuck_reported_at is None or now < local.stuck_reported_at + _REPORT_STUCK_SECONDS:
        return local, (report_timing,)
    return replace(local, stuck_reported_at=None), (report_timing, actions.ReportStuck(()))


def _handle_hang(local: LocalGeneration, hang: events.HangFound, now: float) -> _StepResult:
    reports: tuple[actions.Action, ...] = (
        actions.ReportStuck(hang.stuck),
        *(actions.ReportHang(*culprit) for culprit in hang.culprits),
    )
    local = replace(local, stuck_reported_at=now)
    if hang.state.stopped is None:
        next_state, further = _start_next_attempt(local, hang.state.attempt, hang.cause, hang.failed_at, now)
    elif hang.cause is Cause.HANG and hang.culprit_known:
        next_state, further = _end_attempt(local, Fail(actions.ReportVerdict()), now)
    else:
        next_state, further = _fail_stopped(local, now)
    return next_state, (*reports, *further)


def _handle_store_loss(local: LocalGeneration, task: actions.Task, reason: str, now: float) -> _StepResult:
    """Retry until the store answers or a newer generation arrives; the agent that hosts the store failed or hangs."""
    if task in (actions.SimpleTask.OPEN_INQUIRY, actions.SimpleTask.CONCLUDE_INQUIRY):
        return _end_attempt(local, CountHang(reason), now)
    assert isinstance(task, actions.DiagnoseExits | actions.SimpleTask), f"{task} cannot lose the store"
    retry = replace(task, reconnect=True) if isinstance(task, actions.DiagnoseExits) else task
    return _await_store(local, retry, reason, now)


def _await_store(
    local: LocalGeneration,
    retry: actions.DiagnoseExits | actions.SimpleTask,
    reason: str,
    now: float,
) -> _StepResult:
    reports: tuple[actions.Action, ...] = ()
    if local.stage is not Stage.STORE_LOST:
        sentence = f"the store of generation {local.limits.generation} is gone ({reason}); waiting for a newer one"
        reports = (actions.Log(sentence), actions.EnterPhase(WorkerPhase.JOINING))
    waiting = replace(local, stage=Stage.STORE_LOST, retry=retry, deadline=now + _RECONNECT_SECONDS)
    return waiting, (*reports, actions.ReportWaiting((0,)))


def _fail_stopped(local: LocalGeneration, now: float) -> _StepResult:
    """Fail, because another agent stopped the generation."""
    log = actions.Log(f"generation {local.limits.generation} was stopped by another member", severe=True)
    return _end_attempt(local, Fail(), now, log)


def _fail(local: LocalGeneration) -> LocalGeneration:
    return replace(local, stage=Stage.FAILED, pending=(), has_open_inquiry=False, overdue=False)


# The end of an attempt, and of the generation.


def _start_next_attempt(
    local: LocalGeneration, attempt: int, cause: Cause, failed_at: float | None, now: float
) -> _StepResult:
    """Start the next attempt; on a pod whose ranks did not fail the cause is a lost peer."""
    reports = (actions.SimpleAction.OBSERVE_PROGRESS, actions.ReportRestart(attempt, cause, failed_at))
    return _end_attempt(replace(local, has_open_inquiry=False, overdue=False), SimpleFollowUp.REJOIN, now, *reports)


def _end_attempt(local: LocalGeneration, follow_up: FollowUp, now: float, *reports: actions.Action) -> _StepResult:
    return replace(local, stage=Stage.KILLING, follow_up=follow_up, deadline=now + KILL_SECONDS), (
        *reports,
        actions.ReportTiming(None),
        actions.SimpleAction.KILL,
    )


def _decide_killing(local: LocalGeneration, now: float) -> _StepResult | None:
    if local.alive:
        if now < local.deadline:
            return None
        return _fail_unkillable(local, "a training process")
    return _run_task(replace(local, stage=Stage.KILLED), actions.SimpleTask.END_LEFTOVERS)


def _fail_unkillable(local: LocalGeneration, names: str) -> _StepResult:
    """Fail the pod: the process is stuck in the kernel and holds its device, so no other rank can start."""
    sentence = f"{names} did not end within {KILL_SECONDS:.0f} s of SIGKILL"
    return replace(local, stage=Stage.ENDED, pending=()), (actions.FailPod(sentence),)


def _follow_up(local: LocalGeneration, now: float) -> _StepResult:
    failures = _select_failed_exits(local)
    local = replace(
        local, pending=tuple(event for event in local.pending if isinstance(event, events.SharedStateChanged))
    )
    match local.follow_up:
        case SimpleFollowUp.DIAGNOSE_EXITS:
            reports = tuple(actions.ReportFailure(end.local_rank) for end in failures)
            task = actions.DiagnoseExits(tuple(end.local_rank for end in failures))
            return _run_task(replace(local, stage=Stage.DIAGNOSING), task, *reports)
        case CountHang(reason):
            return _await_store(local, actions.SimpleTask.COUNT_UNANSWERED_HANG, reason, now)
        case Fail(verdict):
            return _fail(local), (verdict or actions.EnterPhase(WorkerPhase.FAILED),)
        case SimpleFollowUp.LEAVE:
            return replace(local, stage=Stage.ENDED, pending=()), ()
        case _:
            return replace(local, stage=Stage.JOINING), ()


def _start_leaving(local: LocalGeneration, now: float) -> _StepResult:
    if local.order is Order.IMMEDIATE:
        return _end_attempt(local, SimpleFollowUp.LEAVE, now)
    saving = replace(local, stage=Stage.SAVING, deadline=now + local.limits.grace_seconds)
    leaving = local.order is Order.TERMINATE
    return _run_task(saving, actions.Announce(leaving, local.superseded_by), actions.RequestExit(memory_ends=leaving))


def _decide_saving(local: LocalGeneration, now: float) -> _StepResult | None:
    """Wait for the ranks while they can still save."""
    if local.order is Order.IMMEDIATE:
        return _end_attempt(local, SimpleFollowUp.LEAVE, now)
    changes = [event.state for event in local.pending if isinstance(event, events.SharedStateChanged)]
    cannot_finish = any(state.broken or state.stopped is not None for state in changes)
    if local.alive and now < local.deadline and not cannot_finish:
        has_failed = any(end.code not in _CLEAN_EXITS for end in local.exits)
        return (
            _run_task(replace(local, broken_announced=True), actions.SimpleTask.ANNOUNCE_BROKEN)
            if has_failed and not local.broken_announced
            else None
        )
    reports: tuple[actions.Action, ...] = (actions.SimpleAction.OBSERVE_PROGRESS,)  # includes their last save
    if local.alive and now >= local.deadline:
        reports = (*reports, actions.SimpleAction.REPORT_GRACE_EXCEEDED)
    return _end_attempt(local, SimpleFollowUp.LEAVE, now, *reports)


def _run_task(local: LocalGeneration, task: actions.Task, *reports: actions.Action) -> _StepResult:
    return replace(local, running_task=task), (*reports, actions.RunTask(task))

"""The life of a generation on one pod: a pure function of its state, an event and the time to a state and actions.

What happens is taken down at once; what follows is decided when no errand is under way, in the order in which it
happened. So nothing is decided by half of an errand's outcome; only an order to leave hurries one.
Invariants: at most one errand is under way; no rank of an attempt is alive when the next one is joined; each end that
nobody asked for is reported at most once, and never as one that was; the agents part at most once; an order to leave is
not forgotten; when the generation is over no rank is alive and nothing follows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from trainium_contract.exit_codes import ExitCode
from trainium_contract.faults.causes import Cause
from trainium_contract.wire.messages import WorkerPhase
from trainium_trainer.agent.lifecycle import actions as do
from trainium_trainer.agent.lifecycle import events as on
from trainium_trainer.agent.lifecycle.events import GenerationEnd, Order
from trainium_trainer.agent.lifecycle.state import (
    After,
    CountHang,
    Fail,
    JoinAgain,
    JudgeEnds,
    LeaveNow,
    Life,
    Stage,
    Terms,
)

if TYPE_CHECKING:
    from trainium_trainer.agent.exits.restart_policy import GenerationState

_POLL_SECONDS = 0.1
"""Between two looks at counters of the store."""
_RECONNECT_SECONDS = 0.2
_YIELD_PATIENCE_SECONDS = 5.0
_KILL_SECONDS = 30.0
_TOLD_SECONDS = 2.5
"""What was told of a standstill stays long enough for a heartbeat to carry it."""
_PEACEFUL = (ExitCode.FINISHED, ExitCode.YIELDING)


_Answer = tuple[Life, tuple[do.Action, ...]]


def step(terms: Terms, life: Life, event: on.Event, now: float) -> _Answer:
    """Take down the event and decide all that can be decided now."""
    if life.stage is Stage.OVER:
        return life, ()
    life, actions = _take(terms, life, event, now)
    while life.busy is None and life.stage is not Stage.OVER:
        follows = _follows(terms, life, now)
        if follows is None:
            break
        life, more = follows
        actions = (*actions, *more)
    if life.told_at is not None and life.stage is not Stage.RUNNING and now >= life.told_at + _TOLD_SECONDS:
        return replace(life, told_at=None), (*actions, do.Stuck(()))
    return life, actions


def wake_at(life: Life) -> float | None:
    """When a Tick is wanted; None while only events lead on."""
    dues = []
    if life.told_at is not None and life.stage is not Stage.RUNNING:
        dues.append(life.told_at + _TOLD_SECONDS)
    if life.busy is None:
        match life.stage:
            case Stage.RUNNING:
                dues.append(min(life.look_due, life.due) if life.inquiring else life.look_due)
            case Stage.ENDING | Stage.SAVING | Stage.STORE_LOST | Stage.BACKOFF | Stage.YIELDED | Stage.FINISHED:
                dues.append(life.due)
    return min(dues, default=None) if life.stage is not Stage.OVER else None


# What is taken down.


def _take(terms: Terms, life: Life, event: on.Event, now: float) -> _Answer:
    match event:
        case on.Begin():
            return replace(life, stage=Stage.JOINING), (do.Enter(WorkerPhase.JOINING, 0),)
        case on.Ordered():
            order, superseded = max(life.order, event.order), max(life.superseded_by, event.superseded_by)
            return replace(life, order=order, superseded_by=superseded), (do.Hurry(),)
        case on.Ended():
            if event.attempt != life.attempt:
                return life, ()
            return replace(life, ends=(*life.ends, event), pending=(*life.pending, event)), ()
        case on.SharedChanged():
            return replace(life, pending=_with_newest(life.pending, event)), ()
        case on.WaitingFor():
            return life, (do.Waits(event.nodes),) if life.order is Order.NONE else ()
        case on.Tick():
            return life, ()
        case _:
            assert life.busy is not None, f"{event} is no errand's that is under way"
            return _result(terms, replace(life, busy=None), life.busy, event, now)


def _with_newest(
    pending: tuple[on.Ended | on.SharedChanged, ...], event: on.SharedChanged
) -> tuple[on.Ended | on.SharedChanged, ...]:
    """One look at the shared state is enough, at the newest; at the place of the first."""
    if not any(isinstance(each, on.SharedChanged) for each in pending):
        return (*pending, event)
    return tuple(event if isinstance(each, on.SharedChanged) else each for each in pending)


def _result(terms: Terms, life: Life, errand: do.Errand, result: on.Result, now: float) -> _Answer:
    match result:
        case on.Joined():
            if life.order is not Order.NONE:
                return life, ()
            attempt = result.state.attempt
            begun = replace(life, stage=Stage.STARTING, attempt=attempt, started=0, ends=(), signed=False)
            return _do(begun, do.StartRanks(attempt, result.port), do.Enter(WorkerPhase.LOADING, attempt))
        case on.Interrupted() | on.ErrandDone():
            return life, ()
        case on.GenerationStopped():
            return (life, ()) if life.order is not Order.NONE else _stop(terms, life, now)
        case on.FoundBad():
            said = do.Say(f"giving up in place: {result.sentence}", severe=True)
            return _failed(life), (said, do.GiveUpWith(result.code, result.sentence))
        case on.Started():
            return replace(life, stage=Stage.RUNNING, started=result.ranks, look_due=now + terms.look_seconds), ()
        case on.Judged():
            return _judged(life, result, now)
        case on.StoreLost():
            return _store_lost(terms, life, errand, result.reason, now)
        case on.Looked():
            return _looked(terms, life, result, now)
        case on.Inquired():
            return _inquired(life, result, now)
        case on.HangFound():
            return _hang_found(terms, life, result, now)
        case on.Counted():
            return _follow(terms, life, result.after, now) or (life, ())
        case on.FinishLooked():
            if result.parted:
                return replace(life, stage=Stage.OVER, outcome=GenerationEnd.FINISHED, pending=()), ()
            return replace(life, due=now + _POLL_SECONDS), ()
        case on.YieldLooked():
            if result.after is None or result.after.attempt <= life.attempt:
                return replace(life, due=now + _POLL_SECONDS), ()
            return _begin_again(life, result.after.attempt, Cause.YIELDED, None, now)


# What follows when no errand is under way.


def _follows(terms: Terms, life: Life, now: float) -> _Answer | None:
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
            return _do(life, do.Join())
        case Stage.RUNNING | Stage.YIELDED | Stage.FINISHED:
            if life.pending:
                first, life = life.pending[0], replace(life, pending=life.pending[1:])
                return _answered(terms, life, first, now) or (life, ())
            return _running(life, now) if life.stage is Stage.RUNNING else _waiting(life, now)
        case Stage.STORE_LOST if now >= life.due and life.retry is not None:
            return _do(life, life.retry)
        case Stage.BACKOFF if now >= life.due:
            return replace(life, stage=Stage.JOINING), ()
        case _:
            return None


def _answered(terms: Terms, life: Life, event: on.Ended | on.SharedChanged, now: float) -> _Answer | None:
    return _ended(life, event, now) if isinstance(event, on.Ended) else _follow(terms, life, event.state, now)


def _running(life: Life, now: float) -> _Answer | None:
    if life.overdue:
        return _do(replace(life, overdue=False), do.Ask(life.attempt))
    if life.inquiring and now >= life.due:
        return _do(life, do.Conclude(life.attempt))
    if now >= life.look_due:
        return _do(life, do.Look(life.attempt))
    return None


def _waiting(life: Life, now: float) -> _Answer | None:
    """All local ranks have ended in peace."""
    finished = life.stage is Stage.FINISHED
    if not life.signed:
        phase = WorkerPhase.FINISHED if finished else WorkerPhase.YIELDED
        return _do(replace(life, signed=True), do.SignOff(life.attempt, phase))
    if now < life.due:
        return None
    return _do(life, do.Finish(life.attempt) if finished else do.GoOn(life.attempt))


def _ended(life: Life, end: on.Ended, now: float) -> _Answer | None:
    """Handle the end of a rank."""
    if end.asked or end.attempt != life.attempt:
        return None
    if end.code not in _PEACEFUL:
        said = do.Say(f"rank {end.rank} ended with code {end.code} in attempt {end.attempt}")
        return _end(life, JudgeEnds(), now, said)
    if life.alive or _failures(life):
        return None  # the others' ends, or the failure among them, lead on
    finished = life.all_ended_with(ExitCode.FINISHED)
    stage, phase = (Stage.FINISHED, WorkerPhase.FINISHED) if finished else (Stage.YIELDED, WorkerPhase.YIELDED)
    due = now if finished else now + _YIELD_PATIENCE_SECONDS
    return replace(life, stage=stage, due=due), (do.Observe(), do.Timed(None), do.Enter(phase))


def _failures(life: Life) -> tuple[on.Ended, ...]:
    return tuple(end for end in life.ends if not end.asked and end.code not in _PEACEFUL)


def _follow(terms: Terms, life: Life, state: GenerationState, now: float) -> _Answer | None:
    """Handle a change of the shared state."""
    if state.stopped is not None:
        if state.stopped == ExitCode.HUNG:
            return _do(life, do.TakeFinding(life.attempt, state))
        return _stop(terms, life, now)
    if state.attempt > life.attempt:
        if life.stage is Stage.STORE_LOST:  # its standstill, counted at last
            return _begin_again(life, state.attempt, Cause.HANG, None, now)
        if state.cause is Cause.HANG and state.attempt == life.attempt + 1:
            return _do(life, do.TakeFinding(life.attempt, state))
        cause = Cause.YIELDED if state.cause is Cause.YIELDED else Cause.PEER_LOST
        return _begin_again(life, state.attempt, cause, None, now)
    if life.alive and state.attempt == life.attempt == state.asked_in and state.inquiry > life.answered:
        return _do(replace(life, answered=state.inquiry), do.AnswerQuestion(state))
    return None


# Failures and standstills.


def _judged(life: Life, judged: on.Judged, now: float) -> _Answer:
    if judged.withdraw or judged.after.stopped is not None:
        sentence = f"giving up in place: rank {judged.rank} ended with code {judged.code} ({judged.sentence})"
        return _failed(life), (do.Say(sentence, severe=True), do.GiveUp(judged.local_rank))
    again, told = _begin_again(life, judged.after.attempt, judged.cause, judged.ended_at, now)
    if not judged.backoff_seconds or life.order is not Order.NONE:
        return again, told
    return replace(again, stage=Stage.BACKOFF, due=now + judged.backoff_seconds), told


def _looked(terms: Terms, life: Life, looked: on.Looked, now: float) -> _Answer:
    life = replace(life, look_due=now + terms.look_seconds, overdue=looked.overdue)
    timed = do.Timed(looked.timing)
    if looked.overdue or life.told_at is None or now < life.told_at + _TOLD_SECONDS:
        return life, (timed,)
    return replace(life, told_at=None), (timed, do.Stuck(()))


def _inquired(life: Life, inquired: on.Inquired, now: float) -> _Answer:
    life = replace(life, inquiring=inquired.open, due=now + _POLL_SECONDS)
    if inquired.stuck is None:
        return life, ()
    return replace(life, told_at=now), (do.Stuck(inquired.stuck),)


def _hang_found(terms: Terms, life: Life, found: on.HangFound, now: float) -> _Answer:
    told: tuple[do.Action, ...] = (do.Stuck(found.stuck), *(do.Hung(*culprit) for culprit in found.culprits))
    life = replace(life, told_at=now)
    if found.after.stopped is None:
        again, more = _begin_again(life, found.after.attempt, found.cause, found.failed_at, now)
    elif found.cause is Cause.HANG and found.named:
        again, more = _end(life, Fail(do.GiveUp()), now)
    else:
        again, more = _stop(terms, life, now)
    return again, (*told, *more)


def _store_lost(terms: Terms, life: Life, errand: do.Errand, reason: str, now: float) -> _Answer:
    """Retry until the store answers or a newer generation arrives: the agent that hosts it is missing or hangs."""
    if isinstance(errand, do.Ask | do.Conclude):
        return _end(life, CountHang(reason), now)
    assert isinstance(errand, do.Judge | do.CountSilent), f"{errand} is quiet about a lost store"
    return _await_store(terms, life, replace(errand, reconnect=True), reason, now)


def _await_store(terms: Terms, life: Life, retry: do.Judge | do.CountSilent, reason: str, now: float) -> _Answer:
    told: tuple[do.Action, ...] = ()
    if life.stage is not Stage.STORE_LOST:
        gone = f"the store of generation {terms.generation} is gone ({reason}); waiting for a newer one"
        told = (do.Say(gone), do.Enter(WorkerPhase.JOINING))
    lost = replace(life, stage=Stage.STORE_LOST, retry=retry, due=now + _RECONNECT_SECONDS)
    return lost, (*told, do.Waits((0,)))


def _stop(terms: Terms, life: Life, now: float) -> _Answer:
    """Another agent gave up for all."""
    said = do.Say(f"generation {terms.generation} was stopped by another member", severe=True)
    return _end(life, Fail(), now, said)


def _failed(life: Life) -> Life:
    return replace(life, stage=Stage.FAILED, pending=(), inquiring=False, overdue=False)


# The end of an attempt, and of the generation.


def _begin_again(life: Life, attempt: int, cause: Cause, failed_at: float | None, now: float) -> _Answer:
    """Start the next attempt; for a pod whose ranks did not fail the cause is a lost peer."""
    told = (do.Observe(), do.Restarting(attempt, cause, failed_at))
    return _end(replace(life, inquiring=False, overdue=False), JoinAgain(), now, *told)


def _end(life: Life, after: After, now: float, *told: do.Action) -> _Answer:
    return replace(life, stage=Stage.ENDING, after=after, due=now + _KILL_SECONDS), (*told, do.Timed(None), do.Kill())


def _ending(terms: Terms, life: Life, now: float) -> _Answer | None:
    if life.alive:
        if now < life.due:
            return None
        # It is stuck in the kernel and holds its device, so that nothing can be started beside it.
        stuck = f"a training process did not end within {_KILL_SECONDS:.0f} s of SIGKILL"
        return replace(life, stage=Stage.OVER, pending=()), (do.Break(stuck),)
    failures = _failures(life)
    life = replace(life, pending=tuple(each for each in life.pending if isinstance(each, on.SharedChanged)))
    match life.after:
        case JudgeEnds():
            told = tuple(do.Failed(end.local_rank) for end in failures)
            judge = do.Judge(life.attempt, tuple(end.local_rank for end in failures))
            return _do(replace(life, stage=Stage.JUDGING), judge, *told)
        case CountHang(reason):
            return _await_store(terms, life, do.CountSilent(life.attempt, reconnect=True), reason, now)
        case Fail(verdict):
            return _failed(life), (verdict or do.Enter(WorkerPhase.FAILED),)
        case LeaveNow():
            return replace(life, stage=Stage.OVER, pending=()), ()
        case _:
            return replace(life, stage=Stage.JOINING), ()


def _leave(terms: Terms, life: Life, now: float) -> _Answer:
    if life.order is Order.IMMEDIATE:
        return _end(life, LeaveNow(), now)
    saving = replace(life, stage=Stage.SAVING, due=now + terms.grace_seconds)
    leaving = life.order is Order.TERMINATE
    return _do(saving, do.Announce(leaving, life.superseded_by), do.AskToLeave(memory_ends=leaving))


def _saving(life: Life, now: float) -> _Answer | None:
    """Wait for the ranks as long as it makes sense."""
    if life.order is Order.IMMEDIATE:
        return _end(life, LeaveNow(), now)
    changes = [each.state for each in life.pending if isinstance(each, on.SharedChanged)]
    in_vain = any(state.broken or state.stopped is not None for state in changes)
    if life.alive and now < life.due and not in_vain:
        broken = any(end.code not in _PEACEFUL for end in life.ends)
        return _do(replace(life, told_broken=True), do.TellBroken()) if broken and not life.told_broken else None
    saved = replace(life, yielded=life.all_ended_with(ExitCode.YIELDING))
    return _end(saved, LeaveNow(), now, do.Observe())  # what they saved last


def _do(life: Life, errand: do.Errand, *told: do.Action) -> _Answer:
    return replace(life, busy=errand), (*told, do.Do(errand))

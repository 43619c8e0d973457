"""A generation on one pod in virtual time: the real owner's decisions, everything else drawn at random.

Ranks, the worker, the other agents, the coordinator and the clock are simulated; every choice and every duration comes
from the seed. What must hold in any order of events is asserted as it happens, so a failure names the seed.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from trainium_agent.exits.restart_policy import GenerationState
from trainium_agent.lifecycle import actions as do
from trainium_agent.lifecycle import events as on
from trainium_agent.lifecycle.events import GenerationEnd, Order
from trainium_agent.lifecycle.generation import step, wake_at
from trainium_agent.lifecycle.state import GenerationLimits, LocalGeneration, Stage
from trainium_contract.faults.causes import Cause

if TYPE_CHECKING:
    from collections.abc import Callable

TERMS = GenerationLimits(generation=3, grace_seconds=20.0, sample_seconds=2.0)
LOCAL_RANKS = 3
FAILURES = (1, 64, 66, 76, 80, 81, 137)
PEACEFUL = (0, 75)
LONGEST_TASK_SECONDS = 6.0
ENOUGH_SECONDS = 90.0
"""After an order: grace, the longest tasks, and every kill."""


@dataclass
class Rank:
    """A local rank of one attempt."""

    attempt: int
    local_rank: int
    asked: bool = False
    code: int | None = None
    reports: int = 0


@dataclass(order=True)
class _Pending:
    at: float
    number: int
    what: Callable[[], None] = field(compare=False)


class Generation:
    """One random history."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.local = LocalGeneration()
        self.shared = self.reported = GenerationState()
        self.ranks: list[Rank] = []
        self.all_ranks: list[Rank] = []
        self.task: do.Task | None = None
        self.hurried = False
        self.stages: set[Stage] = set()
        self.restarts: list[int] = []
        self.verdicts = 0
        self.parted = 0
        self.finished_attempt = -1
        self.broken = False
        self.steps = 0
        self._queue: list[_Pending] = []
        self._number = 0
        self._alarm = 0
        self.unkillable = self.random.random() < 0.01
        # How likely things are differs from history to history, so that rare chains are seen as well.
        self.crash, self.loss, self.hang, self.others = (self.random.random() ** 2 for _ in range(4))

    # The clock.

    def after(self, seconds: float, what: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._queue, _Pending(self.now + seconds, self._number, what))

    def soon(self, longest: float) -> float:
        """A duration: often none at all, so that many things happen in one moment."""
        return self.random.choice((0.0, 0.001, longest * self.random.random() ** 3))

    def run(self) -> None:
        """Run until the generation is over, which an order causes in the end."""
        self.take(on.Notice.BEGIN)
        for _ in range(self.random.randrange(4)):
            self.after(self.random.uniform(0, 40), self.another_agent)
        ordered = 50 * self.random.random() ** 2
        orders = self.random.sample([Order.GRACEFUL, Order.TERMINATE, Order.IMMEDIATE], self.random.randrange(1, 4))
        for order in orders:
            self.after(ordered, lambda order=order: self.take(on.LeaveOrdered(order, 4)))
            ordered += self.soon(30)
        while self._queue and self.local.stage is not Stage.OVER:
            pending = heapq.heappop(self._queue)
            self.now = pending.at
            pending.what()
            self.steps += 1
            assert self.steps < 20_000, "it turns in a circle"
        self.check_end(ordered)

    # The owner.

    def take(self, event: on.Event) -> None:
        before = self.local
        self.local, actions = step(TERMS, before, event, self.now)
        self.stages.add(self.local.stage)
        assert sum(isinstance(action, do.RunTask) for action in actions) <= 1
        if before.busy is not None and not isinstance(event, on.Result):
            assert self.local.busy == before.busy, "an task under way was forgotten"
            assert not any(isinstance(action, do.RunTask) for action in actions), "two tasks at once"
        for action in actions:
            self.carry_out(action)
        self.check_nothing_is_lost(event)
        self._alarm += 1
        wake_time = wake_at(self.local)
        if wake_time is not None:
            assert wake_time > self.now, "a wake in the past would turn in a circle"
            self.after(wake_time - self.now, lambda number=self._alarm: self.tick(number))

    def check_nothing_is_lost(self, event: on.Event) -> None:
        """Check that all reports have been answered whenever nothing is under way."""
        local = self.local
        if isinstance(event, on.SharedChanged):
            self.reported = event.state
        if local.busy is not None or local.stage not in (Stage.RUNNING, Stage.YIELDED, Stage.FINISHED):
            return
        assert not local.pending
        assert local.alive == (local.stage is Stage.RUNNING)
        assert not [end for end in local.ends if not end.asked and end.code not in PEACEFUL], "a failure was lost"
        assert self.reported.stopped is None, "the end of the generation was lost"
        assert self.reported.attempt <= local.attempt, "a newer attempt was lost"
        assert local.order is Order.NONE, "an order was lost"

    def tick(self, number: int) -> None:
        if number == self._alarm:
            self.take(on.Notice.TICK)

    def carry_out(self, action: do.Action) -> None:
        match action:
            case do.RunTask(task):
                assert self.task is None, f"{task} while {self.task} is under way"
                assert self.local.stage is not Stage.OVER
                self.task = task
                self.begin(task)
            case do.SimpleAction.INTERRUPT_TASK:
                self.hurried = True
            case do.SimpleAction.KILL:
                for rank in self.ranks:
                    self.signal(rank, 137)
            case do.RequestExit():
                for rank in self.ranks:
                    self.signal(rank, self.random.choice((75, 75, 75, 75, 0, 1, 143)))
            case do.ReportFailure(local_rank):
                rank = self.ranks[local_rank]
                assert not rank.asked, "an end that was asked for is no failure"
                assert rank.code not in (None, *PEACEFUL)
                rank.reports += 1
                assert rank.reports == 1, "one end, one report"
            case do.ReportHang(number, _):
                rank = self.ranks[number]
                rank.reports += 1
                assert rank.reports == 1, "a rank that failed is not one that hung"
            case do.ReportRestart(attempt):
                assert attempt > self.restart_before, "an attempt is begun once"
                self.restarts.append(attempt)
            case do.ReportVerdict() | do.ReportNodeVerdict():
                self.verdicts += 1
                assert self.verdicts == 1, "one verdict"
            case do.FailPod():
                assert self.unkillable
                self.broken = True

    @property
    def restart_before(self) -> int:
        return self.restarts[-1] if self.restarts else 0

    # Ranks.

    def signal(self, rank: Rank, code: int) -> None:
        if rank.code is None and not (self.unkillable and code == 137 and rank.local_rank == 0):
            rank.asked = True
            self.after(self.soon(1.0 if code == 137 else 25.0), lambda: self.end(rank, code))

    def end(self, rank: Rank, code: int) -> None:
        if rank.code is not None:
            return
        rank.code = code
        event = on.RankEnded(rank.attempt, rank.local_rank, rank.local_rank, code, rank.asked)
        self.after(self.random.choice((0.0, 0.0, 0.002)), lambda: self.take(event))

    def start(self, attempt: int) -> None:
        assert not any(rank.code is None for rank in self.all_ranks), "two attempts at once"
        self.ranks = [Rank(attempt, number) for number in range(LOCAL_RANKS)]
        self.all_ranks += self.ranks
        length = self.soon(30)
        together = self.random.choice((0, 0, 75))
        for rank in self.ranks:
            code = self.random.choice(FAILURES) if self.random.random() < self.crash / 2 else together
            self.after(length + self.soon(2), lambda rank=rank, code=code: self.end(rank, code))

    # Other agents.

    def another_agent(self) -> None:
        """Change the shared state: its failure, a hang, a question, the end of the generation."""
        state, pick = self.shared, self.random.random()
        if state.stopped is None and pick < 0.5:
            cause = self.random.choice((Cause.CRASH, Cause.HANG, Cause.YIELDED))
            state = replace(state, attempt=state.attempt + 1, cause=cause)
        elif state.stopped is None and pick < 0.6:
            state = replace(state, stopped=self.random.choice((64, 77)))
        elif pick < 0.8:
            state = replace(state, inquiry=state.inquiry + 1, asked_in=state.attempt, asked_by=1)
        else:
            state = replace(state, broken=True)
        self.change(state)

    def change(self, state: GenerationState) -> None:
        if state != self.shared:
            self.shared = state
            self.after(self.soon(1.5), lambda: self.take(on.SharedChanged(self.shared)))

    # The worker.

    def begin(self, task: do.Task) -> None:
        match task:
            case do.SimpleTask.JOIN:
                assert not any(rank.code is None for rank in self.all_ranks), "a rank is alive while the next is joined"
                self.after(self.soon(3.0), self.join)
                return
            case do.StartRanks():
                self.start(self.local.attempt)
        longest = LONGEST_TASK_SECONDS if self.random.random() < 0.05 else 0.6
        self.after(self.soon(longest), lambda: self.finish(self.outcome(task)))

    def join(self) -> None:
        if self.hurried:
            self.finish(on.Outcome.INTERRUPTED)
        elif self.shared.stopped is not None:
            self.finish(on.Outcome.STOPPED)
        elif self.random.random() < 0.01:
            self.change(replace(self.shared, attempt=self.shared.attempt + 1))
            self.finish(on.GaveUp(80, "it computes wrong numbers"))
        elif self.random.random() < 0.2:
            self.take(on.WaitingFor((1,)))
            self.after(self.soon(3.0), self.join)
        else:
            self.finish(on.Joined(self.shared, 29_500))

    def finish(self, result: on.Result) -> None:
        self.task = None
        self.take(result)

    def outcome(self, task: do.Task) -> on.Result:
        chance = self.random.random
        attempt, simple = self.local.attempt, do.SimpleTask
        needs_store = (simple.COUNT_UNANSWERED_HANG, simple.OPEN_INQUIRY, simple.CONCLUDE_INQUIRY)
        if (isinstance(task, do.DiagnoseEnds) or task in needs_store) and chance() < self.loss:
            return on.StoreLost("it does not answer")
        match task:
            case do.StartRanks():
                return on.Started(LOCAL_RANKS)
            case do.DiagnoseEnds():
                return self.judged(task)
            case do.SimpleTask.COUNT_UNANSWERED_HANG:
                return on.HangCounted(self.bumped(attempt, Cause.HANG))
            case do.SimpleTask.SAMPLE_RANKS:
                return on.RanksSampled(overdue=chance() < self.hang / 4)
            case do.SimpleTask.OPEN_INQUIRY:
                return on.InquiryUpdated(chance() < 0.8, ())
            case do.AnswerQuestion():
                return on.InquiryUpdated(open=False, stuck=())
            case do.SimpleTask.CONCLUDE_INQUIRY:
                return (
                    self.hung(self.bumped(attempt, Cause.HANG)) if chance() < 0.2 else on.InquiryUpdated(chance() < 0.8)
                )
            case do.ReadFinding(after):
                return self.hung(after)
            case do.SimpleTask.CHECK_FINISHED:
                return self.finish_checked(attempt)
            case do.SimpleTask.CHECK_YIELDED:
                return on.YieldChecked(self.bumped(attempt, Cause.YIELDED) if chance() < 0.3 else None)
            case _:
                return on.Outcome.DONE

    def finish_checked(self, attempt: int) -> on.FinishChecked:
        parted = self.random.random() < 0.3
        self.parted += parted
        self.finished_attempt = attempt
        return on.FinishChecked(parted)

    def judged(self, task: do.DiagnoseEnds) -> on.EndsDiagnosed:
        assert task.local_ranks, "somebody failed"
        decides = self.ranks[self.random.choice(task.local_ranks)]
        assert decides.reports == 1, "what is judged was reported"
        assert not any(rank.code is None for rank in self.ranks), "judged while ranks are alive"
        attempt = self.local.attempt
        withdraw = self.random.random() < 0.05
        stopped = 64 if self.random.random() < 0.05 else self.shared.stopped
        after = self.bumped(attempt, Cause.CRASH)
        if stopped is not None:
            after = replace(after, stopped=stopped)
            self.change(after)
        backoff = self.random.choice((0.0, 0.0, 0.0, 8.0))
        code = decides.code or 0
        return on.EndsDiagnosed(
            decides.local_rank, decides.local_rank, code, Cause.CRASH, "", 1.0, withdraw, backoff, after
        )

    def hung(self, after: GenerationState) -> on.HangFound:
        living = [rank.local_rank for rank in self.ranks if rank.code is None and not rank.asked]
        culprits = tuple((number, "it stood still") for number in living if self.random.random() < 0.3)
        named = bool(culprits) or self.random.random() < 0.5
        cause = Cause.HANG if culprits or not named else Cause.PEER_LOST
        return on.HangFound(after, cause, 1.0, named, culprits)

    def bumped(self, attempt: int, cause: Cause) -> GenerationState:
        """Counted once, however many agents count it."""
        if self.shared.stopped is None and self.shared.attempt == attempt:
            self.change(replace(self.shared, attempt=attempt + 1, cause=cause))
        return self.shared

    # What must hold at the end.

    def check_end(self, ordered: float) -> None:
        assert self.local.stage is Stage.OVER, f"never over: {self.local}"
        assert self.now <= ordered + ENOUGH_SECONDS, "an order was forgotten"
        if self.broken:
            return
        assert self.task is None, "over while an task is under way"
        assert not any(rank.code is None for rank in self.all_ranks), "over while a rank is alive"
        assert self.parted == (self.local.outcome is GenerationEnd.FINISHED), "the agents part at most once"
        if self.local.outcome is GenerationEnd.FINISHED:
            assert self.finished_attempt == self.ranks[0].attempt
            assert all(rank.code == 0 for rank in self.ranks), "finished though a rank had not"
        if self.local.yielded:
            assert all(rank.code == 75 for rank in self.ranks)
        before = self.local
        for late in (
            on.Notice.TICK,
            on.SharedChanged(self.shared),
            on.LeaveOrdered(Order.IMMEDIATE),
            on.WaitingFor((1,)),
        ):
            assert step(TERMS, before, late, self.now + 1) == (before, ()), "nothing follows the end"

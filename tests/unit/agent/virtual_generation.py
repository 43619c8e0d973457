"""Simulate a generation on one pod in virtual time: the real state machine with random events.

Ranks, the worker thread, the other agents, the coordinator and the clock are simulated. Every choice and every duration
comes from the seed. The invariants are asserted after each event.
"""

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from trainium_agent.exits.restart_policy import GenerationState
from trainium_agent.lifecycle import actions, events
from trainium_agent.lifecycle.events import GenerationOutcome, Order
from trainium_agent.lifecycle.generation import step, wake_at
from trainium_agent.lifecycle.state import GenerationLimits, LocalGeneration, Stage
from trainium_agent.workload.master_port import MasterPort
from trainium_contract.faults.causes import Cause

LIMITS = GenerationLimits(generation=3, grace_seconds=20.0, sample_seconds=2.0)
LOCAL_RANKS = 3
FAILURE_CODES = (1, 64, 66, 76, 80, 81, 137)
SUCCESSFUL_CODES = (0, 75)
LONGEST_TASK_SECONDS = 6.0
LEAVE_LIMIT_SECONDS = 90.0
"""Longest time from the last order to the end: grace, the longest tasks, and every kill."""


@dataclass(eq=False)
class Rank:
    """A local rank of one attempt."""

    attempt: int
    local_rank: int
    exit_requested: bool = False
    code: int | None = None
    reports: int = 0


@dataclass(order=True)
class _ScheduledCall:
    time: float
    number: int
    function: Callable[[], None] = field(compare=False)


class VirtualGeneration:
    """A generation in a random order of events."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.local = LocalGeneration(LIMITS)
        self.shared = self.reported = GenerationState()
        self.ranks: list[Rank] = []
        self.all_ranks: list[Rank] = []
        self.task: actions.Task | None = None
        self.interrupted = False
        self.stages: set[Stage] = set()
        self.restarts: list[int] = []
        self.verdicts = 0
        self.barriers_passed = 0
        self.finished_attempt = -1
        self.broken = False
        self.steps = 0
        self._queue: list[_ScheduledCall] = []
        self._number = 0
        self._alarm = 0
        self.unkillable = self.random.random() < 0.01
        self.leftovers: set[Rank] = set()
        """Ended ranks of which a child is alive."""
        # The rates differ between histories, so that rare sequences occur as well.
        self.crash_rate, self.store_loss_rate, self.hang_rate = (self.random.random() ** 2 for _ in range(3))

    # The clock.

    def schedule(self, seconds: float, function: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._queue, _ScheduledCall(self.now + seconds, self._number, function))

    def random_duration(self, longest: float) -> float:
        """Return a duration, often zero, so that many events happen at one time."""
        return self.random.choice((0.0, 0.001, longest * self.random.random() ** 3))

    def run(self) -> None:
        """Run until the generation is over, which an order causes in the end."""
        self.apply_event(events.SimpleEvent.BEGIN)
        for _ in range(self.random.randrange(4)):
            self.schedule(self.random.uniform(0, 40), self.act_as_another_agent)
        ordered_at = 50 * self.random.random() ** 2
        orders = self.random.sample([Order.GRACEFUL, Order.TERMINATE, Order.IMMEDIATE], self.random.randrange(1, 4))
        for order in orders:
            self.schedule(ordered_at, lambda order=order: self.apply_event(events.LeaveOrdered(order, 4)))
            ordered_at += self.random_duration(30)
        while self._queue and self.local.stage is not Stage.ENDED:
            call = heapq.heappop(self._queue)
            self.now = call.time
            call.function()
            self.steps += 1
            assert self.steps < 20_000, "the generation does not end"
        self.check_end(ordered_at)

    # The owner.

    def apply_event(self, event: events.Event) -> None:
        before = self.local
        self.local, requested = step(before, event, self.now)
        self.stages.add(self.local.stage)
        assert sum(isinstance(action, actions.RunTask) for action in requested) <= 1
        if before.running_task is not None and not isinstance(event, events.Result):
            assert self.local.running_task == before.running_task, "a task under way was forgotten"
            assert not any(isinstance(action, actions.RunTask) for action in requested), "two tasks at once"
        for action in requested:
            self.execute(action)
        self.check_nothing_is_missed(event)
        self._alarm += 1
        wake_time = wake_at(self.local)
        if wake_time is not None:
            assert wake_time > self.now, "a wake time in the past would loop"
            self.schedule(wake_time - self.now, lambda number=self._alarm: self.tick(number))

    def check_nothing_is_missed(self, event: events.Event) -> None:
        """Check that all reports have been answered whenever nothing is under way."""
        local = self.local
        if isinstance(event, events.SharedStateChanged):
            self.reported = event.state
        if local.running_task is not None or local.stage not in (Stage.RUNNING, Stage.YIELDED, Stage.FINISHED):
            return
        assert not local.pending
        assert local.alive == (local.stage is Stage.RUNNING)
        assert not [end for end in local.exits if not end.requested and end.code not in SUCCESSFUL_CODES], "unreported"
        assert self.reported.stopped is None, "the end of the generation was not reported"
        assert self.reported.attempt <= local.attempt, "a newer attempt was not reported"
        assert local.order is Order.NONE, "an order was not executed"

    def tick(self, number: int) -> None:
        if number == self._alarm:
            self.apply_event(events.SimpleEvent.TICK)

    def execute(self, action: actions.Action) -> None:
        match action:
            case actions.RunTask(task):
                assert self.task is None, f"{task} while {self.task} is under way"
                assert self.local.stage is not Stage.ENDED
                self.task = task
                self.begin(task)
            case actions.SimpleAction.INTERRUPT_TASK:
                self.interrupted = True
            case actions.SimpleAction.KILL:
                for rank in self.ranks:
                    self.signal(rank, 137)
            case actions.RequestExit():
                for rank in self.ranks:
                    self.signal(rank, self.random.choice((75, 75, 75, 75, 0, 1, 143)))
            case actions.ReportFailure(local_rank):
                rank = self.ranks[local_rank]
                assert not rank.exit_requested, "a requested exit is no failure"
                assert rank.code not in (None, *SUCCESSFUL_CODES)
                rank.reports += 1
                assert rank.reports == 1, "an exit is reported once"
            case actions.ReportHang(number, _):
                rank = self.ranks[number]
                rank.reports += 1
                assert rank.reports == 1, "a rank that failed is not one that hung"
            case actions.ReportRestart(attempt):
                assert attempt > self.restart_before, "an attempt is started once"
                self.restarts.append(attempt)
            case actions.ReportVerdict() | actions.ReportNodeVerdict():
                self.verdicts += 1
                assert self.verdicts == 1, "one verdict"
            case actions.FailPod():
                assert self.unkillable
                self.broken = True

    @property
    def restart_before(self) -> int:
        return self.restarts[-1] if self.restarts else 0

    # Ranks.

    def signal(self, rank: Rank, code: int) -> None:
        if rank.code is None and not (self.unkillable and code == 137 and rank.local_rank == 0):
            rank.exit_requested = True
            self.schedule(self.random_duration(1.0 if code == 137 else 25.0), lambda: self.end_rank(rank, code))

    def end_rank(self, rank: Rank, code: int) -> None:
        if rank.code is not None:
            return
        rank.code = code
        if self.random.random() < 0.3:
            self.leftovers.add(rank)
        event = events.RankExited(rank.attempt, rank.local_rank, rank.local_rank, code, rank.exit_requested)
        self.schedule(self.random.choice((0.0, 0.0, 0.002)), lambda: self.apply_event(event))

    def start(self, attempt: int) -> None:
        assert not any(rank.code is None for rank in self.all_ranks), "two attempts at once"
        self.ranks = [Rank(attempt, number) for number in range(LOCAL_RANKS)]
        self.all_ranks += self.ranks
        length = self.random_duration(30)
        usual_code = self.random.choice((0, 0, 75))
        for rank in self.ranks:
            code = self.random.choice(FAILURE_CODES) if self.random.random() < self.crash_rate / 2 else usual_code
            self.schedule(length + self.random_duration(2), lambda rank=rank, code=code: self.end_rank(rank, code))

    # Other agents.

    def act_as_another_agent(self) -> None:
        """Change the shared state as another agent: a failure, a hang, an inquiry, or the end of the generation."""
        state, pick = self.shared, self.random.random()
        if state.stopped is None and pick < 0.5:
            cause = self.random.choice((Cause.CRASH, Cause.HANG, Cause.YIELDED))
            state = replace(state, attempt=state.attempt + 1, cause=cause)
        elif state.stopped is None and pick < 0.6:
            state = replace(state, stopped=self.random.choice((64, 77)))
        elif pick < 0.8:
            state = replace(state, inquiry=state.inquiry + 1, inquiry_attempt=state.attempt, inquiry_node_rank=1)
        else:
            state = replace(state, broken=True)
        self.change(state)

    def change(self, state: GenerationState) -> None:
        if state != self.shared:
            self.shared = state
            self.schedule(self.random_duration(1.5), lambda: self.apply_event(events.SharedStateChanged(self.shared)))

    # The worker.

    def begin(self, task: actions.Task) -> None:
        match task:
            case actions.SimpleTask.JOIN:
                assert not any(rank.code is None for rank in self.all_ranks), "a rank is alive while the next is joined"
                assert not self.leftovers, "a child of an earlier rank is alive while the next is joined"
                self.schedule(self.random_duration(3.0), self.join)
                return
            case actions.StartRanks():
                self.start(self.local.attempt)
        longest = LONGEST_TASK_SECONDS if self.random.random() < 0.05 else 0.6
        self.schedule(self.random_duration(longest), lambda: self.finish(self.random_result(task)))

    def join(self) -> None:
        if self.interrupted:
            self.finish(events.SimpleResult.INTERRUPTED)
        elif self.shared.stopped is not None:
            self.finish(events.SimpleResult.STOPPED)
        elif self.random.random() < 0.01:
            self.change(replace(self.shared, attempt=self.shared.attempt + 1))
            self.finish(events.PodGaveUp(80, "it computes wrong numbers"))
        elif self.random.random() < 0.2:
            self.apply_event(events.WaitingForNodes((1,)))
            self.schedule(self.random_duration(3.0), self.join)
        else:
            self.finish(events.AttemptJoined(self.shared, MasterPort(29_500)))

    def finish(self, result: events.Result) -> None:
        self.task = None
        self.apply_event(result)

    def random_result(self, task: actions.Task) -> events.Result:
        chance = self.random.random
        attempt, simple = self.local.attempt, actions.SimpleTask
        needs_store = (simple.COUNT_UNANSWERED_HANG, simple.OPEN_INQUIRY, simple.CONCLUDE_INQUIRY)
        if (isinstance(task, actions.DiagnoseExits) or task in needs_store) and chance() < self.store_loss_rate:
            return events.StoreLost("it does not answer")
        match task:
            case actions.SimpleTask.END_LEFTOVERS:
                self.leftovers.clear()
                return events.Unkillable("tee (pid 7)") if self.unkillable else events.SimpleResult.DONE
            case actions.StartRanks():
                return events.RanksStarted(LOCAL_RANKS)
            case actions.DiagnoseExits():
                return self.diagnose(task)
            case actions.SimpleTask.COUNT_UNANSWERED_HANG:
                return events.HangCounted(self.raise_attempt(attempt, Cause.HANG))
            case actions.SimpleTask.SAMPLE_RANKS:
                return events.RanksSampled(overdue=chance() < self.hang_rate / 4)
            case actions.SimpleTask.OPEN_INQUIRY:
                return events.InquiryUpdated(chance() < 0.8, ())
            case actions.AnswerInquiry():
                return events.InquiryUpdated(open=False, stuck=())
            case actions.SimpleTask.CONCLUDE_INQUIRY:
                return (
                    self.hang_found(self.raise_attempt(attempt, Cause.HANG))
                    if chance() < 0.2
                    else events.InquiryUpdated(chance() < 0.8)
                )
            case actions.ReadFinding(after):
                return self.hang_found(after)
            case actions.SimpleTask.CHECK_FINISHED:
                return self.finish_checked(attempt)
            case actions.SimpleTask.CHECK_YIELDED:
                return events.YieldChecked(self.raise_attempt(attempt, Cause.YIELDED) if chance() < 0.3 else None)
            case _:
                return events.SimpleResult.DONE

    def finish_checked(self, attempt: int) -> events.FinishChecked:
        all_finished = self.random.random() < 0.3
        self.barriers_passed += all_finished
        self.finished_attempt = attempt
        return events.FinishChecked(all_finished)

    def diagnose(self, task: actions.DiagnoseExits) -> events.ExitsDiagnosed:
        assert task.local_ranks, "a rank failed"
        decisive_rank = self.ranks[self.random.choice(task.local_ranks)]
        assert decisive_rank.reports == 1, "a verdict needs a report"
        assert not any(rank.code is None for rank in self.ranks), "judged while ranks are alive"
        attempt = self.local.attempt
        withdraw = self.random.random() < 0.05
        stopped = 64 if self.random.random() < 0.05 else self.shared.stopped
        after = self.raise_attempt(attempt, Cause.CRASH)
        if stopped is not None:
            after = replace(after, stopped=stopped)
            self.change(after)
        backoff = self.random.choice((0.0, 0.0, 0.0, 8.0))
        code = decisive_rank.code or 0
        return events.ExitsDiagnosed(
            decisive_rank.local_rank, decisive_rank.local_rank, code, Cause.CRASH, "", 1.0, withdraw, backoff, after
        )

    def hang_found(self, after: GenerationState) -> events.HangFound:
        living = [rank.local_rank for rank in self.ranks if rank.code is None and not rank.exit_requested]
        culprits = tuple((number, "it made no progress") for number in living if self.random.random() < 0.3)
        is_explained = bool(culprits) or self.random.random() < 0.5
        cause = Cause.HANG if culprits or not is_explained else Cause.PEER_LOST
        return events.HangFound(after, cause, 1.0, is_explained, culprits)

    def raise_attempt(self, attempt: int, cause: Cause) -> GenerationState:
        """Raise the shared attempt, unless another agent has done so."""
        if self.shared.stopped is None and self.shared.attempt == attempt:
            self.change(replace(self.shared, attempt=attempt + 1, cause=cause))
        return self.shared

    # Invariants at the end.

    def check_end(self, ordered_at: float) -> None:
        assert self.local.stage is Stage.ENDED, f"the generation did not end: {self.local}"
        assert self.now <= ordered_at + LEAVE_LIMIT_SECONDS, "an order was forgotten"
        if self.broken:
            return
        assert self.task is None, "ended while a task is under way"
        assert not any(rank.code is None for rank in self.all_ranks), "ended while a rank is alive"
        assert self.barriers_passed == (self.local.outcome is GenerationOutcome.FINISHED), "passed at most once"
        if self.local.outcome is GenerationOutcome.FINISHED:
            assert self.finished_attempt == self.ranks[0].attempt
            assert all(rank.code == 0 for rank in self.ranks), "finished before all ranks"
        else:
            assert not self.leftovers, "left while a child of a rank is alive"
        before = self.local
        for late in (
            events.SimpleEvent.TICK,
            events.SharedStateChanged(self.shared),
            events.LeaveOrdered(Order.IMMEDIATE),
            events.WaitingForNodes((1,)),
        ):
            assert step(before, late, self.now + 1) == (before, ()), "nothing follows the end"

"""The supervisor of a pod and the runner of a generation: failed tasks, wrong clocks, late events."""

import asyncio
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.agent.fake_generation_store import FakeGenerationStore, build_membership
from trainium_agent import supervisor as supervisor_module
from trainium_agent.blocking_tasks import BlockingTasks, TaskContext
from trainium_agent.exits.restart_policy import GenerationState
from trainium_agent.generation_runner import GenerationRunner
from trainium_agent.lifecycle import actions, events, pod
from trainium_agent.lifecycle.events import Order
from trainium_agent.lifecycle.generation import step, wake_at
from trainium_agent.lifecycle.state import GenerationLimits, LocalGeneration, SimpleFollowUp, Stage
from trainium_agent.ranks.output import OutputTail
from trainium_agent.ranks.processes import RankProcess
from trainium_agent.shared_state.store import ExitBarrier, GenerationStore, StoreLostError
from trainium_agent.supervisor import AgentSupervisor
from trainium_agent.threads import EventLoop
from trainium_agent.workload.master_port import MasterPort
from trainium_contract.spec.health import PreflightCheck
from trainium_contract.wire.messages import WorkerPhase

MEMBERSHIP = build_membership(9, generation=3)
TASK_CONTEXT = TaskContext(7.0, (), 0)
LIMITS = GenerationLimits(generation=3, grace_seconds=20.0, sample_seconds=2.0)
JUST_STARTED = LocalGeneration(LIMITS, stage=Stage.RUNNING)


def blocking_tasks(store: Any = None, *, all_yielded: bool = True) -> BlockingTasks:
    """Return the tasks of one generation that need no process."""
    tasks = object.__new__(BlockingTasks)
    tasks._max_restarts = 3
    tasks._membership = MEMBERSHIP
    tasks._store = store or FakeGenerationStore()
    tasks._exit_barrier = SimpleNamespace(have_all_entered=lambda _: all_yielded)
    tasks._hangs = SimpleNamespace(sample=lambda: events.RanksSampled(overdue=False), set_living_ranks=lambda _: None)
    return tasks


@pytest.mark.parametrize(
    ("state", "all_yielded", "should_restart"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"leaving": True}, True, False),
        ({"stopped": 64}, True, False),
        ({"superseded_by": 4}, True, False),
        ({"superseded_by": 3}, True, True),
    ],
)
def test_yielded_ranks_restart_in_place_only_when_all_yielded_and_no_pod_leaves(
    state: dict[str, Any], all_yielded: bool, should_restart: bool
) -> None:
    tasks = blocking_tasks(FakeGenerationStore(**state), all_yielded=all_yielded)
    result = tasks.perform(actions.SimpleTask.CHECK_YIELDED, TASK_CONTEXT)
    assert isinstance(result, events.YieldChecked)
    assert (result.state is not None and result.state.attempt == 1) is should_restart


class LostStore(FakeGenerationStore):
    """A store that cannot be reached."""

    connected = False

    def __init__(self, *, is_back: bool = False) -> None:
        super().__init__()
        self.is_back = is_back

    def connect(self) -> None:
        if not self.is_back:
            raise StoreLostError("connection refused")
        self.connected = True

    def update_state(self, follow: Any) -> GenerationState:
        if not self.connected:
            raise StoreLostError("not connected")
        return super().update_state(follow)


def test_an_unanswered_hang_is_counted_once_the_store_is_back() -> None:
    task = actions.SimpleTask.COUNT_UNANSWERED_HANG
    assert isinstance(blocking_tasks(LostStore()).perform(task, TASK_CONTEXT), events.StoreLost)
    counted = blocking_tasks(LostStore(is_back=True)).perform(task, TASK_CONTEXT)
    assert isinstance(counted, events.HangCounted)
    assert counted.state.attempt == 1


def test_an_announcement_to_a_lost_store_is_no_error() -> None:
    shared = FakeGenerationStore()
    tasks, tasks_without_store = blocking_tasks(shared), blocking_tasks(LostStore())
    announce_broken = actions.SimpleTask.ANNOUNCE_BROKEN
    assert tasks.perform(announce_broken, TASK_CONTEXT) == events.SimpleResult.DONE
    assert shared.read_state().broken
    leave = actions.Announce(leaving=True, superseded_by=5)
    assert tasks.perform(leave, TASK_CONTEXT) == events.SimpleResult.DONE
    assert (shared.read_state().leaving, shared.read_state().superseded_by) == (True, 5)
    assert tasks_without_store.perform(announce_broken, TASK_CONTEXT) == events.SimpleResult.DONE
    check = actions.SimpleTask.CHECK_YIELDED
    assert tasks_without_store.perform(check, TASK_CONTEXT).state is None  # type: ignore[union-attr]


def generation_runner(local: LocalGeneration = JUST_STARTED, perform: Any = None) -> Any:
    runner: Any = object.__new__(GenerationRunner)
    runner._local, runner._timer, runner._ranks, runner._generation = local, None, (), 3
    runner._report = SimpleNamespace(best_progress=0.0, set_stuck_ranks=lambda _: None)
    runner._watcher = SimpleNamespace(stop=lambda: None)
    runner._workload = SimpleNamespace(record_success=lambda _: None)
    runner._tasks = SimpleNamespace(perform=perform, close=lambda: None)
    runner._worker = SimpleNamespace(submit=lambda function: function())
    runner.errors, runner.ended = [], []
    runner._on_end = runner.ended.append
    runner._event_loop = SimpleNamespace(post=lambda function: function(), fail=runner.errors.append)
    return runner


def test_an_unexpected_error_of_a_task_ends_the_pod() -> None:
    def perform(*_: Any) -> None:
        raise KeyError("unforeseen")

    runner = generation_runner(perform=perform)
    runner._submit(actions.SimpleTask.ANNOUNCE_BROKEN)
    assert len(runner.errors) == 1
    assert "KeyError: 'unforeseen'" in runner.errors[0]


def test_a_successful_rank_has_ended_once_its_output_is_read() -> None:
    runner, exits, scheduled = generation_runner(), [], []
    runner._stop, runner._handle = None, exits.append
    runner._event_loop.call_at = lambda _, function: scheduled.append(function)
    rank = RankProcess(0, 0, 0, 1, OutputTail(""))
    rank.record_exit(0)
    runner._handle_exit(rank)
    assert exits == [], "its last step may be in the pipe"
    rank.output.close()
    scheduled.pop()()
    assert [event.code for event in exits] == [0]
    failed = RankProcess(0, 0, 0, 2, OutputTail(""))
    failed.record_exit(1)
    runner._handle_exit(failed)
    assert [event.code for event in exits] == [0, 1], "its diagnosis reads the output"


def test_fatal_errors_and_log_lines_of_a_generation_are_forwarded(caplog: pytest.LogCaptureFixture) -> None:
    runner = generation_runner()
    runner._perform(actions.FailPod("a process did not end"))
    runner._perform(actions.Log("a warning"))
    runner._perform(actions.Log("an error", severe=True))
    assert runner.errors == ["a process did not end"]
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("WARNING", "a warning"),
        ("ERROR", "an error"),
    ]


def test_a_generation_ends_once_despite_later_events() -> None:
    runner = generation_runner(LocalGeneration(LIMITS, stage=Stage.ENDED))
    runner._handle(events.SimpleEvent.TICK)
    assert runner.ended == []
    runner = generation_runner(LocalGeneration(LIMITS, stage=Stage.KILLING, started=1, deadline=0.0))
    runner._handle(events.SimpleEvent.TICK)
    runner._handle(events.SimpleEvent.TICK)
    assert [local.stage for local in runner.ended] == [Stage.ENDED]


class FakeReport:
    """A report that records calls."""

    def __init__(self) -> None:
        self.checks: list[Any] = []
        self.verdicts: list[Any] = []
        self.generations: list[Any] = []
        self.phase = WorkerPhase.FAILED
        self.recovering = False
        self.verdict_code = 76
        self.diagnoser = SimpleNamespace(memory_kills=SimpleNamespace(observe=lambda: None))

    def record_check(self, result: Any) -> None:
        self.checks.append(result)

    def set_pod_verdict(self, code: int, sentence: str) -> None:
        self.verdicts.append((code, sentence))

    def start_generation(self, *generation: Any) -> None:
        self.generations.append(generation)

    def observe(self) -> None: ...


def supervisor(loop: Any = None, *, checks: Any = (PreflightCheck.CLOCK,)) -> Any:
    agent: Any = object.__new__(AgentSupervisor)
    agent._settings = SimpleNamespace(checks=checks, grace_seconds=5.0)
    agent._report, agent._clock_passed, agent._runner, agent._timer = FakeReport(), None, None, None
    agent._workload = SimpleNamespace(observe=lambda: None)
    agent._client = SimpleNamespace(answered_at=-1e9, send_heartbeat_now=lambda: None)
    agent._pod = pod.Pod(check_seconds=1.0)
    agent._event_loop = loop
    agent.codes = []
    agent._exit = SimpleNamespace(done=lambda: bool(agent.codes), set_result=agent.codes.append)
    return agent


def test_a_wrong_clock_is_reported_once_and_again_when_corrected(caplog: pytest.LogCaptureFixture) -> None:
    agent = supervisor()
    for coordinator_time in (1000.0, 2000.0, 2000.0, 1000.0, 1000.0):
        agent._handle_coordinator_time(coordinator_time, 1000.0, 1000.1)
    assert [check.passed for check in agent._report.checks] == [True, False, False, True]
    assert caplog.text.count("The node's clock is") == 1


def test_a_disabled_clock_check_reports_nothing() -> None:
    agent = supervisor(checks=())
    agent._handle_coordinator_time(5000.0, 1000.0, 1000.1)
    assert agent._report.checks == []


def test_a_node_that_fails_its_checks_is_unfit_and_has_the_finding_as_verdict() -> None:
    unfit = supervisor()
    unfit._handle_check_result("core 3 computes wrong numbers")
    assert [sentence for _, sentence in unfit._report.verdicts] == ["core 3 computes wrong numbers"]
    assert unfit._pod.unfit
    fit = supervisor()
    fit._handle_check_result("")
    assert fit._pod.checked
    assert not fit._pod.unfit


async def test_a_failed_task_ends_the_pod_and_a_cancelled_one_does_not() -> None:
    async def fails() -> None:
        raise KeyError("unforeseen")

    async def lasts() -> None:
        await asyncio.sleep(600)

    agent = supervisor()
    cancelled, failed = asyncio.create_task(lasts()), asyncio.create_task(fails())
    await asyncio.sleep(0)
    cancelled.cancel()
    await asyncio.gather(cancelled, failed, return_exceptions=True)
    agent._handle_task_end(cancelled)
    assert agent.codes == []
    agent._handle_task_end(failed)
    agent._fail("and once more")
    assert agent.codes == [supervisor_module._INTERNAL_ERROR], "the first error counts"


async def test_a_pod_exits_with_its_verdict_though_no_coordinator_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervisor_module, "_TRAINING_SECONDS", 0.0)
    agent = supervisor()
    observer = asyncio.create_task(agent._observe())
    while not agent.codes and not observer.done():  # noqa: ASYNC110 - each iteration observes once
        await asyncio.sleep(0)
    observer.cancel()
    await asyncio.gather(observer, return_exceptions=True)
    assert agent.codes[0] == 76


def test_events_after_the_end_of_the_pod_are_ignored() -> None:
    agent = supervisor()
    agent.codes.append(0)
    before = agent._pod
    agent._handle(pod.SimpleEvent.NODE_CHECKED)
    assert agent._pod is before


async def test_an_unexpected_error_of_an_event_ends_the_pod() -> None:
    agent = supervisor()
    EventLoop(agent._fail).run(lambda: {}["unforeseen"])
    assert agent.codes == [supervisor_module._INTERNAL_ERROR]


def test_orders_between_generations_are_carried_out() -> None:
    calls: list[Any] = []
    agent = supervisor(SimpleNamespace(call_at=lambda *call: calls.append(call)))
    agent._leave_generation(Order.IMMEDIATE, 4)
    assert agent._report.generations == [(4, WorkerPhase.JOINING)]
    assert calls == []
    agent._leave_generation(Order.TERMINATE, 0)
    assert calls[0][0] > time.monotonic() + 5.0, "the ranks have their time to save"


def test_a_store_that_was_never_connected_is_lost() -> None:
    with pytest.raises(StoreLostError, match="not connected"):
        GenerationStore(MEMBERSHIP).has("key")


def test_a_lost_exit_barrier_counts_as_finished_after_its_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    store = LostStore(is_back=True)
    barrier = ExitBarrier(store, 1, 2)
    barrier.enter(0, WorkerPhase.FINISHED)
    assert not barrier.have_all_finished(0), "one of two"
    store.connected, store.is_back = False, False
    assert not barrier.have_all_finished(0), "it may come back"
    now[0] += 10_000.0
    assert barrier.have_all_finished(0)


RUNNING = LocalGeneration(LIMITS, stage=Stage.RUNNING, attempt=1, started=2, next_sample_at=1000.0)


def test_a_generation_that_has_not_started_ignores_a_tick() -> None:
    assert step(LocalGeneration(LIMITS), events.SimpleEvent.TICK, 0.0) == (LocalGeneration(LIMITS), ())
    assert wake_at(LocalGeneration(LIMITS)) is None


def test_a_late_end_of_an_earlier_attempt_is_ignored() -> None:
    late_exit = events.RankExited(attempt=0, local_rank=0, rank=0, code=1, requested=False)
    assert step(RUNNING, late_exit, 1.0) == (RUNNING, ())


@pytest.mark.parametrize("order", [Order.TERMINATE, Order.GRACEFUL])
def test_an_order_to_leave_prevents_the_start_of_ranks(order: Order) -> None:
    joining = LocalGeneration(LIMITS, stage=Stage.JOINING, running_task=actions.SimpleTask.JOIN, order=order)
    local, requested = step(joining, events.AttemptJoined(GenerationState(), MasterPort(29500)), 1.0)
    assert local.stage is not Stage.STARTING
    assert not any(isinstance(action, actions.StartRanks) for action in requested)
    free = replace(joining, order=Order.NONE)
    local, requested = step(free, events.AttemptJoined(GenerationState(attempt=2), MasterPort(29500)), 1.0)
    assert (local.stage, local.attempt) == (Stage.STARTING, 2)
    assert actions.EnterPhase(WorkerPhase.LOADING, 2) in requested


def test_a_rank_that_survives_sigkill_ends_the_pod_at_the_deadline() -> None:
    ending = replace(RUNNING, stage=Stage.KILLING, follow_up=SimpleFollowUp.REJOIN, deadline=30.0)
    assert step(ending, events.SimpleEvent.TICK, 29.9) == (ending, ())
    assert wake_at(ending) == 30.0
    local, requested = step(ending, events.SimpleEvent.TICK, 30.0)
    assert local.stage is Stage.ENDED
    assert requested == (actions.FailPod("a training process did not end within 30 s of SIGKILL"),)

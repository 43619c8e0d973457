"""The supervisor of a pod and the runner of a generation: failed tasks, wrong clocks, late events."""

import asyncio
import threading
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.agent.shared_store import Shared, membership_at
from trainium_agent import supervisor as supervisor_module
from trainium_agent.exits.restart_policy import GenerationState
from trainium_agent.generation.store import ExitBarrier, GenerationStore, StoreLostError
from trainium_agent.generation_runner import GenerationRunner
from trainium_agent.generation_tasks import GenerationTasks, TaskContext
from trainium_agent.lifecycle import actions, events, pod
from trainium_agent.lifecycle.events import Order
from trainium_agent.lifecycle.generation import step, wake_at
from trainium_agent.lifecycle.state import GenerationLimits, LocalGeneration, SimpleFollowUp, Stage
from trainium_agent.ranks.output import OutputTail
from trainium_agent.ranks.processes import RankProcess
from trainium_agent.rendezvous import RendezvousInterruptedError
from trainium_agent.supervisor import AgentSupervisor
from trainium_contract.spec.health import PreflightCheck
from trainium_contract.wire.messages import WorkerPhase

MEMBERSHIP = membership_at(9, generation=3)
GIVEN = TaskContext(7.0, (), 0)
LIMITS = GenerationLimits(generation=3, grace_seconds=20.0, sample_seconds=2.0)
JUST_STARTED = LocalGeneration(LIMITS, stage=Stage.RUNNING)


def generation_tasks(store: Any = None, *, signed: bool = True) -> GenerationTasks:
    """Return the tasks of one generation that need no process."""
    made = object.__new__(GenerationTasks)
    made._settings = SimpleNamespace(max_in_place_restarts=3)
    made._membership = MEMBERSHIP
    made._store = store or Shared()
    made._exit_barrier = SimpleNamespace(all_entered=lambda _: signed)
    made._leave_requested = threading.Event()
    made._hangs = SimpleNamespace(sample=lambda: events.RanksSampled(overdue=False), set_living_ranks=lambda _: None)
    return made


@pytest.mark.parametrize(
    ("state", "signed", "goes_on"),
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
    state: dict[str, Any], signed: bool, goes_on: bool
) -> None:
    found = generation_tasks(Shared(**state), signed=signed).perform(actions.SimpleTask.CHECK_YIELDED, GIVEN)
    assert isinstance(found, events.YieldChecked)
    assert (found.state is not None and found.state.attempt == 1) is goes_on


class LostStore(Shared):
    """A store that cannot be reached."""

    connected = False

    def __init__(self, *, comes_back: bool = False) -> None:
        super().__init__()
        self.comes_back = comes_back

    def connect(self) -> None:
        if not self.comes_back:
            raise StoreLostError("connection refused")
        self.connected = True

    def update_state(self, follow: Any) -> GenerationState:
        if not self.connected:
            raise StoreLostError("not connected")
        return super().update_state(follow)


def test_an_unanswered_hang_is_counted_once_the_store_is_back() -> None:
    silent = actions.SimpleTask.COUNT_UNANSWERED_HANG
    assert isinstance(generation_tasks(LostStore()).perform(silent, GIVEN), events.StoreLost)
    counted = generation_tasks(LostStore(comes_back=True)).perform(silent, GIVEN)
    assert isinstance(counted, events.HangCounted)
    assert counted.state.attempt == 1


def test_an_announcement_to_a_lost_store_is_no_error() -> None:
    shared = Shared()
    assert generation_tasks(shared).perform(actions.SimpleTask.ANNOUNCE_BROKEN, GIVEN) == events.SimpleResult.DONE
    assert shared.state().broken
    assert (
        generation_tasks(shared).perform(actions.Announce(leaving=True, superseded_by=5), GIVEN)
        == events.SimpleResult.DONE
    )
    assert (shared.state().leaving, shared.state().superseded_by) == (True, 5)
    assert generation_tasks(LostStore()).perform(actions.SimpleTask.ANNOUNCE_BROKEN, GIVEN) == events.SimpleResult.DONE
    assert generation_tasks(LostStore()).perform(actions.SimpleTask.CHECK_YIELDED, GIVEN).state is None  # type: ignore[union-attr]


def test_an_order_to_leave_ends_a_pair_test() -> None:
    mine = generation_tasks()
    mine._raise_when_ordered_to_leave()
    mine._leave_requested.set()
    with pytest.raises(RendezvousInterruptedError):
        mine._raise_when_ordered_to_leave()


def generation_runner(local: LocalGeneration = JUST_STARTED, perform: Any = None) -> Any:
    made: Any = object.__new__(GenerationRunner)
    made._local, made._timer, made._ranks, made._generation = local, None, (), 3
    made._report = SimpleNamespace(best_progress=0.0, set_stuck_ranks=lambda _: None)
    made._watcher = SimpleNamespace(stop=lambda: None)
    made._tasks = SimpleNamespace(perform=perform, close=lambda: None)
    made._worker = SimpleNamespace(submit=lambda what: what())
    made._post = lambda what: what()
    made.broken, made.over = [], []
    made._on_broken, made._on_end = made.broken.append, made.over.append
    return made


def test_an_unexpected_error_of_a_task_ends_the_pod() -> None:
    def perform(*_: Any) -> None:
        raise KeyError("unforeseen")

    made = generation_runner(perform=perform)
    made._submit(actions.SimpleTask.ANNOUNCE_BROKEN)
    assert len(made.broken) == 1
    assert "KeyError: 'unforeseen'" in made.broken[0]


def test_a_successful_rank_has_ended_once_its_output_is_read() -> None:
    made, ended, later = generation_runner(), [], []
    made._stop, made._handle, made._call_at = None, ended.append, lambda _, what: later.append(what)
    rank = RankProcess(0, 0, 0, 1, OutputTail(""))
    rank.record_exit(0)
    made._handle_exit(rank)
    assert ended == [], "its last step may be in the pipe"
    rank.output.close()
    later.pop()()
    assert [event.code for event in ended] == [0]
    failed = RankProcess(0, 0, 0, 2, OutputTail(""))
    failed.record_exit(1)
    made._handle_exit(failed)
    assert [event.code for event in ended] == [0, 1], "its diagnosis reads the output"


def test_fatal_errors_and_log_lines_of_a_generation_are_forwarded(caplog: pytest.LogCaptureFixture) -> None:
    made = generation_runner()
    made._perform(actions.FailPod("a process did not end"))
    made._perform(actions.Log("a word"))
    made._perform(actions.Log("a hard word", severe=True))
    assert made.broken == ["a process did not end"]
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("WARNING", "a word"),
        ("ERROR", "a hard word"),
    ]


def test_a_generation_ends_once_despite_later_events() -> None:
    made = generation_runner(LocalGeneration(LIMITS, stage=Stage.ENDED))
    made._handle(events.SimpleEvent.TICK)
    assert made.over == []
    made = generation_runner(LocalGeneration(LIMITS, stage=Stage.KILLING, started=1, deadline=0.0))
    made._handle(events.SimpleEvent.TICK)
    made._handle(events.SimpleEvent.TICK)
    assert [local.stage for local in made.over] == [Stage.ENDED]


class FakeReport:
    """A report that records calls."""

    def __init__(self) -> None:
        self.checks: list[Any] = []
        self.given_up: list[Any] = []
        self.entered: list[Any] = []
        self.phase = WorkerPhase.FAILED
        self.recovering = False
        self.verdict_code = 76

    def record_check(self, result: Any) -> None:
        self.checks.append(result)

    def set_pod_verdict(self, code: int, sentence: str) -> None:
        self.given_up.append((code, sentence))

    def start_generation(self, *entered: Any) -> None:
        self.entered.append(entered)

    def observe(self) -> None: ...


def supervisor(loop: Any = None, *, checks: Any = (PreflightCheck.CLOCK,)) -> Any:
    made: Any = object.__new__(AgentSupervisor)
    made._settings = SimpleNamespace(checks=checks, grace_seconds=5.0)
    made._report, made._clock_passed, made._runner, made._timer = FakeReport(), None, None, None
    made._workload = SimpleNamespace(observe=lambda: None)
    made._client = SimpleNamespace(answered_at=-1e9, heartbeat_now=lambda: None)
    made._pod = pod.Pod(check_seconds=1.0)
    made._loop = loop
    made.codes = []
    made._exit = SimpleNamespace(done=lambda: bool(made.codes), set_result=made.codes.append)
    return made


def test_a_wrong_clock_is_reported_once_and_again_when_corrected(caplog: pytest.LogCaptureFixture) -> None:
    made = supervisor()
    for theirs in (1000.0, 2000.0, 2000.0, 1000.0, 1000.0):
        made._on_coordinator_time(theirs, 1000.0, 1000.1)
    assert [check.passed for check in made._report.checks] == [True, False, False, True]
    assert caplog.text.count("The node's clock is") == 1


def test_a_disabled_clock_check_reports_nothing() -> None:
    made = supervisor(checks=())
    made._on_coordinator_time(5000.0, 1000.0, 1000.1)
    assert made._report.checks == []


def test_a_node_that_fails_its_checks_is_given_up_with_the_finding() -> None:
    made = supervisor()
    made._on_checked("core 3 computes wrong numbers")
    assert [sentence for _, sentence in made._report.given_up] == ["core 3 computes wrong numbers"]
    assert made._pod.unfit
    healthy = supervisor()
    healthy._on_checked("")
    assert healthy._pod.checked
    assert not healthy._pod.unfit


async def test_a_failed_task_ends_the_pod_and_a_cancelled_one_does_not() -> None:
    async def fails() -> None:
        raise KeyError("unforeseen")

    async def lasts() -> None:
        await asyncio.sleep(600)

    made = supervisor()
    cancelled, failed = asyncio.create_task(lasts()), asyncio.create_task(fails())
    await asyncio.sleep(0)
    cancelled.cancel()
    await asyncio.gather(cancelled, failed, return_exceptions=True)
    made._on_task_end(cancelled)
    assert made.codes == []
    made._on_task_end(failed)
    made._on_broken("and once more")
    assert made.codes == [supervisor_module._INTERNAL_ERROR], "the first word counts"


async def test_a_pod_exits_with_its_verdict_though_no_coordinator_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervisor_module, "_TRAINING_SECONDS", 0.0)
    made = supervisor()
    watching = asyncio.create_task(made._observe())
    while not made.codes:  # noqa: ASYNC110 - each turn of the loop is a look
        await asyncio.sleep(0)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    assert made.codes[0] == 76


def test_events_after_the_end_of_the_pod_are_ignored() -> None:
    made = supervisor()
    made.codes.append(0)
    before = made._pod
    made._handle(pod.SimpleEvent.NODE_CHECKED)
    assert made._pod is before


def test_an_unexpected_error_of_an_event_ends_the_pod() -> None:
    made = supervisor()
    made._run_guarded(lambda: {}["unforeseen"])
    assert made.codes == [supervisor_module._INTERNAL_ERROR]


def test_orders_between_generations_are_carried_out() -> None:
    calls: list[Any] = []
    made = supervisor(SimpleNamespace(call_later=lambda *call: calls.append(call)))
    made._leave_generation(Order.IMMEDIATE, 4)
    assert made._report.entered == [(4, WorkerPhase.JOINING)]
    assert calls == []
    made._leave_generation(Order.TERMINATE, 0)
    assert calls[0][0] > 5.0, "the ranks have their time to save"


def test_a_store_that_was_never_connected_is_lost() -> None:
    with pytest.raises(StoreLostError, match="not connected"):
        GenerationStore(MEMBERSHIP).has("key")


def test_a_lost_exit_barrier_counts_as_finished_after_its_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    store = LostStore(comes_back=True)
    barrier = ExitBarrier(store, 1, 2)
    barrier.enter(0, WorkerPhase.FINISHED)
    assert not barrier.all_finished(0), "one of two"
    store.connected, store.comes_back = False, False
    assert not barrier.all_finished(0), "it may come back"
    now[0] += 10_000.0
    assert barrier.all_finished(0)


RUNNING = LocalGeneration(LIMITS, stage=Stage.RUNNING, attempt=1, started=2, next_sample_at=1000.0)


def ended(rank: int = 0, code: int = 1, *, attempt: int = 1, asked: bool = False) -> events.RankExited:
    return events.RankExited(attempt=attempt, local_rank=rank, rank=rank, code=code, requested=asked)


def test_a_generation_that_has_not_started_ignores_a_tick() -> None:
    assert step(LocalGeneration(LIMITS), events.SimpleEvent.TICK, 0.0) == (LocalGeneration(LIMITS), ())
    assert wake_at(LocalGeneration(LIMITS)) is None


def test_a_late_end_of_an_earlier_attempt_is_ignored() -> None:
    assert step(RUNNING, ended(attempt=0), 1.0) == (RUNNING, ())


@pytest.mark.parametrize("order", [Order.TERMINATE, Order.GRACEFUL])
def test_an_order_to_leave_prevents_the_start_of_ranks(order: Order) -> None:
    joining = LocalGeneration(LIMITS, stage=Stage.JOINING, busy=actions.SimpleTask.JOIN, order=order)
    local, requested = step(joining, events.AttemptJoined(GenerationState(), 29500), 1.0)
    assert local.stage is not Stage.STARTING
    assert not any(isinstance(action, actions.StartRanks) for action in requested)
    free = replace(joining, order=Order.NONE)
    local, requested = step(free, events.AttemptJoined(GenerationState(attempt=2), 29500), 1.0)
    assert (local.stage, local.attempt) == (Stage.STARTING, 2)
    assert actions.EnterPhase(WorkerPhase.LOADING, 2) in requested


def test_a_rank_that_survives_sigkill_ends_the_pod_at_the_deadline() -> None:
    ending = replace(RUNNING, stage=Stage.KILLING, follow_up=SimpleFollowUp.REJOIN, deadline=30.0)
    assert step(ending, events.SimpleEvent.TICK, 29.9) == (ending, ())
    assert wake_at(ending) == 30.0
    local, requested = step(ending, events.SimpleEvent.TICK, 30.0)
    assert local.stage is Stage.ENDED
    assert requested == (actions.FailPod("a training process did not end within 30 s of SIGKILL"),)

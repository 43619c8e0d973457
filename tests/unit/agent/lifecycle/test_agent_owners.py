"""Owners of a pod and of a generation when work fails, clocks differ, or nobody waits for them any more."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from shared_store import Shared, membership_at

from trainium_agent import supervisor as supervisor_module
from trainium_agent.exits.restart_policy import GenerationState
from trainium_agent.generation import store as store_module
from trainium_agent.generation.store import ExitBarrier, GenerationStore, StoreLostError
from trainium_agent.generation_runner import GenerationRunner
from trainium_agent.generation_tasks import GenerationTasks, TaskContext
from trainium_agent.hang import response
from trainium_agent.hang.detection import Finding, FindingKind, Stall
from trainium_agent.lifecycle import actions as do
from trainium_agent.lifecycle import events as on
from trainium_agent.lifecycle import pod
from trainium_agent.lifecycle.events import GenerationEnd, Order
from trainium_agent.lifecycle.generation import step, wake_at
from trainium_agent.lifecycle.state import GenerationLimits, LocalGeneration, Stage, Then
from trainium_agent.ranks import output
from trainium_agent.ranks.output import Tail
from trainium_agent.ranks.processes import RankProcess
from trainium_agent.rendezvous import RendezvousInterruptedError
from trainium_agent.supervisor import AgentSupervisor
from trainium_contract.spec.health import PreflightCheck
from trainium_contract.wire.log_line import LogFormat
from trainium_contract.wire.messages import TrainerPhase, WorkerPhase
from trainium_trainer.checks import pair_test

MEMBERSHIP = membership_at(9, generation=3)
GIVEN = TaskContext(7.0, (), 0)


def work(store: Any = None, *, signed: bool = True) -> GenerationTasks:
    """The tasks of one generation, as far as they need no process."""
    made = object.__new__(GenerationTasks)
    made._settings = SimpleNamespace(max_in_place_restarts=3)
    made._membership = MEMBERSHIP
    made._store = store or Shared()
    made._exit_barrier = SimpleNamespace(all_signed=lambda _: signed)
    made._leave_requested = threading.Event()
    made._hangs = SimpleNamespace(sample=lambda: on.RanksSampled(overdue=False), see=lambda _: None)
    return made


@pytest.mark.parametrize(
    ("state", "signed", "goes_on"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"leaving": True}, True, False),
        ({"stopped": 64}, True, False),
        ({"superseded": 4}, True, False),
        ({"superseded": 3}, True, True),
    ],
)
def test_ranks_that_yielded_go_on_in_place_only_when_all_did_and_nobody_leaves(
    state: dict[str, Any], signed: bool, goes_on: bool
) -> None:
    found = work(Shared(**state), signed=signed).perform(do.SimpleTask.CHECK_YIELDED, GIVEN)
    assert isinstance(found, on.YieldChecked)
    assert (found.after is not None and found.after.attempt == 1) is goes_on


class Lost(Shared):
    """A store that nobody reaches."""

    connected = False

    def __init__(self, *, comes_back: bool = False) -> None:
        super().__init__()
        self.comes_back = comes_back

    def connect(self) -> None:
        if not self.comes_back:
            raise StoreLostError("connection refused")
        self.connected = True

    def change(self, follow: Any) -> GenerationState:
        if not self.connected:
            raise StoreLostError("not connected")
        return super().change(follow)


def test_a_standstill_that_could_not_be_talked_about_is_counted_once_the_store_is_back() -> None:
    silent = do.SimpleTask.COUNT_UNANSWERED_HANG
    assert isinstance(work(Lost()).perform(silent, GIVEN), on.StoreLost)
    counted = work(Lost(comes_back=True)).perform(silent, GIVEN)
    assert isinstance(counted, on.HangCounted)
    assert counted.after.attempt == 1


def test_a_report_that_nobody_receives_is_no_error() -> None:
    shared = Shared()
    assert work(shared).perform(do.SimpleTask.ANNOUNCE_BROKEN, GIVEN) == on.Outcome.DONE
    assert shared.state().broken
    assert work(shared).perform(do.Announce(leaving=True, superseded_by=5), GIVEN) == on.Outcome.DONE
    assert (shared.state().leaving, shared.state().superseded) == (True, 5)
    assert work(Lost()).perform(do.SimpleTask.ANNOUNCE_BROKEN, GIVEN) == on.Outcome.DONE
    assert work(Lost()).perform(do.SimpleTask.CHECK_YIELDED, GIVEN).after is None  # type: ignore[union-attr]


def test_a_round_of_pairs_ends_when_the_pod_is_asked_to_leave() -> None:
    mine = work()
    mine._stop_when_ordered()
    mine._leave_requested.set()
    with pytest.raises(RendezvousInterruptedError):
        mine._stop_when_ordered()


# ---- the owner of a generation --------------------------------------------------------------------------------


def owner(local: LocalGeneration = LocalGeneration(stage=Stage.RUNNING), perform: Any = None) -> Any:  # noqa: B008 - frozen
    made = object.__new__(GenerationRunner)
    made._local, made._alarm, made._ranks, made._generation = local, None, (), 3
    made._limits = GenerationLimits(generation=3, grace_seconds=1.0, sample_seconds=1.0)
    made._report = SimpleNamespace(reached=0.0, stuck=lambda _: None)
    made._watcher = SimpleNamespace(stop=lambda: None)
    made._work = SimpleNamespace(perform=perform, close=lambda: None)
    made._worker = SimpleNamespace(do=lambda what: what())
    made._post = lambda what: what()
    made.broken, made.over = [], []
    made._on_broken, made._on_over = made.broken.append, made.over.append
    return made


def test_work_that_fails_in_a_way_that_nobody_foresaw_ends_the_pod() -> None:
    def perform(*_: Any) -> None:
        raise KeyError("unforeseen")

    made = owner(perform=perform)
    made._give(do.SimpleTask.ANNOUNCE_BROKEN)
    assert len(made.broken) == 1
    assert "KeyError: 'unforeseen'" in made.broken[0]


def test_a_rank_that_succeeded_has_ended_once_its_output_is_read() -> None:
    made, ended, later = owner(), [], []
    made._stop, made._handle, made._call_at = None, ended.append, lambda _, what: later.append(what)
    rank = RankProcess(0, 0, 0, 1, Tail(""))
    rank.ended(0)
    made._take_end(rank)
    assert ended == [], "its last step may be in the pipe"
    rank.output.close()
    later.pop()()
    assert [event.code for event in ended] == [0]
    failed = RankProcess(0, 0, 0, 2, Tail(""))
    failed.ended(1)
    made._take_end(failed)
    assert [event.code for event in ended] == [0, 1], "its diagnosis reads the output"


def test_what_makes_the_pod_useless_and_what_to_report_is_passed_on(caplog: pytest.LogCaptureFixture) -> None:
    made = owner()
    made._carry_out(do.FailPod("a process did not end"))
    made._carry_out(do.Log("a word"))
    made._carry_out(do.Log("a hard word", severe=True))
    assert made.broken == ["a process did not end"]
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("WARNING", "a word"),
        ("ERROR", "a hard word"),
    ]


def test_a_generation_ends_once_though_events_come_afterwards() -> None:
    made = owner(LocalGeneration(stage=Stage.OVER))
    made._handle(on.Notice.TICK)
    assert made.over == []
    made = owner(LocalGeneration(stage=Stage.ENDING, started=1, deadline=0.0))
    made._handle(on.Notice.TICK)
    made._handle(on.Notice.TICK)
    assert [local.stage for local in made.over] == [Stage.OVER]


# ---- the owner of a pod ---------------------------------------------------------------------------------------


class Report:
    """Reports of the pod."""

    def __init__(self) -> None:
        self.checks: list[Any] = []
        self.given_up: list[Any] = []
        self.entered: list[Any] = []
        self.phase = WorkerPhase.FAILED
        self.recovering = False
        self.verdict_code = 76

    def checked(self, result: Any) -> None:
        self.checks.append(result)

    def give_up_with(self, code: int, sentence: str) -> None:
        self.given_up.append((code, sentence))

    def enter_generation(self, *entered: Any) -> None:
        self.entered.append(entered)

    def observe(self) -> None: ...


def supervisor(loop: Any = None, *, checks: Any = (PreflightCheck.CLOCK,)) -> Any:
    made = object.__new__(AgentSupervisor)
    made._settings = SimpleNamespace(checks=checks, grace_seconds=5.0)
    made._report, made._clock_passed, made._running, made._alarm = Report(), None, None, None
    made._workload = SimpleNamespace(observe=lambda: None)
    made._client = SimpleNamespace(answered_at=-1e9, heartbeat_now=lambda: None)
    made._pod = pod.Pod(check_seconds=1.0)
    made._loop = loop
    made.codes = []
    made._exit = SimpleNamespace(done=lambda: bool(made.codes), set_result=made.codes.append)
    return made


def test_a_clock_that_is_wrong_is_reported_once_and_again_when_it_is_right(caplog: pytest.LogCaptureFixture) -> None:
    made = supervisor()
    for theirs in (1000.0, 2000.0, 2000.0, 1000.0, 1000.0):
        made._on_coordinator_time(theirs, 1000.0, 1000.1)
    assert [check.passed for check in made._report.checks] == [True, False, False, True]
    assert caplog.text.count("The node's clock is") == 1


def test_a_clock_is_not_compared_where_the_check_is_off() -> None:
    made = supervisor(checks=())
    made._on_coordinator_time(5000.0, 1000.0, 1000.1)
    assert made._report.checks == []


def test_a_node_that_fails_its_checks_is_given_up_with_what_was_found() -> None:
    made = supervisor()
    made._on_checked("core 3 computes wrong numbers")
    assert [sentence for _, sentence in made._report.given_up] == ["core 3 computes wrong numbers"]
    assert made._pod.unfit
    healthy = supervisor()
    healthy._on_checked("")
    assert healthy._pod.checked
    assert not healthy._pod.unfit


async def test_a_task_that_fails_ends_the_pod_and_one_that_is_cancelled_does_not() -> None:
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


async def test_a_verdict_that_no_coordinator_takes_is_left_with_after_a_long_while(
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


def test_after_the_end_nothing_is_taken_any_more() -> None:
    made = supervisor()
    made.codes.append(0)
    before = made._pod
    made._handle(pod.Notice.NODE_CHECKED)
    assert made._pod is before


def test_an_error_while_an_event_is_taken_ends_the_pod() -> None:
    made = supervisor()
    made._guarded(lambda: {}["unforeseen"])
    assert made.codes == [supervisor_module._INTERNAL_ERROR]


def test_a_pod_without_a_generation_learns_of_the_next_one_and_ends_when_its_time_is_up() -> None:
    calls: list[Any] = []
    made = supervisor(SimpleNamespace(call_later=lambda *call: calls.append(call)))
    made._order(Order.IMMEDIATE, 4)
    assert made._report.entered == [(4, WorkerPhase.JOINING)]
    assert calls == []
    made._order(Order.TERMINATE, 0)
    assert calls[0][0] > 5.0, "the ranks have their time to save"


# ---- smaller parts --------------------------------------------------------------------------------------------


def test_a_store_that_was_never_reached_is_lost_and_not_an_error_of_ours() -> None:
    with pytest.raises(StoreLostError, match="not connected"):
        GenerationStore(MEMBERSHIP).has("key")


def test_when_the_first_node_has_left_the_others_take_it_that_all_have_finished(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [1000.0]
    monkeypatch.setattr(store_module.time, "monotonic", lambda: now[0])
    store = Lost(comes_back=True)
    barrier = ExitBarrier(store, 1, 2)
    barrier.sign(0, WorkerPhase.FINISHED)
    assert not barrier.all_finished(0), "one of two"
    store.connected, store.comes_back = False, False
    assert not barrier.all_finished(0), "it may come back"
    now[0] += 10_000.0
    assert barrier.all_finished(0)


def test_a_line_of_output_that_never_ends_is_shown_in_pieces() -> None:
    tail = Tail("[rank 0] ")
    assert tail.feed(b"x" * output._LONGEST_LINE) == b""
    assert tail.feed(b"y").count(b"x") > 0
    assert tail.feed(b"z\n") == b"[rank 0] z\n"


STILL = Stall(rank=1, phase=TrainerPhase.STEP, step=9, seconds=60.0, limit=15.0, waiting=None)


@pytest.mark.parametrize(
    ("finding", "summary"),
    [
        (Finding(FindingKind.STUCK, culprits=(1,)), "rank 1 is to blame"),
        (Finding(FindingKind.STUCK, culprits=(1, 3)), "ranks 1, 3 are to blame"),
        (Finding(FindingKind.SILENT, silent=(0, 2)), "the agents of node ranks 0, 2 do not answer"),
        (Finding(FindingKind.COLLECTIVE), "all ranks stand alike, nobody is to blame"),
    ],
)
def test_the_log_names_the_cause_of_a_standstill_and_where_each_rank_was(
    finding: Finding, summary: str, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    made = object.__new__(response.HangResponse)
    made._settings = SimpleNamespace(pod_name="w-1", log_format=LogFormat.TEXT)
    known = SimpleNamespace(innermost="train.py:7", text="frame one\nframe two")
    made._write_log(finding, (STILL, STILL), {})
    made._write_log(finding, (STILL,), {1: known})
    assert summary in caplog.text
    assert "not asked" in caplog.text
    assert "train.py:7" in caplog.text
    assert capsys.readouterr().out == "[rank 1] frame one\n[rank 1] frame two\n"
    caplog.clear()
    made._settings = SimpleNamespace(pod_name="w-1", log_format=LogFormat.JSON)
    made._write_log(finding, (STILL,), {1: known})
    assert (caplog.records[-1].getMessage(), vars(caplog.records[-1])["rank"]) == ("frame one\nframe two", 1)
    assert capsys.readouterr().out == "", "a line of the schema goes the way of all others"


def test_a_stack_shows_whether_a_rank_waits_where_nothing_else_does() -> None:
    assert response._apply_stack(STILL, None) is STILL
    assert response._apply_stack(STILL, SimpleNamespace(in_collective=None)) is STILL
    assert response._apply_stack(STILL, SimpleNamespace(in_collective=True)).waiting is True
    known = Stall(rank=1, phase=TrainerPhase.STEP, step=9, seconds=60.0, limit=15.0, waiting=False)
    assert response._apply_stack(known, SimpleNamespace(in_collective=True)) is known


NCCOM = """#!/bin/sh
for last; do :; done
{report}
exit {code}
"""


@pytest.mark.parametrize(
    ("report", "code", "healthy"),
    [
        ('echo \'{"results": [{"check": "passed"}]}\' >$last', 0, True),
        ('echo \'{"results": [{"check": "failed"}]}\' >$last', 1, False),
        ('echo \'{"results": [{"check": "failed"}]}\' >$last', 0, True),
        ("echo '{\"results\": [{}]}' >$last", 1, True),
        ("echo no JSON >$last", 1, True),
        ("true", 1, True),
    ],
)
def test_the_vendors_test_of_collectives_fails_a_node_only_by_a_word_that_is_understood(
    report: str, code: int, healthy: bool, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nccom-test"
    program.write_text(NCCOM.format(report=report, code=code))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert pair_test.collectives_check()[0] is healthy


TERMS = GenerationLimits(generation=3, grace_seconds=20.0, sample_seconds=2.0)
RUNNING = LocalGeneration(stage=Stage.RUNNING, attempt=1, started=2, next_sample_at=1000.0)


def ended(rank: int = 0, code: int = 1, *, attempt: int = 1, asked: bool = False) -> on.RankEnded:
    return on.RankEnded(attempt=attempt, local_rank=rank, rank=rank, code=code, asked=asked)


def test_a_pod_that_has_not_started_waits() -> None:
    assert step(TERMS, LocalGeneration(), on.Notice.TICK, 0.0) == (LocalGeneration(), ())
    assert wake_at(LocalGeneration()) is None


def test_a_rank_of_an_earlier_attempt_that_ends_late_changes_nothing() -> None:
    assert step(TERMS, RUNNING, ended(attempt=0), 1.0) == (RUNNING, ())


def test_a_rank_that_was_asked_to_end_is_no_failure() -> None:
    local, actions = step(TERMS, RUNNING, ended(code=137, asked=True), 1.0)
    assert (local.stage, actions) == (Stage.RUNNING, ())
    local, actions = step(TERMS, RUNNING, ended(code=137), 1.0)
    assert (local.stage, local.after) == (Stage.ENDING, Then.JUDGE_ENDS)
    assert do.SimpleAction.KILL in actions


@pytest.mark.parametrize("order", [Order.TERMINATE, Order.GRACEFUL])
def test_a_pod_that_is_to_leave_starts_no_ranks_though_all_have_joined(order: Order) -> None:
    joining = LocalGeneration(stage=Stage.JOINING, busy=do.SimpleTask.JOIN, order=order)
    local, actions = step(TERMS, joining, on.Joined(GenerationState(), 29500), 1.0)
    assert local.stage is not Stage.STARTING
    assert not any(isinstance(action, do.StartRanks) for action in actions)
    free = replace(joining, order=Order.NONE)
    local, actions = step(TERMS, free, on.Joined(GenerationState(attempt=2), 29500), 1.0)
    assert (local.stage, local.attempt) == (Stage.STARTING, 2)
    assert do.EnterPhase(WorkerPhase.LOADING, 2) in actions


def test_a_rank_that_does_not_die_of_a_kill_ends_the_pod_and_not_before_its_time() -> None:
    ending = replace(RUNNING, stage=Stage.ENDING, after=Then.JOIN_AGAIN, deadline=30.0)
    assert step(TERMS, ending, on.Notice.TICK, 29.9) == (ending, ())
    assert wake_at(ending) == 30.0
    local, actions = step(TERMS, ending, on.Notice.TICK, 30.0)
    assert local.stage is Stage.OVER
    assert actions == (do.FailPod("a training process did not end within 30 s of SIGKILL"),)


def test_what_is_over_receives_nothing() -> None:
    over = LocalGeneration(stage=Stage.OVER, outcome=GenerationEnd.FINISHED)
    assert step(TERMS, over, on.LeaveOrdered(Order.TERMINATE), 1.0) == (over, ())
    assert wake_at(over) is None

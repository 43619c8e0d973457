"""State machines of a pod and of a generation in random orders of events; a failure names its seed."""

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

import trainium_trainer
from tests.unit.agent.virtual_generation import VirtualGeneration
from trainium_agent.exits.restart_policy import GenerationState
from trainium_agent.lifecycle import actions, events, pod
from trainium_agent.lifecycle.events import GenerationOutcome
from trainium_agent.lifecycle.generation import step, wake_at
from trainium_agent.lifecycle.state import GenerationLimits, LocalGeneration, Stage
from trainium_contract.exit_codes import ExitCode
from trainium_contract.faults.causes import Cause
from trainium_contract.wire.messages import StuckRank, TrainerPhase

HISTORIES = 10_000
PARTS = 4


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.long) for part in range(1, PARTS))])
def test_a_generation_keeps_its_invariants_in_ten_thousand_random_orders_of_events(part: int) -> None:
    stages: Counter[Stage] = Counter()
    outcomes: Counter[GenerationOutcome] = Counter()
    restarts = 0
    for seed in range(part, HISTORIES, PARTS):
        history = VirtualGeneration(seed)
        try:
            history.run()
        except AssertionError as error:
            error.add_note(f"seed {seed}, second {history.now:.3f}, {history.local}")
            raise
        stages.update(history.stages)
        outcomes[history.local.outcome] += 1
        restarts += len(history.restarts)
    # The histories cover every stage, both outcomes and many restarts.
    assert set(stages) >= set(Stage) - {Stage.NEW}
    assert all(outcomes[outcome] > HISTORIES / PARTS / 100 for outcome in GenerationOutcome)
    assert restarts > HISTORIES / PARTS / 2


class VirtualPod:
    """A pod whose generations, checks and compiler end at random times."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.pod = pod.Pod(check_seconds=5.0)
        self.now = 0.0
        self.running = 0
        self.has_verdict = False
        """No rank is alive, and the coordinator may have the verdict."""
        self.leave_requested = False
        self.checking, self.compiling = True, False
        self.join_requested_at: float | None = None
        self.launched: list[int] = []
        self.exits: list[int | None] = []

    def apply_event(self, event: pod.Event) -> None:
        self.pod, requested = pod.step(self.pod, event, self.now)
        for action in requested:
            self.execute(action)

    def execute(self, action: pod.Action) -> None:
        assert not self.exits, "nothing follows the end"
        match action:
            case pod.StartGeneration(generation):
                assert not self.running, "two generations at once"
                assert not self.compiling, "ranks beside the compiler"
                assert not self.pod.unfit
                seconds_waited = self.now - (self.now if self.join_requested_at is None else self.join_requested_at)
                assert not self.checking or seconds_waited >= 5.0, "ranks beside the node's checks"
                assert generation == self.pod.newest.generation > max(self.launched, default=0)
                self.running, self.leave_requested, self.has_verdict = generation, False, False
                self.launched.append(generation)
            case pod.BecomeSpare(generation):
                assert not self.running
                assert generation == self.pod.newest.generation
                self.compiling = True
            case pod.LeaveGeneration():
                assert self.running, "no generation runs"
                self.leave_requested = True
            case pod.ExitPod(code):
                assert not self.running or self.has_verdict, "the pod is left while ranks are alive"
                self.exits.append(code)

    def random_event(self) -> None:
        newest, pick = self.pod.newest.generation, self.random.random()
        if pick < 0.25:
            if self.join_requested_at is None:
                self.join_requested_at = self.now
            number = newest + self.random.choice((0, 1, 1, 2))
            self.has_verdict = self.has_verdict and number == newest
            self.apply_event(pod.MembershipReceived(number, immediate=pick < 0.1, member=self.random.random() < 0.7))
        elif pick < 0.4 and self.checking:
            self.checking = False
            self.apply_event(pod.SimpleEvent.NODE_UNFIT if pick < 0.27 else pod.SimpleEvent.NODE_CHECKED)
        elif pick < 0.6 and self.running:
            outcome, self.running, self.has_verdict = self.random.choice(tuple(GenerationOutcome)), 0, False
            self.apply_event(pod.GenerationEnded(outcome))
        elif pick < 0.75 and self.compiling:
            self.compiling = False
            self.apply_event(pod.SimpleEvent.COMPILER_ENDED)
        elif pick < 0.8 and self.running == newest and not self.leave_requested:
            self.has_verdict = True
            self.apply_event(pod.VerdictAcknowledged(self.random.choice((newest, newest - 1))))
        elif pick < 0.85:
            self.apply_event(pod.FinishAcknowledged(newest))
        elif pick < 0.88:
            self.apply_event(
                self.random.choice((pod.SimpleEvent.TERMINATE, pod.SimpleEvent.TERMINATE, pod.SimpleEvent.JOB_DELETED))
            )
        else:
            self.now += 4 * self.random.random()
            self.apply_event(pod.SimpleEvent.TICK)
        self.check()

    def check(self) -> None:
        newest = self.pod.newest.generation
        if self.running and newest > self.running:
            assert self.leave_requested, "a newer generation was ignored"
        if self.running or self.exits or self.compiling or newest <= self.pod.last_handled or self.pod.unfit:
            return
        assert self.pod.deadline is not None, "no event or deadline would wake it"


def test_a_pod_keeps_its_invariants_in_ten_thousand_random_orders_of_events() -> None:
    exits: Counter[int | None] = Counter()
    for seed in range(HISTORIES):
        history = VirtualPod(seed)
        try:
            for _ in range(40):
                history.random_event()
        except AssertionError as error:
            error.add_note(f"seed {seed}, {history.pod}")
            raise
        exits.update(history.exits)
    assert set(exits) == {None, ExitCode.FINISHED}


def test_a_pod_exits_after_its_verdict_is_acknowledged_unless_a_generation_follows() -> None:
    received = pod.MembershipReceived(1, member=True)
    launched, _ = pod.step(replace(pod.Pod(check_seconds=5.0), checked=True), received, 0.0)
    assert launched.running == 1
    waiting, requested = pod.step(launched, pod.VerdictAcknowledged(1), 10.0)
    assert requested == (), "the others read in its store why it stopped"
    assert waiting.wake_at == pytest.approx(13.0)
    assert pod.step(waiting, pod.SimpleEvent.TICK, 12.9)[1] == ()
    ended, requested = pod.step(pod.step(waiting, pod.VerdictAcknowledged(1), 12.0)[0], pod.SimpleEvent.TICK, 13.0)
    assert (ended.has_exited, requested) == (True, (pod.ExitPod(None),))
    superseded, _ = pod.step(waiting, pod.MembershipReceived(2, member=True), 11.0)
    assert superseded.wake_at is None
    assert pod.step(superseded, pod.VerdictAcknowledged(1), 11.5)[0] == superseded, "a late reply"


@pytest.mark.parametrize(
    ("outcome", "newest", "code"),
    [
        (GenerationOutcome.FINISHED, 1, ExitCode.FINISHED),
        (GenerationOutcome.FINISHED, 2, None),
        (GenerationOutcome.LEFT, 1, None),
    ],
)
def test_a_pod_that_is_asked_to_end_has_finished_only_if_nobody_needs_it_again(
    outcome: GenerationOutcome, newest: int, code: int | None
) -> None:
    checked = replace(pod.Pod(check_seconds=5.0), checked=True)
    launched, _ = pod.step(checked, pod.MembershipReceived(1, member=True), 0.0)
    received, _ = pod.step(launched, pod.MembershipReceived(newest, member=False), 1.0)
    terminated, _ = pod.step(received, pod.SimpleEvent.TERMINATE, 2.0)
    assert pod.step(terminated, pod.GenerationEnded(outcome), 3.0)[1] == (pod.ExitPod(code),)
    waiting, _ = pod.step(received, pod.GenerationEnded(outcome), 2.0)
    assert pod.step(waiting, pod.SimpleEvent.TERMINATE, 3.0)[1] == (pod.ExitPod(code),)


def test_a_hang_report_is_cleared_before_the_next_attempt_joins() -> None:
    limits = GenerationLimits(1, grace_seconds=10.0, sample_seconds=0.5)
    local = LocalGeneration(
        limits, stage=Stage.RUNNING, attempt=2, started=1, running_task=actions.SimpleTask.CONCLUDE_INQUIRY
    )
    stuck = (StuckRank(rank=0, phase=TrainerPhase.STEP, step=7, seconds=9.0, waiting=False),)
    hang = events.HangFound(
        GenerationState(attempt=3, cause=Cause.HANG), Cause.HANG, 1.0, culprit_known=True, stuck=stuck
    )
    local, requested = step(local, hang, 100.0)
    assert actions.ReportStuck(stuck) in requested
    local, _ = step(local, events.RankExited(2, 0, 0, 137, requested=True), 100.1)
    assert local.running_task == actions.SimpleTask.END_LEFTOVERS
    local, _ = step(local, events.SimpleResult.DONE, 100.1)
    assert local.running_task == actions.SimpleTask.JOIN
    wake_time = wake_at(local)
    assert wake_time == 102.5, "a heartbeat carries it first"
    local, requested = step(local, events.SimpleEvent.TICK, wake_time)
    assert requested == (actions.ReportStuck(()),)
    assert wake_at(local) is None


def test_the_trainer_uses_no_module_of_torch_elastic() -> None:
    """Its private methods change with each release of torch; membership and shared state replace them."""
    package = Path(trainium_trainer.__file__).parent
    used = [path.name for path in package.rglob("*.py") if "distributed.elastic" in path.read_text(encoding="utf-8")]
    assert used == []

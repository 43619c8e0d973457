"""Single events in the life of a generation that come late, twice, or when nobody counts on them any more."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trainium_agent.exits.restart_policy import GenerationState
from trainium_agent.lifecycle import actions as do
from trainium_agent.lifecycle import events as on
from trainium_agent.lifecycle.events import GenerationEnd, Order
from trainium_agent.lifecycle.generation import step, wake_at
from trainium_agent.lifecycle.state import GenerationLimits, JoinAgain, JudgeEnds, LocalGeneration, Stage
from trainium_contract.wire.messages import WorkerPhase

TERMS = GenerationLimits(generation=3, grace_seconds=20.0, sample_seconds=2.0)
RUNNING = LocalGeneration(stage=Stage.RUNNING, attempt=1, started=2, next_sample_at=1000.0)


def ended(rank: int = 0, code: int = 1, *, attempt: int = 1, asked: bool = False) -> on.RankEnded:
    return on.RankEnded(attempt=attempt, local_rank=rank, rank=rank, code=code, asked=asked)


def test_a_pod_that_has_not_begun_waits() -> None:
    assert step(TERMS, LocalGeneration(), on.Tick(), 0.0) == (LocalGeneration(), ())
    assert wake_at(LocalGeneration()) is None


def test_a_rank_of_an_earlier_attempt_that_ends_late_says_nothing() -> None:
    assert step(TERMS, RUNNING, ended(attempt=0), 1.0) == (RUNNING, ())


def test_a_rank_that_was_told_to_end_is_no_failure() -> None:
    life, actions = step(TERMS, RUNNING, ended(code=137, asked=True), 1.0)
    assert (life.stage, actions) == (Stage.RUNNING, ())
    life, actions = step(TERMS, RUNNING, ended(code=137), 1.0)
    assert (life.stage, life.after) == (Stage.ENDING, JudgeEnds())
    assert do.Kill() in actions


@pytest.mark.parametrize("order", [Order.TERMINATE, Order.GRACEFUL])
def test_a_pod_that_is_to_leave_starts_no_ranks_though_all_have_joined(order: Order) -> None:
    joining = LocalGeneration(stage=Stage.JOINING, busy=do.Join(), order=order)
    life, actions = step(TERMS, joining, on.Joined(GenerationState(), 29500), 1.0)
    assert life.stage is not Stage.STARTING
    assert not any(isinstance(action, do.StartRanks) for action in actions)
    free = replace(joining, order=Order.NONE)
    life, actions = step(TERMS, free, on.Joined(GenerationState(attempt=2), 29500), 1.0)
    assert (life.stage, life.attempt) == (Stage.STARTING, 2)
    assert do.EnterPhase(WorkerPhase.LOADING, 2) in actions


def test_a_rank_that_does_not_die_of_a_kill_ends_the_pod_and_not_before_its_time() -> None:
    ending = replace(RUNNING, stage=Stage.ENDING, after=JoinAgain(), deadline=30.0)
    assert step(TERMS, ending, on.Tick(), 29.9) == (ending, ())
    assert wake_at(ending) == 30.0
    life, actions = step(TERMS, ending, on.Tick(), 30.0)
    assert life.stage is Stage.OVER
    assert actions == (do.FailPod("a training process did not end within 30 s of SIGKILL"),)


def test_what_is_over_hears_nothing() -> None:
    over = LocalGeneration(stage=Stage.OVER, outcome=GenerationEnd.FINISHED)
    assert step(TERMS, over, on.LeaveOrdered(Order.TERMINATE), 1.0) == (over, ())
    assert wake_at(over) is None

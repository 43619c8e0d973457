"""Costs of the interval of durable saves: the arithmetic, and the rollbacks that the simulation counts."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulate_builders import HOUR, FaultClass, fault, live, spec

from trainium_simulator.interval import Rollbacks, best_interval, loss, losses, present_interval
from trainium_simulator.stages import StageTimes

STAGES = StageTimes(save_stall_seconds=0.5, save_seconds=20.0)
DIVIDED = {"trainer": {"dataParallel": "FullySharded"}, "checkpoint": {"memory": {"buddies": 0}}}


def test_a_rollback_costs_half_an_interval_and_the_save() -> None:
    found = loss(600.0, Rollbacks(seen=2, seconds=100_000.0), STAGES)
    assert found.stall == pytest.approx(0.5 / 600)
    assert found.repeated == pytest.approx(2 * (300 + 20) / 100_000)
    assert found.total == found.stall + found.repeated


@given(st.integers(1, 10_000), st.floats(1e3, 1e9), st.floats(1.001, 10.0))
def test_no_interval_loses_less_than_the_best_one(seen: int, seconds: float, factor: float) -> None:
    rollbacks = Rollbacks(seen, seconds)
    best = best_interval(rollbacks, STAGES)
    least = loss(best, rollbacks, STAGES).total
    assert least <= loss(best * factor, rollbacks, STAGES).total * (1 + 1e-12)
    if best / factor > STAGES.save_seconds:
        assert least <= loss(best / factor, rollbacks, STAGES).total * (1 + 1e-12)


def test_none_seen_is_not_none_ever() -> None:
    assert Rollbacks(0, 3e6).per_second == pytest.approx(1e-6)
    assert Rollbacks(0, 0.0).per_second == 0.0
    assert best_interval(Rollbacks(0, 0.0), STAGES) == math.inf


def test_an_interval_shorter_than_a_save_is_not_offered() -> None:
    slow = StageTimes(save_seconds=400.0)
    assert min(each.seconds for each in losses(Rollbacks(1, 1e6), slow)) == 900.0


def test_the_shorter_of_seconds_and_steps_is_the_present_interval() -> None:
    stages = StageTimes(step_seconds=2.0)
    durable = {"everySeconds": 300, "everySteps": 100}
    assert present_interval(spec(checkpoint={"durable": durable}), stages) == 200.0


def test_a_lost_node_is_a_rollback_only_where_its_state_was_held_nowhere_else() -> None:
    lost = fault(5 * HOUR, FaultClass.NODE_LOST, 1)
    assert live(lost).rollbacks == 0
    assert live(lost, job=spec(**DIVIDED)).rollbacks == 1
    assert live(fault(5 * HOUR, FaultClass.PROCESS_CRASH, 1), job=spec(**DIVIDED)).rollbacks == 0


def test_a_crash_while_the_rollback_loads_is_the_same_rollback() -> None:
    job = spec(**DIVIDED)
    lost = fault(5 * HOUR, FaultClass.NODE_LOST, 1)
    crash = fault(5 * HOUR + 5.0, FaultClass.PROCESS_CRASH, 0)
    assert live(lost, crash, job=job, load_durable_seconds=60.0).rollbacks == 1

"""Costs of the interval of durable saves, and counted rollbacks."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.simulate.simulate_builders import HOUR, FaultClass, fault, simulate, spec
from trainium_simulator.interval import (
    Rollbacks,
    compute_optimal_interval,
    estimate_loss,
    estimate_usual_losses,
    find_configured_interval,
)
from trainium_simulator.stages import StageTimes

STAGES = StageTimes(save_stall_seconds=0.5, save_seconds=20.0)
DIVIDED = {"trainer": {"dataParallel": "FullySharded"}, "checkpoint": {"memory": {"buddies": 0}}}


def test_a_rollback_costs_half_an_interval_and_the_save() -> None:
    loss = estimate_loss(600.0, Rollbacks(count=2, simulated_seconds=100_000.0), STAGES)
    assert loss.stall_share == pytest.approx(0.5 / 600)
    assert loss.repeated_share == pytest.approx(2 * (300 + 20) / 100_000)
    assert loss.total_share == loss.stall_share + loss.repeated_share


@given(st.integers(1, 10_000), st.floats(1e3, 1e9), st.floats(1.001, 10.0))
def test_no_interval_loses_less_than_the_best_one(count: int, seconds: float, factor: float) -> None:
    rollbacks = Rollbacks(count, seconds)
    best = compute_optimal_interval(rollbacks, STAGES)
    least = estimate_loss(best, rollbacks, STAGES).total_share
    assert least <= estimate_loss(best * factor, rollbacks, STAGES).total_share * (1 + 1e-12)
    if best / factor > STAGES.save_seconds:
        assert least <= estimate_loss(best / factor, rollbacks, STAGES).total_share * (1 + 1e-12)


def test_no_observed_rollback_still_has_a_rate() -> None:
    assert Rollbacks(0, 3e6).per_second == pytest.approx(1e-6)
    assert Rollbacks(0, 0.0).per_second == 0.0
    assert compute_optimal_interval(Rollbacks(0, 0.0), STAGES) == math.inf


def test_an_interval_shorter_than_a_save_is_not_offered() -> None:
    slow = StageTimes(save_seconds=400.0)
    assert min(estimate.interval_seconds for estimate in estimate_usual_losses(Rollbacks(1, 1e6), slow)) == 900.0


def test_the_shorter_of_seconds_and_steps_is_the_present_interval() -> None:
    stages = StageTimes(step_seconds=2.0)
    durable = {"everySeconds": 300, "everySteps": 100}
    assert find_configured_interval(spec(checkpoint={"durable": durable}), stages) == 200.0


def test_a_lost_node_is_a_rollback_only_where_its_state_was_held_nowhere_else() -> None:
    lost = fault(5 * HOUR, FaultClass.NODE_LOST, 1)
    assert simulate(lost).rollbacks == 0
    assert simulate(lost, job=spec(**DIVIDED)).rollbacks == 1
    assert simulate(fault(5 * HOUR, FaultClass.PROCESS_CRASH, 1), job=spec(**DIVIDED)).rollbacks == 0


def test_a_crash_while_the_rollback_loads_is_the_same_rollback() -> None:
    job = spec(**DIVIDED)
    lost = fault(5 * HOUR, FaultClass.NODE_LOST, 1)
    crash = fault(5 * HOUR + 5.0, FaultClass.PROCESS_CRASH, 0)
    assert simulate(lost, crash, job=job, load_durable_seconds=60.0).rollbacks == 1

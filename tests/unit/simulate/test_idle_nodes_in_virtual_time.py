"""Idle nodes in the simulator: their gain, and preemption without a lost step."""

from typing import Any

import pytest

from tests.unit.simulate.simulate_builders import DAY, HOUR, FaultClass, Mix, fault, spec
from trainium_contract.faults.causes import Cause
from trainium_contract.status.interruptions import RecoveryResponse
from trainium_simulator.stages import StageTimes
from trainium_simulator.study import Case, run_study
from trainium_simulator.virtual.failures import FailureModel
from trainium_simulator.virtual.result import SimulationResult
from trainium_simulator.virtual.schedule import Fault, draw_faults
from trainium_simulator.virtual.simulation import Simulation, SimulationSettings

TAKES: dict[str, Any] = {"elasticity": {"idleNodes": "Take"}, "recovery": {"rescaleAfterSeconds": 60}}


def simulate(*faults: Fault, shared: int = 4, most: int = 8, **changes: Any) -> SimulationResult:
    job = spec(4, 0, **{"workers": {"maxReplicas": most}, **TAKES, **changes})
    return Simulation(
        SimulationSettings(spec=job, stages=StageTimes(), model=FailureModel(), days=1.0, shared_nodes=shared)
    ).run(faults)


def preemption(at: float, slot: int, duration: float) -> Fault:
    return fault(at, FaultClass.OCCUPIED, slot, duration=duration)


def test_all_day_idle_nodes_double_the_work() -> None:
    outcome = simulate()
    assert outcome.seconds_by_size[8] == pytest.approx(DAY, rel=0.01)
    assert outcome.work_done == pytest.approx(2.0, rel=0.01)


def test_idle_nodes_leave_gains_nothing() -> None:
    outcome = simulate(elasticity={"idleNodes": "Leave"})
    assert set(outcome.seconds_by_size) == {4}
    assert outcome.work_done == pytest.approx(1.0, rel=0.01)


def test_preempted_idle_nodes_leave_without_a_lost_step_and_return() -> None:
    outcome = simulate(*(preemption(6 * HOUR, slot, HOUR) for slot in (4, 5, 6, 7)))
    assert [entry.response for entry in outcome.interruptions] == [
        RecoveryResponse.GROW,
        RecoveryResponse.SHRINK,
        RecoveryResponse.GROW,
    ]
    assert {entry.steps_lost for entry in outcome.interruptions} == {0}
    assert outcome.interruptions[1].cause == Cause.PREEMPTED
    assert outcome.seconds_by_size[4] == pytest.approx(HOUR, rel=0.3)


def test_requested_nodes_are_never_preempted() -> None:
    outcome = simulate(*(preemption(6 * HOUR, slot, HOUR) for slot in range(4)), shared=0, most=4)
    assert outcome.interruptions == ()
    assert set(outcome.seconds_by_size) == {4}


def test_capacity_that_comes_and_goes_every_minute_for_an_hour_costs_little() -> None:
    minutes = [preemption(HOUR + 120 * minute, slot, 60.0) for minute in range(30) for slot in (4, 5, 6, 7)]
    outcome = simulate(*minutes)
    assert {entry.steps_lost for entry in outcome.interruptions} <= {0, None}
    assert len(outcome.interruptions) < 25
    assert outcome.seconds_by_size[8] > 0.9 * DAY
    assert outcome.work_done > 1.9


def test_shared_nodes_do_not_change_other_faults() -> None:
    some: dict[str, Any] = {"days": 30.0, "rate": 22.0, "mix": Mix.AUTO, "model": FailureModel()}
    without, shared = draw_faults(7, slots=12, **some), draw_faults(7, slots=12, shared_nodes=4, **some)
    assert [fault for fault in shared if fault.kind is not FaultClass.OCCUPIED] == list(without)
    used = [fault for fault in shared if fault.kind is FaultClass.OCCUPIED]
    assert {fault.slot for fault in used} == {8, 9, 10, 11}
    assert sum(fault.duration for fault in used) / (4 * 30 * DAY) == pytest.approx(0.5, abs=0.1)


@pytest.mark.long
def test_a_study_shows_the_gain_of_idle_nodes() -> None:
    job = spec(4, 0, workers={"maxReplicas": 8, "minReplicas": 2}, **TAKES)
    case = Case(spec=job, stages=StageTimes(), model=FailureModel(), mix=Mix.AUTO, days=1.0, rate=4.0, shared_nodes=4)
    result = run_study(case, 1)
    assert result.work_done.mean > 1.2
    assert result.strict_goodput.mean > 0.9

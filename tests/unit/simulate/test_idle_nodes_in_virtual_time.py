"""Idle nodes that come and go, in the simulator: their gain, and that they cost nothing when they go."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from simulate_builders import DAY, HOUR, FaultClass, Mix, fault, spec

from trainium_contract.faults.causes import Cause
from trainium_contract.status.interruptions import Rung
from trainium_simulator.stages import StageTimes
from trainium_simulator.study import Case, study
from trainium_simulator.virtual.failures import FailureModel
from trainium_simulator.virtual.schedule import Fault, draw
from trainium_simulator.virtual.simulation import Simulation, SimulationSettings

if TYPE_CHECKING:
    from trainium_simulator.virtual.result import SimulationResult

TAKES: dict[str, Any] = {"elasticity": {"idleNodes": "Take"}, "recovery": {"rescaleAfterSeconds": 60}}


def live(*faults: Fault, shared: int = 4, most: int = 8, **changes: Any) -> SimulationResult:
    job = spec(4, 0, **{"workers": {"maxReplicas": most}, **TAKES, **changes})
    return Simulation(
        SimulationSettings(spec=job, stages=StageTimes(), model=FailureModel(), days=1.0, shared=shared)
    ).run(faults)


def taken(at: float, slot: int, duration: float) -> Fault:
    return fault(at, FaultClass.TAKEN, slot, duration=duration)


def test_all_day_idle_nodes_double_the_work() -> None:
    outcome = live()
    assert outcome.sizes[8] == pytest.approx(DAY, rel=0.01)
    assert outcome.work == pytest.approx(2.0, rel=0.01)


def test_a_job_that_leaves_them_does_not() -> None:
    outcome = live(elasticity={"idleNodes": "Leave"})
    assert set(outcome.sizes) == {4}
    assert outcome.work == pytest.approx(1.0, rel=0.01)


def test_nodes_that_others_need_for_an_hour_go_without_a_lost_step_and_come_back() -> None:
    outcome = live(*(taken(6 * HOUR, slot, HOUR) for slot in (4, 5, 6, 7)))
    assert [each.rung for each in outcome.recoveries] == [Rung.GROW, Rung.SHRINK, Rung.GROW]
    assert {each.steps_lost for each in outcome.recoveries} == {0}
    assert outcome.recoveries[1].cause == Cause.PREEMPTED
    assert outcome.sizes[4] == pytest.approx(HOUR, rel=0.3)


def test_nobody_takes_a_node_that_was_asked_for() -> None:
    outcome = live(*(taken(6 * HOUR, slot, HOUR) for slot in range(4)), shared=0, most=4)
    assert outcome.recoveries == ()
    assert set(outcome.sizes) == {4}


def test_capacity_that_comes_and_goes_every_minute_for_an_hour_costs_little() -> None:
    minutes = [taken(HOUR + 120 * minute, slot, 60.0) for minute in range(30) for slot in (4, 5, 6, 7)]
    outcome = live(*minutes)
    assert {each.steps_lost for each in outcome.recoveries} <= {0, None}
    assert len(outcome.recoveries) < 25
    assert outcome.sizes[8] > 0.9 * DAY
    assert outcome.work > 1.9


def test_the_use_of_shared_nodes_leaves_the_other_faults_as_they_are() -> None:
    some: dict[str, Any] = {"days": 30.0, "rate": 22.0, "mix": Mix.AUTO, "model": FailureModel()}
    without, shared = draw(7, slots=12, **some), draw(7, slots=12, shared=4, **some)
    assert [each for each in shared if each.kind is not FaultClass.TAKEN] == list(without)
    used = [each for each in shared if each.kind is FaultClass.TAKEN]
    assert {each.slot for each in used} == {8, 9, 10, 11}
    assert sum(each.duration for each in used) / (4 * 30 * DAY) == pytest.approx(0.5, abs=0.1)


def test_a_study_shows_the_gain_of_idle_nodes() -> None:
    job = spec(4, 0, workers={"maxReplicas": 8, "minReplicas": 2}, **TAKES)
    case = Case(
        spec=job, stages=StageTimes(), model=FailureModel(), mix=Mix.AUTO, days=1.0, rate=4.0, variation="", shared=4
    )
    result = study(case, 1)
    assert result.work.mean > 1.2
    assert result.strict.mean > 0.9

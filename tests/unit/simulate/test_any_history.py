"""Invariants under any faults: the ledger agrees with what happened, and the same seed is the same run."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from simulate_builders import DAY, FaultClass, Mix, fault, live, spec

from tests.testing.suite.trials import trials
from trainium_simulator.stages import StageTimes
from trainium_simulator.study import Case, simulate, study
from trainium_simulator.virtual.failures import SHARES, FailureModel
from trainium_simulator.virtual.schedule import Fault, draw

KINDS = st.sampled_from(list(FaultClass))
FAULTS = st.lists(
    st.builds(
        fault,
        st.floats(0, 0.9 * DAY),
        KINDS,
        st.integers(0, 5),
        duration=st.floats(60, 6 * 3600),
        same_machine=st.booleans(),
    ),
    max_size=8,
)


def case(spares: int = 1, rate: float = 300.0, days: float = 3.0, nodes: int = 4) -> Case:
    job = spec(nodes=nodes, spares=spares, workers={"minReplicas": 1})
    return Case(spec=job, stages=StageTimes(), model=FailureModel(), mix=Mix.AUTO, days=days, rate=rate)


@pytest.mark.timeout(300)
@settings(max_examples=trials(10))
@given(faults=FAULTS, spares=st.integers(0, 2), elastic=st.booleans())
@example(faults=[fault(0.0, FaultClass.RESIZE, 5, duration=76.0)], spares=1, elastic=False)
def test_the_jobs_ledger_agrees_with_what_happened(faults: list[Fault], spares: int, elastic: bool) -> None:
    job = spec(spares=spares, workers={"minReplicas": 1} if elastic else {})
    outcome = live(*sorted(faults), job=job)

    ledger = outcome.ledger
    assert sum(ledger.lost_seconds.values()) + ledger.productive_seconds == pytest.approx(ledger.wall_seconds, abs=5.0)
    assert sum(outcome.sizes.values()) <= DAY + 1
    # A person may ask for more nodes than the job began with.
    assert 0 <= outcome.work <= max(4, *outcome.sizes) / 4
    assert outcome.strict <= 1
    all_reported = FaultClass.API_OUTAGE not in outcome.faults
    if set(outcome.sizes) <= {4} and not outcome.verdicts and all_reported:
        # At one size the steps that were kept are the ledger's productive time. Those of ranks that were lost while the
        # operator was away are reported by the ranks after them, which may come after the end.
        assert outcome.work_seconds == pytest.approx(ledger.productive_seconds, rel=0.01, abs=60.0)


def test_steps_of_a_job_that_loses_all_its_nodes_are_counted_before_it_trains_again() -> None:
    job = spec(spares=0)
    outcome = live(fault(77_130.0, FaultClass.RACK, duration=9_263.0), job=job)

    assert outcome.work_seconds > 0.8 * DAY
    assert outcome.ledger.productive_seconds == pytest.approx(outcome.work_seconds, rel=0.01)


@pytest.mark.timeout(300)
@settings(max_examples=trials(5))
@given(faults=FAULTS)
def test_a_job_trains_again_after_whatever_befell_it(faults: list[Fault]) -> None:
    outcome = live(*sorted(faults), job=spec(spares=1, workers={"minReplicas": 1}), days=3.0)

    assert outcome.by_day[-1] > 0.7 * DAY


def test_the_same_seed_is_the_same_run() -> None:
    first, again = simulate(case(), 7), simulate(case(), 7)

    assert dataclasses.asdict(first) == dataclasses.asdict(again)
    assert dataclasses.asdict(first) != dataclasses.asdict(simulate(case(), 8))


def test_one_more_spare_leaves_the_bad_luck_of_the_others_as_it_was() -> None:
    model = FailureModel()
    few = draw(3, slots=4, days=30, rate=22, mix=Mix.AUTO, model=model)
    more = draw(3, slots=5, days=30, rate=22, mix=Mix.AUTO, model=model)

    assert [each for each in more if each.slot != 4] == list(few)


@pytest.mark.timeout(300)
def test_spares_help_on_the_average() -> None:
    results = [study(case(spares=spares, rate=200.0, nodes=8, days=2.0), 4) for spares in (0, 1, 3)]

    work = [result.work.mean for result in results]
    assert work == sorted(work)
    assert work[-1] > work[0] + 0.005


def test_the_faults_come_at_the_rate_that_was_asked_for() -> None:
    model = FailureModel(lemon_share=0.0)
    faults = draw(1, slots=500, days=30, rate=20, mix=Mix.HARDWARE, model=model)
    healthy = [
        each
        for each in faults
        if each.hazard_threshold <= 1 / (model.lemon_factor * model.infant_factor)
        and each.kind not in (FaultClass.STRAGGLER, FaultClass.API_OUTAGE)
    ]

    assert len(healthy) == pytest.approx(20 * 0.5 * 30, rel=0.2)


def test_the_shares_of_each_mix_are_all_there_is() -> None:
    for shares in SHARES.values():
        assert sum(shares.values()) == pytest.approx(1.0)


def test_no_failures_is_a_job_without_interruptions() -> None:
    result = study(case(rate=0.0), 2)

    assert result.recoveries == ()
    assert result.strict.mean > 0.9995


def test_the_interval_covers_the_spread_of_the_seeds() -> None:
    result = study(case(rate=100.0), 4)

    assert result.strict.margin > 0
    assert result.worst_day <= result.work.mean + 1e-9

"""Invariants under any faults: the ledger agrees with what happened, and the same seed is the same run."""

import dataclasses

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.testing.suite.trials import trials
from tests.unit.simulate.simulate_builders import DAY, FaultClass, Mix, fault, simulate, spec
from trainium_simulator.stages import StageTimes
from trainium_simulator.study import Case, run_study, simulate_seed
from trainium_simulator.virtual.failures import SHARES, FailureModel
from trainium_simulator.virtual.schedule import Fault, draw_faults

KINDS = st.sampled_from(list(FaultClass))
FAULTS = st.lists(
    st.builds(
        fault,
        st.floats(0, 0.9 * DAY),
        KINDS,
        st.integers(0, 5),
        duration=st.floats(60, 6 * 3600),
        same_machine=st.booleans(),
        replicas=st.integers(0, 5),
    ),
    max_size=8,
)


def case(spares: int = 1, rate: float = 300.0, days: float = 3.0, nodes: int = 4) -> Case:
    job = spec(nodes=nodes, spares=spares, workers={"minReplicas": 1})
    return Case(spec=job, stages=StageTimes(), model=FailureModel(), mix=Mix.AUTO, days=days, rate=rate)


@pytest.mark.timeout(300)
@settings(max_examples=trials(10))
@given(faults=FAULTS, spares=st.integers(0, 2), elastic=st.booleans())
@example(faults=[fault(0.0, FaultClass.RESIZE, replicas=5, duration=76.0)], spares=1, elastic=False)
def test_the_jobs_ledger_agrees_with_what_happened(faults: list[Fault], spares: int, elastic: bool) -> None:
    job = spec(spares=spares, workers={"minReplicas": 1} if elastic else {})
    # All faults are over half a day before the end, so that the ranks that were lost are reported by those after them.
    outcome = simulate(*sorted(faults), job=job, days=1.5)

    ledger = outcome.ledger
    assert sum(ledger.lost_seconds.values()) + ledger.productive_seconds == pytest.approx(ledger.wall_seconds, abs=5.0)
    assert sum(outcome.seconds_by_size.values()) <= 1.5 * DAY + 1
    # A person may ask for more nodes than the job began with.
    assert 0 <= outcome.work_done <= max(4, *outcome.seconds_by_size) / 4
    assert outcome.strict_goodput <= 1
    all_reported = FaultClass.API_OUTAGE not in outcome.fault_counts
    if set(outcome.seconds_by_size) <= {4} and not outcome.recreations and all_reported:
        # At one size the steps that were kept are the ledger's productive time.
        assert outcome.work_seconds == pytest.approx(ledger.productive_seconds, rel=0.01, abs=60.0)


@pytest.mark.parametrize("kind", [FaultClass.RACK, FaultClass.DEVICE_ERROR])
def test_steps_of_a_job_that_waits_for_nodes_are_counted_before_it_trains_again(kind: FaultClass) -> None:
    outcome = simulate(fault(76_799.0, kind, duration=20_000.0), job=spec(spares=0))

    assert outcome.work_seconds > 0.8 * DAY
    assert outcome.ledger.productive_seconds == pytest.approx(outcome.work_seconds, rel=0.01)


def test_steps_of_ranks_that_train_on_a_bad_node_are_productive() -> None:
    faults = (fault(64_801.0, FaultClass.RACK, 4, duration=7_933.0), fault(69_673.0, FaultClass.DEVICE_ERROR))
    outcome = simulate(*faults, job=spec(spares=2, workers={"minReplicas": 1}), days=1.5)

    assert outcome.ledger.productive_seconds == pytest.approx(outcome.work_seconds, rel=0.001)


def test_the_ledger_reaches_the_end_of_a_run_that_ends_without_the_operator() -> None:
    outcome = simulate(fault(0.9 * DAY, FaultClass.OPERATOR_LOST, duration=DAY))

    assert outcome.ledger.productive_seconds == pytest.approx(outcome.work_seconds, rel=0.001)


@pytest.mark.timeout(300)
@settings(max_examples=trials(5))
@given(faults=FAULTS)
def test_a_job_trains_again_after_any_faults(faults: list[Fault]) -> None:
    outcome = simulate(*sorted(faults), job=spec(spares=1, workers={"minReplicas": 1}), days=3.0)

    assert outcome.work_seconds_by_day[-1] > 0.7 * DAY


def test_the_same_seed_is_the_same_run() -> None:
    first, again = simulate_seed(case(), 7), simulate_seed(case(), 7)

    assert dataclasses.asdict(first) == dataclasses.asdict(again)
    assert dataclasses.asdict(first) != dataclasses.asdict(simulate_seed(case(), 8))


def test_an_additional_spare_does_not_change_faults_of_other_nodes() -> None:
    model = FailureModel()
    few = draw_faults(3, slots=4, days=30, rate=22, mix=Mix.AUTO, model=model)
    more = draw_faults(3, slots=5, days=30, rate=22, mix=Mix.AUTO, model=model)

    assert [fault for fault in more if fault.slot != 4] == list(few)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_spares_help_on_the_average() -> None:
    results = [run_study(case(spares=spares, rate=200.0, nodes=8, days=2.0), 4) for spares in (0, 1, 3)]

    work = [result.work_done.mean for result in results]
    assert work == sorted(work)
    assert work[-1] > work[0] + 0.005


def test_the_faults_come_at_the_rate_that_was_asked_for() -> None:
    model = FailureModel(lemon_share=0.0)
    faults = draw_faults(1, slots=500, days=30, rate=20, mix=Mix.HARDWARE, model=model)
    healthy = [
        fault
        for fault in faults
        if fault.hazard_threshold <= 1 / (model.lemon_factor * model.infant_factor)
        and fault.kind not in (FaultClass.STRAGGLER, FaultClass.API_OUTAGE)
    ]

    assert len(healthy) == pytest.approx(20 * 0.5 * 30, rel=0.2)


def test_shares_of_each_mix_add_up_to_one() -> None:
    for shares in SHARES.values():
        assert sum(shares.values()) == pytest.approx(1.0)


def test_no_failures_is_a_job_without_interruptions() -> None:
    result = run_study(case(rate=0.0), 2)

    assert result.recoveries == ()
    assert result.strict_goodput.mean > 0.9995


def test_the_interval_covers_the_spread_of_the_seeds() -> None:
    result = run_study(case(rate=100.0), 4)

    assert result.strict_goodput.margin > 0
    assert result.worst_day <= result.work_done.mean + 1e-9

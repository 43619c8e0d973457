"""Times that an operator wrote whose clock was ahead count as now, so that nothing waits until they have come."""

from __future__ import annotations

from dataclasses import replace

import pytest
from plan_builders import NOW, created, interruption, job, observed, planned, running

from trainium_contract.faults.causes import Cause
from trainium_contract.job import GoodputStatus, IdleNodesStatus, TrainingJobStatus
from trainium_contract.status.internal import FailureRecord, GangStatus
from trainium_contract.status.interruptions import Rung
from trainium_contract.status.public import ProgressStatus
from trainium_contract.status.start_failures import StartFailuresStatus
from trainium_operator.plan.membership import idle_nodes
from trainium_operator.plan.model.times import rfc3339
from trainium_operator.plan.pods import gang_policy
from trainium_operator.plan.view.clock_skew import in_the_present


def written(at: float) -> TrainingJobStatus:
    """A status in which every time is this one."""
    entry = interruption(Rung.REPLACE, ago=0.0, failed_at=at, decided_at=at)
    return TrainingJobStatus(
        waiting_since=at,
        leaving_since=at,
        failures=(FailureRecord(cause=Cause.CRASH, at=at), FailureRecord(cause=Cause.CRASH, at=NOW - 50)),
        history=(interruption(Rung.GROW, ago=500), entry),
        goodput=GoodputStatus(accounted_until=at),
        progress=ProgressStatus(updated=rfc3339(at)),
        idle_nodes=IdleNodesStatus(wanted=1, asked_at=at),
        gang=GangStatus(holding_since=at),
    )


def seen(status: TrainingJobStatus) -> TrainingJobStatus:
    base = running(4)
    return in_the_present(replace(base, job=replace(base.job, status=status))).job.status


@pytest.mark.parametrize("ahead", [3.0, 3600.0, 1e8])
def test_every_time_of_the_future_counts_as_now(ahead: float) -> None:
    assert seen(written(NOW + ahead)) == written(NOW)


@pytest.mark.parametrize("ahead", [2.0, 0.0, -3600.0])
def test_a_time_of_the_past_and_one_that_rounding_explains_stay_and_cost_nothing(ahead: float) -> None:
    status = written(NOW + ahead)
    assert seen(status) is status


def test_of_an_interruption_the_time_that_is_late_alone_is_mended() -> None:
    entry = interruption(Rung.REPLACE, ago=100, decided_at=NOW + 100)
    mended = seen(TrainingJobStatus(history=(entry,))).history[0]
    assert (mended.failed_at, mended.decided_at) == (entry.failed_at, NOW)


def pausing(until: float) -> TrainingJobStatus:
    return TrainingJobStatus(idle_nodes=IdleNodesStatus(retry_at=until), gang=GangStatus(given_back=9, retry_at=until))


def test_a_pause_is_over_that_no_policy_would_have_begun() -> None:
    for longest in (
        idle_nodes._LONGEST_PAUSE_SECONDS,
        max(gang_policy.pause_seconds(f"job-{at}", 40) for at in range(500)),
    ):
        status = pausing(NOW + longest)
        assert seen(status) is status
    assert seen(pausing(NOW + 3600)) == pausing(NOW)


def test_a_job_whose_nodes_were_given_back_by_a_clock_that_was_ahead_gets_its_pods() -> None:
    waits = observed(job(status=pausing(NOW + 60)))
    assert created(planned(waits)) == []
    ahead = observed(job(status=pausing(NOW + 3600)))
    assert len(created(planned(ahead))) == 4


def test_a_job_whose_pods_were_refused_by_a_clock_that_was_ahead_gets_its_pods() -> None:
    def refused(at: float) -> TrainingJobStatus:
        return TrainingJobStatus(
            observed_generation=job().generation, start_failures=StartFailuresStatus(rounds=9, at=at)
        )

    assert created(planned(observed(job(status=refused(NOW - 1))))) == []
    assert len(created(planned(observed(job(status=refused(NOW + 3600)))))) == 4

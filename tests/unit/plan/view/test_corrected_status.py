"""An edited status is corrected before policies read it: future times, and the membership."""

from dataclasses import replace
from typing import Any

import pytest

from tests.unit.plan import plan_builders as build
from tests.unit.plan.plan_builders import NOW
from tests.unit.plan.plan_results import make_plan, with_written_status
from trainium_contract.faults.causes import Cause
from trainium_contract.job import GoodputStatus, IdleNodesStatus, TrainingJobStatus
from trainium_contract.rfc3339 import format_rfc3339
from trainium_contract.status.internal import FailureRecord, GangStatus
from trainium_contract.status.interruptions import RecoveryResponse
from trainium_contract.status.public import MembershipStatus, ProgressStatus
from trainium_contract.status.start_failures import StartFailuresStatus
from trainium_operator.plan.features import idle_nodes
from trainium_operator.plan.model.observed import Observed
from trainium_operator.plan.pods import gang_policy
from trainium_operator.plan.report.write_throttle import is_only_progress_change
from trainium_operator.plan.view.corrected_status import correct_status
from trainium_operator.plan.view.size import decide_size


def status_at(time: float) -> TrainingJobStatus:
    """Return a status in which every time is `at`."""
    entry = build.interruption(RecoveryResponse.REPLACE, ago=0.0, failed_at=time, decided_at=time)
    return TrainingJobStatus(
        waiting_since=time,
        leaving_since=time,
        failures=(FailureRecord(cause=Cause.CRASH, at=time), FailureRecord(cause=Cause.CRASH, at=NOW - 50)),
        history=(build.interruption(RecoveryResponse.GROW, ago=500), entry),
        goodput=GoodputStatus(accounted_until=time),
        progress=ProgressStatus(updated=format_rfc3339(time)),
        idle_nodes=IdleNodesStatus(wanted=1, asked_at=time),
        gang=GangStatus(holding_since=time),
    )


def corrected_status(observed: Observed) -> TrainingJobStatus:
    return correct_status(observed, decide_size(observed.job.spec)).job.status


def correct(status: TrainingJobStatus) -> TrainingJobStatus:
    base = replace(build.running_job(4), membership=None)
    return corrected_status(build.with_status(base, status))


@pytest.mark.parametrize("ahead", [3.0, 3600.0, 1e8])
def test_times_in_the_future_are_clamped_to_now(ahead: float) -> None:
    assert correct(status_at(NOW + ahead)) == status_at(NOW)


@pytest.mark.parametrize("ahead", [2.0, 0.0, -3600.0])
def test_past_and_rounded_times_are_unchanged(ahead: float) -> None:
    status = status_at(NOW + ahead)
    assert correct(status) is status


def test_only_the_future_time_of_an_interruption_is_clamped() -> None:
    entry = build.interruption(RecoveryResponse.REPLACE, ago=100, decided_at=NOW + 100)
    mended = correct(TrainingJobStatus(history=(entry,))).history[0]
    assert (mended.failed_at, mended.decided_at) == (entry.failed_at, NOW)


def paused_status(until: float) -> TrainingJobStatus:
    return TrainingJobStatus(idle_nodes=IdleNodesStatus(retry_at=until), gang=GangStatus(given_back=9, retry_at=until))


def test_a_pause_longer_than_any_policy_is_ended() -> None:
    for longest in (
        idle_nodes._MAX_PAUSE_SECONDS,
        max(gang_policy.pause_seconds(f"job-{number}", 40) for number in range(500)),
    ):
        status = paused_status(NOW + longest)
        assert correct(status) is status
    assert correct(paused_status(NOW + 3600)) == paused_status(NOW)


def test_a_gang_pause_written_by_a_fast_clock_ends() -> None:
    waits = build.observation(build.job(status=paused_status(NOW + 60)))
    assert make_plan(waits).created_pods == []
    ahead = build.observation(build.job(status=paused_status(NOW + 3600)))
    assert len(make_plan(ahead).created_pods) == 4


def test_a_creation_backoff_written_by_a_fast_clock_ends() -> None:
    def status_with_refusals(time: float) -> TrainingJobStatus:
        return TrainingJobStatus(
            observed_generation=build.job().generation, start_failures=StartFailuresStatus(rounds=9, at=time)
        )

    assert make_plan(build.observation(build.job(status=status_with_refusals(NOW - 1)))).created_pods == []
    assert len(make_plan(build.observation(build.job(status=status_with_refusals(NOW + 3600)))).created_pods) == 4


RECORDED = MembershipStatus(generation=1, attempt=0, size=4, data_parallel=4)


def with_membership(membership: MembershipStatus, *missing: int, **status: Any) -> Observed:
    base = build.without_pods(build.running_job(4), *missing)
    return build.with_status(base, membership=membership, **status)


@pytest.mark.parametrize(
    "edited",
    [
        MembershipStatus(generation=1, size=1, data_parallel=1),
        MembershipStatus(generation=77, size=1),
        MembershipStatus(generation=2, size=4),
        MembershipStatus(generation=0, size=4),
        MembershipStatus(generation=1, attempt=50, size=4),
        MembershipStatus(generation=1, size=0),
        MembershipStatus(),
    ],
    ids=lambda membership: f"generation {membership.generation} of {membership.size}, attempt {membership.attempt}",
)
def test_an_edited_membership_is_replaced_by_the_recorded_one(edited: MembershipStatus) -> None:
    changed = with_membership(edited)
    assert corrected_status(changed) == changed.job.status.replaced(membership=RECORDED)
    result = make_plan(changed)
    assert (result.status.membership.generation, result.status.membership.size) == (1, 4)
    assert result.published_membership is None, "training continues in the current generation"


def test_unrecorded_decisions_and_abandoned_generations_are_kept() -> None:
    decided = build.interruption(RecoveryResponse.REPLACE, ago=5, took=None, decided_at=NOW - 4)
    next_one = MembershipStatus(generation=2, size=4, data_parallel=4)
    waiting = with_membership(next_one, history=(decided,))
    assert corrected_status(waiting) is waiting.job.status
    resumed = with_membership(next_one, 0, 1, 2, 3)
    assert corrected_status(resumed) is resumed.job.status, "the first generation after a suspension is in no history"
    given_up = with_membership(MembershipStatus(generation=1, size=0), 2)
    assert corrected_status(given_up) is given_up.job.status


@pytest.mark.parametrize("silent", [False, True])
@pytest.mark.parametrize("edited", [-1, 3, 15])
def test_an_edited_checkpoint_is_restored_and_is_no_commit(edited: int, silent: bool) -> None:
    observed = build.running_job(2)
    status = make_plan(observed).status
    assert status.checkpoint.durable_step == 10
    before = format_rfc3339(NOW - 500)
    checkpoint = status.checkpoint.replaced(durable_step=edited, durable_time=before)
    observed = build.with_status(observed, status.replaced(checkpoint=checkpoint))
    status = make_plan(replace(observed, agents={}) if silent else observed).status
    assert (status.checkpoint.durable_step, status.checkpoint.durable_time) == (10, before)


def test_a_commit_is_throttled_like_progress() -> None:
    before = make_plan(build.running_job(2)).status
    after = before.replaced(checkpoint=before.checkpoint.replaced(durable_step=20), committed_step=20)
    assert is_only_progress_change(before, after)


def test_edited_steps_and_checkpoints_are_corrected_at_once() -> None:
    observed = build.running_job(2)
    observed = with_written_status(observed)
    progress = observed.job.status.progress.replaced(step=10**6, updated=format_rfc3339(NOW))
    checkpoint = observed.job.status.checkpoint.replaced(durable_step=10**6)
    edited = observed.job.status.replaced(progress=progress, checkpoint=checkpoint)
    status = make_plan(build.with_status(observed, edited)).status
    assert (status.progress.step, status.checkpoint.durable_step) == (20, 10)

"""Restarts that agents made without the operator are recorded once, by their own times and with one culprit."""

from dataclasses import replace
from typing import Any

import pytest

from tests.unit.plan import plan_builders as build
from tests.unit.plan.plan_builders import NOW
from tests.unit.plan.plan_results import make_plan, member_names
from trainium_contract.exit_codes import ExitCode
from trainium_contract.faults.causes import Cause
from trainium_contract.job import TrainingJobStatus
from trainium_contract.spec.health import PreflightCheck
from trainium_contract.status.conditions import Phase
from trainium_contract.status.internal import FailureRecord
from trainium_contract.status.interruptions import RecoveryResponse
from trainium_contract.status.public import MembershipStatus
from trainium_contract.wire.messages import CheckResult, Transition, WorkerPhase
from trainium_operator.plan.faults.failure_budgets import record_failure


def restarted_job(culprit: Any = None, *, attempt: Any = 1, phase: Any = WorkerPhase.LOADING, **victims: Any) -> Any:
    """Return a job whose members are in `attempt` and whose member 1 has the reports `culprit`."""
    agents = build.agents(range(4), phase, generation=1, attempt=attempt, **victims)
    if culprit is not None:
        agents[1] = build.agent(1, phase, generation=1, attempt=attempt, **culprit)
    return build.running_job(4, agents=agents)


def test_a_restart_in_place_is_one_interruption_with_the_times_of_the_agent() -> None:
    record = build.restart_record(
        1, failed_at=NOW - 3, detected_at=NOW - 2.95, resumed_at=NOW - 1, step_before=20, resume_step=19
    )
    observed = restarted_job(
        {"failures": (build.failure(137, rank=1),), "restarts": (record,)}, phase=WorkerPhase.TRAINING
    )
    result = make_plan(observed)
    entry = result.newest_entry
    assert (entry.response, entry.cause, entry.pod, entry.node) == (
        RecoveryResponse.IN_PLACE,
        Cause.CRASH,
        "demo-w-1",
        "node-1",
    )
    assert entry.detected_seconds == pytest.approx(0.05)
    assert entry.recovered_seconds == pytest.approx(2.0)
    assert (entry.step_before, entry.resume_step, entry.steps_lost, entry.pods_replaced) == (20, 19, 1, 0)
    assert result.status.membership.attempt == 1
    assert [record.cause for record in result.status.failures] == [Cause.CRASH]
    assert result.status.failures[0].node == ""
    assert result.actions == ()


@pytest.mark.parametrize("apart", [-3600.0, 3600.0])
def test_times_of_an_agent_with_a_wrong_clock_are_ignored(apart: float) -> None:
    def build_agent(ordinal: int, off: float = 0.0, **fields: Any) -> Any:
        record = build.restart_record(1, failed_at=NOW - 3 + off, detected_at=NOW - 2.9 + off, resumed_at=NOW - 1 + off)
        return build.agent(ordinal, WorkerPhase.TRAINING, generation=1, attempt=1, restarts=(record,), **fields)

    wrong = CheckResult(check=PreflightCheck.CLOCK, passed=False, seconds=0.0, detail="an hour off")
    agents = {ordinal: build_agent(ordinal) for ordinal in (0, 2, 3)}
    agents[1] = build_agent(1, apart, failures=(build.failure(137, rank=1),), checks=(wrong,))
    entry = make_plan(build.running_job(4, agents=agents)).newest_entry
    assert entry.pod == "demo-w-1"
    assert entry.failed_at == NOW - 3
    assert entry.recovered_seconds == pytest.approx(2.0)


def test_a_restart_reported_after_the_end_is_recorded() -> None:
    record = build.restart_record(
        1, failed_at=NOW - 9, detected_at=NOW - 8.95, resumed_at=NOW - 7, step_before=20, resume_step=20
    )
    reports = {"failures": (build.failure(137, rank=1),), "restarts": (record,)}
    result = make_plan(restarted_job(reports, phase=WorkerPhase.FINISHED))
    assert result.status.phase is Phase.COMPLETED
    assert (result.newest_entry.response, result.newest_entry.pod) == (RecoveryResponse.IN_PLACE, "demo-w-1")
    assert result.newest_entry.recovered_seconds == pytest.approx(2.0)
    assert result.status.restarts.total == 1


def test_an_attempt_is_recorded_once() -> None:
    observed = restarted_job({"failures": (build.failure(137),), "restarts": (build.restart_record(1),)})
    first = make_plan(observed)
    again = make_plan(build.with_status(observed, first.status))
    assert len(again.status.history) == 1
    assert again.status.restarts.total == 1


def test_reports_of_victims_wait_for_the_culprit() -> None:
    agents = build.agents((0, 2, 3), WorkerPhase.JOINING, generation=1, attempt=1)
    result = make_plan(build.running_job(4, agents=agents))
    assert result.status.history == ()
    assert result.requeue_after == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("phase", "responses"),
    [(WorkerPhase.JOINING, ()), (WorkerPhase.LOADING, ()), (WorkerPhase.TRAINING, (RecoveryResponse.IN_PLACE,))],
)
def test_a_restart_beside_a_silent_member_is_recorded_once_the_others_train(phase: Any, responses: Any) -> None:
    """Expect no entry before: the silent member may be what they lost, which is one interruption and not two."""
    record = build.restart_record(1, Cause.PEER_LOST)
    agents = build.agents((0, 2, 3), phase, generation=1, attempt=1, restarts=(record,))
    agents[1] = build.training_agent(1, silent=5.0)
    result = make_plan(build.running_job(4, agents=agents))
    assert tuple(entry.response for entry in result.status.history) == responses
    assert result.requeue_after is not None


def test_a_restart_for_a_member_that_leaves_waits_for_its_report() -> None:
    """Expect no entry before, although the others share its cause and may report first."""
    agents = build.agents(
        (0, 2, 3), WorkerPhase.JOINING, generation=1, attempt=1, restarts=(build.restart_record(1, Cause.HOST),)
    )
    agents[1] = build.agent(1, WorkerPhase.TRAINING, generation=1, attempt=0)
    result = make_plan(build.running_job(4, agents=agents))
    assert result.status.history == ()
    assert result.requeue_after == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("attempt", "responses"),
    [(0, [RecoveryResponse.REPLACE]), (1, [RecoveryResponse.IN_PLACE, RecoveryResponse.REPLACE])],
)
def test_restarts_beside_a_member_that_left_belong_to_its_loss(attempt: int, responses: Any) -> None:
    """Expect a separate entry only if that member started the next attempt, too, before it was lost."""
    record = build.restart_record(1, Cause.DEVICE)
    agents = build.agents((0, 2, 3), WorkerPhase.JOINING, generation=1, attempt=1, restarts=(record,))
    failures = (build.failure(ExitCode.DEVICE_FAULT, rank=1),)
    agents[1] = build.agent(1, WorkerPhase.FAILED, generation=1, attempt=attempt, failures=failures)
    result = make_plan(build.running_job(4, agents=agents))
    assert [entry.response for entry in result.status.history] == responses
    assert result.status.membership.attempt == 1


def test_a_victim_is_never_the_culprit() -> None:
    victim = {"failures": (build.failure(76, rank=0),), "restarts": (build.restart_record(1, Cause.PEER_LOST),)}
    observed = restarted_job(
        {"failures": (build.failure(137, rank=1),), "restarts": (build.restart_record(1),)}, **victim
    )
    assert make_plan(observed).newest_entry.pod == "demo-w-1"
    nobody = restarted_job(None, **victim)
    result = make_plan(nobody)
    assert (result.newest_entry.cause, result.newest_entry.pod) == (Cause.PEER_LOST, "")
    assert result.status.failures == ()


@pytest.mark.parametrize(
    ("workers", "victims", "counted"),
    [
        (1, (0,), "they lost each other and none reported"),
        (4, (2,), "1 worker lost a peer and none reported"),
        (4, (0, 1, 3), "3 workers lost a peer and none reported"),
        (4, (), "none reported"),
        (1, (), "none reported"),
    ],
)
def test_the_message_counts_members_that_lost_a_peer(workers: int, victims: Any, counted: str) -> None:
    def build_agent(ordinal: int) -> Any:
        failures = (build.failure(76, rank=ordinal),) if ordinal in victims else ()
        record = build.restart_record(1, Cause.PEER_LOST)
        return build.agent(ordinal, WorkerPhase.LOADING, generation=1, attempt=1, failures=failures, restarts=(record,))

    entry = make_plan(
        build.running_job(workers, agents={ordinal: build_agent(ordinal) for ordinal in range(workers)})
    ).newest_entry
    assert entry.message == (f"the processes restarted in place; {counted} a failure, so no worker is blamed")
    assert "1 workers" not in entry.message


def test_restarts_because_of_a_lost_member_belong_to_that_loss() -> None:
    agents = build.agents((0, 2, 3), WorkerPhase.JOINING, generation=1, attempt=1, waiting_for=(1,))
    result = make_plan(build.without_pods(build.running_job(4, agents=agents), 1))
    assert [entry.response for entry in result.status.history] == [RecoveryResponse.REPLACE]
    assert result.status.membership.attempt == 1


def test_a_recovery_without_an_agents_record_ends_at_the_first_new_step() -> None:
    observed = restarted_job({"failures": (build.failure(137),)}, phase=WorkerPhase.JOINING)
    status = make_plan(observed).status
    assert make_plan(observed).newest_entry.recovered_seconds is None
    assert (make_plan(observed).newest_entry.failed_at, make_plan(observed).newest_entry.detected_seconds) == (
        NOW,
        0.0,
    )
    agents = build.by_pod_uid(build.training_agents(range(4), step=21, attempt=1))
    later = replace(observed, job=replace(observed.job, status=status), agents=agents, now=NOW + 2)
    result = make_plan(later)
    assert result.newest_entry.recovered_seconds == pytest.approx(0.0, abs=2.0)
    assert result.newest_entry.recovered_seconds is not None
    assert result.newest_entry.steps_lost is None


def test_crashes_in_place_use_up_the_process_budget() -> None:
    observed = restarted_job({"failures": (build.failure(137),), "restarts": (build.restart_record(1),)})
    recovery = observed.job.spec.recovery
    failures = ()
    for seconds in range(10):
        crash = FailureRecord(at=NOW - 100 + seconds, cause=Cause.CRASH, pod="demo-w-1", node="")
        failures = record_failure(failures, crash, recovery)
    status = observed.job.status.model_copy(update={"failures": failures})
    result = make_plan(build.with_status(observed, status))
    assert result.status.phase is Phase.FAILED
    assert "11 process failures within 3600 s" in result.status.verdict
    old = tuple(record.model_copy(update={"at": NOW - 3601}) for record in failures)
    assert make_plan(build.with_status(observed, failures=old)).status.phase is Phase.RECOVERING


def test_unavailable_storage_raises_a_warning_and_uses_no_budget() -> None:
    result = make_plan(
        restarted_job({"failures": (build.failure(81),), "restarts": (build.restart_record(1, Cause.STORAGE),)})
    )
    assert result.newest_entry.cause is Cause.STORAGE
    assert result.status.phase is Phase.RECOVERING
    assert "StorageUnavailable" in {event.reason for event in result.events}


def test_attempts_of_an_older_generation_are_ignored() -> None:
    observed = restarted_job({"failures": (build.failure(137),)})
    result = make_plan(build.with_status(observed, with_decided_generation(observed.job.status, size=4)))
    assert [entry.response for entry in result.status.history] == [RecoveryResponse.REPLACE]


def with_decided_generation(status: TrainingJobStatus, *, size: int) -> TrainingJobStatus:
    """Return the status with a decision on generation 2 that is not recorded yet."""
    entry = build.interruption(RecoveryResponse.REPLACE, ago=1, took=None, step_before=10**6)
    return status.replaced(membership=MembershipStatus(generation=2, size=size), history=(entry,))


def test_an_unrecorded_generation_is_published_with_the_current_members() -> None:
    observed = build.running_job(4)
    decided = build.with_status(observed, with_decided_generation(observed.job.status, size=3))
    new = make_plan(decided).published_membership
    assert new is not None
    assert (new.generation, new.transition, member_names(new)) == (
        2,
        Transition.GRACEFUL,
        member_names(observed.membership),
    )
    # While a member has not reported yet, as after a restart of the operator, the reason may still be there.
    assert make_plan(build.without_pods(decided, 2)).published_membership is None

"""Members have finished only if their agents prove it; every other end of a pod is a failed member."""

from dataclasses import replace
from typing import Any

import pytest

from tests.unit.plan import plan_builders as build
from tests.unit.plan.plan_builders import NOW
from tests.unit.plan.plan_results import make_plan
from trainium_contract.faults.causes import Cause
from trainium_contract.rfc3339 import format_rfc3339
from trainium_contract.status.conditions import ConditionStatus, ConditionType, Phase
from trainium_contract.status.internal import FailureRecord
from trainium_contract.status.interruptions import RecoveryResponse
from trainium_contract.wire.messages import Progress, WorkerPhase
from trainium_operator.plan.model.observed import Observed, PodPhase, PodView

LAST_STEP = Progress(
    step=100, total_steps=100, loss=1.5, memory_step=100, durable_step=100, updated=NOW - 61, productive_seconds=50.0
)
PROGRAM = build.program_spec(workers={"replicas": 3})
TRAINER = build.spec(workers={"replicas": 3})


def ended(ordinal: int, how: str) -> PodView:
    """Return a pod that has ended in one of the ways in which its ranks did not finish."""
    succeeded = build.pod(ordinal, phase=PodPhase.SUCCEEDED, exit_code=0, reason="Completed", ready=False)
    finished = build.finished_pod(ordinal)
    assert finished.last_report is not None
    return {
        "asked to end": replace(succeeded, phase=PodPhase.FAILED, exit_code=75, reason="Error"),
        "Succeeded without proof": succeeded,
        "Succeeded without an exit code": replace(succeeded, exit_code=None, reason=""),
        "evicted with code 0": replace(succeeded, phase=PodPhase.FAILED, reason="Evicted", disrupted=True),
        "finished another generation": replace(finished, last_report=finished.last_report.replaced(generation=7)),
        "a sidecar runs on": replace(succeeded, phase=PodPhase.RUNNING),
    }[how]


WAYS = (
    "asked to end",
    "Succeeded without proof",
    "Succeeded without an exit code",
    "evicted with code 0",
    "finished another generation",
    "a sidecar runs on",
)


@pytest.mark.parametrize("job_spec", [PROGRAM, TRAINER], ids=["program", "trainer"])
@pytest.mark.parametrize("operator", ["runs", "was restarted"])
@pytest.mark.parametrize("who", [(1,), (0, 1), (0, 1, 2)], ids=["one", "two", "all"])
@pytest.mark.parametrize("how", WAYS)
def test_a_pod_that_ended_without_proof_is_a_failed_member(
    job_spec: Any, operator: str, who: tuple[int, ...], how: str
) -> None:
    observed = build.running_job(3, job_spec=job_spec)
    for ordinal in who:
        observed = build.with_pod(observed, ended(ordinal, how))
    if operator == "was restarted":
        living = {uid: agent for uid, agent in observed.agents.items() if int(uid[-1]) not in who}
        observed = replace(observed, agents=living)
    result = make_plan(observed)
    assert result.status.phase is Phase.RECOVERING
    cause = Cause.PREEMPTED if how == "evicted with code 0" else Cause.POD_LOST
    assert (result.newest_entry.cause, result.newest_entry.response) == (cause, RecoveryResponse.REPLACE)
    assert result.newest_entry.pod == f"demo-w-{who[0]}"
    assert set(result.deleted_pods) == {f"demo-w-{ordinal}" for ordinal in who}
    assert len(result.created_pods) == len(who)
    pods_ready = result.condition(ConditionType.PODS_READY)
    assert pods_ready.status is ConditionStatus.FALSE
    assert pods_ready.message.startswith(f"{3 - len(who)} of 3 workers are registered")


@pytest.mark.parametrize("how", [way for way in WAYS if way != "finished another generation"])
def test_a_spare_that_ended_is_replaced(how: str) -> None:
    """One that finished a generation that the operator does not know shows that the cluster's state was restored."""
    observed = build.running_job(3, spares=1)
    result = make_plan(build.with_pod(observed, ended(3, how)))
    assert (result.status.phase, result.status.history) == (Phase.RUNNING, ())
    assert (set(result.deleted_pods), len(result.created_pods)) == ({"demo-w-3"}, 1)


def finished_job(*, job_spec: Any = TRAINER, **report: Any) -> Observed:
    """Return a job whose members finished a minute ago, for an operator that has just started."""
    pods = tuple(
        replace(build.finished_pod(ordinal, progress=LAST_STEP, **report), finished=NOW - 60) for ordinal in range(3)
    )
    observed = build.running_job(3, job_spec=job_spec, pods=pods, coordinator_since=NOW - 1, published=0)
    return replace(observed, agents={})


@pytest.mark.parametrize("job_spec", [PROGRAM, TRAINER], ids=["program", "trainer"])
def test_a_job_that_ended_without_an_operator_shows_its_final_figures(job_spec: Any) -> None:
    record = build.restart_record(
        1, failed_at=NOW - 90, detected_at=NOW - 89.9, resumed_at=NOW - 80, step_before=20, resume_step=20
    )
    observed = finished_job(job_spec=job_spec, attempt=1, restarts=(record,))
    goodput = observed.job.status.goodput.replaced(accounted_until=NOW - 120, wall_seconds=10.0, starting=False)
    status = make_plan(build.with_status(observed, goodput=goodput)).status
    assert status.phase is Phase.COMPLETED
    assert (status.progress.step, status.progress.loss) == (100, 1.5)
    assert (status.checkpoint.durable_step, status.committed_step) == (100, 100)
    assert [entry.response for entry in status.history] == [RecoveryResponse.IN_PLACE]
    assert status.restarts.total == 1
    assert status.goodput.wall_seconds == pytest.approx(70.0), "the minute without a job is not the job's"
    assert status.completion_time == format_rfc3339(NOW - 60)


FAILURE = build.failure(64, attempt=1, rank=1, step=100, message="KeyError: 'x'")


def failed_pods(**report: Any) -> tuple[PodView, ...]:
    """Return pods whose agents ended a minute ago: rank 1 gave up, and nobody answered the others either."""
    codes = {0: 75, 1: 64, 2: 75}
    verdicts: dict[int, Any] = {1: {"verdict": FAILURE, "failures": (FAILURE,)}}
    reports = {
        ordinal: build.heartbeat(ordinal, WorkerPhase.FAILED, generation=1, **report, **verdicts.get(ordinal, {}))
        for ordinal in codes
    }
    ended = {"phase": PodPhase.FAILED, "reason": "Error", "ready": False, "finished": NOW - 60}
    return tuple(
        build.pod(ordinal, exit_code=code, last_report=reports[ordinal], **ended) for ordinal, code in codes.items()
    )


@pytest.mark.parametrize("job_spec", [PROGRAM, TRAINER], ids=["program", "trainer"])
def test_a_job_that_failed_without_an_operator_shows_its_final_figures(job_spec: Any) -> None:
    record = build.restart_record(
        1, failed_at=NOW - 90, detected_at=NOW - 89.9, resumed_at=NOW - 80, step_before=20, resume_step=20
    )
    pods = failed_pods(progress=LAST_STEP, attempt=1, restarts=(record,))
    observed = build.running_job(3, job_spec=job_spec, pods=pods, coordinator_since=NOW - 1, published=0)
    goodput = observed.job.status.goodput.replaced(accounted_until=NOW - 120, wall_seconds=10.0, starting=False)
    status = make_plan(build.with_status(replace(observed, agents={}), goodput=goodput)).status
    assert status.phase is Phase.FAILED
    assert "KeyError: 'x'" in status.verdict
    assert (status.progress.step, status.progress.loss) == (100, 1.5)
    assert (status.checkpoint.durable_step, status.committed_step) == (100, 100)
    assert [entry.response for entry in status.history] == [RecoveryResponse.IN_PLACE, RecoveryResponse.STOP]
    assert status.history[0].recovered_seconds is not None
    assert status.restarts.total == 1
    assert status.goodput.wall_seconds == pytest.approx(70.0), "the minute without a job is not the job's"
    assert status.completion_time == format_rfc3339(NOW - 60)


def test_a_verdict_waits_for_the_reports_of_all_members_after_a_start_of_the_operator() -> None:
    """The member with the verdict may be the first that reports; the figures of rank 0 come with its own report."""
    reports = build.agents(range(3), WorkerPhase.FAILED, generation=1, progress=LAST_STEP)
    reports[1] = build.agent(1, WorkerPhase.FAILED, generation=1, verdict=FAILURE, failures=(FAILURE,))
    observed = build.running_job(3, agents=reports, coordinator_since=NOW - 1)
    early = replace(observed, agents={uid: agent for uid, agent in observed.agents.items() if uid == "uid-1"})
    result = make_plan(early)
    assert (result.status.phase, result.actions) == (early.job.status.phase, ())
    assert result.requeue_after is not None
    assert make_plan(replace(early, coordinator_since=NOW - 10)).status.phase is Phase.FAILED, "not for ever"
    status = make_plan(observed).status
    assert (status.phase, status.progress.step) == (Phase.FAILED, 100)


def test_an_ended_pod_gives_the_other_agents_no_less_time_to_find_a_new_operator() -> None:
    pods = (failed_pods(progress=LAST_STEP)[0], build.pod(1))
    observed = build.running_job(2, pods=pods, coordinator_since=NOW - 8)
    result = make_plan(replace(observed, agents={}))
    assert [entry.pod for entry in result.status.history] == ["demo-w-0"]


def test_a_member_that_finished_an_attempt_that_failed_elsewhere_is_replaced() -> None:
    """The others wait for it in the next attempt, and it has ended."""
    waiting = build.agent(1, WorkerPhase.JOINING, generation=1, attempt=1, waiting_for=(0,))
    observed = build.running_job(2, agents={1: waiting})
    result = make_plan(build.with_pod(observed, build.finished_pod(0)))
    assert result.status.phase is Phase.RECOVERING
    assert (result.newest_entry.cause, result.newest_entry.pod) == (Cause.POD_LOST, "demo-w-0")
    assert set(result.deleted_pods) == {"demo-w-0"}
    alive = make_plan(build.with_agents(observed, build.agents((0,), WorkerPhase.FINISHED, generation=1)))
    assert alive.status.history == (), "its agent follows into the next attempt"


@pytest.mark.parametrize("operator", ["runs", "was restarted"])
def test_a_finished_member_beside_training_ones_is_no_failure(operator: str) -> None:
    agents = {0: build.agent(0, WorkerPhase.FINISHED, generation=1)}
    observed = build.with_pod(build.running_job(2, agents=agents), build.finished_pod(0))
    if operator == "was restarted":
        observed = replace(observed, agents={uid: agent for uid, agent in observed.agents.items() if uid != "uid-0"})
    result = make_plan(observed)
    assert (result.status.history, result.deleted_pods) == ((), {})


def test_a_member_that_reported_to_have_finished_may_be_asked_to_end_then() -> None:
    agents = {0: build.agent(0, WorkerPhase.FINISHED, generation=1)}
    observed = build.with_pod(build.running_job(2, agents=agents), ended(0, "asked to end"))
    result = make_plan(observed)
    assert (result.status.history, result.deleted_pods) == ((), {})
    others = build.with_agents(observed, build.agents((1,), WorkerPhase.FINISHED, generation=1))
    assert make_plan(others).status.phase is Phase.COMPLETED


@pytest.mark.parametrize(
    ("progress", "is_complete"),
    [
        (None, False),
        (Progress(step=0, total_steps=100), False),
        (Progress(step=55, total_steps=100), False),
        (Progress(step=99), False),
        (Progress(step=100), True),
        (Progress(step=0, resume_step=100, total_steps=100), True),
        (Progress(step=60, total_steps=60), True),
    ],
)
@pytest.mark.parametrize("is_alive", [True, False])
def test_a_trainer_completes_only_with_its_last_step(
    progress: Progress | None, is_complete: bool, is_alive: bool
) -> None:
    agents = build.agents(range(2), WorkerPhase.FINISHED, generation=1, progress=progress)
    observed = build.running_job(2, agents=agents)
    if not is_alive:
        pods = tuple(build.finished_pod(ordinal, progress=progress) for ordinal in range(2))
        observed = replace(observed, pods=pods, agents={})
    result = make_plan(observed)
    assert (result.status.phase is Phase.COMPLETED) is is_complete
    if not is_complete and not is_alive:
        assert result.status.phase is Phase.RECOVERING
        assert set(result.deleted_pods) == {"demo-w-0", "demo-w-1"}


def test_pods_that_are_asked_to_end_again_and_again_end_the_job_with_a_verdict() -> None:
    """A liveness probe that fails for every pod, for instance: the job does not replace its workers for ever."""
    observed = build.with_pod(build.running_job(3, job_spec=PROGRAM), ended(1, "asked to end"))
    allowed = observed.job.spec.recovery.budgets.infrastructure.max_failures
    before = tuple(
        FailureRecord(at=NOW - 3000 + 25 * number, cause=Cause.POD_LOST, pod=f"demo-w-{number}", node="")
        for number in range(allowed)
    )
    assert make_plan(build.with_status(observed, failures=before[1:])).status.phase is Phase.RECOVERING
    status = make_plan(build.with_status(observed, failures=before)).status
    assert status.phase is Phase.FAILED
    assert "infrastructure failures" in status.verdict

"""Deadlines: a job that is active for too long, or does not start, saves, releases its nodes and fails."""

from dataclasses import replace
from typing import Any

import pytest

from tests.unit.plan import plan_builders as build
from tests.unit.plan.plan_builders import NOW
from tests.unit.plan.plan_cluster import FakeCluster
from tests.unit.plan.plan_results import make_plan
from trainium_contract.faults.causes import Cause
from trainium_contract.rfc3339 import format_rfc3339
from trainium_contract.status.activity import ActivityStatus
from trainium_contract.status.conditions import Condition, ConditionStatus, ConditionType, Phase
from trainium_contract.status.interruptions import RecoveryResponse
from trainium_contract.status.public import MembershipStatus
from trainium_contract.wire.messages import Progress, WorkerPhase
from trainium_operator.plan.model.conditions import find_condition, is_true
from trainium_operator.plan.model.observed import NodeReadiness
from trainium_operator.plan.model.reasons import Reason

LIMIT = 40


def start_job(*, nodes: int = 6, seconds: float = 20, **job_spec: Any) -> FakeCluster:
    steps = {"trainer": {"steps": job_spec.pop("steps", 10**6)}}
    cluster = FakeCluster(build.spec(workers={"spares": 1}, **steps, **job_spec), nodes)
    cluster.run(seconds)
    return cluster


def job_at_deadline(**changes: Any) -> Any:
    """Return a job that trains on pods 0 and 1 and has just reached a deadline."""
    condition = Condition(
        type=ConditionType.FAILURE_TARGET,
        status=ConditionStatus.TRUE,
        reason="DeadlineExceeded",
        message="The job has been active for 40 s, as long as activeDeadlineSeconds allows.",
        last_transition_time=format_rfc3339(NOW - 1),
    )
    job_spec = build.spec(workers={"replicas": 2}, activeDeadlineSeconds=LIMIT, **changes.pop("spec", {}))
    status = {"conditions": (condition,), "activity": ActivityStatus(since=NOW - 50, stepped=True)}
    return build.running_job(2, job_spec=job_spec, status=status, **changes)


def test_an_active_deadline_saves_first_and_fails_after_the_last_worker() -> None:
    cluster = start_job(activeDeadlineSeconds=LIMIT)
    assert cluster.status.phase is Phase.RUNNING
    since = cluster.status.activity.since
    assert since is not None
    while cluster.now < since + LIMIT:
        assert cluster.status.phase is not Phase.STOPPING
        cluster.run(1)
    assert cluster.status.phase is Phase.STOPPING
    target = find_condition(cluster.status, ConditionType.FAILURE_TARGET)
    assert target is not None
    assert (target.status, target.reason) == (ConditionStatus.TRUE, "DeadlineExceeded")
    assert all(pod.view.deleting for pod in cluster.pods.values())
    assert len(cluster.pods) == 5, "no pod is killed"
    best = cluster.best_step
    cluster.run(6)
    assert cluster.pods == {}
    status = cluster.status
    assert status.phase is Phase.FAILED
    failed = find_condition(status, ConditionType.FAILED)
    assert failed is not None
    assert failed.reason == "DeadlineExceeded"
    assert status.checkpoint.durable_step == best == cluster.committed, "the last save is reported"
    assert status.verdict == (
        f"The job has been active for 40 s, as long as activeDeadlineSeconds allows. Its newest durable checkpoint is "
        f"step {best}. Raise spec.activeDeadlineSeconds and run the job again (kubectl trn retry)."
    )
    assert (status.history[-1].response, status.history[-1].cause) == (RecoveryResponse.STOP, Cause.YIELDED)
    assert (status.restarts.total, status.failures) == (0, ()), "a deadline is no fault"


@pytest.mark.parametrize("writes", range(8))
@pytest.mark.parametrize("when", [0, 1, 3])
def test_a_restarted_operator_completes_a_deadline_after_any_write(writes: int, when: int) -> None:
    cluster = start_job(activeDeadlineSeconds=LIMIT)
    since = cluster.status.activity.since
    assert since is not None
    while cluster.now < since + LIMIT - 1 + when:
        cluster.run(1)
    cluster.now += 1
    cluster.reconcile(crash_after=writes)
    cluster.run(20)
    assert cluster.status.phase is Phase.FAILED
    assert cluster.status.activity.since == since
    assert cluster.status.checkpoint.durable_step >= 0
    assert cluster.pods == {}
    assert len(cluster.status.history) == 1


def test_a_suspended_job_has_no_deadline_and_each_resumption_restarts_the_count() -> None:
    cluster = start_job(activeDeadlineSeconds=LIMIT)
    cluster.suspend(True)
    cluster.run(100)
    assert cluster.status.phase is Phase.SUSPENDED
    assert cluster.status.activity == ActivityStatus()
    cluster.suspend(False)
    cluster.run(LIMIT - 4)
    assert cluster.status.phase is Phase.RUNNING
    cluster.run(12)
    assert cluster.status.phase is Phase.FAILED


def test_a_deadline_can_be_raised_only_before_it_passes() -> None:
    for raised_at, phase in ((LIMIT - 8, Phase.RUNNING), (LIMIT + 2, Phase.FAILED)):
        cluster = start_job(seconds=raised_at, activeDeadlineSeconds=LIMIT)
        cluster.spec = cluster.spec.model_copy(update={"active_deadline_seconds": 10**6})
        cluster.generation += 1
        cluster.dirty = True
        cluster.run(30)
        assert cluster.status.phase is phase


def test_suspension_and_resize_do_not_revoke_a_deadline() -> None:
    cluster = start_job(seconds=LIMIT + 2, activeDeadlineSeconds=LIMIT)
    assert cluster.status.phase is Phase.STOPPING
    cluster.suspend(True)
    cluster.change(replicas=2)
    cluster.run(10)
    assert cluster.status.phase is Phase.FAILED
    assert cluster.pods == {}


def test_a_job_that_finishes_while_stopping_is_complete() -> None:
    finished = build.agents(range(2), WorkerPhase.FINISHED, generation=1)
    result = make_plan(job_at_deadline(agents=finished))
    assert result.status.phase is Phase.COMPLETED
    assert not is_true(result.status, ConditionType.FAILURE_TARGET)


def test_a_worker_that_fails_while_stopping_is_no_failure() -> None:
    crashed = build.training_agent(1, verdict=None)
    observed = job_at_deadline(
        agents={1: replace(crashed, last_seen=NOW - 100)},
        pods=(build.pod(0, deleting=True), build.pod(1, deleting=True)),
    )
    result = make_plan(observed)
    assert result.status.phase is Phase.STOPPING
    assert result.deleted_pods == {}, "asked once"
    assert (result.status.restarts.total, result.status.failures) == (0, ())


def test_a_stopping_job_does_not_wait_for_a_lost_node() -> None:
    nodes = {"node-0": build.node("node-0"), "node-1": build.node("node-1", NodeReadiness.UNKNOWN)}
    result = make_plan(job_at_deadline(nodes=nodes))
    assert result.deleted_pods == {"demo-w-0": None, "demo-w-1": 0}


def test_a_late_pod_of_an_ended_job_is_deleted() -> None:
    cluster = start_job(seconds=LIMIT + 10, activeDeadlineSeconds=LIMIT, cleanPodPolicy="None")
    late = build.observation(build.job(cluster.spec, cluster.status), (build.pod(9),))
    assert make_plan(late).deleted_pods == {"demo-w-9": None}


def test_a_startup_deadline_names_what_the_job_waited_for() -> None:
    cluster = start_job(nodes=2, seconds=25, startupDeadlineSeconds=20)
    cluster.run(10)
    assert cluster.status.phase is Phase.FAILED
    failed = find_condition(cluster.status, ConditionType.FAILED)
    assert failed is not None
    assert failed.reason == "StartupDeadlineExceeded"
    assert cluster.status.verdict.startswith(
        "The job has made no step within 20 s, as long as startupDeadlineSeconds allows: 2 of 4 workers are "
        "registered. demo-w-2, demo-w-3, demo-w-4 cannot be scheduled: 0 nodes are available. It has no durable "
        "checkpoint. Remove what holds the workers up"
    )
    assert cluster.pods == {}


def test_the_startup_deadline_ends_with_the_first_step_and_restarts_on_resume() -> None:
    cluster = start_job(seconds=60, startupDeadlineSeconds=20)
    assert cluster.status.phase is Phase.RUNNING
    assert cluster.status.activity.stepped
    for name in [pod.view.name for pod in cluster.members()]:
        cluster.kill_pod(name)
    cluster.run(60)
    assert cluster.status.phase is Phase.RUNNING, "a recovery is no start"
    cluster.suspend(True)
    cluster.run(10)
    for name in list(cluster.nodes)[:4]:
        cluster.mark_node(name, schedulable=False)
    cluster.suspend(False)
    cluster.run(35)
    assert cluster.status.phase is Phase.FAILED


def test_loading_a_checkpoint_is_no_step() -> None:
    def has_stepped(step: int, resumed: int | None, stage: str = "Train") -> bool:
        progress = Progress(step=step, resume_step=resumed, stage=stage)
        agents = build.training_agents(range(2), progress=progress)
        observed = build.running_job(
            2, job_spec=build.spec(workers={"replicas": 2}, startupDeadlineSeconds=60), agents=agents
        )
        return make_plan(observed).status.activity.stepped

    assert not has_stepped(40, 40)
    assert has_stepped(41, 40)
    assert not has_stepped(0, None)
    assert has_stepped(100, 100, "Export"), "no step is left to be made"


def test_the_time_in_a_queue_does_not_count() -> None:
    waiting = Condition(
        type=ConditionType.ADMITTED,
        status=ConditionStatus.FALSE,
        reason=Reason.WAITING_FOR_QUEUE.value,
        last_transition_time=format_rfc3339(NOW - 900),
    )
    observed = build.running_job(
        2,
        job_spec=build.spec(workers={"replicas": 2}, scheduling={"queueName": "q"}, activeDeadlineSeconds=LIMIT),
        status={
            "conditions": (waiting,),
            "membership": MembershipStatus(),
            "activity": ActivityStatus(since=NOW - 900),
        },
        membership=None,
        published=0,
    )
    assert make_plan(observed).status.activity.since is None


def test_a_missing_or_future_start_of_the_deadline_is_reset_to_now() -> None:
    for since in (None, NOW + 10**6):
        observed = build.running_job(
            2,
            job_spec=build.spec(workers={"replicas": 2}, activeDeadlineSeconds=LIMIT),
            status={"activity": ActivityStatus(since=since)},
        )
        result = make_plan(observed)
        assert result.status.activity.since == NOW
        assert result.requeue_after is not None
        assert result.requeue_after <= LIMIT


@pytest.mark.parametrize(
    ("step", "words"),
    [(7, "durable checkpoint is step 7."), (0, "durable checkpoint is step 0."), (-1, "It has no durable checkpoint.")],
)
def test_the_verdict_names_the_newest_durable_step(step: int, words: str) -> None:
    observed = job_at_deadline(
        pods=(), agents={0: build.training_agent(0, progress=None), 1: build.training_agent(1, progress=None)}
    )
    checkpoint = observed.job.status.checkpoint.model_copy(update={"durable_step": step})
    assert words in make_plan(build.with_status(observed, checkpoint=checkpoint)).status.verdict


def test_an_edited_failure_target_still_ends_the_job() -> None:
    observed = job_at_deadline(pods=())
    target = observed.job.status.conditions[0].model_copy(update={"reason": "Whatever", "message": ""})
    result = make_plan(build.with_status(observed, conditions=(target,)))
    assert result.status.phase is Phase.FAILED
    assert "Its newest durable checkpoint is step 10" in result.status.verdict

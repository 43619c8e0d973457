"""Policy for idle nodes: how many extras are requested or kept, and when the job grows onto them."""

from dataclasses import replace
from typing import Any

import pytest

from tests.unit.plan import plan_builders as build
from tests.unit.plan.plan_builders import NOW
from trainium_contract.faults.causes import Cause
from trainium_contract.job import GoodputStatus, IdleNodesStatus, TrainingJobStatus
from trainium_contract.status.conditions import ConditionType
from trainium_contract.status.interruptions import RecoveryResponse
from trainium_contract.status.ledger import SizeAccount
from trainium_contract.status.public import CompiledStatus, ProgressStatus
from trainium_contract.wire.messages import WorkerPhase
from trainium_operator.plan.diagnose.failed_member import FailedMember
from trainium_operator.plan.features.idle_nodes import use_idle_nodes
from trainium_operator.plan.model.actions import PolicyResult
from trainium_operator.plan.model.conditions import set_condition
from trainium_operator.plan.model.grant import AdmissionState, Grant
from trainium_operator.plan.model.observed import Observed, PodPhase
from trainium_operator.plan.model.reasons import Reason
from trainium_operator.plan.view.workers import add_last_reports

RESCALE_AFTER_SECONDS = 30
FIRST_SEEN = NOW - 50
"""When the agents of extras were first seen."""


def job_with_extras(*, extras: int = 0, waiting: int = 0, most: int = 4, members: int = 2, **changes: Any) -> Observed:
    """Return a job of two workers with warm and pending extras."""
    job_spec = build.spec(
        workers={"replicas": 2, "maxReplicas": most},
        recovery={"rescaleAfterSeconds": RESCALE_AFTER_SECONDS},
        elasticity={"idleNodes": "Take"},
        trainer={"steps": 10**6, **changes.pop("trainer", {})},
    )
    started = members + extras
    pods = (
        *(build.pod(ordinal, extra=ordinal >= 2) for ordinal in range(started)),
        *(
            build.pod(ordinal, extra=True, node="", phase=PodPhase.PENDING, scheduled=False)
            for ordinal in range(started, started + waiting)
        ),
    )
    agents = build.agents(range(members, started)) | changes.pop("agents", {})
    return build.running_job(members, job_spec=job_spec, pods=pods, agents=agents, **changes)


def idle_status(status: TrainingJobStatus | None = None, **idle: Any) -> TrainingJobStatus:
    """Return the status with two requested nodes."""
    return (status or TrainingJobStatus()).replaced(desired=2, idle_nodes=IdleNodesStatus(**idle))


def with_resize_cost(price: float, ago: float = 5000.0, **fields: Any) -> TrainingJobStatus:
    """Return a status whose last resize took `price` seconds."""
    return TrainingJobStatus(history=(build.interruption(RecoveryResponse.REPLACE, ago=ago, took=price),), **fields)


def decide(
    observed: Observed, status: TrainingJobStatus | None = None, failed_members: tuple[FailedMember, ...] = ()
) -> PolicyResult:
    return use_idle_nodes(
        build.context(observed), status or idle_status(), frozenset(failed.member.pod_uid for failed in failed_members)
    )


def loss_of_member(observed: Observed, ordinal: int) -> tuple[FailedMember, ...]:
    member, worker = build.context(observed).members[ordinal]
    return (FailedMember(member=member, worker=worker, cause=Cause.CRASH, failed_at=NOW, message=""),)


def sizes(result: PolicyResult) -> tuple[int, int, int]:
    """Return the desired size, the idle nodes in it, and the number of requested extras."""
    idle = result.status.idle_nodes
    return result.status.desired, idle.taken, idle.wanted


def test_a_training_job_requests_extras_up_to_its_maximum() -> None:
    result = decide(job_with_extras())
    assert sizes(result) == (2, 0, 2)
    assert result.status.idle_nodes.asked_at == NOW
    assert result.requeue_at == (NOW + RESCALE_AFTER_SECONDS,)


@pytest.mark.parametrize(
    ("observed", "status"),
    [
        (job_with_extras(most=2), idle_status(failed_requests=3, retry_at=NOW + 5)),
        (job_with_extras(), idle_status(wanted=2).replaced(desired=1)),  # a queue grants less than was asked for
        (job_with_extras(nodes_wanted_by_gangs=2), idle_status(wanted=2, asked_at=NOW - 5)),
        (job_with_extras(most=4, extras=2), idle_status(TrainingJobStatus(desired=0)).replaced(desired=0)),
        (replace(job_with_extras(), membership=None, published=0), idle_status(wanted=2)),
    ],
)
def test_a_job_at_its_maximum_requests_no_extras(observed: Observed, status: TrainingJobStatus) -> None:
    result = decide(observed, status)
    assert result.status.desired == status.desired
    assert result.status.idle_nodes == IdleNodesStatus()
    assert result.requeue_at == ()


def test_extras_are_limited_by_the_maximum_size() -> None:
    assert sizes(decide(job_with_extras(most=3))) == (2, 0, 1)


def test_extras_need_a_class_of_lowest_priority() -> None:
    observed = job_with_extras()
    plain = build.context(observed)
    without_class = replace(plain, settings=replace(plain.settings, extra_priority_class=""))
    assert use_idle_nodes(without_class, idle_status(), frozenset()).status.idle_nodes == IdleNodesStatus()


def test_idle_nodes_leave_disables_extras() -> None:
    observed = job_with_extras()
    leaves = observed.job.spec.model_copy(update={"elasticity": build.spec().elasticity})
    result = decide(build.with_job(observed, spec=leaves))
    assert sizes(result) == (2, 0, 0)


RESIZING = set_condition(
    TrainingJobStatus(), ConditionType.RESIZING, True, Reason.SIZE_REQUESTED, "from 2 to 3 nodes", now=NOW
)


@pytest.mark.parametrize(
    ("observed", "status"),
    [
        (job_with_extras(agents={1: build.agent(1, WorkerPhase.LOADING, generation=1)}), idle_status()),
        (job_with_extras(), idle_status(RESIZING)),
        (job_with_extras(), idle_status(TrainingJobStatus(stage="Export"))),
        (add_last_reports(replace(job_with_extras(), pods=(build.finished_pod(0), build.pod(1)))), idle_status()),
        (replace(job_with_extras(), pods=(build.pod(0),)), idle_status().replaced(desired=3)),
    ],
)
def test_no_extras_while_a_member_does_not_train_or_no_steps_are_left(
    observed: Observed, status: TrainingJobStatus
) -> None:
    result = decide(observed, status)
    assert result.status.desired == status.desired
    assert (result.status.idle_nodes.wanted, result.status.idle_nodes.asked_at) == (0, None)
    with_extras = replace(
        observed, pods=(*observed.pods, build.pod(7, extra=True)), agents={**observed.agents, "uid-7": build.agent(7)}
    )
    assert decide(with_extras, status).status.desired == status.desired


def test_no_extras_while_a_member_is_lost_or_the_job_is_too_small() -> None:
    observed = job_with_extras()
    assert sizes(decide(observed, failed_members=loss_of_member(observed, 1))) == (2, 0, 0)
    assert sizes(decide(job_with_extras(members=1))) == (2, 0, 0)


@pytest.mark.parametrize(
    ("idle", "status", "created_from", "until"),
    [
        ({"retry_at": NOW + 7}, TrainingJobStatus(), 0.0, NOW + 7),
        ({"retry_at": NOW}, TrainingJobStatus(), 0.0, None),
        ({"retry_at": NOW + 600}, TrainingJobStatus(), 0.0, NOW + 600),
        ({}, with_resize_cost(1.0, ago=10), 0.0, NOW - 10 + RESCALE_AFTER_SECONDS),
        ({}, with_resize_cost(1.0, ago=RESCALE_AFTER_SECONDS), 0.0, None),
        ({}, TrainingJobStatus(), NOW + 3, NOW + 3),
        ({}, TrainingJobStatus(), NOW, None),
    ],
)
def test_extras_are_requested_after_pause_cooldown_and_operator_start(
    idle: dict[str, float], status: TrainingJobStatus, created_from: float, until: float | None
) -> None:
    result = decide(job_with_extras(create_after=created_from), idle_status(status, **idle))
    if until is None:
        assert (result.status.idle_nodes.wanted, result.status.idle_nodes.asked_at) == (2, NOW)
        assert result.status.idle_nodes.retry_at is None
    else:
        assert (result.status.idle_nodes.wanted, result.status.idle_nodes.asked_at) == (0, None)
        assert result.requeue_at == (until,)


def with_steps_left(steps: int, price: float | None, **fields: Any) -> TrainingJobStatus:
    """Return a status with this number of remaining steps of 2 s."""
    status = TrainingJobStatus() if price is None else with_resize_cost(price)
    return status.replaced(
        goodput=GoodputStatus(sizes=(SizeAccount(size=2, step_seconds=2.0),)),
        progress=ProgressStatus(step=1000 - steps, total_steps=1000),
        **fields,
    )


def test_extras_are_requested_only_if_the_remaining_steps_repay_two_resizes() -> None:
    assert (
        decide(job_with_extras(), idle_status(with_steps_left(21, 10.0))).status.idle_nodes.wanted == 2
    )  # 21 s are saved, 20 spent
    assert decide(job_with_extras(), idle_status(with_steps_left(20, 10.0))).status.idle_nodes.wanted == 0
    assert (
        decide(job_with_extras(), idle_status(with_steps_left(1, None))).status.idle_nodes.wanted == 2
    )  # the cost is unknown


def test_a_job_grows_only_if_the_remaining_steps_repay_two_resizes() -> None:
    observed = job_with_extras(extras=2)
    assert decide(observed, idle_status(with_steps_left(21, 10.0))).status.desired == 4
    assert decide(observed, idle_status(with_steps_left(20, 10.0))).status.desired == 2


def test_compilation_counts_towards_the_cost_of_growing() -> None:
    observed = job_with_extras(extras=2)
    graphs = CompiledStatus(sizes=(2,), seconds=5.0)
    assert decide(observed, idle_status(with_steps_left(25, 10.0, compiled=graphs))).status.desired == 2
    assert decide(observed, idle_status(with_steps_left(26, 10.0, compiled=graphs))).status.desired == 4


@pytest.mark.parametrize(
    ("price", "requeue_at"), [(30.0, FIRST_SEEN + 60.0), (24.9, None), (25.0, None), (25.1, FIRST_SEEN + 50.2)]
)
def test_a_job_grows_once_extras_have_existed_for_twice_the_cost(price: float, requeue_at: float | None) -> None:
    result = decide(job_with_extras(extras=2), idle_status(with_resize_cost(price)))
    if requeue_at is None:
        assert sizes(result) == (4, 2, 2)
    else:
        assert sizes(result) == (2, 0, 2)
        assert result.requeue_at == (pytest.approx(requeue_at),)


def test_the_age_of_extras_is_that_of_the_youngest() -> None:
    observed = job_with_extras(extras=2)
    fresh = replace(build.agent(3), first_seen=NOW - 1)
    result = decide(build.with_agents(observed, {3: fresh}), idle_status(with_resize_cost(10.0)))
    assert result.status.desired == 2
    assert result.requeue_at == (NOW - 1 + 20.0,)


def test_a_job_grows_after_its_cooldown() -> None:
    result = decide(job_with_extras(extras=2), idle_status(with_resize_cost(1.0, ago=RESCALE_AFTER_SECONDS - 1)))
    assert result.status.desired == 2
    assert result.requeue_at == (NOW + 1,)
    assert (
        decide(job_with_extras(extras=2), idle_status(with_resize_cost(1.0, ago=RESCALE_AFTER_SECONDS))).status.desired
        == 4
    )


def test_a_job_of_unknown_resize_cost_grows_at_once() -> None:
    observed = job_with_extras(extras=2)
    fresh = {
        **observed.agents,
        **{f"uid-{ordinal}": replace(build.agent(ordinal), first_seen=NOW) for ordinal in (2, 3)},
    }
    assert decide(replace(observed, agents=fresh)).status.desired == 4


def test_training_extras_are_kept() -> None:
    result = decide(job_with_extras(members=4), idle_status(wanted=2, taken=2))
    assert sizes(result) == (4, 2, 2)
    assert result.requeue_at == ()


def test_size_is_requested_nodes_plus_warm_extras() -> None:
    assert sizes(decide(job_with_extras(extras=1)))[:2] == (3, 1)
    assert sizes(decide(job_with_extras(extras=1, most=8), idle_status()))[:2] == (3, 1)
    observed = job_with_extras(members=3)
    assert decide(observed, idle_status(wanted=1, taken=1), loss_of_member(observed, 2)).status.desired == 2


def test_after_a_loss_a_job_continues_with_its_extras() -> None:
    observed = job_with_extras(members=4)
    result = decide(observed, idle_status(wanted=2, taken=2), loss_of_member(observed, 3))
    assert result.status.desired == 3
    assert result.status.idle_nodes.taken == 1
    observed = job_with_extras(members=3, extras=1)  # the fourth was about to join
    assert decide(observed, idle_status(wanted=2, taken=1), loss_of_member(observed, 0)).status.desired == 3


@pytest.mark.parametrize(("granted", "size"), [(1, 2), (2, 2), (3, 3), (4, 4), (9, 4)])
def test_extras_are_limited_by_the_grant_of_the_queue(granted: int, size: int) -> None:
    context = replace(
        build.context(job_with_extras(extras=2)), grant=Grant(state=AdmissionState.ADMITTED, workers=granted)
    )
    assert use_idle_nodes(context, idle_status(), frozenset()).status.desired == size


def test_scheduled_extras_end_the_wait() -> None:
    result = decide(
        job_with_extras(extras=2), idle_status(with_resize_cost(100.0), wanted=2, asked_at=NOW - 5, failed_requests=3)
    )
    assert (result.status.idle_nodes.wanted, result.status.idle_nodes.asked_at) == (2, None)


@pytest.mark.parametrize(("since", "waits"), [(29.0, True), (30.0, False), (31.0, False)])
def test_unschedulable_extras_are_withdrawn_after_the_timeout(since: float, waits: bool) -> None:
    result = decide(
        job_with_extras(extras=1, waiting=1), idle_status(with_resize_cost(1000.0), wanted=2, asked_at=NOW - since)
    )
    idle = result.status.idle_nodes
    if waits:
        assert (idle.wanted, idle.asked_at, idle.failed_requests) == (2, NOW - since, 0)
        assert NOW - since + RESCALE_AFTER_SECONDS in result.requeue_at
    else:
        assert (idle.wanted, idle.asked_at, idle.failed_requests) == (1, None, 1), "the one that has a node stays"
        assert idle.retry_at == NOW + 60


def test_pending_extras_are_limited_by_the_maximum_size() -> None:
    result = decide(job_with_extras(waiting=2, most=3), idle_status(wanted=2, asked_at=NOW - 1))
    assert result.status.idle_nodes.wanted == 1


@pytest.mark.parametrize(("times", "pause"), [(0, 60), (1, 120), (2, 240), (3, 480), (4, 600), (5, 600), (5000, 600)])
def test_the_backoff_of_extras_doubles_up_to_ten_minutes(times: int, pause: int) -> None:
    result = decide(
        job_with_extras(waiting=2), idle_status(wanted=2, asked_at=NOW - RESCALE_AFTER_SECONDS, failed_requests=times)
    )
    assert result.status.idle_nodes == IdleNodesStatus(wanted=0, failed_requests=times + 1, retry_at=NOW + pause)
    assert result.requeue_at == (NOW + pause,)


def job_with_extra(**changes: Any) -> Observed:
    """Return a job with one extra in this state."""
    observed = job_with_extras()
    return replace(observed, pods=(*observed.pods, build.pod(2, extra=True, **changes)))


def with_failed_agent(observed: Observed) -> Observed:
    beat = build.heartbeat(2, WorkerPhase.FAILED, verdict=build.failure(1))
    return build.with_agents(observed, {2: replace(build.agent(2), heartbeat=beat)})


@pytest.mark.parametrize(
    ("observed", "failed_requests"),
    [
        (job_with_extra(phase=PodPhase.FAILED), 1),
        (with_failed_agent(job_with_extra()), 1),
        (job_with_extra(phase=PodPhase.FAILED, deleting=True), 0),
        (with_failed_agent(job_with_extra(deleting=True)), 0),
        (job_with_extra(phase=PodPhase.PENDING, node=""), 0),
        (replace(job_with_extras(), pods=(*job_with_extras().pods, build.pod(2, phase=PodPhase.FAILED))), 0),  # a spare
    ],
)
def test_a_failed_extra_counts_as_a_failed_request(observed: Observed, failed_requests: int) -> None:
    assert decide(observed).status.idle_nodes.failed_requests == failed_requests


@pytest.mark.parametrize(
    ("observed", "before", "failed_requests"),
    [
        (job_with_extras(extras=2), 0, 0),
        (job_with_extras(extras=1), 0, 0),
        (job_with_extras(extras=2), 2, 3),  # no more than there were
        (job_with_extras(), 0, 3),
        (job_with_extras(extras=1, waiting=1), 0, 0),
    ],
)
def test_the_backoff_of_extras_is_reset_when_new_extras_are_warm(
    observed: Observed, before: int, failed_requests: int
) -> None:
    kept = idle_status(with_resize_cost(1000.0), failed_requests=3, retry_at=NOW + 5)
    observed = build.with_status(observed, idle_nodes=IdleNodesStatus(taken=before))
    assert decide(observed, kept).status.idle_nodes.failed_requests == failed_requests


def test_a_cold_extra_keeps_the_backoff() -> None:
    starting = {2: build.agent(2, ready=False)}
    assert (
        decide(
            job_with_extras(extras=1, agents=starting), idle_status(failed_requests=3, retry_at=NOW + 5)
        ).status.idle_nodes.failed_requests
        == 3
    )


def test_extras_that_save_no_pass_are_not_requested() -> None:
    result = decide(
        job_with_extras(most=3, trainer={"batch": {"globalSize": 4}})
    )  # two passes on two nodes and on three
    assert sizes(result) == (2, 0, 0)
    assert result.status.idle_nodes.asked_at is None


def test_extras_that_would_save_no_pass_are_released() -> None:
    eight = {"trainer": {"batch": {"globalSize": 8}}}  # 8 samples: 2 nodes 4 passes, 3 three, 4 to 7 two, 8 one
    assert (
        sizes(decide(job_with_extras(extras=4, most=8, **eight), idle_status(with_resize_cost(1e4), retry_at=NOW + 9)))[
            2
        ]
        == 2
    )
    assert (
        sizes(decide(job_with_extras(extras=1, most=8, **eight), idle_status(with_resize_cost(1e4), retry_at=NOW + 9)))[
            2
        ]
        == 1
    )


def test_no_growth_while_a_member_is_in_an_older_generation() -> None:
    late = job_with_extras(extras=2, agents={1: build.training_agent(1, generation=0)})
    assert decide(late).status.desired == 2

"""Policy for idle nodes: how many extras are requested or kept, and when the job grows onto them."""

from dataclasses import replace
from typing import Any

import pytest

from tests.unit.plan.plan_builders import (
    NOW,
    agent,
    facts_of,
    failure,
    heartbeat,
    interruption,
    pod,
    running,
    spec,
    training,
    with_status,
)
from trainium_contract.faults.causes import Cause
from trainium_contract.job import GoodputStatus, IdleNodesStatus, TrainingJobStatus
from trainium_contract.status.conditions import ConditionType
from trainium_contract.status.interruptions import Rung
from trainium_contract.status.ledger import SizeAccount
from trainium_contract.status.public import CompiledStatus, ProgressStatus
from trainium_contract.wire.messages import WorkerPhase
from trainium_operator.plan.diagnose.loss import Loss
from trainium_operator.plan.features.idle_nodes.policy import use_idle_nodes
from trainium_operator.plan.model.actions import PolicyResult
from trainium_operator.plan.model.conditions import with_condition
from trainium_operator.plan.model.feature import AdmissionState, Grant
from trainium_operator.plan.model.observed import Observed, PodPhase
from trainium_operator.plan.model.reasons import Reason

REST = 30
LAST_SEEN = NOW - 50
"""Since when the extras of these tests are there."""


def job(*, extras: int = 0, waiting: int = 0, most: int = 4, members: int = 2, **changes: Any) -> Observed:
    """Return a job of two workers with warm and pending extras."""
    made = spec(
        workers={"replicas": 2, "maxReplicas": most},
        recovery={"rescaleAfterSeconds": REST},
        elasticity={"idleNodes": "Take"},
        trainer={"steps": 10**6, **changes.pop("trainer", {})},
        **changes.pop("more", {}),
    )
    here = members + extras
    pods = (
        *(pod(at, extra=at >= 2) for at in range(here)),
        *(pod(at, extra=True, node="", phase=PodPhase.PENDING, scheduled=False) for at in range(here, here + waiting)),
    )
    agents = {at: agent(at) for at in range(members, here)} | changes.pop("agents", {})
    return running(members, job_spec=made, pods=pods, agents=agents, **changes)


def asked(status: TrainingJobStatus | None = None, **idle: Any) -> TrainingJobStatus:
    """Return the status with two requested nodes."""
    return (status or TrainingJobStatus()).replaced(desired=2, idle_nodes=IdleNodesStatus(**idle))


def priced(price: float, ago: float = 5000.0, **fields: Any) -> TrainingJobStatus:
    """Return a status whose last resize took `price` seconds."""
    return TrainingJobStatus(history=(interruption(Rung.REPLACE, ago=ago, took=price),), **fields)


def decide(seen: Observed, status: TrainingJobStatus | None = None, losses: tuple[Loss, ...] = ()) -> PolicyResult:
    return use_idle_nodes(facts_of(seen), status or asked(), losses)


def lost(seen: Observed, at: int) -> tuple[Loss, ...]:
    member, worker = facts_of(seen).members[at]
    return (Loss(member=member, worker=worker, cause=Cause.CRASH, failed_at=NOW, message=""),)


def decided(answer: PolicyResult) -> tuple[int, int, int]:
    """Return the desired size, the idle nodes in it, and the number of requested extras."""
    idle = answer.status.idle_nodes
    return answer.status.desired, idle.taken, idle.wanted


def test_a_training_job_requests_extras_up_to_its_maximum() -> None:
    answer = decide(job())
    assert decided(answer) == (2, 0, 2)
    assert answer.status.idle_nodes.asked_at == NOW
    assert answer.requeue_at == (NOW + REST,)


@pytest.mark.parametrize(
    ("seen", "status"),
    [
        (job(most=2), asked(failed_requests=3, retry_at=NOW + 5)),
        (job(), asked(wanted=2).replaced(desired=1)),  # a queue grants less than was asked for
        (job(nodes_wanted_by_gangs=2), asked(wanted=2, asked_at=NOW - 5)),
        (job(most=4, extras=2), asked(TrainingJobStatus(desired=0)).replaced(desired=0)),
        (replace(job(), membership=None, published=0), asked(wanted=2)),
    ],
)
def test_a_job_at_its_maximum_requests_no_extras(seen: Observed, status: TrainingJobStatus) -> None:
    answer = decide(seen, status)
    assert answer.status.desired == status.desired
    assert answer.status.idle_nodes == IdleNodesStatus()
    assert answer.requeue_at == ()


def test_extras_are_limited_by_the_maximum_size() -> None:
    assert decided(decide(job(most=3))) == (2, 0, 1)


def test_extras_need_a_class_of_lowest_priority() -> None:
    seen = job()
    plain = facts_of(seen)
    without_class = replace(plain, settings=replace(plain.settings, extra_priority_class=""))
    assert use_idle_nodes(without_class, asked(), ()).status.idle_nodes == IdleNodesStatus()


def test_idle_nodes_leave_disables_extras() -> None:
    seen = job()
    leaves = seen.job.spec.model_copy(update={"elasticity": spec().elasticity})
    answer = decide(replace(seen, job=replace(seen.job, spec=leaves)))
    assert decided(answer) == (2, 0, 0)


RESIZING = with_condition(
    TrainingJobStatus(), ConditionType.RESIZING, True, Reason.SIZE_REQUESTED, "from 2 to 3 nodes", now=NOW
)


@pytest.mark.parametrize(
    ("seen", "status"),
    [
        (job(agents={1: agent(1, WorkerPhase.LOADING, generation=1)}), asked()),
        (job(), asked(RESIZING)),
        (job(), asked(TrainingJobStatus(stage="Export"))),
        (replace(job(), pods=(pod(0, phase=PodPhase.SUCCEEDED), pod(1))), asked()),
        (replace(job(), pods=(pod(0),)), asked().replaced(desired=3)),
    ],
)
def test_no_extras_while_a_member_does_not_train_or_no_steps_are_left(
    seen: Observed, status: TrainingJobStatus
) -> None:
    answer = decide(seen, status)
    assert answer.status.desired == status.desired
    assert (answer.status.idle_nodes.wanted, answer.status.idle_nodes.asked_at) == (0, None)
    with_extras = replace(seen, pods=(*seen.pods, pod(7, extra=True)), agents={**seen.agents, "uid-7": agent(7)})
    assert decide(with_extras, status).status.desired == status.desired


def test_no_extras_while_a_member_is_lost_or_the_job_is_too_small() -> None:
    seen = job()
    assert decided(decide(seen, losses=lost(seen, 1))) == (2, 0, 0)
    assert decided(decide(job(members=1))) == (2, 0, 0)


@pytest.mark.parametrize(
    ("idle", "status", "created_from", "until"),
    [
        ({"retry_at": NOW + 7}, TrainingJobStatus(), 0.0, NOW + 7),
        ({"retry_at": NOW}, TrainingJobStatus(), 0.0, None),
        ({"retry_at": NOW + 600}, TrainingJobStatus(), 0.0, NOW + 600),
        ({}, priced(1.0, ago=10), 0.0, NOW - 10 + REST),
        ({}, priced(1.0, ago=REST), 0.0, None),
        ({}, TrainingJobStatus(), NOW + 3, NOW + 3),
        ({}, TrainingJobStatus(), NOW, None),
    ],
)
def test_extras_are_requested_after_pause_cooldown_and_operator_start(
    idle: dict[str, float], status: TrainingJobStatus, created_from: float, until: float | None
) -> None:
    answer = decide(job(create_after=created_from), asked(status, **idle))
    if until is None:
        assert (answer.status.idle_nodes.wanted, answer.status.idle_nodes.asked_at) == (2, NOW)
        assert answer.status.idle_nodes.retry_at is None
    else:
        assert (answer.status.idle_nodes.wanted, answer.status.idle_nodes.asked_at) == (0, None)
        assert answer.requeue_at == (until,)


def left(steps: int, price: float | None, **fields: Any) -> TrainingJobStatus:
    """Return a status with this number of remaining steps of 2 s."""
    known = TrainingJobStatus() if price is None else priced(price)
    return known.replaced(
        goodput=GoodputStatus(sizes=(SizeAccount(size=2, step_seconds=2.0),)),
        progress=ProgressStatus(step=1000 - steps, total_steps=1000),
        **fields,
    )


def test_extras_are_requested_only_if_the_remaining_steps_repay_two_resizes() -> None:
    assert decide(job(), asked(left(21, 10.0))).status.idle_nodes.wanted == 2  # 21 s are saved, 20 spent
    assert decide(job(), asked(left(20, 10.0))).status.idle_nodes.wanted == 0
    assert decide(job(), asked(left(1, None))).status.idle_nodes.wanted == 2  # the cost is unknown


def test_a_job_grows_only_if_the_remaining_steps_repay_two_resizes() -> None:
    seen = job(extras=2)
    assert decide(seen, asked(left(21, 10.0))).status.desired == 4
    assert decide(seen, asked(left(20, 10.0))).status.desired == 2


def test_compilation_counts_towards_the_cost_of_growing() -> None:
    seen = job(extras=2)
    graphs = CompiledStatus(sizes=(2,), seconds=5.0)
    assert decide(seen, asked(left(25, 10.0, compiled=graphs))).status.desired == 2
    assert decide(seen, asked(left(26, 10.0, compiled=graphs))).status.desired == 4


@pytest.mark.parametrize(
    ("price", "requeue_at"), [(30.0, LAST_SEEN + 60.0), (24.9, None), (25.0, None), (25.1, LAST_SEEN + 50.2)]
)
def test_a_job_grows_once_extras_have_existed_for_twice_the_cost(price: float, requeue_at: float | None) -> None:
    answer = decide(job(extras=2), asked(priced(price)))
    if requeue_at is None:
        assert decided(answer) == (4, 2, 2)
    else:
        assert decided(answer) == (2, 0, 2)
        assert answer.requeue_at == (pytest.approx(requeue_at),)


def test_the_age_of_extras_is_that_of_the_youngest() -> None:
    seen = job(extras=2)
    fresh = replace(agent(3), first_seen=NOW - 1)
    answer = decide(replace(seen, agents={**seen.agents, "uid-3": fresh}), asked(priced(10.0)))
    assert answer.status.desired == 2
    assert answer.requeue_at == (NOW - 1 + 20.0,)


def test_a_job_grows_after_its_cooldown() -> None:
    answer = decide(job(extras=2), asked(priced(1.0, ago=REST - 1)))
    assert answer.status.desired == 2
    assert answer.requeue_at == (NOW + 1,)
    assert decide(job(extras=2), asked(priced(1.0, ago=REST))).status.desired == 4


def test_a_job_of_unknown_resize_cost_grows_at_once() -> None:
    seen = job(extras=2)
    fresh = {**seen.agents, **{f"uid-{at}": replace(agent(at), first_seen=NOW) for at in (2, 3)}}
    assert decide(replace(seen, agents=fresh)).status.desired == 4


def test_training_extras_are_kept() -> None:
    answer = decide(job(members=4), asked(wanted=2, taken=2))
    assert decided(answer) == (4, 2, 2)
    assert answer.requeue_at == ()


def test_size_is_requested_nodes_plus_warm_extras() -> None:
    assert decided(decide(job(extras=1)))[:2] == (3, 1)
    assert decided(decide(job(extras=1, most=8), asked()))[:2] == (3, 1)
    seen = job(members=3)
    assert decide(seen, asked(wanted=1, taken=1), lost(seen, 2)).status.desired == 2


def test_after_a_loss_a_job_continues_with_its_extras() -> None:
    seen = job(members=4)
    answer = decide(seen, asked(wanted=2, taken=2), lost(seen, 3))
    assert answer.status.desired == 3
    assert answer.status.idle_nodes.taken == 1
    seen = job(members=3, extras=1)  # the fourth was about to join
    assert decide(seen, asked(wanted=2, taken=1), lost(seen, 0)).status.desired == 3


@pytest.mark.parametrize(("granted", "size"), [(1, 2), (2, 2), (3, 3), (4, 4), (9, 4)])
def test_extras_are_limited_by_the_grant_of_the_queue(granted: int, size: int) -> None:
    facts = replace(facts_of(job(extras=2)), grant=Grant(state=AdmissionState.ADMITTED, workers=granted))
    assert use_idle_nodes(facts, asked(), ()).status.desired == size


def test_scheduled_extras_end_the_wait() -> None:
    answer = decide(job(extras=2), asked(priced(100.0), wanted=2, asked_at=NOW - 5, failed_requests=3))
    assert (answer.status.idle_nodes.wanted, answer.status.idle_nodes.asked_at) == (2, None)


@pytest.mark.parametrize(("since", "waits"), [(29.0, True), (30.0, False), (31.0, False)])
def test_unschedulable_extras_are_withdrawn_after_the_timeout(since: float, waits: bool) -> None:
    answer = decide(job(extras=1, waiting=1), asked(priced(1000.0), wanted=2, asked_at=NOW - since))
    idle = answer.status.idle_nodes
    if waits:
        assert (idle.wanted, idle.asked_at, idle.failed_requests) == (2, NOW - since, 0)
        assert NOW - since + REST in answer.requeue_at
    else:
        assert (idle.wanted, idle.asked_at, idle.failed_requests) == (1, None, 1), "the one that has a node stays"
        assert idle.retry_at == NOW + 60


def test_pending_extras_are_limited_by_the_maximum_size() -> None:
    answer = decide(job(waiting=2, most=3), asked(wanted=2, asked_at=NOW - 1))
    assert answer.status.idle_nodes.wanted == 1


@pytest.mark.parametrize(("times", "pause"), [(0, 60), (1, 120), (2, 240), (3, 480), (4, 600), (5, 600), (5000, 600)])
def test_the_backoff_of_extras_doubles_up_to_ten_minutes(times: int, pause: int) -> None:
    answer = decide(job(waiting=2), asked(wanted=2, asked_at=NOW - REST, failed_requests=times))
    assert answer.status.idle_nodes == IdleNodesStatus(wanted=0, failed_requests=times + 1, retry_at=NOW + pause)
    assert answer.requeue_at == (NOW + pause,)


def broken(**changes: Any) -> Observed:
    """Return a job with one extra in this state."""
    seen = job()
    return replace(seen, pods=(*seen.pods, pod(2, extra=True, **changes)))


def gave_up(seen: Observed) -> Observed:
    beat = heartbeat(2, WorkerPhase.FAILED, verdict=failure(1))
    return replace(seen, agents={**seen.agents, "uid-2": replace(agent(2), heartbeat=beat)})


@pytest.mark.parametrize(
    ("seen", "failed_requests"),
    [
        (broken(phase=PodPhase.FAILED), 1),
        (gave_up(broken()), 1),
        (broken(phase=PodPhase.FAILED, deleting=True), 0),
        (gave_up(broken(deleting=True)), 0),
        (broken(phase=PodPhase.PENDING, node=""), 0),
        (replace(job(), pods=(*job().pods, pod(2, phase=PodPhase.FAILED))), 0),  # a spare
    ],
)
def test_a_failed_extra_counts_as_a_failed_request(seen: Observed, failed_requests: int) -> None:
    assert decide(seen).status.idle_nodes.failed_requests == failed_requests


@pytest.mark.parametrize(
    ("seen", "before", "failed_requests"),
    [
        (job(extras=2), 0, 0),
        (job(extras=1), 0, 0),
        (job(extras=2), 2, 3),  # no more than there were
        (job(), 0, 3),
        (job(extras=1, waiting=1), 0, 0),
    ],
)
def test_the_backoff_of_extras_is_reset_when_new_extras_are_warm(
    seen: Observed, before: int, failed_requests: int
) -> None:
    kept = asked(priced(1000.0), failed_requests=3, retry_at=NOW + 5)
    status = seen.job.status.replaced(idle_nodes=IdleNodesStatus(taken=before))
    seen = with_status(seen, status)
    assert decide(seen, kept).status.idle_nodes.failed_requests == failed_requests


def test_a_cold_extra_keeps_the_backoff() -> None:
    starting = {2: agent(2, ready=False)}
    assert (
        decide(
            job(extras=1, agents=starting), asked(failed_requests=3, retry_at=NOW + 5)
        ).status.idle_nodes.failed_requests
        == 3
    )


def test_extras_that_save_no_pass_are_not_requested() -> None:
    answer = decide(job(most=3, trainer={"batch": {"globalSize": 4}}))  # two passes on two nodes and on three
    assert decided(answer) == (2, 0, 0)
    assert answer.status.idle_nodes.asked_at is None


def test_extras_that_would_save_no_pass_are_released() -> None:
    eight = {"trainer": {"batch": {"globalSize": 8}}}  # 8 samples: 2 nodes 4 passes, 3 three, 4 to 7 two, 8 one
    assert decided(decide(job(extras=4, most=8, **eight), asked(priced(1e4), retry_at=NOW + 9)))[2] == 2
    assert decided(decide(job(extras=1, most=8, **eight), asked(priced(1e4), retry_at=NOW + 9)))[2] == 1


def test_no_growth_while_a_member_is_in_an_older_generation() -> None:
    late = job(extras=2, agents={1: training(1, generation=0)})
    assert decide(late).status.desired == 2

"""Resizes of a training job: when it grows or shrinks, how far, and what the history records."""

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
from trainium_contract.status.public import CompiledStatus, MembershipStatus, ProgressStatus
from trainium_contract.wire.messages import Transition, WorkerPhase
from trainium_operator.plan.membership.decisions import finish_decided_generation, record_size_request, resize
from trainium_operator.plan.membership.generation import Decision
from trainium_operator.plan.model.conditions import find_condition, set_condition
from trainium_operator.plan.model.grant import AdmissionState, Grant
from trainium_operator.plan.model.observed import Observed
from trainium_operator.plan.model.reasons import Reason
from trainium_operator.plan.view.workers import add_last_reports

RESCALE_AFTER_SECONDS = 30


def elastic_job(members: int, newcomers: int = 0, **changes: Any) -> Observed:
    """Return a job of two to four workers, and warm `newcomers` without a rank."""
    job_spec = build.spec(
        workers={"replicas": 4, "minReplicas": 2, **changes.pop("workers", {})},
        recovery={"rescaleAfterSeconds": RESCALE_AFTER_SECONDS},
        **changes.pop("spec_changes", {}),
    )
    return build.running_job(members, spares=newcomers, job_spec=job_spec, **changes)


def desired_status(size: int = 4, **fields: Any) -> TrainingJobStatus:
    fields_by_default = {"membership": MembershipStatus(generation=1, size=2), **fields}
    return TrainingJobStatus(desired=size, **fields_by_default)


def with_manual_scale(status: TrainingJobStatus) -> TrainingJobStatus:
    return set_condition(status, ConditionType.RESIZING, True, Reason.SIZE_REQUESTED, "from 2 to 4", now=NOW)


def decide(observed: Observed, status: TrainingJobStatus | None = None) -> Decision:
    return resize(build.context(observed), status or desired_status())


def new_size(decision: Decision) -> int | None:
    return None if decision.new is None else len(decision.new.members)


def test_a_job_grows_gracefully_once_all_workers_are_warm() -> None:
    decision = decide(elastic_job(2, 2))
    assert decision.new is not None
    assert new_size(decision) == 4
    assert (decision.new.transition, decision.new.cause) == (Transition.GRACEFUL, Cause.RESIZE)
    assert decision.requeue_at == ()
    entry = decision.status.history[-1]
    assert (entry.response, entry.cause, entry.message) == (RecoveryResponse.GROW, Cause.CAPACITY, "from 2 to 4 nodes")


@pytest.mark.parametrize(
    "observed",
    [
        elastic_job(2),
        elastic_job(4, 1),
        elastic_job(2, 2, agents={1: build.agent(1, WorkerPhase.LOADING, generation=1)}),
        elastic_job(2, 2, agents={1: build.training_agent(1, generation=0)}),
        elastic_job(2, 2, agents={1: build.agent(1, WorkerPhase.FINISHED, generation=1)}),
        add_last_reports(
            replace(elastic_job(2, 2), pods=(build.finished_pod(0), build.pod(1), build.pod(2), build.pod(3)))
        ),
    ],
)
def test_no_resize_without_warm_workers_or_while_a_member_does_not_train(observed: Observed) -> None:
    assert decide(observed) == Decision(status=desired_status())


def test_a_loading_job_shrinks_and_a_finishing_one_does_not() -> None:
    assert (
        new_size(
            decide(elastic_job(4, agents={0: build.agent(0, WorkerPhase.LOADING, generation=1)}), desired_status(3))
        )
        == 3
    )
    finished = elastic_job(4, agents={0: build.agent(0, WorkerPhase.FINISHED, generation=1)})
    assert decide(finished, desired_status(3)).new is None


def test_a_member_without_a_pod_does_not_keep_the_job_from_shrinking() -> None:
    observed = elastic_job(4)
    assert new_size(decide(replace(observed, pods=observed.pods[:3]), desired_status(3))) == 3


@pytest.mark.parametrize(
    ("ago", "until"),
    [(RESCALE_AFTER_SECONDS - 1, NOW + 1), (RESCALE_AFTER_SECONDS, None), (RESCALE_AFTER_SECONDS + 1, None)],
)
def test_automatic_growth_has_a_cooldown(ago: float, until: float | None) -> None:
    status = desired_status(history=(build.interruption(RecoveryResponse.REPLACE, ago=ago),))
    decision = decide(elastic_job(2, 2), status)
    assert (new_size(decision), decision.requeue_at) == ((4, ()) if until is None else (None, (until,)))


def test_a_suspended_job_is_not_requeued_while_no_worker_is_there() -> None:
    status = desired_status(history=(build.interruption(RecoveryResponse.REPLACE, ago=1),))
    assert decide(elastic_job(2), status) == Decision(status=status)


def test_a_requested_resize_skips_cooldown_and_cost() -> None:
    status = with_manual_scale(status_without_gain(history=(build.interruption(RecoveryResponse.REPLACE, ago=1),)))
    decision = decide(elastic_job(2, 2), status)
    assert new_size(decision) == 4
    entry = decision.status.history[-1]
    assert (entry.response, entry.cause) == (RecoveryResponse.RESIZE, Cause.RESIZE)


def status_without_gain(**fields: Any) -> TrainingJobStatus:
    """Return a status with one step left and a resize cost of 10 s."""
    return desired_status(
        **{"history": (build.interruption(RecoveryResponse.REPLACE, ago=500),), **fields},
        goodput=GoodputStatus(sizes=(SizeAccount(size=2, step_seconds=2.0),)),
        progress=ProgressStatus(step=99, total_steps=100),
    )


def test_growth_that_does_not_pay_is_skipped() -> None:
    assert decide(elastic_job(2, 2), status_without_gain()) == Decision(status=status_without_gain())


@pytest.mark.parametrize(
    ("waiting_since", "size", "requeue_at"),
    [
        (NOW - 10, None, (NOW + 20,)),
        (NOW - RESCALE_AFTER_SECONDS, 3, ()),
        (NOW - RESCALE_AFTER_SECONDS - 1, 3, ()),
        (None, None, (NOW + RESCALE_AFTER_SECONDS,)),
    ],
)
def test_partial_growth_happens_only_after_a_wait(
    waiting_since: float | None, size: int | None, requeue_at: tuple[float, ...]
) -> None:
    decision = decide(elastic_job(2, 1), desired_status(waiting_since=waiting_since))
    assert (new_size(decision), decision.requeue_at) == (size, requeue_at)


def test_partial_growth_to_an_illegal_size_is_skipped() -> None:
    pairs = {"spec_changes": {"parallelism": {"tensor": 2}}}
    for since in (NOW - 100, NOW - 10):
        assert decide(elastic_job(2, 1, **pairs), desired_status(waiting_since=since)) == Decision(
            status=desired_status(waiting_since=since)
        )


def test_a_requested_resize_waits_before_partial_growth() -> None:
    assert decide(elastic_job(2, 1), with_manual_scale(desired_status(waiting_since=NOW - 10))).requeue_at == (
        NOW + 20,
    )


def with_graphs(*sizes: int, seconds: float = 60.0, **fields: Any) -> TrainingJobStatus:
    return desired_status(
        **{"compiled": CompiledStatus(sizes=sizes, seconds=seconds), "waiting_since": NOW - 100, **fields}
    )


def test_growth_to_an_uncompiled_size_waits_since_the_last_resize() -> None:
    shrunk = build.interruption(RecoveryResponse.SHRINK, ago=100, took=0.0)  # 60 s at half the speed: pays after 120
    assert decide(elastic_job(2, 2), with_graphs(2, history=(shrunk,))).requeue_at == (NOW + 20,)
    long_ago = build.interruption(RecoveryResponse.SHRINK, ago=120, took=0.0)
    assert new_size(decide(elastic_job(2, 2), with_graphs(2, history=(long_ago,)))) == 4


def test_only_a_change_of_size_counts_as_one() -> None:
    shrunk = build.interruption(RecoveryResponse.SHRINK, ago=130, took=0.0)
    undecided = build.interruption(RecoveryResponse.GROW, ago=60, took=None, decided_at=None)
    replaced = build.interruption(RecoveryResponse.REPLACE, ago=60, took=0.0)
    assert new_size(decide(elastic_job(2, 2), with_graphs(2, history=(shrunk, undecided, replaced)))) == 4
    for response in (RecoveryResponse.SHRINK, RecoveryResponse.GROW, RecoveryResponse.RESIZE):
        newer = build.interruption(response, ago=60, took=0.0)
        assert decide(elastic_job(2, 2), with_graphs(2, history=(shrunk, newer))).requeue_at == (NOW + 60,)


def test_a_job_whose_size_never_changed_does_not_wait_for_graphs() -> None:
    assert new_size(decide(elastic_job(2, 2), with_graphs(2))) == 4


def test_a_requested_resize_does_not_wait_for_compilation() -> None:
    shrunk = build.interruption(RecoveryResponse.SHRINK, ago=100, took=0.0)
    assert new_size(decide(elastic_job(2, 2), with_manual_scale(with_graphs(2, history=(shrunk,))))) == 4


def test_a_compiled_size_is_preferred_to_a_larger_uncompiled_one() -> None:
    assert new_size(decide(elastic_job(2, 2), with_graphs(2, 3))) == 3
    assert new_size(decide(elastic_job(2, 2), with_graphs(2, 3, 4))) == 4
    assert new_size(decide(elastic_job(2, 2), with_manual_scale(with_graphs(2, 3)))) == 4


def test_the_history_names_idle_nodes() -> None:
    taken = desired_status(4, idle_nodes=IdleNodesStatus(taken=1))
    assert "from 2 to 4 nodes: 1 idle node beyond the 3 requested" in newest_message(elastic_job(2, 2), taken)
    back = newest_message(elastic_job(4, nodes_wanted_by_gangs=2), desired_status(3))
    assert back == "from 4 to 3 nodes: 1 idle node released, because other jobs wait for 2"
    assert newest_message(elastic_job(4), desired_status(3)) == "from 4 to 3 nodes"
    assert newest_message(elastic_job(4), desired_status(3, idle_nodes=IdleNodesStatus(taken=1))) == "from 4 to 3 nodes"
    assert newest_message(elastic_job(2, 2, nodes_wanted_by_gangs=2), desired_status(4)) == "from 2 to 4 nodes"


def newest_message(observed: Observed, status: TrainingJobStatus) -> str:
    return decide(observed, status).status.history[-1].message


@pytest.mark.parametrize(
    ("desired", "message"), [(3, "from 2 to 3 nodes: the queue grants 3 of 4"), (4, "from 2 to 4 nodes")]
)
def test_the_history_names_the_grant_of_a_queue(desired: int, message: str) -> None:
    context = replace(build.context(elastic_job(2, 2)), grant=Grant(state=AdmissionState.ADMITTED, workers=desired))
    assert resize(context, desired_status(desired)).status.history[-1].message == message


def test_shrinking_for_want_of_capacity_is_reported_as_a_resize() -> None:
    entry = decide(elastic_job(4), desired_status(3)).status.history[-1]
    assert (entry.response, entry.cause) == (RecoveryResponse.RESIZE, Cause.CAPACITY)


def test_a_resize_after_a_fault_adds_no_history_entry() -> None:
    fault = build.interruption(RecoveryResponse.REPLACE, ago=5, took=None)
    decision = decide(elastic_job(4), desired_status(3, history=(fault,)))
    assert new_size(decision) == 3
    assert decision.status.history == (fault,)


def test_a_resize_decided_before_a_crash_is_recorded_once() -> None:
    decided = desired_status(3, membership=MembershipStatus(generation=2, size=3))
    decision = decide(elastic_job(4), decided)
    assert new_size(decision) == 3
    assert decision.status.history == ()


def test_extras_leave_before_the_highest_ranks() -> None:
    observed = elastic_job(4)
    observed = replace(observed, pods=tuple(replace(pod, extra=pod.ordinal == 1) for pod in observed.pods))
    decision = decide(observed, desired_status(3))
    assert decision.new is not None
    assert [member.pod_name for member in decision.new.members] == ["demo-w-0", "demo-w-3", "demo-w-2"]


def test_growth_beyond_the_request_uses_extras_and_keeps_the_spare() -> None:
    observed = elastic_job(2, 2)
    observed = replace(observed, pods=tuple(replace(pod, extra=pod.ordinal == 3) for pod in observed.pods))
    decision = decide(observed, desired_status(3, idle_nodes=IdleNodesStatus(taken=1)))
    assert decision.new is not None
    assert [member.pod_name for member in decision.new.members] == ["demo-w-0", "demo-w-1", "demo-w-3"]


@pytest.mark.parametrize(
    ("observed", "status", "desired", "words"),
    [
        (elastic_job(2), desired_status(4), 4, None),
        (elastic_job(2), desired_status(0), 4, None),  # before the first size
        (replace(elastic_job(2), membership=None), desired_status(4), 3, None),
        (
            elastic_job(2),
            desired_status(4, idle_nodes=IdleNodesStatus(taken=1)),
            3,
            None,
        ),  # as many as were asked for before
        (elastic_job(2), desired_status(4, idle_nodes=IdleNodesStatus(taken=1)), 4, "from 2 to 4 nodes"),
        (elastic_job(2), desired_status(1), 3, "from 2 to 3 nodes"),
        (elastic_job(4), desired_status(4), 2, "from 4 to 2 nodes"),
    ],
)
def test_a_requested_size_is_shown_until_it_is_reached(
    observed: Observed, status: TrainingJobStatus, desired: int, words: str | None
) -> None:
    noted = find_condition(record_size_request(build.context(observed), status, desired), ConditionType.RESIZING)
    if words is None:
        assert noted is None
    else:
        assert noted is not None
        assert (noted.status, noted.reason) == ("True", Reason.SIZE_REQUESTED)
        assert words in noted.message


def finish_decided(observed: Observed, generation: int = 2, **fields: Any) -> Decision:
    status = desired_status(membership=MembershipStatus(generation=generation, size=4), **fields)
    return finish_decided_generation(build.context(observed), status)


def test_an_unrecorded_generation_starts_with_the_current_members() -> None:
    decision = finish_decided(elastic_job(4))
    assert decision.new is not None
    assert decision.new.members == build.membership(0, 1, 2, 3).members
    assert (decision.new.transition, decision.new.cause) == (Transition.GRACEFUL, Cause.RESIZE)
    fault = build.interruption(RecoveryResponse.REPLACE, ago=5, took=None, cause=Cause.NODE_LOST)
    again = finish_decided(elastic_job(4), history=(fault,))
    assert again.new is not None
    assert again.new.cause is Cause.NODE_LOST


def test_a_recorded_generation_is_not_restarted() -> None:
    assert finish_decided(elastic_job(4), generation=1).new is None
    assert (
        finish_decided_generation(build.context(replace(elastic_job(4), membership=None)), desired_status()).new is None
    )


@pytest.mark.parametrize(
    "observed",
    [
        replace(elastic_job(4), pods=tuple(build.pod(ordinal) for ordinal in range(3))),
        elastic_job(4, agents={2: build.agent(2, WorkerPhase.FINISHED, generation=1)}),
        elastic_job(4, agents={2: build.training_agent(2, silent=60.0)}),
    ],
)
def test_a_decided_generation_starts_only_with_all_members_working(observed: Observed) -> None:
    assert finish_decided(observed).new is None

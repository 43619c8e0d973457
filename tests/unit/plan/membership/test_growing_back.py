"""Resizes of a training job: when it grows or shrinks, how far, and what the history records."""

from dataclasses import replace
from typing import Any

import pytest

from tests.unit.plan.plan_builders import NOW, agent, facts_of, interruption, membership, pod, running, spec, training
from trainium_contract.faults.causes import Cause
from trainium_contract.job import GoodputStatus, IdleNodesStatus, TrainingJobStatus
from trainium_contract.status.conditions import ConditionType
from trainium_contract.status.interruptions import Rung
from trainium_contract.status.ledger import SizeAccount
from trainium_contract.status.public import CompiledStatus, MembershipStatus, ProgressStatus
from trainium_contract.wire.messages import Transition, WorkerPhase
from trainium_operator.plan.membership.decisions import finish_decided_generation, record_size_request, resize
from trainium_operator.plan.membership.generation import Decision
from trainium_operator.plan.model.conditions import find_condition, with_condition
from trainium_operator.plan.model.feature import AdmissionState, Grant
from trainium_operator.plan.model.observed import Observed, PodPhase
from trainium_operator.plan.model.reasons import Reason

REST = 30


def job(members: int, newcomers: int = 0, **changes: Any) -> Observed:
    """Return a job of two to four workers, and warm `newcomers` without a rank."""
    made = spec(
        workers={"replicas": 4, "minReplicas": 2, **changes.pop("workers", {})},
        recovery={"rescaleAfterSeconds": REST},
        **changes.pop("more", {}),
    )
    return running(members, spares=newcomers, job_spec=made, **changes)


def wants(size: int = 4, **fields: Any) -> TrainingJobStatus:
    known = {"membership": MembershipStatus(generation=1, size=2), **fields}
    return TrainingJobStatus(desired=size, **known)


def with_manual_scale(status: TrainingJobStatus) -> TrainingJobStatus:
    return with_condition(status, ConditionType.RESIZING, True, Reason.SIZE_REQUESTED, "from 2 to 4", now=NOW)


def decide(seen: Observed, status: TrainingJobStatus | None = None) -> Decision:
    return resize(facts_of(seen), status or wants())


def size_of(decision: Decision) -> int | None:
    return None if decision.new is None else len(decision.new.members)


def test_a_job_grows_gracefully_once_all_workers_are_warm() -> None:
    decision = decide(job(2, 2))
    assert decision.new is not None
    assert size_of(decision) == 4
    assert (decision.new.transition, decision.new.cause) == (Transition.GRACEFUL, Cause.RESIZE)
    assert decision.requeue_at == ()
    entry = decision.status.history[-1]
    assert (entry.rung, entry.cause, entry.message) == (Rung.GROW, Cause.CAPACITY, "from 2 to 4 nodes")


@pytest.mark.parametrize(
    "seen",
    [
        job(2),
        job(4, 1),
        job(2, 2, agents={1: agent(1, WorkerPhase.LOADING, generation=1)}),
        job(2, 2, agents={1: training(1, generation=0)}),
        job(2, 2, agents={1: agent(1, WorkerPhase.FINISHED, generation=1)}),
        replace(job(2, 2), pods=(pod(0, phase=PodPhase.SUCCEEDED), pod(1), pod(2), pod(3))),
    ],
)
def test_no_resize_without_warm_workers_or_while_a_member_does_not_train(seen: Observed) -> None:
    assert decide(seen) == Decision(status=wants())


def test_a_loading_job_shrinks_and_a_finishing_one_does_not() -> None:
    assert size_of(decide(job(4, agents={0: agent(0, WorkerPhase.LOADING, generation=1)}), wants(3))) == 3
    finished = job(4, agents={0: agent(0, WorkerPhase.FINISHED, generation=1)})
    assert decide(finished, wants(3)).new is None


def test_a_member_without_a_pod_does_not_keep_the_job_from_shrinking() -> None:
    seen = job(4)
    assert size_of(decide(replace(seen, pods=seen.pods[:3]), wants(3))) == 3


@pytest.mark.parametrize(("ago", "until"), [(REST - 1, NOW + 1), (REST, None), (REST + 1, None)])
def test_automatic_growth_has_a_cooldown(ago: float, until: float | None) -> None:
    status = wants(history=(interruption(Rung.REPLACE, ago=ago),))
    decision = decide(job(2, 2), status)
    assert (size_of(decision), decision.requeue_at) == ((4, ()) if until is None else (None, (until,)))


def test_a_suspended_job_is_not_requeued_while_no_worker_is_there() -> None:
    status = wants(history=(interruption(Rung.REPLACE, ago=1),))
    assert decide(job(2), status) == Decision(status=status)


def test_a_requested_resize_skips_cooldown_and_cost() -> None:
    status = with_manual_scale(status_without_gain(history=(interruption(Rung.REPLACE, ago=1),)))
    decision = decide(job(2, 2), status)
    assert size_of(decision) == 4
    entry = decision.status.history[-1]
    assert (entry.rung, entry.cause) == (Rung.RESIZE, Cause.RESIZE)


def status_without_gain(**fields: Any) -> TrainingJobStatus:
    """Return a status with one step left and a resize cost of 10 s."""
    return wants(
        **{"history": (interruption(Rung.REPLACE, ago=500),), **fields},
        goodput=GoodputStatus(sizes=(SizeAccount(size=2, step_seconds=2.0),)),
        progress=ProgressStatus(step=99, total_steps=100),
    )


def test_growth_that_does_not_pay_is_skipped() -> None:
    assert decide(job(2, 2), status_without_gain()) == Decision(status=status_without_gain())


@pytest.mark.parametrize(
    ("waiting_since", "size", "requeue_at"),
    [
        (NOW - 10, None, (NOW + 20,)),
        (NOW - REST, 3, ()),
        (NOW - REST - 1, 3, ()),
        (None, None, (NOW + REST,)),
    ],
)
def test_partial_growth_happens_only_after_a_wait(
    waiting_since: float | None, size: int | None, requeue_at: tuple[float, ...]
) -> None:
    decision = decide(job(2, 1), wants(waiting_since=waiting_since))
    assert (size_of(decision), decision.requeue_at) == (size, requeue_at)


def test_partial_growth_to_an_illegal_size_is_skipped() -> None:
    pairs = {"more": {"parallelism": {"tensor": 2}}}
    for since in (NOW - 100, NOW - 10):
        assert decide(job(2, 1, **pairs), wants(waiting_since=since)) == Decision(status=wants(waiting_since=since))


def test_a_requested_resize_waits_before_partial_growth() -> None:
    assert decide(job(2, 1), with_manual_scale(wants(waiting_since=NOW - 10))).requeue_at == (NOW + 20,)


def graphs(*sizes: int, seconds: float = 60.0, **fields: Any) -> TrainingJobStatus:
    return wants(**{"compiled": CompiledStatus(sizes=sizes, seconds=seconds), "waiting_since": NOW - 100, **fields})


def test_growth_to_an_uncompiled_size_waits_since_the_last_resize() -> None:
    shrunk = interruption(Rung.SHRINK, ago=100, took=0.0)  # 60 s at half the speed: pays after 120
    assert decide(job(2, 2), graphs(2, history=(shrunk,))).requeue_at == (NOW + 20,)
    long_ago = interruption(Rung.SHRINK, ago=120, took=0.0)
    assert size_of(decide(job(2, 2), graphs(2, history=(long_ago,)))) == 4


def test_only_a_change_of_size_counts_as_one() -> None:
    shrunk = interruption(Rung.SHRINK, ago=130, took=0.0)
    undecided = interruption(Rung.GROW, ago=60, took=None, decided_at=None)
    replaced = interruption(Rung.REPLACE, ago=60, took=0.0)
    assert size_of(decide(job(2, 2), graphs(2, history=(shrunk, undecided, replaced)))) == 4
    for rung in (Rung.SHRINK, Rung.GROW, Rung.RESIZE):
        newer = interruption(rung, ago=60, took=0.0)
        assert decide(job(2, 2), graphs(2, history=(shrunk, newer))).requeue_at == (NOW + 60,)


def test_a_job_whose_size_never_changed_does_not_wait_for_graphs() -> None:
    assert size_of(decide(job(2, 2), graphs(2))) == 4


def test_a_requested_resize_does_not_wait_for_compilation() -> None:
    shrunk = interruption(Rung.SHRINK, ago=100, took=0.0)
    assert size_of(decide(job(2, 2), with_manual_scale(graphs(2, history=(shrunk,))))) == 4


def test_a_compiled_size_is_preferred_to_a_larger_uncompiled_one() -> None:
    assert size_of(decide(job(2, 2), graphs(2, 3))) == 3
    assert size_of(decide(job(2, 2), graphs(2, 3, 4))) == 4
    assert size_of(decide(job(2, 2), with_manual_scale(graphs(2, 3)))) == 4


def test_the_history_names_idle_nodes() -> None:
    taken = wants(4, idle_nodes=IdleNodesStatus(taken=1))
    assert "from 2 to 4 nodes: 1 that were idle, beyond the 3 asked for" in _message(job(2, 2), taken)
    back = _message(job(4, nodes_wanted_by_gangs=2), wants(3))
    assert back == "from 4 to 3 nodes: 1 that were idle are given back, other jobs wait for 2"
    assert _message(job(4), wants(3)) == "from 4 to 3 nodes"
    assert _message(job(4), wants(3, idle_nodes=IdleNodesStatus(taken=1))) == "from 4 to 3 nodes"
    assert _message(job(2, 2, nodes_wanted_by_gangs=2), wants(4)) == "from 2 to 4 nodes"


def _message(seen: Observed, status: TrainingJobStatus) -> str:
    return decide(seen, status).status.history[-1].message


@pytest.mark.parametrize(
    ("desired", "message"), [(3, "from 2 to 3 nodes: the queue grants 3 of 4"), (4, "from 2 to 4 nodes")]
)
def test_the_history_names_the_grant_of_a_queue(desired: int, message: str) -> None:
    facts = replace(facts_of(job(2, 2)), grant=Grant(state=AdmissionState.ADMITTED, workers=desired))
    assert resize(facts, wants(desired)).status.history[-1].message == message


def test_shrinking_for_want_of_capacity_is_reported_as_a_resize() -> None:
    entry = decide(job(4), wants(3)).status.history[-1]
    assert (entry.rung, entry.cause) == (Rung.RESIZE, Cause.CAPACITY)


def test_a_resize_after_a_fault_adds_no_history_entry() -> None:
    fault = interruption(Rung.REPLACE, ago=5, took=None)
    decision = decide(job(4), wants(3, history=(fault,)))
    assert size_of(decision) == 3
    assert decision.status.history == (fault,)


def test_a_resize_decided_before_a_crash_is_recorded_once() -> None:
    decided = wants(3, membership=MembershipStatus(generation=2, size=3))
    decision = decide(job(4), decided)
    assert size_of(decision) == 3
    assert decision.status.history == ()


def test_extras_leave_before_the_highest_ranks() -> None:
    seen = job(4)
    seen = replace(seen, pods=tuple(replace(each, extra=each.ordinal == 1) for each in seen.pods))
    decision = decide(seen, wants(3))
    assert decision.new is not None
    assert [member.pod_name for member in decision.new.members] == ["demo-w-0", "demo-w-3", "demo-w-2"]


def test_growth_beyond_the_request_uses_extras_and_keeps_the_spare() -> None:
    seen = job(2, 2)
    seen = replace(seen, pods=tuple(replace(each, extra=each.ordinal == 3) for each in seen.pods))
    decision = decide(seen, wants(3, idle_nodes=IdleNodesStatus(taken=1)))
    assert decision.new is not None
    assert [member.pod_name for member in decision.new.members] == ["demo-w-0", "demo-w-1", "demo-w-3"]


@pytest.mark.parametrize(
    ("seen", "status", "desired", "words"),
    [
        (job(2), wants(4), 4, None),
        (job(2), wants(0), 4, None),  # before the first size
        (replace(job(2), membership=None), wants(4), 3, None),
        (job(2), wants(4, idle_nodes=IdleNodesStatus(taken=1)), 3, None),  # as many as were asked for before
        (job(2), wants(4, idle_nodes=IdleNodesStatus(taken=1)), 4, "from 2 to 4 nodes"),
        (job(2), wants(1), 3, "from 2 to 3 nodes"),
        (job(4), wants(4), 2, "from 4 to 2 nodes"),
    ],
)
def test_a_requested_size_is_shown_until_it_is_reached(
    seen: Observed, status: TrainingJobStatus, desired: int, words: str | None
) -> None:
    noted = find_condition(record_size_request(facts_of(seen), status, desired), ConditionType.RESIZING)
    if words is None:
        assert noted is None
    else:
        assert noted is not None
        assert (noted.status, noted.reason) == ("True", Reason.SIZE_REQUESTED)
        assert words in noted.message


def undone(seen: Observed, generation: int = 2, **fields: Any) -> Decision:
    status = wants(membership=MembershipStatus(generation=generation, size=4), **fields)
    return finish_decided_generation(facts_of(seen), status)


def test_an_unrecorded_generation_starts_with_the_current_members() -> None:
    decision = undone(job(4))
    assert decision.new is not None
    assert decision.new.members == membership(0, 1, 2, 3).members
    assert (decision.new.transition, decision.new.cause) == (Transition.GRACEFUL, Cause.RESIZE)
    fault = interruption(Rung.REPLACE, ago=5, took=None, cause=Cause.NODE_LOST)
    again = undone(job(4), history=(fault,))
    assert again.new is not None
    assert again.new.cause is Cause.NODE_LOST


def test_a_recorded_generation_is_not_restarted() -> None:
    assert undone(job(4), generation=1).new is None
    assert finish_decided_generation(facts_of(replace(job(4), membership=None)), wants()).new is None


@pytest.mark.parametrize(
    "seen",
    [
        replace(job(4), pods=tuple(pod(at) for at in range(3))),
        job(4, agents={2: agent(2, WorkerPhase.FINISHED, generation=1)}),
        job(4, agents={2: training(2, silent=60.0)}),
    ],
)
def test_a_decided_generation_starts_only_with_all_members_working(seen: Observed) -> None:
    assert undone(seen).new is None

"""A changed number of workers: who joins, who leaves, and when their pods are created and deleted."""

from dataclasses import replace
from typing import Any

from tests.unit.plan import plan_builders as build
from tests.unit.plan.plan_builders import NOW
from tests.unit.plan.plan_results import make_plan, member_names
from trainium_contract.faults.causes import Cause
from trainium_contract.status.conditions import ConditionType, Phase
from trainium_contract.status.interruptions import RecoveryResponse
from trainium_contract.status.public import MembershipStatus
from trainium_contract.wire.messages import Transition, WorkerPhase
from trainium_operator.plan.model.conditions import find_condition, is_true
from trainium_operator.plan.model.observed import PodPhase


def with_replicas(observed: Any, replicas: Any, **workers: Any) -> Any:
    return build.with_job(observed, spec=build.spec(workers={"replicas": replicas, **workers}))


def test_on_shrinking_the_highest_ranks_leave_gracefully_and_no_pod_is_deleted_yet() -> None:
    result = make_plan(with_replicas(build.running_job(4, spares=1), 3, spares=1))
    membership = result.published_membership
    assert member_names(membership) == ["demo-w-0", "demo-w-1", "demo-w-2"]
    assert membership.transition is Transition.GRACEFUL
    assert (result.newest_entry.response, result.newest_entry.cause) == (RecoveryResponse.RESIZE, Cause.RESIZE)
    assert result.deleted_pods == {}
    assert result.created_pods == []
    assert result.status.phase is Phase.RESIZING


def job_after_shrinking(phase: Any) -> Any:
    """Return a job whose generation 2 of 3 members is published, without pod 3."""
    observed = with_replicas(build.running_job(4), 3)
    members = build.agents(range(3), phase, generation=2)
    agents = {f"uid-{ordinal}": known for ordinal, known in {**members, 3: build.agent(3, generation=2)}.items()}
    observed = replace(observed, membership=build.membership(0, 1, 2, generation=2), published=2, agents=agents)
    return build.with_status(observed, membership=MembershipStatus(generation=2, size=3), desired=3)


def test_the_pods_that_left_are_deleted_only_when_the_new_generation_trains() -> None:
    assert make_plan(job_after_shrinking(WorkerPhase.LOADING)).deleted_pods == {}
    assert make_plan(job_after_shrinking(WorkerPhase.TRAINING)).deleted_pods == {"demo-w-3": None}


def test_on_growing_the_spare_joins_at_once_and_is_refilled() -> None:
    result = make_plan(with_replicas(build.running_job(3, spares=1), 4, spares=1))
    assert result.published_members == ["demo-w-0", "demo-w-1", "demo-w-2", "demo-w-3"]
    assert result.published_membership.transition is Transition.GRACEFUL
    assert result.created_pods == ["demo-w-4"]


def test_on_growing_without_spares_pods_are_made_and_waited_for() -> None:
    result = make_plan(with_replicas(build.running_job(3), 4))
    assert result.published_membership is None
    assert result.created_pods == ["demo-w-3"]
    assert result.status.phase is Phase.RESIZING
    assert find_condition(result.status, ConditionType.RESIZING).reason == "SizeRequested"
    assert result.status.waiting_since == NOW


def test_a_job_that_had_to_shrink_reports_it_and_grows_back_when_all_are_there() -> None:
    observed = with_replicas(build.running_job(3, spares=1), 4, minReplicas=2)
    without_spare = replace(
        observed, pods=observed.pods[:3], agents={u: a for u, a in observed.agents.items() if u != "uid-3"}
    )
    small = make_plan(build.with_status(without_spare, desired=4))
    assert find_condition(small.status, ConditionType.RESIZING).reason == "CapacityMissing"
    assert small.status.phase is Phase.RUNNING
    grown = make_plan(build.with_status(observed, desired=4))
    assert (grown.newest_entry.response, grown.newest_entry.cause) == (RecoveryResponse.GROW, Cause.CAPACITY)


def test_pods_that_never_ran_are_the_first_to_go() -> None:
    observed = build.running_job(4)
    pending = replace(build.pod(4, node="", ip="", ready=False, scheduled=False), phase=PodPhase.PENDING)
    result = make_plan(replace(observed, pods=(*observed.pods, pending)))
    assert result.deleted_pods == {"demo-w-4": None}


def test_a_cold_spare_counts_but_does_not_join() -> None:
    cold = replace(build.agent(3), heartbeat=build.heartbeat(3, ready=False))
    result = make_plan(with_replicas(build.running_job(3, spares=1, agents={3: cold}), 4))
    assert result.published_membership is None
    assert result.created_pods == []
    assert is_true(result.status, ConditionType.RESIZING)

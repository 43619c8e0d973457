from dataclasses import replace
from typing import Any

from tests.unit.plan.plan_builders import (
    NOW,
    agent,
    created,
    deleted,
    heartbeat,
    membership,
    newest,
    planned,
    pod,
    published,
    ranks,
    running,
    spec,
    with_status,
)
from trainium_contract.faults.causes import Cause
from trainium_contract.status.conditions import ConditionType, Phase
from trainium_contract.status.interruptions import Rung
from trainium_contract.status.public import MembershipStatus
from trainium_contract.wire.messages import Transition, WorkerPhase
from trainium_operator.plan.model.conditions import find_condition, is_true
from trainium_operator.plan.model.observed import PodPhase


def scaled(seen: Any, replicas: Any, **workers: Any) -> Any:
    return replace(seen, job=replace(seen.job, spec=spec(workers={"replicas": replicas, **workers})))


def test_on_shrinking_the_highest_ranks_leave_gracefully_and_no_pod_is_deleted_yet() -> None:
    result = planned(scaled(running(4, spares=1), 3, spares=1))
    membership = published(result)
    assert ranks(membership) == ["demo-w-0", "demo-w-1", "demo-w-2"]
    assert membership.transition is Transition.GRACEFUL
    assert (newest(result).rung, newest(result).cause) == (Rung.RESIZE, Cause.RESIZE)
    assert deleted(result) == {}
    assert created(result) == []
    assert result.status.phase is Phase.RESIZING


def after_shrinking(phase: Any) -> Any:
    """Return a job whose generation 2 of 3 members is published, without pod 3."""
    seen = scaled(running(4), 3)
    members = {at: agent(at, phase, generation=2) for at in range(3)}
    agents = {f"uid-{at}": known for at, known in {**members, 3: agent(3, generation=2)}.items()}
    seen = replace(seen, membership=membership(0, 1, 2, generation=2), published=2, agents=agents)
    return with_status(seen, membership=MembershipStatus(generation=2, size=3), desired=3)


def test_the_pods_that_left_are_deleted_only_when_the_new_generation_trains() -> None:
    assert deleted(planned(after_shrinking(WorkerPhase.LOADING))) == {}
    assert deleted(planned(after_shrinking(WorkerPhase.TRAINING))) == {"demo-w-3": None}


def test_on_growing_the_spare_joins_at_once_and_is_refilled() -> None:
    result = planned(scaled(running(3, spares=1), 4, spares=1))
    assert ranks(published(result)) == ["demo-w-0", "demo-w-1", "demo-w-2", "demo-w-3"]
    assert published(result).transition is Transition.GRACEFUL
    assert created(result) == ["demo-w-4"]


def test_on_growing_without_spares_pods_are_made_and_waited_for() -> None:
    result = planned(scaled(running(3), 4))
    assert published(result) is None
    assert created(result) == ["demo-w-3"]
    assert result.status.phase is Phase.RESIZING
    assert find_condition(result.status, ConditionType.RESIZING).reason == "SizeRequested"
    assert result.status.waiting_since == NOW


def test_a_job_that_had_to_shrink_reports_it_and_grows_back_when_all_are_there() -> None:
    seen = scaled(running(3, spares=1), 4, minReplicas=2)
    without_spare = replace(seen, pods=seen.pods[:3], agents={u: a for u, a in seen.agents.items() if u != "uid-3"})
    small = planned(with_status(without_spare, desired=4))
    assert find_condition(small.status, ConditionType.RESIZING).reason == "CapacityMissing"
    assert small.status.phase is Phase.RUNNING
    grown = planned(with_status(seen, desired=4))
    assert (newest(grown).rung, newest(grown).cause) == (Rung.GROW, Cause.CAPACITY)


def test_pods_that_never_ran_are_the_first_to_go() -> None:
    seen = running(4)
    pending = replace(pod(4, node="", ip="", ready=False, scheduled=False), phase=PodPhase.PENDING)
    result = planned(replace(seen, pods=(*seen.pods, pending)))
    assert deleted(result) == {"demo-w-4": None}


def test_a_cold_spare_counts_but_does_not_join() -> None:
    cold = replace(agent(3), heartbeat=heartbeat(3, ready=False))
    result = planned(scaled(running(3, spares=1, agents={3: cold}), 4))
    assert published(result) is None
    assert created(result) == []
    assert is_true(result.status, ConditionType.RESIZING)

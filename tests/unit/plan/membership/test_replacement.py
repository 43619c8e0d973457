from dataclasses import replace
from typing import Any

import pytest

from tests.unit.plan.plan_builders import (
    NOW,
    agent,
    created,
    deleted,
    facts_of,
    failure,
    kinds,
    membership,
    newest,
    node,
    planned,
    pod,
    published,
    ranks,
    running,
    spec,
    training,
    with_pod,
    with_status,
    without,
)
from trainium_contract.faults.causes import Cause
from trainium_contract.spec.health import PreflightCheck
from trainium_contract.status.conditions import Phase
from trainium_contract.status.interruptions import Interruption, Rung
from trainium_contract.status.public import CompiledStatus, MembershipStatus
from trainium_contract.wire.messages import CheckResult, Transition, WorkerPhase
from trainium_operator.plan.diagnose.loss import Loss
from trainium_operator.plan.membership.decisions import decide_generation
from trainium_operator.plan.model.actions import CreatePod
from trainium_operator.plan.model.observed import PodPhase

OPEN = Interruption(
    generation=1,
    time="2027-01-15T08:00:00Z",
    cause=Cause.POD_LOST,
    rung=Rung.REPLACE,
    pod="demo-w-1",
    detected_seconds=1.0,
    step_before=20,
    failed_at=NOW - 30,
)


def recovering(seen: Any, **status: Any) -> Any:
    """Return the observation after the loss was recorded."""
    fields = {"history": (OPEN,), "waiting_since": NOW - 30, **status}
    return with_status(seen, seen.job.status.model_copy(update=fields))


def test_a_spare_takes_the_lost_rank_and_survivors_keep_theirs() -> None:
    result = planned(without(running(4, spares=1), 1))
    membership = published(result)
    assert ranks(membership) == ["demo-w-0", "demo-w-4", "demo-w-2", "demo-w-3"]
    assert (membership.generation, membership.transition, membership.cause) == (2, Transition.IMMEDIATE, Cause.POD_LOST)
    assert (newest(result).rung, newest(result).pods_replaced) == (Rung.SPARE, 1)
    assert (newest(result).pod, newest(result).rank) == ("demo-w-1", 1)
    assert created(result) == ["demo-w-5"]
    assert result.status.membership == MembershipStatus(
        generation=2, size=4, data_parallel=4, passes=6, batch=24, speed=1.0
    )


def test_a_spare_whose_node_failed_a_check_takes_a_rank_only_when_there_is_no_other() -> None:
    failed = CheckResult(check=PreflightCheck.MEMORY, passed=False, seconds=1.0, detail="slow")
    fine = failed.model_copy(update={"passed": True})
    agents = {4: agent(4, checks=(fine, failed)), 5: agent(5, checks=(fine, fine))}
    seen = without(running(4, spares=2, agents=agents), 1)
    assert ranks(published(planned(seen))) == ["demo-w-0", "demo-w-5", "demo-w-2", "demo-w-3"]
    assert ranks(published(planned(without(seen, 5)))) == ["demo-w-0", "demo-w-4", "demo-w-2", "demo-w-3"]


def test_the_membership_is_published_first_and_ended_pods_deleted_last() -> None:
    seen = with_pod(running(4, spares=1), pod(1, phase=PodPhase.FAILED, reason="Error", exit_code=137))
    assert kinds(planned(seen).actions) == ["PublishMembership", "CreatePod", "DeletePod", "ApplyObject"]


def test_a_loss_is_recorded_and_counted_once_while_a_replacement_is_pending() -> None:
    result = planned(recovering(without(running(4), 1), next_pod_ordinal=5))
    assert len(result.status.history) == 1
    assert result.status.restarts.total == 0
    assert result.status.failures == ()
    assert result.requeue_after is not None


def test_a_second_loss_in_the_same_generation_joins_the_first() -> None:
    result = planned(recovering(without(running(4), 1, 2)))
    assert len(result.status.history) == 1


def test_a_loss_between_decision_and_record_is_recorded_once() -> None:
    seen = without(running(4), 1)
    decided = MembershipStatus(generation=2, size=4)
    closed = OPEN.model_copy(update={"recovered_seconds": 3.0})
    result = planned(recovering(seen, membership=decided, history=(closed,)))
    assert result.status.history == (closed,)


def test_a_pending_replacement_takes_the_lost_rank() -> None:
    seen = without(running(4, agents={4: agent(4)}, pods=tuple(pod(at) for at in (0, 1, 2, 3))), 1)
    seen = replace(seen, pods=(*seen.pods, pod(4, created=NOW - 20)))
    seen = replace(seen, nodes={each.node: seen.nodes.get(each.node) or node(each.node) for each in seen.pods})
    result = planned(recovering(seen))
    assert ranks(published(result)) == ["demo-w-0", "demo-w-4", "demo-w-2", "demo-w-3"]
    assert newest(result).rung is Rung.REPLACE


def test_an_elastic_job_shrinks_only_after_the_wait_and_reports_it() -> None:
    elastic = spec(workers={"minReplicas": 2})
    seen = without(running(4, job_spec=elastic), 3)
    assert published(planned(recovering(seen, waiting_since=NOW - 119))) is None
    result = planned(recovering(seen, waiting_since=NOW - 120))
    assert ranks(published(result)) == ["demo-w-0", "demo-w-1", "demo-w-2"]
    assert newest(result).rung is Rung.SHRINK
    assert newest(result).pods_replaced == 0
    assert result.status.waiting_since == NOW


def test_a_job_never_shrinks_below_its_floor() -> None:
    elastic = spec(workers={"minReplicas": 3})
    seen = without(running(4, job_spec=elastic), 2, 3)
    assert published(planned(recovering(seen, waiting_since=NOW - 9999))) is None


def test_a_shrunk_job_that_loses_another_worker_takes_a_spare_at_its_present_size_at_once() -> None:
    elastic = spec(workers={"minReplicas": 2})
    seen = without(running(4, job_spec=elastic), 1)
    shrunk = membership(0, 1, 2)
    seen = replace(seen, membership=shrunk)
    seen = replace(seen, agents={**seen.agents, "uid-3": agent(3)})
    result = planned(recovering(seen, membership=MembershipStatus(generation=1, size=3)))
    assert ranks(published(result)) == ["demo-w-0", "demo-w-3", "demo-w-2"]


def test_a_status_adopts_a_newer_recorded_generation() -> None:
    seen = running(4, membership=membership(0, 1, 2, 3, generation=7), published=7)
    agents = {f"uid-{at}": training(at, generation=7) for at in range(4)}
    result = planned(replace(seen, agents=agents))
    assert result.status.membership.generation == 7
    assert result.actions == ()


def test_the_budget_for_lost_workers_ends_the_job_with_a_verdict() -> None:
    tight = spec(recovery={"budgets": {"infrastructure": {"maxFailures": 0}}})
    result = planned(without(running(4, job_spec=tight), 1))
    assert result.status.phase is Phase.FAILED
    assert "1 infrastructure failure within" in result.status.verdict
    assert newest(result).rung is Rung.STOP
    assert set(deleted(result)) == {"demo-w-0", "demo-w-2", "demo-w-3"}


def test_a_replacement_keeps_away_from_the_node_that_has_just_failed() -> None:
    seen = running(4, agents={2: training(2, failures=(failure(80, attempt=0),))})
    pods = [action.manifest for action in planned(seen).actions if isinstance(action, CreatePod)]
    assert len(pods) == 1
    assert "node-2" in str(pods[0]["spec"]["affinity"])


@pytest.mark.parametrize(("made", "rung"), [(-31.0, Rung.SPARE), (-30.9, Rung.REPLACE), (-20.0, Rung.REPLACE)])
def test_a_pod_that_was_there_before_the_fault_is_a_spare_and_creation_times_are_rounded(
    made: float, rung: Rung
) -> None:
    seen = recovering(without(running(4, spares=1), 1))
    seen = replace(seen, pods=(*seen.pods[:3], pod(4, created=NOW + made)))
    assert newest(planned(seen)).rung is rung


def test_a_complete_job_resumes_at_an_uncompiled_size() -> None:
    seen = without(running(4, spares=1, status={"compiled": CompiledStatus(sizes=(2,), seconds=600.0)}), 1)
    assert len(ranks(published(planned(seen)))) == 4


def waits_since(seen: Any, since: float | None, losses: tuple[Loss, ...] = ()) -> float | None:
    status = seen.job.status.replaced(waiting_since=since)
    return decide_generation(facts_of(seen), status, losses).status.waiting_since


def test_waiting_since_is_set_once_and_cleared_when_complete() -> None:
    complete, short = running(4), running(3, status={"desired": 4})
    assert waits_since(complete, NOW - 30) is None
    assert waits_since(short, None) == NOW
    assert waits_since(short, NOW - 30) == NOW - 30
    finished = running(3, status={"desired": 4}, agents={2: agent(2, WorkerPhase.FINISHED, generation=1)})
    assert waits_since(finished, None) is None, "at the end of a run there is no wait"
    assert waits_since(finished, NOW - 30) == NOW - 30
    member, worker = facts_of(complete).members[1]
    lost = (Loss(member=member, worker=worker, cause=Cause.CRASH, failed_at=NOW, message=""),)
    assert waits_since(complete, NOW - 5, lost) == NOW - 5
    assert waits_since(complete, None, lost) is None, "the loss itself has written it"

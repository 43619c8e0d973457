"""A failed member is replaced by a spare or a new pod, or the job shrinks; ranks of the others stay."""

from dataclasses import replace
from typing import Any

import pytest

from tests.unit.plan import plan_builders as build
from tests.unit.plan.plan_builders import NOW
from tests.unit.plan.plan_results import make_plan, member_names
from trainium_contract.faults.causes import Cause
from trainium_contract.spec.health import PreflightCheck
from trainium_contract.status.conditions import Phase
from trainium_contract.status.interruptions import RecoveryResponse
from trainium_contract.status.public import CompiledStatus, MembershipStatus
from trainium_contract.wire.messages import MAX_GENERATION_LEAD, CheckResult, Transition, WorkerPhase
from trainium_operator.plan.diagnose.failed_member import FailedMember
from trainium_operator.plan.membership.decisions import decide_generation
from trainium_operator.plan.model.observed import PodPhase

LOSS = {"cause": Cause.POD_LOST, "pod": "demo-w-1", "detected_seconds": 1.0, "step_before": 20, "decided_at": None}
OPEN = build.interruption(RecoveryResponse.REPLACE, ago=30, took=None, **LOSS)


def with_open_loss(observed: Any, **status: Any) -> Any:
    """Return the observation after the failure was recorded."""
    fields = {"history": (OPEN,), "waiting_since": NOW - 30, **status}
    return build.with_status(observed, **fields)


def test_a_spare_takes_the_lost_rank_and_survivors_keep_theirs() -> None:
    result = make_plan(build.without_pods(build.running_job(4, spares=1), 1))
    membership = result.published_membership
    assert member_names(membership) == ["demo-w-0", "demo-w-4", "demo-w-2", "demo-w-3"]
    assert (membership.generation, membership.transition, membership.cause) == (2, Transition.IMMEDIATE, Cause.POD_LOST)
    assert (result.newest_entry.response, result.newest_entry.pods_replaced) == (RecoveryResponse.SPARE, 1)
    assert (result.newest_entry.pod, result.newest_entry.rank) == ("demo-w-1", 1)
    assert result.created_pods == ["demo-w-5"]
    assert result.status.membership == MembershipStatus(
        generation=2, size=4, data_parallel=4, passes=6, batch=24, speed=1.0
    )


def test_a_spare_whose_node_failed_a_check_takes_a_rank_only_when_there_is_no_other() -> None:
    failed = CheckResult(check=PreflightCheck.MEMORY, passed=False, seconds=1.0, detail="slow")
    fine = failed.model_copy(update={"passed": True})
    agents = {4: build.agent(4, checks=(fine, failed)), 5: build.agent(5, checks=(fine, fine))}
    observed = build.without_pods(build.running_job(4, spares=2, agents=agents), 1)
    assert make_plan(observed).published_members == ["demo-w-0", "demo-w-5", "demo-w-2", "demo-w-3"]
    assert make_plan(build.without_pods(observed, 5)).published_members == [
        "demo-w-0",
        "demo-w-4",
        "demo-w-2",
        "demo-w-3",
    ]


def test_the_membership_is_published_first_and_ended_pods_deleted_last() -> None:
    observed = build.with_pod(
        build.running_job(4, spares=1), build.pod(1, phase=PodPhase.FAILED, reason="Error", exit_code=137)
    )
    assert make_plan(observed).action_kinds == ["PublishMembership", "CreatePod", "DeletePod", "ApplyOptional"]


def test_a_loss_is_recorded_and_counted_once_while_a_replacement_is_pending() -> None:
    result = make_plan(with_open_loss(build.without_pods(build.running_job(4), 1), next_pod_ordinal=5))
    assert len(result.status.history) == 1
    assert result.status.restarts.total == 0
    assert result.status.failures == ()
    assert result.requeue_after is not None


def test_a_second_loss_in_the_same_generation_joins_the_first() -> None:
    result = make_plan(with_open_loss(build.without_pods(build.running_job(4), 1, 2)))
    assert len(result.status.history) == 1


def test_a_loss_between_decision_and_record_is_recorded_once() -> None:
    observed = build.without_pods(build.running_job(4), 1)
    decided = MembershipStatus(generation=2, size=4)
    closed = OPEN.model_copy(update={"recovered_seconds": 3.0})
    result = make_plan(with_open_loss(observed, membership=decided, history=(closed,)))
    assert result.status.history == (closed,)


def test_a_pending_replacement_takes_the_lost_rank() -> None:
    observed = build.without_pods(
        build.running_job(4, agents={4: build.agent(4)}, pods=tuple(build.pod(ordinal) for ordinal in (0, 1, 2, 3))), 1
    )
    observed = replace(observed, pods=(*observed.pods, build.pod(4, created=NOW - 20)))
    observed = replace(
        observed, nodes={pod.node: observed.nodes.get(pod.node) or build.node(pod.node) for pod in observed.pods}
    )
    result = make_plan(with_open_loss(observed))
    assert result.published_members == ["demo-w-0", "demo-w-4", "demo-w-2", "demo-w-3"]
    assert result.newest_entry.response is RecoveryResponse.REPLACE


def test_an_elastic_job_shrinks_only_after_the_wait_and_reports_it() -> None:
    elastic = build.spec(workers={"minReplicas": 2})
    observed = build.without_pods(build.running_job(4, job_spec=elastic), 3)
    assert make_plan(with_open_loss(observed, waiting_since=NOW - 119)).published_membership is None
    result = make_plan(with_open_loss(observed, waiting_since=NOW - 120))
    assert result.published_members == ["demo-w-0", "demo-w-1", "demo-w-2"]
    assert result.newest_entry.response is RecoveryResponse.SHRINK
    assert result.newest_entry.pods_replaced == 0
    assert result.status.waiting_since == NOW


def test_a_job_never_shrinks_below_its_floor() -> None:
    elastic = build.spec(workers={"minReplicas": 3})
    observed = build.without_pods(build.running_job(4, job_spec=elastic), 2, 3)
    assert make_plan(with_open_loss(observed, waiting_since=NOW - 9999)).published_membership is None


def test_a_shrunk_job_that_loses_another_worker_takes_a_spare_at_its_present_size_at_once() -> None:
    elastic = build.spec(workers={"minReplicas": 2})
    observed = build.without_pods(build.running_job(4, job_spec=elastic), 1)
    shrunk = build.membership(0, 1, 2)
    observed = replace(observed, membership=shrunk)
    observed = build.with_agents(observed, {3: build.agent(3)})
    result = make_plan(with_open_loss(observed, membership=MembershipStatus(generation=1, size=3)))
    assert result.published_members == ["demo-w-0", "demo-w-3", "demo-w-2"]


def test_a_status_adopts_a_newer_recorded_generation() -> None:
    observed = build.running_job(4, membership=build.membership(0, 1, 2, 3, generation=7), published=7)
    agents = build.by_pod_uid(build.training_agents(range(4), generation=7))
    result = make_plan(replace(observed, agents=agents))
    assert result.status.membership.generation == 7
    assert result.actions == ()


def test_the_budget_for_lost_workers_ends_the_job_with_a_verdict() -> None:
    tight = build.spec(recovery={"budgets": {"infrastructure": {"maxFailures": 0}}})
    result = make_plan(build.without_pods(build.running_job(4, job_spec=tight), 1))
    assert result.status.phase is Phase.FAILED
    assert "1 infrastructure failure within" in result.status.verdict
    assert result.newest_entry.response is RecoveryResponse.STOP
    assert set(result.deleted_pods) == {"demo-w-0", "demo-w-2", "demo-w-3"}


def test_a_replacement_keeps_away_from_the_node_that_has_just_failed() -> None:
    observed = build.running_job(4, agents={2: build.training_agent(2, failures=(build.failure(80, attempt=0),))})
    (manifest,) = make_plan(observed).created_manifests
    assert "node-2" in str(manifest["spec"]["affinity"])


@pytest.mark.parametrize(
    ("created", "response"),
    [(-31.0, RecoveryResponse.SPARE), (-30.9, RecoveryResponse.REPLACE), (-20.0, RecoveryResponse.REPLACE)],
)
def test_a_pod_that_was_there_before_the_fault_is_a_spare_and_creation_times_are_rounded(
    created: float, response: RecoveryResponse
) -> None:
    observed = with_open_loss(build.without_pods(build.running_job(4, spares=1), 1))
    observed = replace(observed, pods=(*observed.pods[:3], build.pod(4, created=NOW + created)))
    assert make_plan(observed).newest_entry.response is response


def test_a_complete_job_resumes_at_an_uncompiled_size() -> None:
    observed = build.without_pods(
        build.running_job(4, spares=1, status={"compiled": CompiledStatus(sizes=(2,), seconds=600.0)}), 1
    )
    assert len(make_plan(observed).published_members) == 4


def decide_waiting_since(
    observed: Any, since: float | None, failed_members: tuple[FailedMember, ...] = ()
) -> float | None:
    status = observed.job.status.replaced(waiting_since=since)
    return decide_generation(build.context(observed), status, failed_members).status.waiting_since


def test_waiting_since_is_set_once_and_cleared_when_complete() -> None:
    complete, short = build.running_job(4), build.running_job(3, status={"desired": 4})
    assert decide_waiting_since(complete, NOW - 30) is None
    assert decide_waiting_since(short, None) == NOW
    assert decide_waiting_since(short, NOW - 30) == NOW - 30
    finished = build.running_job(
        3, status={"desired": 4}, agents={2: build.agent(2, WorkerPhase.FINISHED, generation=1)}
    )
    assert decide_waiting_since(finished, None) is None, "at the end of a run there is no wait"
    assert decide_waiting_since(finished, NOW - 30) == NOW - 30
    member, worker = build.context(complete).members[1]
    lost = (FailedMember(member=member, worker=worker, cause=Cause.CRASH, failed_at=NOW, message=""),)
    assert decide_waiting_since(complete, NOW - 5, lost) == NOW - 5
    assert decide_waiting_since(complete, None, lost) is None, "the failure itself has written it"


# --- a record that is older than an agent ------------------------------------------------------------------------


@pytest.mark.parametrize("ordinal", [pytest.param(1, id="a member"), pytest.param(4, id="a spare")])
@pytest.mark.parametrize("reported", [2, 3, 900])
def test_an_agent_in_a_newer_generation_than_the_record_makes_all_start_above_it(ordinal: int, reported: int) -> None:
    agents = {ordinal: build.agent(ordinal, generation=reported)}
    result = make_plan(build.running_job(4, spares=1, agents=agents))
    membership = result.published_membership
    assert member_names(membership) == ["demo-w-0", "demo-w-1", "demo-w-2", "demo-w-3"]
    assert membership.generation == reported + 1
    assert result.status.membership.generation == reported + 1
    assert "restore of etcd" in result.newest_entry.message
    assert result.newest_entry.node == ""


def test_a_loss_after_a_restore_is_answered_above_the_newest_agent() -> None:
    observed = build.without_pods(build.running_job(4, spares=1, agents={2: build.agent(2, generation=7)}), 1)
    result = make_plan(observed)
    assert result.published_membership.generation == 8
    assert "demo-w-1" not in member_names(result.published_membership)


@pytest.mark.parametrize(
    ("claim", "above"),
    [
        pytest.param({"newer_generation": 3}, 4, id="refused by a newer generation"),
        pytest.param({"newer_generation": 3, "generation": 0}, None, id="in another generation"),
        pytest.param({"newer_generation": 2 + MAX_GENERATION_LEAD}, None, id="no number of this run"),
    ],
)
def test_a_rank_that_newer_checkpoints_refuse_makes_all_start_above_them_at_once(
    claim: dict[str, int], above: int | None
) -> None:
    refused = build.failure(76, step=-1, **claim)
    observed = build.running_job(4, agents={0: build.agent(0, WorkerPhase.JOINING, generation=1, failures=(refused,))})
    result = make_plan(observed)
    membership = result.published_membership
    assert (membership and membership.generation) == above
    if above is not None:
        assert "checkpoints are of generation 3" in result.newest_entry.message
        assert result.status.restarts.by_cause == {"PodLost": 1}, "no failure of a process"


def test_members_that_have_not_registered_again_are_waited_for() -> None:
    observed = build.running_job(4, agents={2: build.agent(2, generation=7)})
    uid = next(member.pod_uid for member in observed.membership.members if member.pod_name == "demo-w-0")
    agents = {key: agent for key, agent in observed.agents.items() if key != uid}
    assert make_plan(replace(observed, agents=agents)).published_membership is None

"""Kueue: requested Workloads, reactions to admission and eviction, and the release of quota."""

from dataclasses import replace
from typing import Any

import pytest

from tests.unit.plan import plan_builders as build
from tests.unit.plan.kueue_builders import ADMITTED, EVICTED, PREEMPTED, SPARES, WORKERS, workload, workload_condition
from tests.unit.plan.plan_builders import NOW, SETTINGS
from tests.unit.plan.plan_results import PlanResult, make_plan
from trainium_contract.job import TrainingJobStatus
from trainium_contract.status.activity import ActivityStatus
from trainium_contract.status.conditions import Condition, ConditionStatus, ConditionType
from trainium_operator.plan.features.kueue.requests import MAX_QUOTA_STEPS, list_remaining_steps
from trainium_operator.plan.model.actions import (
    ApplyWorkload,
    CreatePod,
    DeleteWorkload,
    PublishMembership,
    SetQuotaConditions,
)
from trainium_operator.plan.model.conditions import find_condition
from trainium_operator.plan.model.observed import ApiState, Observed
from trainium_operator.plan.model.quota import (
    Placement,
    QuotaView,
    WorkloadCondition,
    WorkloadConditionView,
    WorkloadView,
)
from trainium_operator.plan.view.size import decide_size

READY = replace(SETTINGS, kueue=ApiState.READY)
BLUE = Placement(
    node_selector={"pool": "blue"}, tolerations=({"key": "pool", "operator": "Exists", "effect": "NoSchedule"},)
)
QUEUE = {"queueName": "team"}


def without_quota(view: WorkloadView, *more: WorkloadConditionView) -> WorkloadView:
    return replace(
        view, grants=(), conditions=(workload_condition(WorkloadCondition.QUOTA_RESERVED, true=False), *more)
    )


def queued_job(observed: Observed, *workloads: WorkloadView, **changes: Any) -> Observed:
    quota = QuotaView(workloads=workloads, flavors={"blue": BLUE}, priority=0)
    return replace(observed, quota=replace(quota, **changes))


def plan_in_queue(observed: Observed, *workloads: WorkloadView, **changes: Any) -> PlanResult:
    """Return the plan of a job in a queue of Kueue that has these Workloads."""
    return make_plan(queued_job(observed, *workloads, **changes), READY)


def new_job(**workers: Any) -> Observed:
    return build.observation(build.job(build.spec(workers={"replicas": 4, "spares": 1, **workers}, scheduling=QUEUE)))


def running_job(count: int = 4, *, pods: int | None = None, **workers: Any) -> Observed:
    """Return a job that trains on `count` nodes."""
    job_spec = build.spec(workers={"replicas": count, "spares": 0, **workers}, scheduling=QUEUE)
    observed = build.running_job(count, job_spec=job_spec)
    placed = tuple(replace(pod, pod_set=WORKERS) for pod in observed.pods)
    return replace(observed, pods=placed[:pods])


def requested_counts(result: PlanResult) -> dict[str, dict[str, int]]:
    """Return the requested counts by Workload and pod set."""
    return {
        action.manifest["metadata"]["name"]: {
            pod_set["name"]: pod_set["count"] for pod_set in action.manifest["spec"]["podSets"]
        }
        for action in result.actions_of_type(ApplyWorkload)
    }


def admitted_condition(result: PlanResult) -> Condition:
    return result.condition(ConditionType.ADMITTED)


def test_a_new_job_requests_quota_before_any_pod() -> None:
    result = plan_in_queue(new_job())
    assert requested_counts(result) == {"demo-quota-0": {WORKERS: 4, SPARES: 1}}
    assert result.created_pods == []
    assert (admitted_condition(result).status, admitted_condition(result).reason) == (
        ConditionStatus.FALSE,
        "WaitingForQueue",
    )
    action = result.only_action(ApplyWorkload)
    metadata, body = action.manifest["metadata"], action.manifest["spec"]
    assert metadata["ownerReferences"][0]["uid"] == "job-uid"
    assert body["queueName"] == "team"
    (container,) = body["podSets"][0]["template"]["spec"]["containers"]
    assert set(container) <= {"name", "resources"}, "what quota does not count may change while quota is held"


@pytest.mark.parametrize(
    ("value", "priorities", "named"), [(7, [7, 6], ["high"]), (None, [0, -1], [])], ids=["there", "no such class"]
)
def test_required_quota_has_the_priority_of_the_job_and_optional_quota_less(
    value: int | None, priorities: list[int], named: list[str]
) -> None:
    job_spec = build.spec(workers={"minReplicas": 2}, scheduling={**QUEUE, "priorityClassName": "high"})
    observed = build.observation(build.job(job_spec))
    needed = plan_in_queue(observed, priority=value).actions_of_type(ApplyWorkload)
    more = plan_in_queue(observed, workload(0, 2), priority=value).actions_of_type(ApplyWorkload)
    bodies = [action.manifest["spec"] for action in (*needed, *more)]
    assert [body["priority"] for body in bodies][:2] == priorities
    assert [body["priorityClassRef"]["name"] for body in bodies if "priorityClassRef" in body] == named


def test_an_elastic_job_asks_for_its_smallest_size_first() -> None:
    result = plan_in_queue(new_job(minReplicas=2))
    assert requested_counts(result) == {"demo-quota-0": {WORKERS: 2, SPARES: 1}}


UNRESERVED = workload_condition(WorkloadCondition.QUOTA_RESERVED, true=False, message="no quota")
NOT_ADMITTED = workload_condition(WorkloadCondition.ADMITTED, true=False)


@pytest.mark.parametrize(
    ("conditions", "message"),
    [
        pytest.param((UNRESERVED, NOT_ADMITTED), "queue team: no quota", id="the queue gives a reason"),
        pytest.param((), "queue team: Kueue has not processed it yet", id="Kueue has not processed it"),
        pytest.param((PREEMPTED,), "evicted from queue team (Preempted): by another workload", id="evicted"),
        pytest.param((PREEMPTED, UNRESERVED), "evicted from queue team (Preempted): no quota", id="evicted, and waits"),
    ],
)
def test_the_condition_shows_the_reason_of_kueue_while_the_job_waits(
    conditions: tuple[WorkloadConditionView, ...], message: str
) -> None:
    result = plan_in_queue(new_job(), workload(0, 4, 1, grants=(), conditions=conditions))
    assert admitted_condition(result).message == message


def test_an_admission_creates_pods_with_its_flavor() -> None:
    result = plan_in_queue(new_job(), workload(0, 4, 1))
    pods = [action.manifest for action in result.actions_of_type(CreatePod)]
    sets = [pod["metadata"]["labels"]["kueue.x-k8s.io/podset"] for pod in pods]
    assert sets == [WORKERS] * 4 + [SPARES]
    for pod in pods:
        assert pod["spec"]["nodeSelector"]["pool"] == "blue"
        assert dict(BLUE.tolerations[0]) in pod["spec"]["tolerations"]
        assert pod["metadata"]["annotations"]["kueue.x-k8s.io/workload"] == "demo-quota-0"
    assert requested_counts(result) == {}


ZONE_A = Placement(labels={"ours": "yes"}, node_selector={"zone": "a"})


def test_additions_of_admission_checks_are_applied() -> None:
    (first, *_) = plan_in_queue(new_job(), workload(0, 4, 1, updates={WORKERS: ZONE_A})).actions_of_type(CreatePod)
    assert first.manifest["spec"]["nodeSelector"] == {"pool": "blue", "zone": "a"}
    assert first.manifest["metadata"]["labels"]["ours"] == "yes"


@pytest.mark.parametrize(
    ("workers", "updates", "flavors", "message"),
    [
        pytest.param({}, {}, {}, "ResourceFlavor blue does not exist any more", id="a deleted flavor"),
        pytest.param(
            {},
            {WORKERS: Placement(node_selector={"pool": "red"})},
            {"blue": BLUE},
            "want node selector pool to be blue and red",
            id="a check contradicts the flavor",
        ),
        pytest.param(
            {"template": {"spec": {"nodeSelector": {"zone": "b"}}}},
            {WORKERS: ZONE_A},
            {"blue": BLUE},
            "want node selector zone to be b and a",
            id="a check contradicts the template",
        ),
    ],
)
def test_an_admission_that_cannot_be_applied_starts_nothing(
    workers: dict[str, Any], updates: dict[str, Placement], flavors: dict[str, Placement], message: str
) -> None:
    result = plan_in_queue(new_job(**workers), workload(0, 4, 1, updates=updates), flavors=flavors)
    assert result.created_pods == []
    assert message in admitted_condition(result).message


def test_an_admitted_elastic_job_requests_steps_on_the_same_flavor() -> None:
    result = plan_in_queue(new_job(minReplicas=2), workload(0, 2, 1))
    assert len(result.created_pods) == 3
    assert result.status.desired == 2
    assert requested_counts(result) == {"demo-quota-1": {WORKERS: 1}, "demo-quota-2": {WORKERS: 1}}
    steps = [action.manifest["spec"] for action in result.actions_of_type(ApplyWorkload)]
    assert [step["priority"] for step in steps] == [-1, -2], "they are preempted first"
    assert steps[0]["podSets"][0]["template"]["spec"]["nodeSelector"] == {"pool": "blue"}


def test_a_step_that_is_admitted_is_used() -> None:
    observed = queued_job(new_job(minReplicas=2), workload(0, 2, 1), workload(1, 1), without_quota(workload(2, 1)))
    assert len(make_plan(observed, READY).created_pods) == 4


def test_an_evicted_step_shrinks_the_job_and_is_returned_after_its_pod() -> None:
    held = (workload(0, 2), workload(1, 1), workload(2, 1, conditions=EVICTED))
    result = plan_in_queue(running_job(4, minReplicas=2), *held)
    assert result.actions_of_type(SetQuotaConditions) == result.actions_of_type(DeleteWorkload) == [] or all(
        not action.returns_quota for action in result.actions_of_type(SetQuotaConditions)
    )
    assert "the queue grants 3 of 4" in result.status.history[-1].message
    published = result.only_action(PublishMembership)
    assert len(published.membership.members) == 3
    assert published.membership.transition.value == "Graceful"
    assert result.deleted_pods == {}, "it saves with the others first"

    smaller = running_job(3, replicas=4, minReplicas=2)
    result = plan_in_queue(smaller, *held)
    (action,) = [action for action in result.actions_of_type(SetQuotaConditions) if action.returns_quota]
    assert (action.name, action.uid, action.version) == ("demo-quota-2", "workload-2", "7")
    assert {condition.type.value: condition.is_true for condition in action.conditions} == {
        "QuotaReserved": False,
        "Admitted": False,
        "Requeued": True,
    }


def test_an_evicted_job_returns_its_quota_after_its_last_pod() -> None:
    evicted = workload(0, 4, conditions=EVICTED)
    result = plan_in_queue(running_job(), evicted)
    assert set(result.deleted_pods) == {f"demo-w-{ordinal}" for ordinal in range(4)}
    assert set(result.deleted_pods.values()) == {None}, "with its grace"
    assert result.actions_of_type(SetQuotaConditions) == []
    assert result.status.membership.size == 0
    assert admitted_condition(result).reason == "Evicted"
    assert "by another workload" in admitted_condition(result).message
    assert result.status.restarts.total == 0

    leaving = replace(running_job(), job=replace(running_job().job, status=result.status))
    leaving = replace(leaving, pods=tuple(replace(pod, deleting=True) for pod in leaving.pods))
    assert plan_in_queue(leaving, evicted).actions_of_type(SetQuotaConditions) == []

    empty = replace(leaving, pods=(), agents={})
    action = plan_in_queue(empty, evicted).only_action(SetQuotaConditions)
    assert action.returns_quota


@pytest.mark.parametrize(
    ("reason", "again"), [("Preempted", True), ("NodeFailures", True), ("PodsReadyTimeout", False), ("Other", False)]
)
def test_only_some_evictions_requeue_a_job_at_once(reason: str, again: bool) -> None:
    evicted = workload(0, 4, 1, conditions=(*ADMITTED, workload_condition(WorkloadCondition.EVICTED, reason=reason)))
    action = plan_in_queue(new_job(), evicted).only_action(SetQuotaConditions)
    assert {condition.type: condition.is_true for condition in action.conditions}[WorkloadCondition.REQUEUED] is again


def test_returned_quota_is_not_returned_again() -> None:
    waiting = without_quota(workload(0, 4, 1), workload_condition(WorkloadCondition.EVICTED, reason="Preempted"))
    first = plan_in_queue(new_job(), waiting)
    ask = first.only_action(ApplyWorkload)
    digest = ask.manifest["metadata"]["annotations"]["trainium.dev/content-hash"]
    result = plan_in_queue(new_job(), replace(waiting, content_hash=digest))
    assert (
        result.actions_of_type(SetQuotaConditions)
        == result.actions_of_type(ApplyWorkload)
        == result.actions_of_type(DeleteWorkload)
        == []
    )
    assert admitted_condition(result).reason == "Evicted"


def test_an_inactive_workload_stops_the_job_with_advice() -> None:
    result = plan_in_queue(running_job(), workload(0, 4, active=False))
    assert len(result.deleted_pods) == 4
    assert "set its spec.active to true" in admitted_condition(result).message
    action = plan_in_queue(new_job(), workload(0, 4, 1, active=False)).only_action(SetQuotaConditions)
    assert action.returns_quota
    idle = without_quota(workload(0, 4, 1, active=False))
    assert plan_in_queue(new_job(), idle).actions_of_type(ApplyWorkload) == [], "a person deactivated it"


def test_steps_are_deleted_while_the_job_is_not_admitted() -> None:
    steps = (workload(1, 1), workload(2, 1))
    result = plan_in_queue(new_job(minReplicas=2), without_quota(workload(0, 2, 1)), *steps)
    assert [action.name for action in result.actions_of_type(DeleteWorkload)] == ["demo-quota-1", "demo-quota-2"]
    assert result.created_pods == []


def test_a_deleted_workload_stops_the_job_before_a_new_request() -> None:
    result = plan_in_queue(running_job())
    assert len(result.deleted_pods) == 4
    assert requested_counts(result) == {}


def test_a_suspended_job_releases_its_quota_when_its_pods_are_deleted() -> None:
    observed = running_job()
    observed = build.with_job(observed, spec=observed.job.spec.replaced(suspend=True))
    held = (workload(0, 4),)
    assert plan_in_queue(observed, *held).actions_of_type(DeleteWorkload) == []
    dropped = plan_in_queue(replace(observed, pods=(), agents={}), *held).actions_of_type(DeleteWorkload)
    assert dropped == [DeleteWorkload("demo-quota-0", "workload-0")]


@pytest.mark.parametrize("kind", [ConditionType.COMPLETE, ConditionType.FAILED])
def test_the_end_of_a_job_is_reported_when_no_pod_runs(kind: ConditionType) -> None:
    done = Condition(type=kind, status=ConditionStatus.TRUE, reason="R", last_transition_time="2026-01-01T00:00:00Z")
    job_spec = build.spec(workers={"replicas": 2, "minReplicas": 1}, scheduling=QUEUE)
    ended = build.observation(build.job(job_spec, TrainingJobStatus(conditions=(done,))), (build.pod(0),))
    held = (workload(0, 1), workload(1, 1))
    assert plan_in_queue(ended, *held).actions_of_type(SetQuotaConditions) == []
    result = plan_in_queue(replace(ended, pods=()), *held)
    action = result.only_action(SetQuotaConditions)
    (finished,) = action.conditions
    assert (action.name, finished.type.value, finished.is_true) == ("demo-quota-0", "Finished", True)
    assert finished.reason == ("Succeeded" if kind is ConditionType.COMPLETE else "Failed")
    assert not action.returns_quota
    assert result.actions_of_type(DeleteWorkload) == [DeleteWorkload("demo-quota-1", "workload-1")]
    over = (replace(held[0], conditions=(*ADMITTED, workload_condition(WorkloadCondition.FINISHED))),)
    assert plan_in_queue(replace(ended, pods=()), *over).actions_of_type(SetQuotaConditions) == []


def test_a_job_that_trains_reports_once_that_its_pods_are_ready() -> None:
    action = plan_in_queue(running_job(), workload(0, 4)).only_action(SetQuotaConditions)
    assert [(condition.type.value, condition.is_true) for condition in action.conditions] == [("PodsReady", True)]
    ready = workload(0, 4, conditions=(*ADMITTED, workload_condition(WorkloadCondition.PODS_READY)))
    assert plan_in_queue(running_job(), ready).actions_of_type(SetQuotaConditions) == []


def test_a_lost_worker_is_replaced_in_its_pod_set() -> None:
    observed = running_job(4, spares=1)
    spare = replace(build.pod(4), pod_set=SPARES)
    observed = replace(
        observed,
        pods=(*observed.pods[:2], observed.pods[3], spare),
        agents={**observed.agents, "uid-4": build.training_agent(4)},
    )
    result = plan_in_queue(observed, workload(0, 4, 1))
    action = result.only_action(CreatePod)
    assert action.manifest["metadata"]["labels"]["kueue.x-k8s.io/podset"] == WORKERS


def test_a_larger_size_is_requested_as_a_step_while_training() -> None:
    observed = running_job(4, replicas=6)
    result = plan_in_queue(observed, workload(0, 4))
    assert requested_counts(result) == {"demo-quota-1": {WORKERS: 2}}
    assert result.status.desired == 4
    assert result.deleted_pods == {}
    assert result.created_pods == []


def test_a_smaller_size_releases_the_steps_that_it_does_not_need() -> None:
    observed = running_job(2, replicas=2, minReplicas=2)
    result = plan_in_queue(observed, workload(0, 2), workload(1, 1), workload(2, 1))
    assert [action.name for action in result.actions_of_type(DeleteWorkload)] == ["demo-quota-2"]
    for pods, names in ((4, ["demo-quota-2"]), (5, [])):
        observed = running_job(pods, replicas=2, minReplicas=2, spares=1)
        result = plan_in_queue(observed, workload(0, 2, 1), workload(1, 1), workload(2, 1))
        assert [action.name for action in result.actions_of_type(DeleteWorkload)] == names, (
            "what is left is for four pods, one a spare"
        )


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (ApiState.OFF, "set the chart's kueue.enabled"),
        (ApiState.ABSENT, "does not serve kueue.x-k8s.io/v1beta2"),
        (ApiState.READING, "not read yet"),
    ],
)
def test_without_kueue_a_queued_job_waits_and_a_running_one_continues(state: ApiState, words: str) -> None:
    settings = replace(SETTINGS, kueue=state)
    result = make_plan(new_job(), settings)
    assert result.actions == ()
    assert words in admitted_condition(result).message
    result = make_plan(running_job(), settings)
    assert result.deleted_pods == {}
    assert result.status.membership.size == 4


def test_a_job_whose_queue_was_cleared_trains_on_and_holds_no_quota() -> None:
    observed = queued_job(build.running_job(4), workload(0, 4))
    result = make_plan(observed, READY)
    assert result.actions_of_type(DeleteWorkload) == [DeleteWorkload("demo-quota-0", "workload-0")]
    assert result.deleted_pods == {}


def test_nothing_changes_while_a_workload_is_being_deleted() -> None:
    result = plan_in_queue(new_job(), workload(0, 4, 1, deleting=True))
    assert (
        result.actions_of_type(ApplyWorkload)
        == result.actions_of_type(DeleteWorkload)
        == result.actions_of_type(SetQuotaConditions)
        == []
    )
    assert "is being deleted" in admitted_condition(result).message


@pytest.mark.parametrize(("floor", "replicas"), [(1, 1), (1, 24), (7, 24), (1, 400)])
def test_steps_lead_to_the_desired_size_and_are_few(floor: int, replicas: int) -> None:
    size = decide_size(
        build.spec(workers={"replicas": replicas, "minReplicas": floor}, trainer={"batch": {"globalSize": 400}})
    )
    steps = list_remaining_steps(size, floor)
    assert floor + sum(steps) == size.desired
    assert all(step > 0 for step in steps)
    assert len(steps) <= MAX_QUOTA_STEPS


@pytest.mark.parametrize(("answer", "ends"), [(ADMITTED, True), (EVICTED, False)])
def test_time_without_quota_does_not_count_towards_a_deadline(
    answer: tuple[WorkloadConditionView, ...], ends: bool
) -> None:
    job_spec = build.spec(workers={"replicas": 4, "spares": 0}, scheduling=QUEUE, activeDeadlineSeconds=40)
    observed = build.running_job(
        4, job_spec=job_spec, status={"activity": ActivityStatus(since=NOW - 50, stepped=True)}
    )
    observed = replace(observed, pods=tuple(replace(pod, pod_set=WORKERS) for pod in observed.pods))
    result = plan_in_queue(observed, workload(0, 4, conditions=answer))
    target = find_condition(result.status, ConditionType.FAILURE_TARGET)
    assert (target is not None and target.status is ConditionStatus.TRUE) == ends
    assert (result.status.activity.since is None) == (not ends), "it starts again with the next admission"


TAKES = {"elasticity": {"idleNodes": "Take"}}


def job_beyond_request(
    members: int, *workloads: WorkloadView, wanted: int = 0, extras: int = 0, **changes: Any
) -> Observed:
    """Return a job of two to four nodes that trains on `members`, the last `extras` of them idle ones."""
    job_spec = build.spec(
        workers={"replicas": 2, "maxReplicas": 4}, scheduling=QUEUE, trainer={"steps": 10**6}, **TAKES
    )
    status = {"idle_nodes": {"wanted": wanted, "taken": extras}, "desired": members}
    observed = build.running_job(members, job_spec=job_spec, status=status, **changes)
    placed = tuple(replace(pod, pod_set=WORKERS, extra=pod.ordinal >= members - extras) for pod in observed.pods)
    return queued_job(replace(observed, pods=placed), *workloads)


def test_idle_nodes_take_requests_steps_beyond_the_request() -> None:
    result = make_plan(job_beyond_request(2, workload(0, 2)), READY)
    assert result.status.idle_nodes.wanted == 2
    assert requested_counts(result) == {"demo-quota-1": {WORKERS: 1}, "demo-quota-2": {WORKERS: 1}}
    assert result.created_pods == [], "no pod before it is granted"


def test_a_granted_step_beyond_the_request_creates_an_extra() -> None:
    observed = job_beyond_request(2, workload(0, 2), workload(1, 1), without_quota(workload(2, 1)), wanted=2)
    result = make_plan(observed, READY)
    action = result.only_action(CreatePod)
    assert action.manifest["metadata"]["labels"]["trainium.dev/extra"] == "true"
    assert result.status.desired == 2, "it grows when the extra is warm"


def test_a_revoked_step_shrinks_the_job_to_its_request() -> None:
    held = (workload(0, 2), workload(1, 1, conditions=EVICTED), workload(2, 1, conditions=EVICTED))
    result = make_plan(job_beyond_request(4, *held, wanted=2, extras=2), READY)
    published = result.only_action(PublishMembership)
    assert [member.pod_name for member in published.membership.members] == ["demo-w-0", "demo-w-1"]
    assert published.membership.transition.value == "Graceful"
    assert result.status.desired == 2

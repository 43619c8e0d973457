"""Gang scheduling: objects of each gang API, and the timeout without one."""

from dataclasses import replace
from typing import Any

import pytest

from tests.unit.plan import plan_builders as build
from tests.unit.plan.plan_builders import NOW, SETTINGS
from tests.unit.plan.plan_cluster import FakeCluster
from tests.unit.plan.plan_results import PlanResult, make_plan
from trainium_contract.job import TrainingJobStatus
from trainium_contract.status.conditions import ConditionType, Phase
from trainium_contract.status.internal import GangStatus
from trainium_operator.plan.model.actions import ApplyGroup, CreatePod
from trainium_operator.plan.model.conditions import find_condition
from trainium_operator.plan.model.observed import GangApi, Observed, PodPhase
from trainium_operator.plan.pods.gang_policy import pause_seconds
from trainium_operator.plan.report.write_throttle import COUNT_INTERVAL_SECONDS

NATIVE = {GangApi.SCHEDULING_GROUP: "scheduling.k8s.io/v1beta1"}
OLD_NATIVE = {GangApi.WORKLOAD_REF: "scheduling.k8s.io/v1alpha1"}
COSCHEDULING = {GangApi.COSCHEDULING: "scheduling.x-k8s.io/v1alpha1"}
ALL = {**COSCHEDULING, **OLD_NATIVE, **NATIVE}


def new_job(scheduling: dict[str, Any] | None = None, **workers: Any) -> Observed:
    return build.observation(
        build.job(build.spec(workers={"replicas": 4, "spares": 1, **workers}, scheduling=scheduling or {}))
    )


def plan_gang(observed: Observed, served: dict[GangApi, str] | None = None) -> PlanResult:
    return make_plan(observed, replace(SETTINGS, gang_apis=served or {}))


def applied_group(result: PlanResult) -> Any:
    manifests = [action.manifest for action in result.actions_of_type(ApplyGroup)]
    assert len(manifests) <= 1
    return manifests[0] if manifests else None


def admitted_condition(result: PlanResult) -> tuple[str, str]:
    condition = find_condition(result.status, ConditionType.ADMITTED)
    assert condition is not None
    return condition.status.value, condition.reason


def test_a_native_gang_is_a_pod_group_of_the_smallest_size_that_pods_name() -> None:
    result = plan_gang(new_job(), NATIVE)
    gang = applied_group(result)
    assert (gang["apiVersion"], gang["kind"]) == ("scheduling.k8s.io/v1beta1", "PodGroup")
    assert gang["spec"] == {"schedulingPolicy": {"gang": {"minCount": 4}}}, "the spare is not part of the minimum"
    assert gang["metadata"]["ownerReferences"][0]["uid"] == "job-uid"
    assert {manifest["spec"]["schedulingGroup"]["podGroupName"] for manifest in result.created_manifests} == {
        gang["metadata"]["name"]
    }
    kinds = [type(action) for action in result.actions]
    assert kinds.index(ApplyGroup) < kinds.index(CreatePod), "a pod without its group waits for it"


def test_a_job_that_is_created_again_has_another_group_because_the_old_one_may_be_terminating() -> None:
    first, again = new_job(), new_job()
    again = replace(again, job=replace(again.job, uid="another-uid"))
    names = [applied_group(plan_gang(observed, NATIVE))["metadata"]["name"] for observed in (first, again, first)]
    assert names[0] == names[2] != names[1]


def test_the_least_of_an_elastic_job_is_its_smallest_legal_size() -> None:
    assert applied_group(plan_gang(new_job(minReplicas=2), NATIVE))["spec"]["schedulingPolicy"]["gang"]["minCount"] == 2


def test_kubernetes_1_35_has_a_workload_that_pods_refer_to() -> None:
    result = plan_gang(new_job(), OLD_NATIVE)
    gang = applied_group(result)
    assert gang["kind"] == "Workload"
    assert gang["spec"]["podGroups"] == [{"name": "workers", "policy": {"gang": {"minCount": 4}}}]
    assert gang["spec"]["controllerRef"] == {"apiGroup": "trainium.dev", "kind": "TrainingJob", "name": "demo"}
    assert result.created_manifests[0]["spec"]["workloadRef"] == {
        "name": gang["metadata"]["name"],
        "podGroup": "workers",
    }


def test_coscheduling_has_a_pod_group_and_a_label() -> None:
    result = plan_gang(new_job({"gang": "Coscheduling"}), ALL)
    gang = applied_group(result)
    assert (gang["apiVersion"], gang["spec"]) == ("scheduling.x-k8s.io/v1alpha1", {"minMember": 4})
    assert (
        result.created_manifests[0]["metadata"]["labels"]["scheduling.x-k8s.io/pod-group"] == gang["metadata"]["name"]
    )


@pytest.mark.parametrize(
    ("scheduling", "served", "kind"),
    [
        ({}, {}, None),
        ({}, ALL, "scheduling.k8s.io/v1beta1"),
        ({}, COSCHEDULING, "scheduling.x-k8s.io/v1alpha1"),
        ({"gang": "None"}, ALL, None),
        ({"gang": "Native"}, COSCHEDULING, None),
        ({"queueName": "team"}, ALL, None),
    ],
)
def test_the_first_api_that_is_served_and_wanted_is_used(
    scheduling: dict[str, Any], served: dict[GangApi, str], kind: str | None
) -> None:
    gang = applied_group(plan_gang(new_job(scheduling), served))
    assert (gang and gang["apiVersion"]) == kind


def test_a_gang_that_cannot_be_scheduled_is_reported() -> None:
    result = plan_gang(new_job({"gang": "Native"}), COSCHEDULING)
    condition = find_condition(result.status, ConditionType.ADMITTED)
    assert condition is not None
    assert "does not serve the requested gang API, Native" in condition.message
    assert len(result.created_manifests) == 5, "the time-out does it instead"


def test_a_single_worker_is_no_gang() -> None:
    assert applied_group(plan_gang(new_job(replicas=1, spares=0), NATIVE)) is None


def test_newcomers_of_a_running_job_are_not_in_a_group() -> None:
    observed = build.running_job(4)
    observed = build.without_pods(observed, 3, keep_agents=True)
    result = plan_gang(observed, NATIVE)
    assert result.created_pods == ["demo-w-4"]
    assert applied_group(result) is None
    assert "schedulingGroup" not in result.created_manifests[0]["spec"]


def test_a_pending_gang_pod_is_recreated_without_the_group_after_the_start() -> None:
    waiting = build.pod(4, phase=PodPhase.PENDING, node="", ip="", gang="demo-12345678", scheduled=False)
    bound = replace(waiting, node="node-4")
    for extra, expected in ((waiting, {"demo-w-4": None}), (bound, {})):
        observed = build.running_job(
            4, pods=(*(build.pod(ordinal) for ordinal in range(4)), extra), job_spec=build.spec(workers={"spares": 1})
        )
        assert plan_gang(observed, NATIVE).deleted_pods == expected


def test_another_smallest_size_before_the_start_makes_another_group() -> None:
    first = applied_group(plan_gang(new_job(), NATIVE))["metadata"]["name"]
    pods = tuple(
        build.pod(ordinal, phase=PodPhase.PENDING, node="", ip="", gang=first, scheduled=False, template_hash="")
        for ordinal in range(5)
    )
    changed = build.observation(
        build.job(build.spec(workers={"replicas": 3, "spares": 1}), TrainingJobStatus(next_pod_ordinal=5)), pods
    )
    result = plan_gang(changed, NATIVE)
    assert set(result.deleted_pods) == {pod.name for pod in pods}
    assert applied_group(result)["metadata"]["name"] != first


# The time-out


def partially_bound_job(bound: int, *, since: float | None = None, elastic: bool = False, **gang: Any) -> Observed:
    """Return a job of four whose first `bound` workers hold nodes."""
    workers = {"replicas": 4, "spares": 0, **({"minReplicas": 2} if elastic else {})}
    status = TrainingJobStatus(
        desired=4, next_pod_ordinal=4, gang=GangStatus(holding_since=since, **gang), waiting_since=NOW - 1
    )
    pods = tuple(
        build.pod(ordinal)
        if ordinal < bound
        else build.pod(ordinal, phase=PodPhase.PENDING, node="", ip="", scheduled=False)
        for ordinal in range(4)
    )
    return build.observation(build.job(build.spec(workers=workers), status), pods, build.agents(range(bound)))


def test_a_partial_gang_releases_its_nodes_after_the_timeout() -> None:
    waiting = plan_gang(partially_bound_job(3))
    assert waiting.status.gang.holding_since == NOW
    assert waiting.deleted_pods == {}
    result = plan_gang(partially_bound_job(3, since=NOW - 600))
    assert set(result.deleted_pods) == {f"demo-w-{ordinal}" for ordinal in range(4)}
    assert result.created_pods == []
    assert result.status.gang.releases == 1
    assert result.status.gang.retry_at == NOW + pause_seconds("job-uid", 1)
    assert admitted_condition(result) == ("False", "GangTimedOut")
    assert [event.reason for event in result.events if event.reason == "GangTimedOut"] == ["GangTimedOut"]


def test_holding_since_is_not_written_while_pods_are_being_bound() -> None:
    """Nor is it one that nothing is wrong with the first of those nodes."""
    observed = partially_bound_job(3)
    status = plan_gang(replace(observed, nodes={})).status
    held = build.with_status(observed, status.replaced(gang=GangStatus()))
    assert find_condition(status, ConditionType.NODES_HEALTHY) is None
    assert find_condition(plan_gang(held).status, ConditionType.NODES_HEALTHY) is not None
    waiting = plan_gang(replace(held, status_written=NOW - 1))
    assert waiting.status == held.job.status
    assert waiting.requeue_after == pytest.approx(COUNT_INTERVAL_SECONDS - 1)
    written = plan_gang(replace(held, status_written=NOW - COUNT_INTERVAL_SECONDS))
    assert written.status.gang.holding_since == NOW


def test_that_nodes_are_no_longer_held_is_written_at_once() -> None:
    """Else those of the next attempt would be released too early."""
    observed = partially_bound_job(0, since=NOW - 300)
    held = build.with_status(observed, plan_gang(observed).status.replaced(gang=observed.job.status.gang))
    assert plan_gang(replace(held, status_written=NOW)).status.gang.holding_since is None


def test_a_job_that_waits_for_nodes_shows_until_when() -> None:
    admitted = find_condition(plan_gang(partially_bound_job(3)).status, ConditionType.ADMITTED)
    assert admitted is not None
    assert admitted.message == (
        "not all workers have a node; if too few have one after 600 s, the job releases these nodes"
    )


def test_a_crash_after_a_gang_timeout_reports_it_once() -> None:
    first = plan_gang(partially_bound_job(3, since=NOW - 600))
    observed = partially_bound_job(3)
    again = plan_gang(replace(observed, job=replace(observed.job, status=first.status), now=NOW + 1))
    assert set(again.deleted_pods) == {f"demo-w-{ordinal}" for ordinal in range(4)}
    assert again.status.gang == first.status.gang
    assert again.events == ()


def test_an_elastic_job_that_can_start_smaller_keeps_its_nodes() -> None:
    result = plan_gang(partially_bound_job(3, since=NOW - 600, elastic=True))
    assert result.deleted_pods == {}
    assert result.status.gang.holding_since is None
    later = partially_bound_job(3, elastic=True)
    started = plan_gang(build.with_status(later, waiting_since=NOW - 121))
    assert started.status.membership.size == 3


def test_an_elastic_job_that_cannot_start_at_all_releases_its_nodes() -> None:
    assert len(plan_gang(partially_bound_job(1, since=NOW - 600, elastic=True)).deleted_pods) == 4


def test_a_gang_without_nodes_holds_nothing() -> None:
    assert plan_gang(partially_bound_job(0)).status.gang.holding_since is None


def test_pauses_grow_and_are_deterministic_for_each_job() -> None:
    pauses = [pause_seconds("one", times) for times in range(1, 12)]
    assert pauses == [pause_seconds("one", times) for times in range(1, 12)]
    assert all(15 <= pause <= 900 for pause in pauses)
    assert pauses[5] > pauses[0]
    assert len({pause_seconds(f"job-{number}", 1) for number in range(50)}) == 50


@pytest.mark.parametrize(("times", "around"), [(1, 30), (2, 60), (5, 480), (6, 600), (40, 600)])
def test_a_pause_doubles_from_half_a_minute_to_ten_minutes(times: int, around: int) -> None:
    pauses = [pause_seconds(f"job-{number}", times) / around for number in range(2000)]
    assert 0.5 <= min(pauses) < 0.505
    assert 1.495 < max(pauses) <= 1.5


def test_a_job_without_enough_nodes_retries_until_it_starts() -> None:
    cluster = FakeCluster(build.spec(workers={"replicas": 4}, scheduling={"gangTimeoutSeconds": 60}), nodes=3)
    cluster.run(30)
    assert len(cluster.pods) == 4
    cluster.run(45)
    assert cluster.pods == {}
    assert cluster.status.gang.releases == 1
    cluster.run(50)
    assert len(cluster.pods) == 4, "another attempt"
    cluster.run(200)
    assert cluster.status.gang.releases >= 2
    cluster.nodes["node-3"] = replace(cluster.nodes["node-0"], name="node-3")
    cluster.run(200)
    assert cluster.status.phase in (Phase.RUNNING, Phase.COMPLETED)
    assert cluster.status.gang == GangStatus()


def test_a_suspended_job_is_not_admitted() -> None:
    observed = build.observation(build.job(build.spec(suspend=True)), nodes={"node-0": build.node("node-0")})
    assert admitted_condition(plan_gang(observed)) == ("False", "Suspended")

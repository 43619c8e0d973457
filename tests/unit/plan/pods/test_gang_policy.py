"""Gang scheduling: objects of each gang API, and the timeout without one."""

from dataclasses import replace
from typing import Any

import pytest

from tests.unit.plan.plan_builders import (
    NOW,
    SETTINGS,
    agent,
    created,
    deleted,
    job,
    node,
    observed,
    pod,
    running,
    spec,
    with_status,
)
from tests.unit.plan.plan_cluster import FakeCluster
from trainium_contract.job import TrainingJobStatus
from trainium_contract.status.conditions import ConditionType, Phase
from trainium_contract.status.internal import GangStatus
from trainium_operator.plan.model.actions import ApplyGroup, CreatePod, Plan
from trainium_operator.plan.model.conditions import find_condition
from trainium_operator.plan.model.observed import GangApi, Observed, PodPhase
from trainium_operator.plan.plan import plan
from trainium_operator.plan.pods.gang_policy import pause_seconds
from trainium_operator.plan.report.write_throttle import COUNT_INTERVAL_SECONDS

NATIVE = {GangApi.SCHEDULING_GROUP: "scheduling.k8s.io/v1alpha2"}
OLD_NATIVE = {GangApi.WORKLOAD_REF: "scheduling.k8s.io/v1alpha1"}
COSCHEDULING = {GangApi.COSCHEDULING: "scheduling.x-k8s.io/v1alpha1"}
ALL = {**COSCHEDULING, **OLD_NATIVE, **NATIVE}


def new_job(scheduling: dict[str, Any] | None = None, **workers: Any) -> Observed:
    return observed(job(spec(workers={"replicas": 4, "spares": 1, **workers}, scheduling=scheduling or {})))


def planned(seen: Observed, served: dict[GangApi, str] | None = None) -> Plan:
    return plan(seen, replace(SETTINGS, gang_apis=served or {}))


def manifests(result: Plan) -> list[Any]:
    return [action.manifest for action in result.actions if isinstance(action, CreatePod)]


def group(result: Plan) -> Any:
    manifests = [action.manifest for action in result.actions if isinstance(action, ApplyGroup)]
    assert len(manifests) <= 1
    return manifests[0] if manifests else None


def admitted(result: Plan) -> tuple[str, str]:
    condition = find_condition(result.status, ConditionType.ADMITTED)
    assert condition is not None
    return condition.status.value, condition.reason


def test_a_native_gang_is_a_pod_group_of_the_smallest_size_that_pods_name() -> None:
    result = planned(new_job(), NATIVE)
    made = group(result)
    assert (made["apiVersion"], made["kind"]) == ("scheduling.k8s.io/v1alpha2", "PodGroup")
    assert made["spec"] == {"schedulingPolicy": {"gang": {"minCount": 4}}}, "the spare is not part of the minimum"
    assert made["metadata"]["ownerReferences"][0]["uid"] == "job-uid"
    assert {each["spec"]["schedulingGroup"]["podGroupName"] for each in manifests(result)} == {made["metadata"]["name"]}
    kinds = [type(action) for action in result.actions]
    assert kinds.index(ApplyGroup) < kinds.index(CreatePod), "a pod without its group waits for it"


def test_the_least_of_an_elastic_job_is_its_smallest_legal_size() -> None:
    assert group(planned(new_job(minReplicas=2), NATIVE))["spec"]["schedulingPolicy"]["gang"]["minCount"] == 2


def test_kubernetes_1_35_has_a_workload_that_pods_refer_to() -> None:
    result = planned(new_job(), OLD_NATIVE)
    made = group(result)
    assert made["kind"] == "Workload"
    assert made["spec"]["podGroups"] == [{"name": "workers", "policy": {"gang": {"minCount": 4}}}]
    assert made["spec"]["controllerRef"] == {"apiGroup": "trainium.dev", "kind": "TrainingJob", "name": "demo"}
    assert manifests(result)[0]["spec"]["workloadRef"] == {"name": made["metadata"]["name"], "podGroup": "workers"}


def test_coscheduling_has_a_pod_group_and_a_label() -> None:
    result = planned(new_job({"gang": "Coscheduling"}), ALL)
    made = group(result)
    assert (made["apiVersion"], made["spec"]) == ("scheduling.x-k8s.io/v1alpha1", {"minMember": 4})
    assert manifests(result)[0]["metadata"]["labels"]["scheduling.x-k8s.io/pod-group"] == made["metadata"]["name"]


@pytest.mark.parametrize(
    ("scheduling", "served", "kind"),
    [
        ({}, {}, None),
        ({}, ALL, "scheduling.k8s.io/v1alpha2"),
        ({}, COSCHEDULING, "scheduling.x-k8s.io/v1alpha1"),
        ({"gang": "None"}, ALL, None),
        ({"gang": "Native"}, COSCHEDULING, None),
        ({"queueName": "team"}, ALL, None),
    ],
)
def test_the_first_api_that_is_served_and_wanted_is_used(
    scheduling: dict[str, Any], served: dict[GangApi, str], kind: str | None
) -> None:
    made = group(planned(new_job(scheduling), served))
    assert (made and made["apiVersion"]) == kind


def test_a_gang_that_cannot_be_scheduled_is_reported() -> None:
    result = planned(new_job({"gang": "Native"}), COSCHEDULING)
    condition = find_condition(result.status, ConditionType.ADMITTED)
    assert condition is not None
    assert "does not serve the gang API that was asked for, Native" in condition.message
    assert len(manifests(result)) == 5, "the time-out does it instead"


def test_a_single_worker_is_no_gang() -> None:
    assert group(planned(new_job(replicas=1, spares=0), NATIVE)) is None


def test_newcomers_of_a_running_job_are_not_in_a_group() -> None:
    seen = running(4)
    seen = replace(seen, pods=tuple(each for each in seen.pods if each.ordinal != 3))
    result = planned(seen, NATIVE)
    assert created(result) == ["demo-w-4"]
    assert group(result) is None
    assert "schedulingGroup" not in manifests(result)[0]["spec"]


def test_a_pending_gang_pod_is_recreated_without_the_group_after_the_start() -> None:
    waiting = pod(4, phase=PodPhase.PENDING, node="", ip="", gang="demo-12345678", scheduled=False)
    bound = replace(waiting, node="node-4")
    for extra, expected in ((waiting, {"demo-w-4": None}), (bound, {})):
        seen = running(4, pods=(*(pod(at) for at in range(4)), extra), job_spec=spec(workers={"spares": 1}))
        assert deleted(planned(seen, NATIVE)) == expected


def test_another_smallest_size_before_the_start_makes_another_group() -> None:
    first = group(planned(new_job(), NATIVE))["metadata"]["name"]
    pods = tuple(
        pod(at, phase=PodPhase.PENDING, node="", ip="", gang=first, scheduled=False, template_hash="")
        for at in range(5)
    )
    changed = observed(job(spec(workers={"replicas": 3, "spares": 1}), TrainingJobStatus(next_pod_ordinal=5)), pods)
    result = planned(changed, NATIVE)
    assert set(deleted(result)) == {each.name for each in pods}
    assert group(result)["metadata"]["name"] != first


# The time-out


def partial(bound: int, *, since: float | None = None, elastic: bool = False, **gang: Any) -> Observed:
    """Return a job of four whose first `bound` workers hold nodes."""
    workers = {"replicas": 4, "spares": 0, **({"minReplicas": 2} if elastic else {})}
    status = TrainingJobStatus(
        desired=4, next_pod_ordinal=4, gang=GangStatus(holding_since=since, **gang), waiting_since=NOW - 1
    )
    pods = tuple(
        pod(at) if at < bound else pod(at, phase=PodPhase.PENDING, node="", ip="", scheduled=False) for at in range(4)
    )
    return observed(job(spec(workers=workers), status), pods, {at: agent(at) for at in range(bound)})


def test_a_partial_gang_releases_its_nodes_after_the_timeout() -> None:
    waiting = planned(partial(3))
    assert waiting.status.gang.holding_since == NOW
    assert deleted(waiting) == {}
    result = planned(partial(3, since=NOW - 600))
    assert set(deleted(result)) == {f"demo-w-{at}" for at in range(4)}
    assert created(result) == []
    assert result.status.gang.releases == 1
    assert result.status.gang.retry_at == NOW + pause_seconds("job-uid", 1)
    assert admitted(result) == ("False", "GangTimedOut")
    assert [event.reason for event in result.events if event.reason == "GangTimedOut"] == ["GangTimedOut"]


def test_holding_since_is_not_written_while_pods_are_being_bound() -> None:
    """Nor is it one that nothing is wrong with the first of those nodes."""
    seen = partial(3)
    status = planned(replace(seen, nodes={})).status
    held = with_status(seen, status.replaced(gang=GangStatus()))
    assert find_condition(status, ConditionType.NODES_HEALTHY) is None
    assert find_condition(planned(held).status, ConditionType.NODES_HEALTHY) is not None
    waiting = planned(replace(held, status_written=NOW - 1))
    assert waiting.status == held.job.status
    assert waiting.requeue_after == pytest.approx(COUNT_INTERVAL_SECONDS - 1)
    written = planned(replace(held, status_written=NOW - COUNT_INTERVAL_SECONDS))
    assert written.status.gang.holding_since == NOW


def test_that_nodes_are_no_longer_held_is_written_at_once() -> None:
    """Else those of the next attempt would be released too early."""
    seen = partial(0, since=NOW - 300)
    held = with_status(seen, planned(seen).status.replaced(gang=seen.job.status.gang))
    assert planned(replace(held, status_written=NOW)).status.gang.holding_since is None


def test_a_job_that_waits_for_nodes_shows_until_when() -> None:
    admitted = find_condition(planned(partial(3)).status, ConditionType.ADMITTED)
    assert admitted is not None
    assert admitted.message == (
        "not all workers have a node; if too few have one after 600 s, the job releases these nodes"
    )


def test_a_crash_after_a_gang_timeout_reports_it_once() -> None:
    first = planned(partial(3, since=NOW - 600))
    seen = partial(3)
    again = planned(replace(seen, job=replace(seen.job, status=first.status), now=NOW + 1))
    assert set(deleted(again)) == {f"demo-w-{at}" for at in range(4)}
    assert again.status.gang == first.status.gang
    assert again.events == ()


def test_an_elastic_job_that_can_start_smaller_keeps_its_nodes() -> None:
    result = planned(partial(3, since=NOW - 600, elastic=True))
    assert deleted(result) == {}
    assert result.status.gang.holding_since is None
    later = partial(3, elastic=True)
    status = later.job.status.model_copy(update={"waiting_since": NOW - 121})
    started = planned(with_status(later, status))
    assert started.status.membership.size == 3


def test_an_elastic_job_that_cannot_start_at_all_releases_its_nodes() -> None:
    assert len(deleted(planned(partial(1, since=NOW - 600, elastic=True)))) == 4


def test_a_gang_without_nodes_holds_nothing() -> None:
    assert planned(partial(0)).status.gang.holding_since is None


def test_pauses_grow_and_are_deterministic_for_each_job() -> None:
    pauses = [pause_seconds("one", times) for times in range(1, 12)]
    assert pauses == [pause_seconds("one", times) for times in range(1, 12)]
    assert all(15 <= pause <= 900 for pause in pauses)
    assert pauses[5] > pauses[0]
    assert len({pause_seconds(f"job-{at}", 1) for at in range(50)}) == 50


@pytest.mark.parametrize(("times", "around"), [(1, 30), (2, 60), (5, 480), (6, 600), (40, 600)])
def test_a_pause_doubles_from_half_a_minute_to_ten_minutes(times: int, around: int) -> None:
    pauses = [pause_seconds(f"job-{at}", times) / around for at in range(2000)]
    assert 0.5 <= min(pauses) < 0.505
    assert 1.495 < max(pauses) <= 1.5


def test_a_job_without_enough_nodes_retries_until_it_starts() -> None:
    cluster = FakeCluster(spec(workers={"replicas": 4}, scheduling={"gangTimeoutSeconds": 60}), nodes=3)
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
    seen = observed(job(spec(suspend=True)), nodes={"node-0": node("node-0")})
    assert admitted(planned(seen)) == ("False", "Suspended")

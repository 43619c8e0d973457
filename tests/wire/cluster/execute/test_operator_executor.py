"""The executor: order of writes, conflicts, refusals, limits of creations and deletions, and the membership record."""

import asyncio
import copy
import json
from dataclasses import replace
from typing import Any

import pytest

from tests.testing.api.fake_api_server import http_error
from tests.testing.suite.virtual_time import in_virtual_time, run_pending_tasks
from tests.wire.cluster.execute.executor_harness import ExecutorHarness, replace_status
from trainium_contract.api_server.errors import ConflictError, ForbiddenError
from trainium_contract.status.conditions import Phase
from trainium_operator.cluster.api import resources
from trainium_operator.cluster.api.client import Api
from trainium_operator.cluster.api.resources import CONFIG_MAPS
from trainium_operator.cluster.api.transport import HttpResponse
from trainium_operator.cluster.cache.membership_record import read_membership
from trainium_operator.cluster.execute.deletion_limit import MIN_DELETIONS, ForceDeleteLimitError
from trainium_operator.cluster.execute.executor import MAX_DELETIONS_DURING_START
from trainium_operator.plan.features.network_policy import build_network_policy
from trainium_operator.plan.manifests.config_maps import build_membership_map
from trainium_operator.plan.model.actions import (
    ApplyObject,
    ApplyOptional,
    CreatePod,
    DeletePod,
    Event,
    Plan,
)
from trainium_operator.plan.model.observed import WorkerIngress
from trainium_operator.plan.model.reasons import Reason
from trainium_operator.plan.pods.disruption_budget import build_budget


class ConcurrentRequests:
    """A counter of the requests of one method that are in flight at a time."""

    def __init__(self, harness: ExecutorHarness, method: str) -> None:
        self.most = self._current = 0
        self._method, self._request = method, harness.cluster.request
        harness.cluster.request = self._count_request  # type: ignore[method-assign]

    async def _count_request(self, method: str, *arguments: Any, **options: Any) -> Any:
        if method != self._method:
            return await self._request(method, *arguments, **options)
        self._current += 1
        self.most = max(self.most, self._current)
        await asyncio.sleep(0.02)
        self._current -= 1
        return await self._request(method, *arguments, **options)


@in_virtual_time
async def test_the_status_is_written_before_pods_and_events(harness: ExecutorHarness) -> None:
    writer = asyncio.create_task(harness.recorder.run())
    lost = Event(reason=Reason.WORKER_FAILED, note="failed", warning=True, pod="j-w-0")
    plan = Plan(
        status=replace_status(harness.job, phase=Phase.STARTING), actions=harness.pod_creations(2), events=(lost,)
    )
    await harness.executor.execute(harness.job, plan)
    await run_pending_tasks()
    paths = [write.path.rpartition("/")[2] for write in harness.cluster.writes]
    assert paths[0] == "status"
    assert sorted(paths[1:]) == ["events", "pods", "pods"]
    (event,) = harness.events()
    assert event["related"] == {"apiVersion": "v1", "kind": "Pod", "name": "j-w-0", "namespace": "default"}
    writer.cancel()


@in_virtual_time
async def test_an_unchanged_status_is_not_written(harness: ExecutorHarness) -> None:
    await harness.execute()
    assert harness.cluster.writes == []


@in_virtual_time
async def test_a_status_from_an_old_copy_is_a_conflict_that_renews_the_copy(harness: ExecutorHarness) -> None:
    harness.cluster.change(resources.JOBS, "default", "j", lambda raw: raw["spec"].update(suspend=True))
    with pytest.raises(ConflictError):
        await harness.execute(*harness.pod_creations(1), phase=Phase.STARTING)
    assert harness.cluster.names(resources.PODS) == []
    assert harness.job.spec.suspend
    await harness.execute(*harness.pod_creations(1), phase=Phase.STARTING)
    assert harness.cluster.names(resources.PODS) == ["j-w-0"]


@in_virtual_time
async def test_a_repeated_plan_changes_nothing(harness: ExecutorHarness) -> None:
    config = ApplyObject(harness.owned_object("j-config", kind="ConfigMap", data={"trainer.yaml": "x"}))
    actions = (config, *harness.pod_creations(5), harness.publish_action(1, 0))
    await harness.execute(*actions)
    version = harness.cluster.version
    await harness.execute(*actions)
    assert harness.cluster.version == version
    assert harness.cluster.names(resources.PODS) == [f"j-w-{number}" for number in range(5)]
    assert harness.cluster.names(resources.CONFIG_MAPS) == ["j-config", "j-membership"]
    assert harness.published == [1, 1]


@in_virtual_time
async def test_writes_are_in_the_caches_at_once(harness: ExecutorHarness) -> None:
    await harness.execute(*harness.pod_creations(3), harness.publish_action(1, 0), phase=Phase.STARTING)
    assert harness.job.status.phase is Phase.STARTING
    pods = harness.caches.pods.store.list_owned_by(harness.job.id)
    assert sorted(view.name for view in pods.values()) == ["j-w-0", "j-w-1", "j-w-2"]
    record = harness.caches.find_membership(harness.job)
    assert record is not None
    assert record.membership is not None
    assert record.membership.generation == 1


@in_virtual_time
async def test_a_pod_of_another_owner_is_a_conflict(harness: ExecutorHarness) -> None:
    harness.cluster.add(resources.PODS, {"metadata": {"name": "j-w-0"}})
    with pytest.raises(ConflictError, match="does not belong to this job"):
        await harness.execute(*harness.pod_creations(1))


@in_virtual_time
async def test_an_exceeded_quota_is_requested_once(harness: ExecutorHarness) -> None:
    harness.refuse_creations("pods", "exceeded quota")
    with pytest.raises(ForbiddenError, match="exceeded quota"):
        await harness.execute(*harness.pod_creations(100))
    assert sum(request[0] == "POST" for request in harness.cluster.requests) == 1


@pytest.mark.parametrize("written", ["a new budget", "a changed budget", "a configuration"])
@in_virtual_time
async def test_a_write_of_another_object_keeps_the_pause_of_creations(harness: ExecutorHarness, written: str) -> None:
    job = harness.job
    if written == "a changed budget":
        await harness.execute(ApplyObject(build_budget(job, 2)))
    harness.refuse_creations("pods", "exceeded quota")
    for pause in (1.0, 2.0, 4.0, 8.0):
        with pytest.raises(ForbiddenError):
            await harness.execute(*harness.pod_creations(2))
        assert harness.refusal_backoff.get_blocked_until(job.uid) == harness.now + pause
        other = (
            build_budget(job, int(pause))
            if "budget" in written
            else build_membership_map(job, harness.publish_action(1, 0).membership)
        )
        await harness.execute(ApplyObject(other))
        assert harness.refusal_backoff.get_blocked_until(job.uid) == harness.now + pause
        harness.now += pause
    harness.cluster.faults.clear()
    await harness.execute(*harness.pod_creations(2))
    assert harness.refusal_backoff.get_blocked_until(job.uid) == 0.0


@in_virtual_time
async def test_refusals_are_one_event_and_each_object_has_its_pause(harness: ExecutorHarness) -> None:
    writer = asyncio.create_task(harness.recorder.run())
    harness.refuse_creations("configmaps", "the namespace terminates")
    maps = [ApplyObject(harness.owned_object(f"j-{name}", kind="ConfigMap", data={})) for name in ("a", "b", "c")]
    for _ in range(2):
        with pytest.raises(ForbiddenError):
            await harness.execute(*maps)
        harness.now += 2.0
    await run_pending_tasks()
    (event,) = harness.events()
    assert event["reason"] == "WriteFailed"
    harness.cluster.faults.clear()
    await harness.execute(*maps[:2])
    assert harness.refusal_backoff.get_blocked_until(harness.job.uid) == harness.now, "the third object still pauses"
    await harness.execute(maps[2])
    assert harness.refusal_backoff.get_blocked_until(harness.job.uid) == 0.0
    writer.cancel()


@in_virtual_time
async def test_an_exceeded_quota_is_one_event_for_all_pod_names(harness: ExecutorHarness) -> None:
    numbers = iter(range(7, 99))

    def refuse_pods(method: str, path: str) -> Any:
        if method != "POST" or not path.endswith("pods"):
            return None
        number = next(numbers)
        return http_error(
            403,
            "Forbidden",
            f'pods "j-w-{number}" is forbidden: exceeded quota: team, used: cpu={number}; j-w-{number}',
        )

    writer = asyncio.create_task(harness.recorder.run())
    harness.cluster.faults.append(refuse_pods)
    for _ in range(5):
        with pytest.raises(ForbiddenError):
            await harness.execute(*harness.pod_creations(2))
        harness.now += 60.0
    await run_pending_tasks()
    (event,) = harness.events()
    assert "exceeded quota: team" in event["message"]
    assert (
        harness.refusal_backoff.find_refusal(harness.job.uid) == "Pod j-w-N: exceeded quota: team, used: cpu=11; j-w-N"
    )
    harness.cluster.faults.clear()
    await harness.execute(*harness.pod_creations(2))
    assert harness.refusal_backoff.find_refusal(harness.job.uid) == ""
    writer.cancel()


@in_virtual_time
async def test_an_applied_object_reverts_nested_edits(harness: ExecutorHarness) -> None:
    ingress = WorkerIngress(operator_namespace="system", operator_labels={"app": "operator"}, rules=())
    desired = {
        resources.DISRUPTION_BUDGETS: build_budget(harness.job, 3),
        resources.NETWORK_POLICIES: build_network_policy(harness.job, ingress),
    }
    for resource, manifest in desired.items():
        edited = copy.deepcopy(manifest)
        selector = edited["spec"]["selector" if resource is resources.DISRUPTION_BUDGETS else "podSelector"]
        selector["matchLabels"]["tier"] = "by hand"
        selector["matchExpressions"] = [{"key": "tier", "operator": "Exists"}]
        edited["spec"]["maxUnavailable"] = 1
        harness.cluster.add(resource, edited)
    await harness.execute(
        ApplyObject(desired[resources.DISRUPTION_BUDGETS]), ApplyOptional(desired[resources.NETWORK_POLICIES])
    )
    for resource, manifest in desired.items():
        name = manifest["metadata"]["name"]
        assert harness.cluster.get(resource, "default", name)["spec"] == manifest["spec"]


@in_virtual_time
async def test_no_creation_starts_after_a_refusal(harness: ExecutorHarness) -> None:
    def refuse_pods(method: str, path: str) -> Any:
        too_many = len(harness.cluster.names(resources.PODS)) >= 3
        return http_error(403, "Forbidden", "exceeded quota") if method == "POST" and too_many else None

    harness.cluster.faults.append(refuse_pods)
    with pytest.raises(ForbiddenError):
        await harness.execute(*harness.pod_creations(100), harness.publish_action(1, 0))
    # One, four, and eight more after the next two successes; none starts after the first refusal.
    assert 4 <= sum(request[0] == "POST" for request in harness.cluster.requests) <= 13
    assert harness.published == []
    assert len(harness.caches.pods.store) == 3


@in_virtual_time
async def test_at_most_sixty_four_pods_are_created_at_a_time(harness: ExecutorHarness) -> None:
    requests = ConcurrentRequests(harness, "POST")
    started = asyncio.get_running_loop().time()
    await harness.execute(*harness.pod_creations(1000))
    assert requests.most == 64
    assert len(harness.cluster.names(resources.PODS)) == 1000
    assert asyncio.get_running_loop().time() - started < 0.6


@pytest.mark.parametrize(("beside_a_start", "most"), [(True, MAX_DELETIONS_DURING_START), (False, 64)])
@in_virtual_time
async def test_few_ended_pods_are_deleted_at_a_time_during_a_start(
    harness: ExecutorHarness, beside_a_start: bool, most: int
) -> None:
    """The new pods are bound and started first; a job that only releases pods delays nothing."""
    await harness.execute(*harness.pod_creations(100))
    ended = [
        harness.cluster.get(resources.PODS, "default", name) for name in sorted(harness.cluster.names(resources.PODS))
    ]
    requests = ConcurrentRequests(harness, "DELETE")
    starts = harness.pod_creations(101)[100:] if beside_a_start else ()
    deletions = (DeletePod(raw["metadata"]["name"], raw["metadata"]["uid"], None) for raw in ended)
    await harness.execute(*starts, *deletions)
    assert requests.most == most
    assert len(harness.cluster.names(resources.PODS)) == len(starts)


@in_virtual_time
async def test_deletion_of_a_missing_or_recreated_pod_succeeds(harness: ExecutorHarness) -> None:
    await harness.execute(*harness.pod_creations(2))
    uid = harness.pod_uids()["j-w-0"]
    await harness.execute(
        DeletePod("j-w-0", uid, 0), DeletePod("j-w-1", "an-earlier-one", None), DeletePod("j-w-7", "u", None)
    )
    assert harness.cluster.names(resources.PODS) == ["j-w-1"]
    assert [key[1] for key in harness.caches.pods.store.snapshot()] == ["j-w-1"]


@in_virtual_time
async def test_a_gracefully_deleted_pod_is_deleting_at_once(harness: ExecutorHarness) -> None:
    harness.cluster.graceful_pods = True
    await harness.execute(*harness.pod_creations(1))
    uid = harness.pod_uids()["j-w-0"]
    await harness.execute(DeletePod("j-w-0", uid, None))
    view = harness.caches.pods.store.get(("default", "j-w-0"))
    assert view is not None
    assert view.deleting


@in_virtual_time
async def test_forced_deletions_are_limited_and_creations_are_not(harness: ExecutorHarness) -> None:
    await harness.execute(*harness.pod_creations(12))
    uids = harness.pod_uids()
    deletions = tuple(DeletePod(name, uid, 0) for name, uid in uids.items())
    replacement = CreatePod(harness.owned_object("j-w-12", spec={"containers": [{"name": "worker"}]}))
    with pytest.raises(ForceDeleteLimitError):
        await harness.execute(*deletions, replacement)
    remaining = harness.cluster.names(resources.PODS)
    assert len(remaining) == 12 - MIN_DELETIONS + 1
    assert "j-w-12" in remaining
    graceful = tuple(DeletePod(name, uids[name], None) for name in remaining if name in uids)
    await harness.execute(*graceful)
    assert harness.cluster.names(resources.PODS) == ["j-w-12"]


@in_virtual_time
async def test_ended_pods_are_deleted_despite_refused_creations(harness: ExecutorHarness) -> None:
    await harness.execute(*harness.pod_creations(3))
    uids = harness.pod_uids()
    deletions = tuple(DeletePod(name, uid, None) for name, uid in uids.items())

    harness.refuse_creations("pods", "exceeded quota")
    with pytest.raises(ForbiddenError, match="exceeded quota"):
        await harness.execute(CreatePod(harness.owned_object("j-w-7")), *deletions, harness.publish_action(1, 0))
    assert harness.cluster.names(resources.PODS) == []
    assert harness.published == []


@in_virtual_time
async def test_a_pod_removed_during_its_deletion_leaves_the_cache(harness: ExecutorHarness) -> None:
    await harness.execute(*harness.pod_creations(1))
    raw = harness.cluster.get(resources.PODS, "default", "j-w-0")
    # A real API server answers with the last state, without a resourceVersion.
    last = {**raw, "metadata": {**raw["metadata"], "deletionTimestamp": "2026-01-01T00:00:00Z"}, "kind": "Pod"}
    del last["metadata"]["resourceVersion"]

    def answer_deletion(method: str, path: str) -> Any:
        return (
            HttpResponse(200, {}, json.dumps(last).encode()) if method == "DELETE" and path.endswith("j-w-0") else None
        )

    harness.cluster.faults.append(answer_deletion)
    await harness.execute(DeletePod("j-w-0", raw["metadata"]["uid"], None))
    assert harness.caches.pods.store.get(("default", "j-w-0")) is None


@in_virtual_time
async def test_an_object_with_edited_labels_is_reverted(harness: ExecutorHarness) -> None:
    await harness.caches.config_maps.refresh()
    config = ApplyObject(harness.owned_object("j-config", kind="ConfigMap", data={"trainer.yaml": "x"}))
    await harness.execute(config)

    def edit(raw: dict[str, Any]) -> None:
        raw["metadata"]["labels"] = {"mine": "too"}
        raw["data"] = {"trainer.yaml": "y", "more": "z"}

    harness.cluster.change(resources.CONFIG_MAPS, "default", "j-config", edit)
    await harness.caches.config_maps.refresh()
    assert len(harness.caches.config_maps.store) == 0
    await harness.execute(config)
    config_map = harness.cluster.get(resources.CONFIG_MAPS, "default", "j-config")
    assert config_map["data"] == {"trainer.yaml": "x"}
    assert config_map["metadata"]["labels"].items() >= config.manifest["metadata"]["labels"].items()
    assert len(harness.caches.config_maps.store) == 1


@in_virtual_time
async def test_the_plan_of_a_deleted_job_creates_nothing(harness: ExecutorHarness) -> None:
    job = harness.job
    await harness.execute(*harness.pod_creations(1))
    harness.cluster.remove(resources.JOBS, "default", "j")
    assert harness.cluster.names(resources.PODS) == []
    plan = Plan(status=replace_status(job, phase=Phase.STARTING), actions=harness.pod_creations(1))
    with pytest.raises(Exception, match="not found"):
        await harness.executor.execute(replace(job), plan)
    assert harness.caches.jobs.store.get(("default", "j")) is None
    assert harness.cluster.names(resources.PODS) == []


@in_virtual_time
async def test_a_generation_has_one_membership(harness: ExecutorHarness) -> None:
    await harness.execute(harness.publish_action(1, 0))
    with pytest.raises(ConflictError):
        await harness.execute(harness.publish_action(1, 0, ip="10.9.9.9"))
    await harness.execute(harness.publish_action(2, 1))
    with pytest.raises(ConflictError, match="holds generation 2, not 1"):
        await harness.execute(harness.publish_action(2, 1, ip="10.9.9.9"))
    assert harness.published == [1, 2]


@in_virtual_time
async def test_a_known_record_is_replaced_in_one_request(harness: ExecutorHarness) -> None:
    await harness.execute(harness.publish_action(1, 0))
    harness.cluster.requests.clear()
    second = harness.publish_action(2, 1, "10.0.0.2")
    await harness.execute(second)
    path = CONFIG_MAPS.build_path("default", "j-membership")
    assert harness.cluster.requests == [("PATCH", path)]
    record = harness.caches.find_membership(harness.job)
    assert record is not None
    assert record.membership is second.membership, "the record shares the published membership"
    assert read_membership(harness.cluster.get(CONFIG_MAPS, "default", "j-membership")) == second.membership


@in_virtual_time
async def test_a_changed_record_is_read_before_it_is_replaced(harness: ExecutorHarness) -> None:
    await harness.execute(harness.publish_action(1, 0))
    foreign = {**harness.publish_action(2, 1, "10.9.9.9").manifest, "metadata": {"labels": {"of": "another operator"}}}
    await Api(harness.cluster).merge(CONFIG_MAPS, "default", "j-membership", foreign)
    with pytest.raises(ConflictError, match="holds generation 2, not 1"):
        await harness.execute(harness.publish_action(2, 1))
    assert harness.published == [1]
    await Api(harness.cluster).delete(CONFIG_MAPS, "default", "j-membership")
    await harness.execute(harness.publish_action(3, 2))
    assert harness.published == [1, 3], "the user deleted it"


@in_virtual_time
async def test_foreign_data_in_the_record_is_removed_by_the_next_generation(harness: ExecutorHarness) -> None:
    await harness.execute(harness.publish_action(1, 0))
    await Api(harness.cluster).merge(CONFIG_MAPS, "default", "j-membership", {"data": {"theirs": "x"}})
    await harness.caches.config_maps.refresh()
    await harness.execute(harness.publish_action(2, 1))
    assert "theirs" not in harness.cluster.get(CONFIG_MAPS, "default", "j-membership").get("data", {})
    assert harness.published == [1, 2]


@in_virtual_time
async def test_the_record_of_an_earlier_job_with_the_name_is_a_conflict(harness: ExecutorHarness) -> None:
    stale = harness.owned_object("j-membership", data={})
    stale["metadata"]["ownerReferences"][0]["uid"] = "an-earlier-job"
    harness.cluster.add(CONFIG_MAPS, stale)
    with pytest.raises(ConflictError, match="belongs to an earlier job"):
        await harness.execute(harness.publish_action(1, 0))

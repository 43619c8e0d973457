"""The executor: order of writes, conflicts, refusals, limits of creations and deletions, and the membership record."""

import asyncio
import copy
import json
from dataclasses import replace
from typing import Any

import pytest

from tests.testing.api.fake_kubernetes import http_error
from tests.testing.suite.virtual_time import in_virtual_time, run_pending_tasks
from tests.wire.cluster.execute.execution_world import World, replace_status
from trainium_contract.status.conditions import Phase
from trainium_operator.cluster.api import resources
from trainium_operator.cluster.api.client import Api
from trainium_operator.cluster.api.errors import ConflictError, ForbiddenError
from trainium_operator.cluster.api.resources import CONFIG_MAPS
from trainium_operator.cluster.api.transport import HttpResponse
from trainium_operator.cluster.cache.membership_record import read_membership
from trainium_operator.cluster.execute.deletion_limit import LEAST, ForceDeleteLimitError
from trainium_operator.cluster.execute.executor import MAX_DELETIONS_DURING_START
from trainium_operator.plan.features.network_policy.policy import build_network_policy
from trainium_operator.plan.manifests.config_maps import build_membership_map
from trainium_operator.plan.model.actions import (
    ApplyObject,
    ApplyPolicy,
    CreatePod,
    DeletePod,
    EventIntent,
    EventKind,
    EventType,
    Plan,
)
from trainium_operator.plan.model.observed import WorkerIngress
from trainium_operator.plan.pods.disruption_budget import build_budget


class ConcurrentRequests:
    """A counter of the requests of one method that are in flight at a time."""

    def __init__(self, world: World, method: str) -> None:
        self.most = self._now = 0
        self._method, self._request = method, world.cluster.request
        world.cluster.request = self._counted  # type: ignore[method-assign]

    async def _counted(self, method: str, *arguments: Any, **options: Any) -> Any:
        if method != self._method:
            return await self._request(method, *arguments, **options)
        self._now += 1
        self.most = max(self.most, self._now)
        await asyncio.sleep(0.02)
        self._now -= 1
        return await self._request(method, *arguments, **options)


@in_virtual_time
async def test_the_status_is_written_before_pods_and_events(world: World) -> None:
    writer = asyncio.create_task(world.recorder.run())
    intent = EventIntent(EventType.WARNING, "WorkerLost", "gone", EventKind.POD, "j-w-0")
    plan = Plan(status=replace_status(world.job, phase=Phase.STARTING), actions=world.pods(2), events=(intent,))
    await world.executor.execute(world.job, plan)
    await run_pending_tasks()
    paths = [write.path.rpartition("/")[2] for write in world.cluster.writes]
    assert paths[0] == "status"
    assert sorted(paths[1:]) == ["events", "pods", "pods"]
    (event,) = world.events()
    assert event["related"] == {"apiVersion": "v1", "kind": "Pod", "name": "j-w-0", "namespace": "default"}
    writer.cancel()


@in_virtual_time
async def test_an_unchanged_status_is_not_written(world: World) -> None:
    await world.do()
    assert world.cluster.writes == []


@in_virtual_time
async def test_a_status_from_an_old_copy_is_a_conflict_that_renews_the_copy(world: World) -> None:
    world.cluster.change(resources.JOBS, "default", "j", lambda raw: raw["spec"].update(suspend=True))
    with pytest.raises(ConflictError):
        await world.do(*world.pods(1), phase=Phase.STARTING)
    assert world.cluster.names(resources.PODS) == []
    assert world.job.spec.suspend
    await world.do(*world.pods(1), phase=Phase.STARTING)
    assert world.cluster.names(resources.PODS) == ["j-w-0"]


@in_virtual_time
async def test_a_repeated_plan_changes_nothing(world: World) -> None:
    config = ApplyObject(world.owned("j-config", kind="ConfigMap", data={"trainer.yaml": "x"}))
    actions = (config, *world.pods(5), world.publication(1, 0))
    await world.do(*actions)
    version = world.cluster.version
    await world.do(*actions)
    assert world.cluster.version == version
    assert world.cluster.names(resources.PODS) == [f"j-w-{number}" for number in range(5)]
    assert world.cluster.names(resources.CONFIG_MAPS) == ["j-config", "j-membership"]
    assert world.published == [1, 1]


@in_virtual_time
async def test_writes_are_in_the_caches_at_once(world: World) -> None:
    await world.do(*world.pods(3), world.publication(1, 0), phase=Phase.STARTING)
    assert world.job.status.phase is Phase.STARTING
    pods = world.caches.pods.store.owned_by(world.job.id)
    assert sorted(view.name for view in pods.values()) == ["j-w-0", "j-w-1", "j-w-2"]
    record = world.caches.find_membership(world.job)
    assert record is not None
    assert record.membership is not None
    assert record.membership.generation == 1


@in_virtual_time
async def test_a_pod_of_another_owner_is_a_conflict(world: World) -> None:
    world.cluster.add(resources.PODS, {"metadata": {"name": "j-w-0"}})
    with pytest.raises(ConflictError, match="does not belong to this job"):
        await world.do(*world.pods(1))


@in_virtual_time
async def test_an_exceeded_quota_is_asked_once(world: World) -> None:
    world.refuse_creations("pods", "exceeded quota")
    with pytest.raises(ForbiddenError, match="exceeded quota"):
        await world.do(*world.pods(100))
    assert sum(request[0] == "POST" for request in world.cluster.requests) == 1


@pytest.mark.parametrize("written", ["a budget that is new", "a budget that is changed", "a configuration"])
@in_virtual_time
async def test_a_write_of_another_object_keeps_the_pause_of_creations(world: World, written: str) -> None:
    job = world.job
    if written == "a budget that is changed":
        await world.do(ApplyObject(build_budget(job, 2)))
    world.refuse_creations("pods", "exceeded quota")
    for pause in (1.0, 2.0, 4.0, 8.0):
        with pytest.raises(ForbiddenError):
            await world.do(*world.pods(2))
        assert world.creation_backoff.blocked_until(job.uid) == world.now + pause
        other = (
            build_budget(job, int(pause))
            if "budget" in written
            else build_membership_map(job, world.publication(1, 0).membership)
        )
        await world.do(ApplyObject(other))
        assert world.creation_backoff.blocked_until(job.uid) == world.now + pause
        world.now += pause
    world.cluster.faults.clear()
    await world.do(*world.pods(2))
    assert world.creation_backoff.blocked_until(job.uid) == 0.0


@in_virtual_time
async def test_refusals_are_one_event_and_each_object_has_its_pause(world: World) -> None:
    writer = asyncio.create_task(world.recorder.run())
    world.refuse_creations("configmaps", "it goes")
    maps = [ApplyObject(world.owned(f"j-{name}", kind="ConfigMap", data={})) for name in ("a", "b", "c")]
    for _ in range(2):
        with pytest.raises(ForbiddenError):
            await world.do(*maps)
        world.now += 2.0
    await run_pending_tasks()
    (event,) = world.events()
    assert event["reason"] == "WriteFailed"
    world.cluster.faults.clear()
    await world.do(*maps[:2])
    assert world.creation_backoff.blocked_until(world.job.uid) == world.now, "the pause of the third"
    await world.do(maps[2])
    assert world.creation_backoff.blocked_until(world.job.uid) == 0.0
    writer.cancel()


@in_virtual_time
async def test_an_exceeded_quota_is_one_event_for_all_pod_names(world: World) -> None:
    tries = iter(range(7, 99))

    def full(method: str, path: str) -> Any:
        if method != "POST" or not path.endswith("pods"):
            return None
        at = next(tries)
        return http_error(
            403, "Forbidden", f'pods "j-w-{at}" is forbidden: exceeded quota: team, used: cpu={at}; j-w-{at}'
        )

    writer = asyncio.create_task(world.recorder.run())
    world.cluster.faults.append(full)
    for _ in range(5):
        with pytest.raises(ForbiddenError):
            await world.do(*world.pods(2))
        world.now += 60.0
    await run_pending_tasks()
    (event,) = world.events()
    assert "exceeded quota: team" in event["note"]
    assert world.creation_backoff.refusal(world.job.uid) == "exceeded quota: team, used: cpu=11; j-w-N"
    world.cluster.faults.clear()
    await world.do(*world.pods(2))
    assert world.creation_backoff.refusal(world.job.uid) == ""
    writer.cancel()


@in_virtual_time
async def test_an_applied_object_reverts_nested_edits(world: World) -> None:
    ingress = WorkerIngress(operator_namespace="system", operator_labels={"app": "operator"}, rules=())
    desired = {
        resources.DISRUPTION_BUDGETS: build_budget(world.job, 3),
        resources.NETWORK_POLICIES: build_network_policy(world.job, ingress),
    }
    for resource, manifest in desired.items():
        edited = copy.deepcopy(manifest)
        selector = edited["spec"]["selector" if resource is resources.DISRUPTION_BUDGETS else "podSelector"]
        selector["matchLabels"]["tier"] = "by hand"
        selector["matchExpressions"] = [{"key": "tier", "operator": "Exists"}]
        edited["spec"]["maxUnavailable"] = 1
        world.cluster.add(resource, edited)
    await world.do(ApplyObject(desired[resources.DISRUPTION_BUDGETS]), ApplyPolicy(desired[resources.NETWORK_POLICIES]))
    for resource, manifest in desired.items():
        name = manifest["metadata"]["name"]
        assert world.cluster.get(resource, "default", name)["spec"] == manifest["spec"]


@in_virtual_time
async def test_no_creation_starts_after_a_refusal(world: World) -> None:
    def full(method: str, path: str) -> Any:
        too_many = len(world.cluster.names(resources.PODS)) >= 3
        return http_error(403, "Forbidden", "exceeded quota") if method == "POST" and too_many else None

    world.cluster.faults.append(full)
    with pytest.raises(ForbiddenError):
        await world.do(*world.pods(100), world.publication(1, 0))
    # One, four, and eight more after the next two successes; none starts after the first refusal.
    assert 4 <= sum(request[0] == "POST" for request in world.cluster.requests) <= 13
    assert world.published == []
    assert len(world.caches.pods.store) == 3


@in_virtual_time
async def test_at_most_sixty_four_pods_are_created_at_a_time(world: World) -> None:
    requests = ConcurrentRequests(world, "POST")
    started = asyncio.get_running_loop().time()
    await world.do(*world.pods(1000))
    assert requests.most == 64
    assert len(world.cluster.names(resources.PODS)) == 1000
    assert asyncio.get_running_loop().time() - started < 0.6


@pytest.mark.parametrize(("beside_a_start", "most"), [(True, MAX_DELETIONS_DURING_START), (False, 64)])
@in_virtual_time
async def test_few_ended_pods_are_deleted_at_a_time_during_a_start(
    world: World, beside_a_start: bool, most: int
) -> None:
    """The new pods are bound and started first; a job that only releases pods delays nothing."""
    await world.do(*world.pods(100))
    going = [world.cluster.get(resources.PODS, "default", name) for name in sorted(world.cluster.names(resources.PODS))]
    requests = ConcurrentRequests(world, "DELETE")
    starts = world.pods(101)[100:] if beside_a_start else ()
    deletions = (DeletePod(raw["metadata"]["name"], raw["metadata"]["uid"], None) for raw in going)
    await world.do(*starts, *deletions)
    assert requests.most == most
    assert len(world.cluster.names(resources.PODS)) == len(starts)


@in_virtual_time
async def test_deletion_of_a_missing_or_recreated_pod_succeeds(world: World) -> None:
    await world.do(*world.pods(2))
    uid = world.uids()["j-w-0"]
    await world.do(
        DeletePod("j-w-0", uid, 0), DeletePod("j-w-1", "an-earlier-one", None), DeletePod("j-w-7", "u", None)
    )
    assert world.cluster.names(resources.PODS) == ["j-w-1"]
    assert [key[1] for key in world.caches.pods.store.snapshot()] == ["j-w-1"]


@in_virtual_time
async def test_a_gracefully_deleted_pod_is_deleting_at_once(world: World) -> None:
    world.cluster.graceful_pods = True
    await world.do(*world.pods(1))
    uid = world.uids()["j-w-0"]
    await world.do(DeletePod("j-w-0", uid, None))
    view = world.caches.pods.store.get(("default", "j-w-0"))
    assert view is not None
    assert view.deleting


@in_virtual_time
async def test_forced_deletions_are_limited_and_creations_are_not(world: World) -> None:
    await world.do(*world.pods(12))
    uids = world.uids()
    deletions = tuple(DeletePod(name, uid, 0) for name, uid in uids.items())
    replacement = CreatePod(world.owned("j-w-12", spec={"containers": [{"name": "worker"}]}))
    with pytest.raises(ForceDeleteLimitError):
        await world.do(*deletions, replacement)
    remaining = world.cluster.names(resources.PODS)
    assert len(remaining) == 12 - LEAST + 1
    assert "j-w-12" in remaining
    gentle = tuple(DeletePod(name, uids[name], None) for name in remaining if name in uids)
    await world.do(*gentle)
    assert world.cluster.names(resources.PODS) == ["j-w-12"]


@in_virtual_time
async def test_ended_pods_are_deleted_despite_refused_creations(world: World) -> None:
    await world.do(*world.pods(3))
    uids = world.uids()
    deletions = tuple(DeletePod(name, uid, None) for name, uid in uids.items())

    world.refuse_creations("pods", "exceeded quota")
    with pytest.raises(ForbiddenError, match="exceeded quota"):
        await world.do(CreatePod(world.owned("j-w-7")), *deletions, world.publication(1, 0))
    assert world.cluster.names(resources.PODS) == []
    assert world.published == []


@in_virtual_time
async def test_a_pod_removed_during_its_deletion_leaves_the_cache(world: World) -> None:
    await world.do(*world.pods(1))
    raw = world.cluster.get(resources.PODS, "default", "j-w-0")
    # What a real API server answers then: the last state, which no resourceVersion names any more.
    last = {**raw, "metadata": {**raw["metadata"], "deletionTimestamp": "2026-01-01T00:00:00Z"}, "kind": "Pod"}
    del last["metadata"]["resourceVersion"]

    def removed(method: str, path: str) -> Any:
        return (
            HttpResponse(200, {}, json.dumps(last).encode()) if method == "DELETE" and path.endswith("j-w-0") else None
        )

    world.cluster.faults.append(removed)
    await world.do(DeletePod("j-w-0", raw["metadata"]["uid"], None))
    assert world.caches.pods.store.get(("default", "j-w-0")) is None


@in_virtual_time
async def test_an_object_with_edited_labels_is_reverted(world: World) -> None:
    await world.caches.config_maps.refresh()
    config = ApplyObject(world.owned("j-config", kind="ConfigMap", data={"trainer.yaml": "x"}))
    await world.do(config)

    def spoil(raw: dict[str, Any]) -> None:
        raw["metadata"]["labels"] = {"mine": "too"}
        raw["data"] = {"trainer.yaml": "y", "more": "z"}

    world.cluster.change(resources.CONFIG_MAPS, "default", "j-config", spoil)
    await world.caches.config_maps.refresh()
    assert len(world.caches.config_maps.store) == 0
    await world.do(config)
    found = world.cluster.get(resources.CONFIG_MAPS, "default", "j-config")
    assert found["data"] == {"trainer.yaml": "x"}
    assert found["metadata"]["labels"].items() >= config.manifest["metadata"]["labels"].items()
    assert len(world.caches.config_maps.store) == 1


@in_virtual_time
async def test_the_plan_of_a_deleted_job_creates_nothing(world: World) -> None:
    job = world.job
    await world.do(*world.pods(1))
    world.cluster.remove(resources.JOBS, "default", "j")
    assert world.cluster.names(resources.PODS) == []
    plan = Plan(status=replace_status(job, phase=Phase.STARTING), actions=world.pods(1))
    with pytest.raises(Exception, match="not found"):
        await world.executor.execute(replace(job), plan)
    assert world.caches.jobs.store.get(("default", "j")) is None
    assert world.cluster.names(resources.PODS) == []


@in_virtual_time
async def test_a_generation_has_one_membership(world: World) -> None:
    await world.do(world.publication(1, 0))
    with pytest.raises(ConflictError):
        await world.do(world.publication(1, 0, ip="10.9.9.9"))
    await world.do(world.publication(2, 1))
    with pytest.raises(ConflictError, match="holds generation 2, not 1"):
        await world.do(world.publication(2, 1, ip="10.9.9.9"))
    assert world.published == [1, 2]


@in_virtual_time
async def test_a_known_record_is_replaced_in_one_request(world: World) -> None:
    await world.do(world.publication(1, 0))
    world.cluster.requests.clear()
    second = world.publication(2, 1, "10.0.0.2")
    await world.do(second)
    path = CONFIG_MAPS.path("default", "j-membership")
    assert world.cluster.requests == [("PATCH", path)]
    record = world.caches.find_membership(world.job)
    assert record is not None
    assert record.membership is second.membership, "it is not read again, and not kept twice"
    assert read_membership(world.cluster.get(CONFIG_MAPS, "default", "j-membership")) == second.membership


@in_virtual_time
async def test_a_changed_record_is_read_before_it_is_replaced(world: World) -> None:
    await world.do(world.publication(1, 0))
    theirs = {**world.publication(2, 1, "10.9.9.9").manifest, "metadata": {"labels": {"of": "another operator"}}}
    await Api(world.cluster).merge(CONFIG_MAPS, "default", "j-membership", theirs)
    with pytest.raises(ConflictError, match="holds generation 2, not 1"):
        await world.do(world.publication(2, 1))
    assert world.published == [1]
    await Api(world.cluster).delete(CONFIG_MAPS, "default", "j-membership")
    await world.do(world.publication(3, 2))
    assert world.published == [1, 3], "the user deleted it"


@in_virtual_time
async def test_foreign_data_in_the_record_is_removed_by_the_next_generation(world: World) -> None:
    await world.do(world.publication(1, 0))
    await Api(world.cluster).merge(CONFIG_MAPS, "default", "j-membership", {"data": {"theirs": "x"}})
    await world.caches.config_maps.refresh()
    await world.do(world.publication(2, 1))
    assert "theirs" not in world.cluster.get(CONFIG_MAPS, "default", "j-membership").get("data", {})
    assert world.published == [1, 2]


@in_virtual_time
async def test_the_record_of_an_earlier_job_with_the_name_is_a_conflict(world: World) -> None:
    stale = world.owned("j-membership", data={})
    stale["metadata"]["ownerReferences"][0]["uid"] = "an-earlier-job"
    world.cluster.add(CONFIG_MAPS, stale)
    with pytest.raises(ConflictError, match="belongs to an earlier job"):
        await world.do(world.publication(1, 0))

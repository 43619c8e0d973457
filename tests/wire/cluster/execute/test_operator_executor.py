from __future__ import annotations

import asyncio
import copy
import json
from dataclasses import replace
from typing import Any

import pytest
from execution_world import World, replace_status

from tests.testing.api.fake_kubernetes import refuse
from tests.testing.suite.virtual_time import in_virtual_time, settle
from trainium_contract.status.conditions import Phase
from trainium_operator.cluster.api import resources
from trainium_operator.cluster.api.errors import ConflictError, ForbiddenError
from trainium_operator.cluster.api.transport import HttpResponse
from trainium_operator.cluster.execute.deletion_limit import LEAST, ForceDeleteLimitError
from trainium_operator.cluster.execute.executor import BESIDE_A_START
from trainium_operator.plan.features.network_policy.policy import network_policy
from trainium_operator.plan.manifests.config_maps import membership_map
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
from trainium_operator.plan.pods.disruption_budget import budget


class ConcurrentRequests:
    """The number of requests of one method that are in flight at a time."""

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
async def test_status_is_written_first_and_events_follow_it(world: World) -> None:
    writer = asyncio.create_task(world.recorder.run())
    intent = EventIntent(EventType.WARNING, "WorkerLost", "gone", EventKind.POD, "j-w-0")
    plan = Plan(status=replace_status(world.job, phase=Phase.STARTING), actions=world.pods(2), events=(intent,))
    await world.executor.execute(world.job, plan)
    await settle()
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
async def test_a_status_written_over_an_old_copy_is_refused_and_the_copy_renewed(world: World) -> None:
    world.cluster.change(resources.JOBS, "default", "j", lambda raw: raw["spec"].update(suspend=True))
    with pytest.raises(ConflictError):
        await world.do(*world.pods(1), phase=Phase.STARTING)
    assert world.cluster.names(resources.PODS) == []
    assert world.job.spec.suspend
    await world.do(*world.pods(1), phase=Phase.STARTING)
    assert world.cluster.names(resources.PODS) == ["j-w-0"]


@in_virtual_time
async def test_the_same_plan_twice_is_as_good_as_once(world: World) -> None:
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
async def test_own_writes_are_in_the_caches_at_once(world: World) -> None:
    await world.do(*world.pods(3), world.publication(1, 0), phase=Phase.STARTING)
    assert world.job.status.phase is Phase.STARTING
    pods = world.caches.pods.store.owned_by(world.job.id)
    assert sorted(view.name for view in pods.values()) == ["j-w-0", "j-w-1", "j-w-2"]
    record = world.caches.membership_of(world.job)
    assert record is not None
    assert record.membership is not None
    assert record.membership.generation == 1


@in_virtual_time
async def test_a_pod_of_that_name_without_our_owner_is_a_conflict(world: World) -> None:
    world.cluster.add(resources.PODS, {"metadata": {"name": "j-w-0"}})
    with pytest.raises(ConflictError, match="does not belong to this job"):
        await world.do(*world.pods(1))


@in_virtual_time
async def test_creations_start_slowly_so_that_a_full_quota_costs_one_refusal(world: World) -> None:
    world.refuse_creations("pods", "exceeded quota")
    with pytest.raises(ForbiddenError, match="exceeded quota"):
        await world.do(*world.pods(100))
    assert sum(request[0] == "POST" for request in world.cluster.requests) == 1


@pytest.mark.parametrize("written", ["a budget that is new", "a budget that is changed", "a configuration"])
@in_virtual_time
async def test_a_write_of_another_object_does_not_reset_the_pause_after_an_exceeded_quota(
    world: World, written: str
) -> None:
    job = world.job
    if written == "a budget that is changed":
        await world.do(ApplyObject(budget(job, 2)))
    world.refuse_creations("pods", "exceeded quota")
    for pause in (1.0, 2.0, 4.0, 8.0):
        with pytest.raises(ForbiddenError):
            await world.do(*world.pods(2))
        assert world.creation_backoff.blocked_until(job.uid) == world.now + pause
        other = (
            budget(job, int(pause)) if "budget" in written else membership_map(job, world.publication(1, 0).membership)
        )
        await world.do(ApplyObject(other))
        assert world.creation_backoff.blocked_until(job.uid) == world.now + pause
        world.now += pause
    world.cluster.faults.clear()
    await world.do(*world.pods(2))
    assert world.creation_backoff.blocked_until(job.uid) == 0.0


@in_virtual_time
async def test_several_refusals_at_once_are_one_event_and_each_object_has_its_pause(world: World) -> None:
    writer = asyncio.create_task(world.recorder.run())
    world.refuse_creations("configmaps", "it goes")
    maps = [ApplyObject(world.owned(f"j-{name}", kind="ConfigMap", data={})) for name in ("a", "b", "c")]
    for _ in range(2):
        with pytest.raises(ForbiddenError):
            await world.do(*maps)
        world.now += 2.0
    await settle()
    (event,) = world.events()
    assert event["reason"] == "WriteFailed"
    world.cluster.faults.clear()
    await world.do(*maps[:2])
    assert world.creation_backoff.blocked_until(world.job.uid) == world.now, "the pause of the third"
    await world.do(maps[2])
    assert world.creation_backoff.blocked_until(world.job.uid) == 0.0
    writer.cancel()


@in_virtual_time
async def test_a_quota_that_is_used_up_is_one_event_and_one_sentence_whatever_the_pods_are_called(world: World) -> None:
    tries = iter(range(7, 99))

    def full(method: str, path: str) -> Any:
        if method != "POST" or not path.endswith("pods"):
            return None
        at = next(tries)
        return refuse(403, "Forbidden", f'pods "j-w-{at}" is forbidden: exceeded quota: team, used: cpu={at}; j-w-{at}')

    writer = asyncio.create_task(world.recorder.run())
    world.cluster.faults.append(full)
    for _ in range(5):
        with pytest.raises(ForbiddenError):
            await world.do(*world.pods(2))
        world.now += 60.0
    await settle()
    (event,) = world.events()
    assert "exceeded quota: team" in event["note"]
    assert world.creation_backoff.refusal(world.job.uid) == "exceeded quota: team, used: cpu=11; j-w-N"
    world.cluster.faults.clear()
    await world.do(*world.pods(2))
    assert world.creation_backoff.refusal(world.job.uid) == ""
    writer.cancel()


@in_virtual_time
async def test_applying_an_object_reverts_an_edit_at_any_depth(world: World) -> None:
    ingress = WorkerIngress(operator_namespace="system", operator_labels={"app": "operator"}, rules=())
    wanted = {
        resources.DISRUPTION_BUDGETS: budget(world.job, 3),
        resources.NETWORK_POLICIES: network_policy(world.job, ingress),
    }
    for resource, manifest in wanted.items():
        edited = copy.deepcopy(manifest)
        selector = edited["spec"]["selector" if resource is resources.DISRUPTION_BUDGETS else "podSelector"]
        selector["matchLabels"]["tier"] = "by hand"
        selector["matchExpressions"] = [{"key": "tier", "operator": "Exists"}]
        edited["spec"]["maxUnavailable"] = 1
        world.cluster.add(resource, edited)
    await world.do(ApplyObject(wanted[resources.DISRUPTION_BUDGETS]), ApplyPolicy(wanted[resources.NETWORK_POLICIES]))
    for resource, manifest in wanted.items():
        name = manifest["metadata"]["name"]
        assert world.cluster.get(resource, "default", name)["spec"] == manifest["spec"]


@in_virtual_time
async def test_a_refusal_half_way_lets_those_in_flight_end_and_starts_no_more(world: World) -> None:
    def full(method: str, path: str) -> Any:
        too_many = len(world.cluster.names(resources.PODS)) >= 3
        return refuse(403, "Forbidden", "exceeded quota") if method == "POST" and too_many else None

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


@pytest.mark.parametrize(("beside_a_start", "most"), [(True, BESIDE_A_START), (False, 64)])
@in_virtual_time
async def test_ended_pods_are_deleted_in_small_numbers_beside_a_start(
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
async def test_deleting_a_missing_pod_or_another_incarnation_counts_as_done(world: World) -> None:
    await world.do(*world.pods(2))
    uid = world.uids()["j-w-0"]
    await world.do(
        DeletePod("j-w-0", uid, 0), DeletePod("j-w-1", "an-earlier-one", None), DeletePod("j-w-7", "u", None)
    )
    assert world.cluster.names(resources.PODS) == ["j-w-1"]
    assert [key[1] for key in world.caches.pods.store.snapshot()] == ["j-w-1"]


@in_virtual_time
async def test_a_pod_that_leaves_gracefully_shows_as_deleting_at_once(world: World) -> None:
    world.cluster.graceful_pods = True
    await world.do(*world.pods(1))
    uid = world.uids()["j-w-0"]
    await world.do(DeletePod("j-w-0", uid, None))
    view = world.caches.pods.store.get(("default", "j-w-0"))
    assert view is not None
    assert view.deleting


@in_virtual_time
async def test_forced_deletions_above_the_last_bound_wait_and_replacements_do_not(world: World) -> None:
    await world.do(*world.pods(12))
    uids = world.uids()
    deletions = tuple(DeletePod(name, uid, 0) for name, uid in uids.items())
    replacement = CreatePod(world.owned("j-w-12", spec={"containers": [{"name": "worker"}]}))
    with pytest.raises(ForceDeleteLimitError):
        await world.do(*deletions, replacement)
    left = world.cluster.names(resources.PODS)
    assert len(left) == 12 - LEAST + 1
    assert "j-w-12" in left
    gentle = tuple(DeletePod(name, uids[name], None) for name in left if name in uids)
    await world.do(*gentle)
    assert world.cluster.names(resources.PODS) == ["j-w-12"]


@in_virtual_time
async def test_what_has_ended_is_deleted_also_where_nothing_may_be_created(world: World) -> None:
    await world.do(*world.pods(3))
    uids = world.uids()
    deletions = tuple(DeletePod(name, uid, None) for name, uid in uids.items())

    world.refuse_creations("pods", "exceeded quota")
    with pytest.raises(ForbiddenError, match="exceeded quota"):
        await world.do(CreatePod(world.owned("j-w-7")), *deletions, world.publication(1, 0))
    assert world.cluster.names(resources.PODS) == []
    assert world.published == []


@in_virtual_time
async def test_a_pod_that_somebody_else_removes_during_its_deletion_leaves_the_cache(world: World) -> None:
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
async def test_an_edited_object_of_the_job_is_reverted_and_not_called_another_s(world: World) -> None:
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
async def test_a_job_that_was_deleted_meanwhile_leaves_nothing_behind(world: World) -> None:
    job = world.job
    await world.do(*world.pods(1))
    world.cluster.remove(resources.JOBS, "default", "j")
    assert world.cluster.names(resources.PODS) == []
    plan = Plan(status=replace_status(job, phase=Phase.STARTING), actions=world.pods(1))
    with pytest.raises(Exception, match="not found"):
        await world.executor.execute(replace(job), plan)
    assert world.caches.jobs.store.get(("default", "j")) is None
    assert world.cluster.names(resources.PODS) == []

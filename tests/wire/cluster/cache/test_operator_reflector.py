"""The reflector: list, watch, bookmarks, restarts, and its store."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.testing.api.fake_api_server import FakeApiServer, http_error
from tests.testing.suite.timeouts import scaled
from tests.testing.suite.virtual_time import in_virtual_time, run_pending_tasks
from trainium_contract.api_server.errors import StateRestoredError
from trainium_operator.cluster.api.client import PAGE, Api
from trainium_operator.cluster.api.resources import PODS
from trainium_operator.cluster.cache.reflector import SILENCE_SECONDS, Reflector


def pod(name: str, **labels: str) -> dict:
    return {"metadata": {"name": name, "labels": {"role": "worker", **labels}}}


@contextlib.asynccontextmanager
async def run_reflector(cluster: FakeApiServer, **options: Any) -> AsyncIterator[Reflector[str]]:
    api = Api(cluster, jitter=lambda: 0.5)
    reflector = Reflector(
        api,
        PODS,
        lambda raw: raw["metadata"]["labels"].get("colour", ""),
        labels="role=worker",
        jitter=lambda: 0.5,
        **options,
    )
    task = asyncio.create_task(reflector.run())
    await reflector.synced.wait()
    await run_pending_tasks()
    try:
        yield reflector
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def names(reflector: Reflector[str]) -> list[str]:
    return sorted(name for _, name in reflector.store.snapshot())


@in_virtual_time
async def test_a_paged_list_and_a_watch_fill_the_store() -> None:
    cluster = FakeApiServer()
    for number in range(2 * PAGE + 3):
        cluster.add(PODS, pod(f"p-{number:04}"))
    cluster.add(PODS, {"metadata": {"name": "foreign", "labels": {}}})
    async with run_reflector(cluster) as reflector:
        assert len(reflector.store) == 2 * PAGE + 3
        assert cluster.requests.count(("GET", "/api/v1/pods")) == 3
        cluster.add(PODS, pod("new"))
        cluster.change(PODS, "default", "p-0001", lambda raw: raw["metadata"]["labels"].update(colour="red"))
        cluster.remove(PODS, "default", "p-0002")
        await run_pending_tasks()
        assert reflector.store.get(("default", "p-0001")) == "red"
        assert reflector.store.get(("default", "p-0002")) is None
        assert reflector.store.get(("default", "new")) == ""


@in_virtual_time
async def test_objects_deleted_during_an_expired_watch_are_removed() -> None:
    cluster = FakeApiServer()
    for number in range(10):
        cluster.add(PODS, pod(f"p-{number}"))
    async with run_reflector(cluster) as reflector:
        deleted: list[str] = []
        reflector.store.listen(lambda key, _old, new: deleted.append(key[1]) if new is None else None)
        cluster.stall_streams()
        for number in range(4):
            cluster.remove(PODS, "default", f"p-{number}")
        cluster.compact()
        cluster.drop_streams()
        await asyncio.sleep(1)
        assert names(reflector) == [f"p-{number}" for number in range(4, 10)]
        assert sorted(deleted) == [f"p-{number}" for number in range(4)]


@in_virtual_time
async def test_a_dropped_watch_resumes_without_a_list() -> None:
    cluster = FakeApiServer()
    async with run_reflector(cluster) as reflector:
        cluster.stall_streams()
        cluster.add(PODS, pod("in-between"))
        cluster.drop_streams()
        await asyncio.sleep(2)
        assert names(reflector) == ["in-between"]
        assert cluster.requests.count(("GET", "/api/v1/pods")) == 1


@in_virtual_time
async def test_a_silent_watch_is_restarted() -> None:
    cluster = FakeApiServer()
    async with run_reflector(cluster) as reflector:
        cluster.stall_streams()
        cluster.add(PODS, pod("unseen"))
        await asyncio.sleep(SILENCE_SECONDS - 5)
        assert names(reflector) == []
        await asyncio.sleep(10)
        assert names(reflector) == ["unseen"]


@in_virtual_time
async def test_bookmarks_keep_a_watch_alive_and_advance_its_version() -> None:
    cluster = FakeApiServer()
    async with run_reflector(cluster) as reflector:
        for _ in range(3):
            await asyncio.sleep(60)
            cluster.add(PODS, {"metadata": {"name": f"foreign-{cluster.version}", "labels": {}}})
            cluster.send_bookmarks()
        await run_pending_tasks()
        watches = [request for request in cluster.requests if request[0] == "WATCH"]
        assert len(watches) == 1
        assert asyncio.get_running_loop().time() - reflector.last_seen < 1
        cluster.compact()  # all that the bookmarks have reported
        cluster.drop_streams()
        await asyncio.sleep(2)
        assert cluster.requests.count(("GET", "/api/v1/pods")) == 1


@in_virtual_time
async def test_a_periodic_list_corrects_a_missed_event() -> None:
    cluster = FakeApiServer()
    cluster.add(PODS, pod("ghost"))
    async with run_reflector(cluster, relist_seconds=600) as reflector:
        del cluster.objects["pods", "default", "ghost"]  # and no event reports it
        for _ in range(12):
            await asyncio.sleep(60)
            cluster.send_bookmarks()
        assert names(reflector) == []


@in_virtual_time
async def test_the_store_is_updated_after_an_outage() -> None:
    cluster = FakeApiServer()
    async with run_reflector(cluster) as reflector:
        cluster.down = True
        cluster.drop_streams()
        await asyncio.sleep(120)
        cluster.add(PODS, pod("after"))
        cluster.down = False
        await asyncio.sleep(16)
        assert names(reflector) == ["after"]


@pytest.mark.parametrize("outage_seconds", [5, 700], ids=["the watch would continue", "the list is due"])
@in_virtual_time
async def test_a_server_that_is_at_an_older_version_than_before_is_noticed(outage_seconds: int) -> None:
    """A watch from a version of the future is silent until the server has passed it."""
    cluster = FakeApiServer()
    cluster.add(PODS, pod("in the backup"))
    backup, version = dict(cluster.objects), cluster.version
    reflector = Reflector(Api(cluster, jitter=lambda: 0.5), PODS, lambda raw: raw, jitter=lambda: 0.5)
    task = asyncio.create_task(reflector.run())
    await reflector.synced.wait()
    for number in range(5):
        cluster.add(PODS, pod(f"lost-{number}"))
    await run_pending_tasks()
    cluster.down = True
    cluster.drop_streams()
    await asyncio.sleep(outage_seconds)
    cluster.restore(backup, version)
    cluster.down = False
    with pytest.raises(ExceptionGroup) as raised:
        await asyncio.wait_for(task, scaled(20))
    assert raised.group_contains(StateRestoredError, match="restore of etcd")


@in_virtual_time
async def test_a_refused_list_is_retried_with_growing_pauses() -> None:
    cluster = FakeApiServer()
    cluster.faults.append(lambda *_: http_error(403, "Forbidden", "no right to list pods"))
    api = Api(cluster, jitter=lambda: 0.5)
    reflector = Reflector(api, PODS, lambda raw: raw)
    task = asyncio.create_task(reflector.run())
    await asyncio.sleep(120)
    assert not reflector.synced.is_set()
    assert 8 <= len(cluster.requests) <= 25
    cluster.faults.clear()
    await asyncio.sleep(16)
    assert reflector.synced.is_set()
    task.cancel()


@in_virtual_time
async def test_an_unreadable_object_does_not_hide_others() -> None:
    cluster = FakeApiServer()
    cluster.add(PODS, pod("good"))
    cluster.add(PODS, {"metadata": {"name": "bad", "labels": {"role": "worker"}}, "broken": True})

    def parse(raw: dict) -> str:
        if raw.get("broken"):
            raise ValueError("no")
        return "good"

    reflector = Reflector(Api(cluster), PODS, parse)
    task = asyncio.create_task(reflector.run())
    await reflector.synced.wait()
    assert names(reflector) == ["good"]
    task.cancel()

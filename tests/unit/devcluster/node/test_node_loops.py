"""Reflectors, status writer, tokens, events and probes of a node, with a fake API server."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from trainium_contract.api_server.errors import ConnectionFailedError, build_error
from trainium_devcluster.node.api.events import EventSeverity, EventSink
from trainium_devcluster.node.api.reflector import ObjectCache, Reflector
from trainium_devcluster.node.api.waiting import wait_for_event
from trainium_devcluster.node.pods import probes
from trainium_devcluster.node.pods.probe_actions import ProbeResult, find_port_number
from trainium_devcluster.node.pods.status_writer import StatusWriter
from trainium_devcluster.node.volumes.service_account_tokens import TokenSource


def item(uid: str, version: int = 1) -> dict[str, Any]:
    return {"metadata": {"uid": uid, "name": uid, "namespace": "n", "resourceVersion": str(version)}}


class FakeApi:
    """An API server with scripted responses; an exception in a script is raised."""

    def __init__(self) -> None:
        self.lists: list[Any] = []
        self.watches: list[list[Any]] = []
        self.answers: list[Any] = []
        self.calls: list[tuple[str, str, Any]] = []

    async def get(self, path: str, params: Any = None) -> Any:
        return self._next(self.lists)

    async def watch(self, path: str, params: Any) -> AsyncIterator[tuple[str, Any]]:
        if not self.watches:
            await asyncio.Event().wait()
        for event in self.watches.pop(0):
            if isinstance(event, Exception):
                raise event
            yield event

    async def patch(self, path: str, body: Any, kind: str = "") -> Any:
        self.calls.append(("patch", path, body))
        await asyncio.sleep(0.01)
        return self._next(self.answers) if self.answers else item("u", len(self.calls))

    async def create(self, path: str, body: Any) -> Any:
        self.calls.append(("create", path, body))
        return self._next(self.answers) if self.answers else {}

    @staticmethod
    def _next(script: list[Any]) -> Any:
        answer = script.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def object_list(*items: Any) -> dict[str, Any]:
    return {"metadata": {"resourceVersion": "1"}, "items": list(items)}


@pytest.fixture
def api() -> Any:
    return FakeApi()


async def test_a_reflector_detects_deletions_between_watches(api: Any) -> None:
    api.lists = [object_list(item("a"), item("b")), object_list(item("b"), item("c"))]
    api.watches = [[("MODIFIED", item("b", 2)), build_error(410, "Expired", "too old")]]
    seen: list[tuple[str, bool]] = []
    reflector = Reflector(api, "/p", {}, lambda obj, missing: seen.append((obj["metadata"]["uid"], missing)))
    task = asyncio.create_task(reflector.run())
    while ("c", False) not in seen:  # noqa: ASYNC110 - polls a fake
        await asyncio.sleep(0.01)
    task.cancel()
    assert seen == [("a", False), ("b", False), ("b", False), ("a", True), ("b", False), ("c", False)]


async def test_a_reflector_waits_for_an_unreachable_api_server(api: Any) -> None:
    api.lists = [ConnectionFailedError("no"), ConnectionFailedError("no"), object_list()]
    reflector = Reflector(api, "/p", {}, lambda *_: None)
    task = asyncio.create_task(reflector.run())
    assert await wait_for_event(reflector.synced, 5)
    task.cancel()


async def test_an_object_is_watched_while_it_is_used(api: Any) -> None:
    api.lists = [object_list(item("cm")), object_list()]
    cache, woken = ObjectCache(api), asyncio.Event()
    assert await cache.acquire("configmaps", "n", "cm", "pod-1", woken.set) == item("cm")
    assert await cache.acquire("configmaps", "n", "cm", "pod-2", woken.set) == item("cm")
    cache.release("pod-1")
    assert await cache.acquire("configmaps", "n", "cm", "pod-2", woken.set) == item("cm")
    cache.release("pod-2")
    assert await cache.acquire("configmaps", "n", "cm", "pod-3", woken.set) is None
    cache.release("pod-3")


async def test_pending_status_writes_are_merged(api: Any) -> None:
    state = {"phase": "Pending"}
    writer = StatusWriter(api, lambda: item("u"), lambda _: dict(state), lambda _: None)
    task = asyncio.create_task(writer.run())
    writer.mark_dirty()
    await asyncio.sleep(0.005)
    for phase in ("Running", "Failed", "Succeeded"):
        state["phase"] = phase
        writer.mark_dirty()
    await writer.flush()
    await writer.flush()
    assert [body["status"]["phase"] for _, _, body in api.calls] == ["Pending", "Succeeded"]
    assert api.calls[0][2]["metadata"] == {"uid": "u"}
    task.cancel()


async def test_a_status_write_is_retried_until_the_server_is_back(api: Any) -> None:
    api.answers = [ConnectionFailedError("no"), build_error(500, "", "oops"), item("u", 9)]
    written: list[Any] = []
    writer = StatusWriter(api, lambda: item("u"), lambda _: {"phase": "Running"}, written.append)
    task = asyncio.create_task(writer.run())
    await writer.flush()
    assert written == [item("u", 9)]
    task.cancel()


async def test_the_status_of_a_pod_that_was_recreated_is_left_alone(api: Any) -> None:
    api.answers = [build_error(409, "Conflict", "uid mismatch")]
    writer = StatusWriter(api, lambda: item("u"), lambda _: {"phase": "Running"}, lambda _: None)
    task = asyncio.create_task(writer.run())
    await writer.flush()
    assert writer.deleted
    task.cancel()


async def test_a_token_is_renewed_before_its_expiry_and_kept_on_failure(
    api: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def token_response(token: str, expires: str) -> dict[str, Any]:
        return {"status": {"token": token, "expirationTimestamp": expires}}

    now = 1_000_000_000.0  # 2001-09-09T01:46:40Z
    monkeypatch.setattr(time, "time", lambda: now)
    pod = item("u") | {"spec": {"serviceAccountName": "sa"}}
    source = TokenSource(api, pod, {"path": "token", "audience": "x", "expirationSeconds": 1000})
    api.answers = [
        token_response("one", "2001-09-09T02:03:20Z"),
        ConnectionFailedError("no"),
        token_response("two", "2001-09-09T03:46:40Z"),
    ]
    assert await source.get() == "one"
    assert api.calls[0][1] == "/api/v1/namespaces/n/serviceaccounts/sa/token"
    assert api.calls[0][2]["spec"]["boundObjectRef"]["uid"] == "u"
    now += 799
    assert await source.get() == "one"
    now += 2
    assert await source.get() == "one"
    now += 10
    assert await source.get() == "two"


async def test_the_same_event_again_is_counted(api: Any) -> None:
    sink = EventSink(api, "node-1")
    task = asyncio.create_task(sink.run())
    for _ in range(2):
        sink.emit(item("u"), "Pod", EventSeverity.WARNING, "BackOff", "again", field_path="spec.containers{c}")
    while len(api.calls) < 2:  # noqa: ASYNC110 - polls a fake
        await asyncio.sleep(0.01)
    assert [call[0] for call in api.calls] == ["create", "patch"]
    assert api.calls[1][2]["count"] == 2
    task.cancel()


class ProbeRecorder:
    """Callbacks of probes that record their calls."""

    def __init__(self) -> None:
        self.log: list[Any] = []

    def callbacks(self) -> probes.ProbeCallbacks:
        return probes.ProbeCallbacks(
            on_startup_succeeded=lambda: self.log.append("started"),
            on_ready_changed=lambda ready: self.log.append(f"ready={ready}"),
            on_unhealthy=lambda kind, _: self.log.append(f"{kind.value} unhealthy"),
            on_probe_failed=lambda kind, _: self.log.append(f"{kind.value} failed"),
        )


async def run_probe(container: dict[str, Any], results: list[bool]) -> list[Any]:
    recorder = ProbeRecorder()

    async def check(_: Any, __: float) -> ProbeResult:
        if not results:
            await asyncio.Event().wait()
        return ProbeResult(results.pop(0))

    task = asyncio.create_task(probes.run_probes(container, check, recorder.callbacks()))
    while results and not task.done():  # noqa: ASYNC110 - polls a fake
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return recorder.log


FAST = {"periodSeconds": 0.01}


async def test_a_container_without_probes_is_ready_once_it_has_started() -> None:
    assert await run_probe({}, []) == ["started", "ready=True"]


async def test_readiness_has_thresholds_both_ways() -> None:
    container = {"readinessProbe": {**FAST, "successThreshold": 2, "failureThreshold": 2}}
    log = await run_probe(container, [True, False, True, True, False, True, False, False])
    unhealthy = "readiness unhealthy"
    assert log == ["started", unhealthy, "ready=True", unhealthy, unhealthy, unhealthy, "ready=False"]


async def test_liveness_fails_after_its_threshold_only() -> None:
    container = {"livenessProbe": {**FAST, "failureThreshold": 2}}
    log = await run_probe(container, [False, True, False, False])
    assert log[-1] == "liveness failed"
    assert log.count("liveness unhealthy") == 3


async def test_a_failed_startup_probe_requests_a_restart_and_starts_no_other_probe() -> None:
    container = {"startupProbe": {**FAST, "failureThreshold": 2}, "livenessProbe": FAST}
    assert await run_probe(container, [False, False, True]) == [
        "startup unhealthy",
        "startup unhealthy",
        "startup failed",
    ]


def test_ports_are_numbers_or_names() -> None:
    container = {"ports": [{"name": "web", "containerPort": 80}]}
    assert [find_port_number(port, container) for port in (1, "2", "web", "none")] == [1, 2, 80, None]


async def test_a_task_can_be_cancelled_as_it_is_woken() -> None:
    event = asyncio.Event()

    async def loop() -> None:
        while True:
            await wait_for_event(event, None)
            event.clear()

    task = asyncio.create_task(loop())
    await asyncio.sleep(0)
    event.set()
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 1)

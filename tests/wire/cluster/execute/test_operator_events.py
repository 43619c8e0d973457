from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tests.testing.api.fake_kubernetes import FakeCluster
from tests.testing.suite.virtual_time import run_virtual, settle
from trainium_operator.cluster.api.client import Api
from trainium_operator.cluster.api.resources import EVENTS
from trainium_operator.cluster.execute.events import BUCKET, EventRecorder, Note

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

JOB = {"apiVersion": "trainium.dev/v1alpha1", "kind": "TrainingJob", "namespace": "default", "name": "j", "uid": "u"}


def note(text: str, reason: str = "WorkerLost", uid: str = "u") -> Note:
    return Note("default", {**JOB, "uid": uid}, reason, text)


def recording(test: Callable[[FakeCluster, EventRecorder], Awaitable[None]]) -> Callable[[], None]:
    """Make a test of a coroutine function that needs a cluster and a recorder, in virtual time."""

    async def run() -> None:
        cluster = FakeCluster()
        loop = asyncio.get_running_loop()
        recorder = EventRecorder(Api(cluster), "operator-0", wall_clock=lambda: 1.7e9 + loop.time())
        task = asyncio.create_task(recorder.run())
        await test(cluster, recorder)
        task.cancel()

    return lambda: run_virtual(run())


def events(cluster: FakeCluster) -> list[dict]:
    return [raw for (plural, _, _), raw in sorted(cluster.objects.items()) if plural == EVENTS.plural]


@recording
async def test_an_event_has_all_that_the_api_asks_for(cluster: FakeCluster, recorder: EventRecorder) -> None:
    recorder.record(Note("default", JOB, "WorkerLost", "x" * 3000, warning=True, related={"kind": "Node", "name": "n"}))
    await settle()
    (event,) = events(cluster)
    assert event["apiVersion"] == "events.k8s.io/v1"
    assert event["regarding"] == JOB
    assert event["related"] == {"kind": "Node", "name": "n"}
    assert (event["type"], event["reason"], event["action"]) == ("Warning", "WorkerLost", "Reconcile")
    assert event["reportingController"] == "trainium.dev/operator"
    assert event["eventTime"].endswith("Z")
    assert len(event["note"]) < 1024


@recording
async def test_repetitions_become_a_series_of_one_event(cluster: FakeCluster, recorder: EventRecorder) -> None:
    for _ in range(10):
        recorder.record(note("pod w-1 lost"))
        await asyncio.sleep(20)
    (event,) = events(cluster)
    assert event["series"]["count"] == 9
    recorder.record(note("pod w-2 lost"))
    await settle()
    assert len(events(cluster)) == 2


@recording
async def test_notes_of_one_series_are_one_event_though_their_texts_name_other_pods(
    cluster: FakeCluster, recorder: EventRecorder
) -> None:
    for at in range(4):
        text = f"Pod w-{at} ended before it could join: exit code 7"
        recorder.record(Note("default", JOB, "WorkerFailed", text, series="exit code 7"))
        await asyncio.sleep(40)
    recorder.record(Note("default", JOB, "WorkerFailed", "Pod w-5 ended: exit code 8", series="exit code 8"))
    await settle()
    assert sorted(event.get("series", {}).get("count", 1) for event in events(cluster)) == [1, 4]


@recording
async def test_after_a_long_pause_it_is_a_new_event(cluster: FakeCluster, recorder: EventRecorder) -> None:
    recorder.record(note("pod w-1 lost"))
    await asyncio.sleep(1000)
    recorder.record(note("pod w-1 lost"))
    await settle()
    assert len(events(cluster)) == 2


@recording
async def test_a_job_with_too_many_events_is_limited_and_does_not_limit_others(
    cluster: FakeCluster, recorder: EventRecorder
) -> None:
    for number in range(100):
        recorder.record(note(f"news {number}"))
    recorder.record(note("other job", uid="v"))
    await asyncio.sleep(1)
    assert len(events(cluster)) == BUCKET + 1
    assert recorder.dropped == 100 - BUCKET


@recording
async def test_a_series_whose_event_has_expired_starts_again(cluster: FakeCluster, recorder: EventRecorder) -> None:
    recorder.record(note("pod w-1 lost"))
    await asyncio.sleep(60)
    (event,) = events(cluster)
    cluster.remove(EVENTS, "default", event["metadata"]["name"])
    recorder.record(note("pod w-1 lost"))
    await asyncio.sleep(1)
    assert len(events(cluster)) == 1


@recording
async def test_an_unreachable_api_server_blocks_nothing(cluster: FakeCluster, recorder: EventRecorder) -> None:
    cluster.down = True
    recorder.record(note("lost"))
    await recorder.flush(1.0)
    await asyncio.sleep(100)
    cluster.down = False
    recorder.record(note("found"))
    await settle()
    assert [event["note"] for event in events(cluster)] == ["found"]

"""Events of jobs: fields, counts, and the limit of each job."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import asdict

from tests.testing.api.fake_api_server import FakeApiServer
from tests.testing.suite.virtual_time import run_pending_tasks, run_virtual
from trainium_operator.cluster.api.client import Api
from trainium_operator.cluster.api.resources import EVENTS
from trainium_operator.cluster.execute.events import BUCKET, EventRecorder
from trainium_operator.plan.model.actions import Event
from trainium_operator.plan.model.names import JobId
from trainium_operator.plan.model.reasons import Reason

JOB = JobId("default", "j", "u")
INVOLVED = {"apiVersion": "trainium.dev/v1alpha1", "kind": "TrainingJob", **asdict(JOB)}


def record(recorder: EventRecorder, note: str, job: JobId = JOB, series: str = "") -> None:
    recorder.record(job, Event(reason=Reason.WORKER_FAILED, note=note, series=series))


def with_recorder(test: Callable[[FakeApiServer, EventRecorder], Awaitable[None]]) -> Callable[[], None]:
    """Decorate a test that is a coroutine function: run it in virtual time with a cluster and a recorder."""

    async def run() -> None:
        cluster = FakeApiServer()
        loop = asyncio.get_running_loop()
        recorder = EventRecorder(Api(cluster), "operator-0", wall_clock=lambda: 1.7e9 + loop.time())
        task = asyncio.create_task(recorder.run())
        await test(cluster, recorder)
        task.cancel()

    return lambda: run_virtual(run())


def events(cluster: FakeApiServer) -> list[dict]:
    return [raw for (plural, _, _), raw in sorted(cluster.objects.items()) if plural == EVENTS.plural]


@with_recorder
async def test_an_event_has_the_required_fields(cluster: FakeApiServer, recorder: EventRecorder) -> None:
    recorder.record(JOB, Event(reason=Reason.WORKER_FAILED, note="x" * 3000, warning=True, node="n"))
    await run_pending_tasks()
    (event,) = events(cluster)
    assert event["apiVersion"] == "v1"
    assert event["involvedObject"] == INVOLVED
    assert event["related"] == {"apiVersion": "v1", "kind": "Node", "name": "n"}
    assert (event["type"], event["reason"], event["action"]) == ("Warning", "WorkerFailed", "Reconcile")
    assert event["reportingComponent"] == "trainium.dev/operator"
    assert event["eventTime"].startswith(event["firstTimestamp"].removesuffix("Z"))
    assert event["lastTimestamp"] == event["firstTimestamp"]
    assert len(event["message"]) < 1024


@with_recorder
async def test_repeated_notes_are_a_series_of_one_event(cluster: FakeApiServer, recorder: EventRecorder) -> None:
    for _ in range(10):
        record(recorder, "pod w-1 lost")
        await asyncio.sleep(20)
    (event,) = events(cluster)
    assert event["count"] == 9
    assert event["lastTimestamp"] > event["firstTimestamp"]
    record(recorder, "pod w-2 lost")
    await run_pending_tasks()
    assert len(events(cluster)) == 2


@with_recorder
async def test_notes_of_one_series_are_one_event(cluster: FakeApiServer, recorder: EventRecorder) -> None:
    for number in range(4):
        text = f"Pod w-{number} ended before it could join: exit code 7"
        record(recorder, text, series="exit code 7")
        await asyncio.sleep(40)
    record(recorder, "Pod w-5 ended: exit code 8", series="exit code 8")
    await run_pending_tasks()
    assert sorted(event["count"] for event in events(cluster)) == [1, 4]


@with_recorder
async def test_a_note_after_a_long_pause_is_a_new_event(cluster: FakeApiServer, recorder: EventRecorder) -> None:
    record(recorder, "pod w-1 lost")
    await asyncio.sleep(1000)
    record(recorder, "pod w-1 lost")
    await run_pending_tasks()
    assert len(events(cluster)) == 2


@with_recorder
async def test_events_are_limited_for_each_job(cluster: FakeApiServer, recorder: EventRecorder) -> None:
    for number in range(100):
        record(recorder, f"news {number}")
    record(recorder, "other job", JobId("default", "j", "v"))
    await asyncio.sleep(1)
    assert len(events(cluster)) == BUCKET + 1
    assert recorder.dropped == 100 - BUCKET


@with_recorder
async def test_a_series_whose_event_has_expired_starts_again(cluster: FakeApiServer, recorder: EventRecorder) -> None:
    record(recorder, "pod w-1 lost")
    await asyncio.sleep(60)
    (event,) = events(cluster)
    cluster.remove(EVENTS, "default", event["metadata"]["name"])
    record(recorder, "pod w-1 lost")
    await asyncio.sleep(1)
    assert len(events(cluster)) == 1


@with_recorder
async def test_notes_during_an_outage_are_dropped(cluster: FakeApiServer, recorder: EventRecorder) -> None:
    cluster.down = True
    record(recorder, "lost")
    await recorder.flush(1.0)
    await asyncio.sleep(100)
    cluster.down = False
    record(recorder, "found")
    await run_pending_tasks()
    assert [event["message"] for event in events(cluster)] == ["found"]

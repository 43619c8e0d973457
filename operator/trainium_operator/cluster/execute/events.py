"""Events about jobs, in the order in which `kubectl describe` shows them.

Guarantees:
- Recording never blocks and never fails a reconcile.
- The same event again within ten minutes is counted in one Event.
- A token bucket limits the events of a job. Notes have at most 1,023 bytes.
- Names are deterministic, so a repeated POST is harmless.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainium_contract.api_server.errors import AlreadyExistsError, ApiError, NotFoundError
from trainium_contract.rfc3339 import format_micro_time, format_rfc3339
from trainium_operator.bounded_dict import BoundedDict
from trainium_operator.cluster.api.resources import EVENTS, JOBS, NODES, PODS
from trainium_operator.plan.model.actions import Event
from trainium_operator.plan.model.reasons import Reason

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainium_contract.api_server.responses import Json
    from trainium_operator.cluster.api.client import Api
    from trainium_operator.plan.model.names import JobId

logger = logging.getLogger(__name__)

CONTROLLER = "trainium.dev/operator"
SERIES_SECONDS = 600.0
SERIES_WRITE_SECONDS = 30.0
"""A repeating event is written at most this often."""
BUCKET = 25
REFILL_SECONDS = 6.0
QUEUED = 1_000
REMEMBERED = 4_096
MAX_NOTE_CHARACTERS = 1_023
_NUMBER = re.compile(r"\d+")


def write_failed_event(text: str) -> Event:
    """Return the event of a refused write; texts that differ only in a pod's ordinal are one series."""
    return Event(reason=Reason.WRITE_FAILED, note=text, warning=True, series=_NUMBER.sub("0", text))


@dataclass(slots=True)
class _Series:
    name: str
    count: int
    last: float
    written: float


@dataclass(slots=True)
class _Bucket:
    tokens: float
    at: float


class EventRecorder:
    """Queues events with `record` and writes them with `run`; one for each process."""

    def __init__(self, api: Api, instance: str, *, wall_clock: Callable[[], float]) -> None:
        self.dropped = 0
        self._api = api
        self._instance = instance[:128]
        self._wall_clock = wall_clock
        self._queue: asyncio.Queue[tuple[JobId, Event]] = asyncio.Queue(QUEUED)
        self._series: BoundedDict[tuple[str, str, str], _Series] = BoundedDict(REMEMBERED)
        self._buckets: BoundedDict[str, _Bucket] = BoundedDict(REMEMBERED)

    def record(self, job: JobId, event: Event) -> None:
        """Queue the event, unless the job's limit is used up."""
        if not self._is_allowed(job.uid):
            self.dropped += 1
            return
        try:
            self._queue.put_nowait((job, event))
        except asyncio.QueueFull:
            self.dropped += 1

    async def run(self) -> None:
        """Write events until cancelled."""
        while True:
            job, event = await self._queue.get()
            try:
                await self._write(job, event)
            except ApiError as error:
                about = {"namespace": job.namespace, "job": job.name}
                logger.warning("event %s about %s was not written: %s", event.reason, job.name, error, extra=about)
            finally:
                self._queue.task_done()

    async def flush(self, seconds: float) -> None:
        """Wait at most `seconds` until all recorded events are written."""
        try:
            async with asyncio.timeout(seconds):
                await self._queue.join()
        except TimeoutError:
            logger.warning("%d events were not written", self._queue.qsize())

    def _is_allowed(self, uid: str) -> bool:
        now = asyncio.get_running_loop().time()
        bucket = self._buckets[uid] = self._buckets.get(uid) or _Bucket(BUCKET, now)
        bucket.tokens = min(BUCKET, bucket.tokens + (now - bucket.at) / REFILL_SECONDS)
        bucket.at = now
        if bucket.tokens < 1:
            return False
        bucket.tokens -= 1
        return True

    async def _write(self, job: JobId, event: Event) -> None:
        now = self._wall_clock()
        identity = (job.uid, event.reason.value, event.series or event.note)
        series = self._series.get(identity)
        if series is not None and now - series.last <= SERIES_SECONDS:
            series.count += 1
            series.last = now
            if now - series.written < SERIES_WRITE_SECONDS:
                return
            series.written = now
            try:
                body = {"count": series.count, "lastTimestamp": format_rfc3339(now)}
                await self._api.merge(EVENTS, job.namespace, series.name, body)
            except NotFoundError:  # its time to live has expired
                del self._series[identity]
            else:
                return
        digest = hashlib.sha256(repr((*identity, round(now, 3))).encode()).hexdigest()[:16]
        name = f"{job.name[:200]}.{digest}"
        self._series[identity] = _Series(name, 1, now, now)
        try:
            await self._api.create(EVENTS, job.namespace, self._build_body(job, event, name, now))
        except AlreadyExistsError:
            return

    def _build_body(self, job: JobId, event: Event, name: str, now: float) -> Json:
        body: Json = {
            "apiVersion": EVENTS.api_version,
            "kind": EVENTS.kind,
            "metadata": {"name": name, "namespace": job.namespace},
            "eventTime": format_micro_time(now),
            "firstTimestamp": format_rfc3339(now),
            "lastTimestamp": format_rfc3339(now),
            "count": 1,
            "source": {"component": CONTROLLER},
            "reportingComponent": CONTROLLER,
            "reportingInstance": self._instance,
            "action": "Reconcile",
            "reason": event.reason.value,
            "type": "Warning" if event.warning else "Normal",
            "involvedObject": {
                "apiVersion": JOBS.api_version,
                "kind": JOBS.kind,
                "namespace": job.namespace,
                "name": job.name,
                "uid": job.uid,
            },
            "message": event.note.encode()[:MAX_NOTE_CHARACTERS].decode(errors="ignore"),
        }
        if event.pod:
            body["related"] = {"apiVersion": "v1", "kind": PODS.kind, "name": event.pod, "namespace": job.namespace}
        elif event.node:
            body["related"] = {"apiVersion": "v1", "kind": NODES.kind, "name": event.node}
        return body

"""Send events about pods, containers, Services and the node in the background.

Guarantees:
- `emit` never blocks and never raises.
- A repeated event increases the count of the first one.
"""

import asyncio
import hashlib
import logging
import time
from enum import StrEnum

from trainium_contract.api_server.errors import ApiError
from trainium_contract.rfc3339 import format_rfc3339
from trainium_devcluster.node.api.client import MERGE_PATCH, Api
from trainium_devcluster.node.api.objects import Json, get_uid

_log = logging.getLogger(__name__)
_MAX_MESSAGE = 1000  # characters; the API server's limit is 1,024
_MAX_KNOWN = 2000
_NOT_FOUND = 404


class EventSeverity(StrEnum):
    """The types of events."""

    NORMAL = "Normal"
    WARNING = "Warning"


class EventSink:
    """Sends the events of a node."""

    def __init__(self, api: Api, node: str) -> None:
        self._api = api
        self._node = node
        self._queue: asyncio.Queue[Json] = asyncio.Queue(maxsize=1000)
        self._counts: dict[str, int] = {}

    def emit(
        self, obj: Json, kind: str, severity: EventSeverity, reason: str, message: str, *, field_path: str = ""
    ) -> None:
        """Queue an event about `obj`."""
        metadata = obj["metadata"]
        now = format_rfc3339(time.time())
        text = message[:_MAX_MESSAGE]
        key = hashlib.sha256("\0".join([get_uid(obj), reason, field_path, text]).encode()).hexdigest()[:16]
        involved = {
            "apiVersion": "v1",
            "kind": kind,
            "name": metadata["name"],
            "namespace": metadata.get("namespace", ""),
            "uid": get_uid(obj),
            "resourceVersion": metadata.get("resourceVersion", ""),
        }
        if field_path:
            involved["fieldPath"] = field_path
        event = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": f"{metadata['name']}.{key}", "namespace": metadata.get("namespace") or "default"},
            "involvedObject": involved,
            "reason": reason,
            "message": text,
            "type": severity.value,
            "source": {"component": "kubelet", "host": self._node},
            "reportingComponent": "kubelet",
            "reportingInstance": self._node,
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        try:
            self._queue.put_nowait(event)
        except asyncio.QueueFull:
            _log.warning("event dropped: %s %s", reason, text)

    async def run(self) -> None:
        """Send events until cancelled."""
        while True:
            event = await self._queue.get()
            try:
                await self._send(event)
            except ApiError as error:
                _log.debug("event %s lost: %s", event["reason"], error)

    async def _send(self, event: Json) -> None:
        name, namespace = event["metadata"]["name"], event["metadata"]["namespace"]
        path = f"/api/v1/namespaces/{namespace}/events"
        key = f"{namespace}/{name}"
        count = self._counts.pop(key, 0) + 1
        self._counts[key] = count
        if len(self._counts) > _MAX_KNOWN:
            self._counts.pop(next(iter(self._counts)))
        if count > 1:
            body = {"count": count, "lastTimestamp": event["lastTimestamp"]}
            try:
                await self._api.patch(f"{path}/{name}", body, MERGE_PATCH)
            except ApiError as error:
                if error.status != _NOT_FOUND:
                    raise
            else:
                return
        await self._api.create(path, event)

"""Write a pod's status, at once and with one request at a time.

Guarantees:
- The last write has the newest status.
- Pending writes are combined.
- A write includes the pod's uid, so it never changes a pod that was recreated with the same name.
- An unreachable API server is retried until it answers.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from trainium_contract.api_server.errors import ApiError, ConnectionFailedError
from trainium_contract.rfc3339 import format_rfc3339
from trainium_devcluster.node.api.client import Api
from trainium_devcluster.node.api.objects import Json, get_name, get_namespace, get_uid

_log = logging.getLogger(__name__)
_FIRST_BACKOFF_SECONDS, _MAX_BACKOFF_SECONDS = 0.1, 2.0
_NOT_FOUND, _CONFLICT, _INVALID = 404, 409, 422


@dataclass(slots=True, eq=False)
class StatusWriter:
    """Writes the status of a pod; `render` returns the current status, for a time given as text."""

    api: Api
    get_pod: Callable[[], Json]
    render: Callable[[str], Json]
    on_written: Callable[[Json], None]
    deleted: bool = False
    _dirty: asyncio.Event = field(default_factory=asyncio.Event)
    _idle: asyncio.Event = field(default_factory=asyncio.Event)
    _last: Json | None = None

    def mark_dirty(self) -> None:
        """Request a write of the status."""
        self._dirty.set()
        self._idle.clear()

    async def flush(self) -> None:
        """Wait until the current status is written or the pod is deleted from the API server."""
        self.mark_dirty()
        await self._idle.wait()

    async def run(self) -> None:
        """Write changes until cancelled."""
        while True:
            if not self._dirty.is_set():
                self._idle.set()
            await self._dirty.wait()
            self._dirty.clear()
            status = self.render(format_rfc3339(time.time()))
            if self.deleted or _are_equal_ignoring_times(status, self._last):
                continue
            await self._write(status)

    async def _write(self, status: Json) -> None:
        pod = self.get_pod()
        path = f"/api/v1/namespaces/{get_namespace(pod)}/pods/{get_name(pod)}/status"
        pause = _FIRST_BACKOFF_SECONDS
        while True:
            try:
                answer = await self.api.patch(path, {"metadata": {"uid": get_uid(pod)}, "status": status})
            except ConnectionFailedError:
                pass
            except ApiError as error:
                if error.status in {_NOT_FOUND, _CONFLICT}:
                    self.deleted = True
                    return
                _log.warning("status of pod %s/%s: %s", get_namespace(pod), get_name(pod), error)
                if error.status == _INVALID:
                    return
            else:
                self._last = status
                self.on_written(answer)
                return
            await asyncio.sleep(pause)
            pause = min(_MAX_BACKOFF_SECONDS, pause * 2)
            status = self.render(format_rfc3339(time.time()))


def _are_equal_ignoring_times(one: Json, other: Json | None) -> bool:
    return other is not None and _drop_times(one) == _drop_times(other)


def _drop_times(status: Json) -> Json:
    conditions = [{k: v for k, v in c.items() if k != "lastTransitionTime"} for c in status.get("conditions") or []]
    return {**status, "conditions": conditions}

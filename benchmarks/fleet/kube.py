"""Observe the pods of a cluster as administrator during a benchmark, by a watch that records times.

The same watch observes the pods of the floor and those of the operator, so that its cost is in both. Times are of this
process's monotonic clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from trainium_contract.api_server.errors import ApiError
from trainium_contract.api_server.kubeconfig import find_access
from trainium_devcluster.node.api.client import Api
from trainium_devcluster.node.api.reflector import Reflector

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainium_devcluster.cluster import Cluster

Json = dict[str, Any]


def create_admin_client(cluster: Cluster) -> Api:
    """Return a client with the administrator's rights."""
    return Api(find_access(str(cluster.kubeconfig), None, {}), "fleet-benchmark", seconds=120)


async def delete(api: Api, path: str) -> None:
    """Delete an object, if it exists."""
    try:
        await api.delete(path, {})
    except ApiError as error:
        if error.status != http.client.NOT_FOUND:
            raise


@dataclass(slots=True)
class PodState:
    """The state of a pod, with times of the monotonic clock."""

    uid: str
    created_at: float
    running_at: float | None = None
    failed: bool = False
    deleting: bool = False
    node: str = ""
    ip: str = ""


class PodWatch:
    """Watches the pods of a label selector."""

    def __init__(self, api: Api, selector: str, on_change: Callable[[str, PodState, bool], None] | None = None) -> None:
        """Follow the pods; `on_change` is called for each event with name, pod and whether it was deleted."""
        self.pods: dict[str, PodState] = {}
        self.created = 0
        """Number of pods that were created since the start of the watch."""
        self._on_change = on_change
        self._changed = asyncio.Event()
        self._reflector = Reflector(api, "/api/v1/namespaces/default/pods", {"labelSelector": selector}, self._apply)

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._reflector.run())
        await self._reflector.synced.wait()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def wait_until(self, condition: Callable[[], bool], what: str, seconds: float) -> float:
        """Wait until the condition holds and return the time. Raises TimeoutError with `what`."""
        try:
            async with asyncio.timeout(seconds):
                while not condition():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            running = sum(pod.running_at is not None for pod in self.pods.values())
            raise TimeoutError(f"not within {seconds:.0f} s: {what} ({len(self.pods)} pods, {running} ran)") from None
        return time.monotonic()

    async def wait_until_running(self, count: int, seconds: float) -> tuple[float, float]:
        """Wait until `count` pods run; return when the last one was created and when the last one ran."""

        def list_running_pods() -> list[PodState]:
            return [pod for pod in self.pods.values() if pod.running_at and not pod.failed and not pod.deleting]

        await self.wait_until(lambda: len(list_running_pods()) >= count, f"{count} pods run", seconds)
        first = sorted(list_running_pods(), key=lambda pod: pod.running_at or 0.0)[:count]
        return max(pod.created_at for pod in first), max(pod.running_at or 0.0 for pod in first)

    def _apply(self, raw: Json, deleted: bool) -> None:
        now = time.monotonic()
        metadata, status = raw["metadata"], raw.get("status", {})
        name = metadata["name"]
        pod = self.pods.get(name)
        if pod is None or pod.uid != metadata["uid"]:
            pod = self.pods[name] = PodState(metadata["uid"], now)
            self.created += 1
        pod.node = raw["spec"].get("nodeName", "")
        pod.ip = status.get("podIP", "")
        pod.deleting = "deletionTimestamp" in metadata
        phase = status.get("phase")
        pod.failed = phase == "Failed"
        if phase == "Running" and pod.running_at is None:
            pod.running_at = now
        if deleted:
            self.pods.pop(name, None)
        if self._on_change is not None:
            self._on_change(name, pod, deleted)
        self._changed.set()

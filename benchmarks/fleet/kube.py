"""Access the API server as administrator during a benchmark: plain requests, and a watch that records times.

The same watch observes the pods of the floor and those of the operator, so that its cost is in both. Times are of this
process's monotonic clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import aiohttp

from trainium_devcluster.controlplane.components import HOST

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainium_devcluster.cluster import Cluster

Json = dict[str, Any]


class RefusedError(Exception):
    """The API server refused a request."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"HTTP {status}: {text[:400]}")
        self.status = status


class Kube:
    """A client with the administrator's certificate."""

    def __init__(self, cluster: Cluster) -> None:
        pki = cluster.paths.pki
        self._context = ssl.create_default_context(cafile=str(pki / "ca.crt"))
        self._context.load_cert_chain(pki / "admin.crt", pki / "admin.key")
        self._server = f"https://{HOST}:{cluster.ports.apiserver}"
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        connector = aiohttp.TCPConnector(limit=0, ssl=self._context)
        self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=120))
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def request(self, method: str, path: str, body: Json | None = None, kind: str = "application/json") -> Json:
        """Send a request and parse the answer; raises RefusedError."""
        data = None if body is None else json.dumps(body)
        text = await self._text(method, path, data, kind)
        document: Json = json.loads(text)
        return document

    async def text(self, path: str) -> str:
        """Return the body of a GET."""
        return await self._text("GET", path, None, "")

    async def _text(self, method: str, path: str, data: str | None, kind: str) -> str:
        assert self._session is not None
        headers = {"Content-Type": kind} if data is not None else {}
        async with self._session.request(method, self._server + path, data=data, headers=headers) as answer:
            text = await answer.text()
            if answer.status >= 400:
                raise RefusedError(answer.status, text)
            return text

    async def patch(self, path: str, body: Json) -> Json:
        """Apply a merge patch."""
        return await self.request("PATCH", path, body, "application/merge-patch+json")

    async def delete(self, path: str) -> None:
        """Delete an object, if it exists."""
        try:
            await self.request("DELETE", path, {})
        except RefusedError as error:
            if error.status != 404:
                raise

    async def stream(self, path: str) -> aiohttp.ClientResponse:
        """Open a watch, which the caller closes."""
        assert self._session is not None
        return await self._session.get(
            self._server + path, timeout=aiohttp.ClientTimeout(total=None), read_bufsize=1 << 20
        )

    async def writes(self) -> dict[str, float]:
        """Return the number of writing requests so far, by resource, as the API server counts them."""
        counts: dict[str, float] = {}
        for line in (await self.text("/metrics")).splitlines():
            if not line.startswith("apiserver_request_total{"):
                continue
            labels, _, value = line.rpartition(" ")
            if any(f'verb="{verb}"' in labels for verb in ("POST", "PUT", "PATCH", "APPLY", "DELETE")):
                resource = labels.partition('resource="')[2].partition('"')[0]
                counts[resource] = counts.get(resource, 0.0) + float(value)
        return counts


@dataclass(slots=True)
class PodState:
    """State of a pod, with times."""

    uid: str
    created: float
    running: float | None = None
    failed: bool = False
    deleting: bool = False
    node: str = ""
    ip: str = ""


@dataclass
class PodWatch:
    """Pods of a label selector, followed by a watch."""

    kube: Kube
    selector: str
    pods: dict[str, PodState] = field(default_factory=dict)
    created: int = 0
    """Number of pods that were created since the start of the watch."""
    on_change: Callable[[str, PodState, bool], None] | None = None
    """Called for each event with name, pod and whether it was deleted."""
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _task: asyncio.Task[None] | None = None
    _path: str = ""
    _version: str = ""

    async def __aenter__(self) -> Self:
        self._path = f"/api/v1/namespaces/default/pods?labelSelector={self.selector}"
        found = await self.kube.request("GET", self._path)
        self._version = found["metadata"]["resourceVersion"]
        for raw in found["items"]:
            self._apply("ADDED", raw)
        stream = await self._open()
        self._task = asyncio.create_task(self._watch(stream))
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def until(self, condition: Callable[[], bool], seconds: float, what: str) -> float:
        """Wait until the condition holds and return the time. Raises TimeoutError with `what`."""
        try:
            async with asyncio.timeout(seconds):
                while not condition():
                    if self._task is not None and self._task.done():
                        self._task.result()
                        raise RuntimeError("the watch of pods ended")
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            running = sum(pod.running is not None for pod in self.pods.values())
            raise TimeoutError(f"not within {seconds:.0f} s: {what} ({len(self.pods)} pods, {running} ran)") from None
        return time.monotonic()

    async def until_running(self, count: int, seconds: float) -> tuple[float, float]:
        """Wait until `count` pods run; return when the last of them was created and when the last of them ran."""

        def running() -> list[PodState]:
            return [pod for pod in self.pods.values() if pod.running and not pod.failed and not pod.deleting]

        await self.until(lambda: len(running()) >= count, seconds, f"{count} pods run")
        first = sorted(running(), key=lambda pod: pod.running or 0.0)[:count]
        return max(pod.created for pod in first), max(pod.running or 0.0 for pod in first)

    async def _open(self) -> aiohttp.ClientResponse:
        return await self.kube.stream(
            f"{self._path}&watch=true&resourceVersion={self._version}&timeoutSeconds=7200&allowWatchBookmarks=true"
        )

    async def _watch(self, stream: aiohttp.ClientResponse) -> None:
        try:
            while True:
                async for line in stream.content:
                    event = json.loads(line)
                    self._version = event["object"]["metadata"]["resourceVersion"]
                    if event["type"] != "BOOKMARK":
                        self._apply(event["type"], event["object"])
                # The API server closes watches that read too slowly; the next one continues at the same version.
                stream.close()
                stream = await self._open()
        finally:
            stream.close()
            self._changed.set()

    def _apply(self, kind: str, raw: Json) -> None:
        now = time.monotonic()
        metadata, status = raw["metadata"], raw.get("status", {})
        name = metadata["name"]
        seen = self.pods.get(name)
        if seen is None or seen.uid != metadata["uid"]:
            seen = self.pods[name] = PodState(metadata["uid"], now)
            self.created += 1
        seen.node = raw["spec"].get("nodeName", "")
        seen.ip = status.get("podIP", "")
        seen.deleting = "deletionTimestamp" in metadata
        phase = status.get("phase")
        seen.failed = phase == "Failed"
        if phase == "Running" and seen.running is None:
            seen.running = now
        if kind == "DELETED":
            self.pods.pop(name, None)
        if self.on_change is not None:
            self.on_change(name, seen, kind == "DELETED")
        self._changed.set()

"""The whole operator on a fake cluster in virtual time, killable at any write; several make up the replicas."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from tests.testing.api.fake_api_server import FakeApiServer
from tests.testing.suite.timeouts import Message
from trainium_contract.api_server.errors import ApiError, ConnectionFailedError
from trainium_operator.cluster.api.resources import JOBS
from trainium_operator.cluster.api.transport import HttpResponse, ResponseStream
from trainium_operator.cluster.lease import LeaseLostError
from trainium_operator.runtime import Runtime
from trainium_operator.settings import Settings

WALL_START_SECONDS = 1.7e9


def wall_clock() -> float:
    return WALL_START_SECONDS + asyncio.get_running_loop().time()


class Connection:
    """The connection of one process; after a kill it neither sends nor receives."""

    def __init__(self, cluster: FakeApiServer, die_after_write: int | None) -> None:
        self.cluster = cluster
        self.killed = asyncio.Event()
        self.cut = False
        """The network between this process and the API server."""
        self.latency = 0.0
        self.writes: list[tuple[str, str, int]] = []
        """Method, path and status of each write but those of the Lease."""
        self._die_after_write = die_after_write

    def die_after(self, writes: int) -> None:
        """Kill the process right after this number of further writes."""
        self._die_after_write = len(self.writes) + writes

    async def request(
        self, method: str, path: str, *, query: Mapping[str, str], body: Any, content_type: str, timeout: float
    ) -> HttpResponse:
        await self._require_alive()
        await asyncio.sleep(self.latency / 2)
        response = await self.cluster.request(
            method, path, query=query, body=body, content_type=content_type, timeout=timeout
        )
        if method != "GET" and "/leases" not in path:
            self.writes.append((method, path, response.status))
            if len(self.writes) == self._die_after_write:
                self.killed.set()
        await asyncio.sleep(self.latency / 2)
        await self._require_alive()  # the write was done, and the process never learns of it
        return response

    @asynccontextmanager
    async def stream(self, path: str, *, query: Mapping[str, str], silence: float) -> AsyncIterator[ResponseStream]:
        await self._require_alive()
        async with self.cluster.stream(path, query=query, silence=silence) as stream:
            yield stream

    async def _require_alive(self) -> None:
        if self.killed.is_set():
            await asyncio.Event().wait()
        if self.cut:
            raise ConnectionFailedError("no route to host")


class OperatorProcess:
    """One replica: Lease, caches, workers and coordinator state; no servers."""

    def __init__(
        self,
        cluster: FakeApiServer,
        *,
        die_after_write: int | None = None,
        identity: str = "operator-0",
        clock: Callable[[], float] = wall_clock,
        settings: Settings | None = None,
        namespace: str = "system",
    ) -> None:
        self.connection = Connection(cluster, die_after_write)
        self.runtime = Runtime(
            settings or Settings(), self.connection, namespace=namespace, identity=identity, wall_clock=clock
        )
        self.ended = asyncio.Event()
        """It ended by itself: the Lease was lost."""
        self.began_to_lead = 0.0
        self._lease: asyncio.Task[None]
        self._tasks: list[asyncio.Task[Any]] = []

    @property
    def reachable(self) -> bool:
        """Return whether agents can reach the process."""
        return not self.connection.killed.is_set() and not self.ended.is_set()

    async def start(self) -> None:
        runtime = self.runtime
        caches = runtime.caches
        work = [reflector.run() for reflector in (*caches.list_reflectors(), *caches.list_optional_reflectors())]
        self._lease = asyncio.create_task(self._lead())
        jobs = [] if runtime.settings.namespaces else [self._watch_jobs()]
        others = [
            *jobs,
            *work,
            runtime.recorder.run(),
            runtime.fleet.run(),
            runtime.owner_references.run(),
            self._work(),
        ]
        runtime.caches.kueue.offered.set_served(True)
        runtime.caches.dra.offered.set_served(True)
        others += [runtime.caches.kueue.run(), runtime.caches.dra.run()]
        self._tasks = [self._lease, *map(asyncio.create_task, others)]
        self._tasks.append(asyncio.create_task(runtime.reconciler.resync(runtime.settings.resync)))

    async def _watch_jobs(self) -> None:
        """Watch the jobs as kopf does."""
        jobs = self.runtime.caches.jobs
        version = ""
        while True:
            with contextlib.suppress(ApiError):
                version = await jobs.refresh()
                watch = self.runtime.api.watch(JOBS, resource_version=version, seconds=300, silence=70)
                async for event in watch:
                    if event["type"] != "BOOKMARK":
                        jobs.observe(event["object"], deleted=event["type"] == "DELETED")
            await asyncio.sleep(2.0)

    async def _lead(self) -> None:
        runtime = self.runtime
        try:
            await runtime.elector.acquire()
            async with asyncio.TaskGroup() as group:
                group.create_task(runtime.hold())
                runtime.certificate_keeper.tls.loaded.set()  # there are no connections and no discovery
                runtime.discovery.known.set()
                await runtime.take_over()
                self.began_to_lead = asyncio.get_running_loop().time()
        except* LeaseLostError:
            self.ended.set()
            runtime.stop_leading()
            for task in self._tasks[1:]:
                task.cancel()

    async def _work(self) -> None:
        await self.runtime.leading.wait()
        await asyncio.gather(*(self.runtime.reconciler.work() for _ in range(self.runtime.settings.workers)))

    async def kill(self) -> None:
        """Kill the process as SIGKILL does."""
        self.connection.killed.set()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.runtime.queue.close()

    async def stop(self) -> None:
        """Stop the process as SIGTERM does, in the order of `main`."""
        self.runtime.stop_leading()
        await self.runtime.queue.wait_until_idle()
        self._lease.cancel()
        await asyncio.wait([self._lease])
        await self.runtime.elector.release()
        await self.runtime.recorder.flush(2.0)
        await self.kill()


async def until(condition: Callable[[], bool], message: Message, seconds: float) -> None:
    """Wait in virtual time, as `timeouts.until` does in real time; raise AssertionError at the timeout."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while not condition():
        if loop.time() > deadline:
            raise AssertionError(f"not within {seconds} s: {message if isinstance(message, str) else message()}")
        await asyncio.sleep(0.1)

"""The whole operator on a fake cluster in virtual time, killable at any write, and workers that do as agents do."""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from trainium_contract.messages import HeartbeatRequest, Progress, RegisterRequest, WorkerPhase
from trainium_operator.cluster.resources import JOBS, NODES, PODS
from trainium_operator.coordinator.state import OldGenerationError
from trainium_operator.runtime import Runtime
from trainium_operator.settings import Settings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping

    from fake_kubernetes import FakeCluster

    from trainium_operator.cluster.transport import Answer, Stream

WALL = 1.7e9


def wall_clock() -> float:
    return WALL + asyncio.get_running_loop().time()


class Connection:
    """One process's connection: once the process is killed, nothing goes out and nothing comes back."""

    def __init__(self, cluster: FakeCluster, die_after_write: int | None) -> None:
        self.cluster = cluster
        self.killed = asyncio.Event()
        self.writes = 0
        self._die_after_write = die_after_write

    async def request(
        self, method: str, path: str, *, query: Mapping[str, str], body: Any, content_type: str, timeout: float
    ) -> Answer:
        await self._alive()
        answer = await self.cluster.request(
            method, path, query=query, body=body, content_type=content_type, timeout=timeout
        )
        if method != "GET":
            self.writes += 1
            if self.writes == self._die_after_write:
                self.killed.set()
        await self._alive()  # the write was done, and the process never learns of it
        return answer

    @asynccontextmanager
    async def stream(self, path: str, *, query: Mapping[str, str], silence: float) -> AsyncIterator[Stream]:
        await self._alive()
        async with self.cluster.stream(path, query=query, silence=silence) as stream:
            yield stream

    async def _alive(self) -> None:
        if self.killed.is_set():
            await asyncio.Event().wait()


class OperatorProcess:
    """Caches, workers and coordinator state of one process; no servers."""

    def __init__(self, cluster: FakeCluster, *, die_after_write: int | None = None) -> None:
        self.connection = Connection(cluster, die_after_write)
        self.runtime = Runtime(
            Settings(), self.connection, namespace="system", identity="operator-0", wall_clock=wall_clock
        )
        self._tasks: list[asyncio.Task[Any]] = []

    async def start(self) -> None:
        runtime = self.runtime
        jobs = asyncio.create_task(self._watch_jobs())
        work = [reflector.run() for reflector in runtime.caches.reflectors()]
        self._tasks = [jobs, *(asyncio.create_task(each) for each in [*work, runtime.recorder.run()])]
        self._tasks.append(asyncio.create_task(self._lead()))

    async def _watch_jobs(self) -> None:
        """What kopf does."""
        jobs = self.runtime.caches.jobs
        version = await jobs.refresh()
        while True:
            with contextlib.suppress(Exception):
                async for event in self.runtime.api.watch(JOBS, resource_version=version, seconds=300, silence=70):
                    if event["type"] != "BOOKMARK":
                        jobs.observe(event["object"], deleted=event["type"] == "DELETED")
            version = await jobs.refresh()

    async def _lead(self) -> None:
        await self.runtime.caches.synced()
        self.runtime.begin_leading()
        await asyncio.gather(*(self.runtime.reconciler.work() for _ in range(4)))

    async def kill(self) -> None:
        self.connection.killed.set()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.runtime.queue.close()


class Workers:
    """Kubelet and agents: pods become Running, register with whoever leads, and train when all members are there."""

    def __init__(self, cluster: FakeCluster, nodes: int, total_steps: int) -> None:
        self.cluster = cluster
        self.operator: OperatorProcess | None = None
        self.total_steps = total_steps
        self.step = 0
        self.lost_nodes: set[str] = set()
        for number in range(nodes):
            cluster.add(NODES, _node(f"node-{number}"))

    async def run(self) -> None:
        while True:
            await asyncio.sleep(0.5)
            self._kubelet()
            self._agents()

    def _kubelet(self) -> None:
        busy = {self.cluster.get(PODS, "default", name)["spec"].get("nodeName") for name in self.cluster.names(PODS)}
        for name in self.cluster.names(PODS):
            raw = self.cluster.get(PODS, "default", name)
            if "deletionTimestamp" in raw["metadata"]:
                self.cluster.remove(PODS, "default", name)
            elif raw["status"]["phase"] == "Pending":
                free = sorted(
                    node for node in self.cluster.names(NODES, "") if node not in busy and node not in self.lost_nodes
                )
                if free:
                    busy.add(free[0])
                    self.cluster.change(PODS, "default", name, _bind(free[0], int(free[0].removeprefix("node-"))))

    def _agents(self) -> None:
        if self.operator is None or not self.operator.runtime.leading.is_set():
            return
        state = self.operator.runtime.state
        running = {
            name: raw
            for name in self.cluster.names(PODS)
            if (raw := self.cluster.get(PODS, "default", name))["status"]["phase"] == "Running"
            and raw["spec"]["nodeName"] not in self.lost_nodes
        }
        jobs = {raw["metadata"]["ownerReferences"][0]["uid"]: raw["metadata"]["labels"] for raw in running.values()}
        memberships = {uid: state.membership(uid) for uid in jobs}
        for membership in memberships.values():
            here = {raw["metadata"]["uid"] for raw in running.values()}
            if membership and all(member.pod_uid in here for member in membership.members):
                self.step = min(self.total_steps, self.step + 1)
        for name, raw in running.items():
            owner = raw["metadata"]["ownerReferences"][0]
            self._speak(state, owner, name, raw, memberships[owner["uid"]])

    def _speak(self, state: Any, owner: Any, name: str, raw: Any, membership: Any) -> None:
        identity = {
            "namespace": "default",
            "job": owner["name"],
            "pod_name": name,
            "pod_uid": raw["metadata"]["uid"],
        }
        if (owner["uid"], raw["metadata"]["uid"]) not in self._registered(state):
            request = RegisterRequest(
                **identity,
                pod_ip=raw["status"]["podIP"],
                node_name=raw["spec"]["nodeName"],
                rendezvous_port=29500,
                agent_version="1",
            )
            if state.register(owner["uid"], request):
                self.operator.runtime.queue.put(("default", owner["name"]))
        member = membership is not None and membership.rank_of(raw["metadata"]["uid"]) is not None
        finished = self.step >= self.total_steps
        phase = (WorkerPhase.FINISHED if finished else WorkerPhase.TRAINING) if member else WorkerPhase.STANDBY
        heartbeat = HeartbeatRequest(
            **identity,
            generation=membership.generation if member else 0,
            phase=phase,
            progress=Progress(step=self.step, updated=wall_clock(), durable_step=self.step) if member else None,
            ready=True,
        )
        with contextlib.suppress(OldGenerationError):
            if state.heartbeat(owner["uid"], heartbeat).matters:
                self.operator.runtime.queue.put(("default", owner["name"]))
        if finished and member and raw["status"]["phase"] == "Running":
            self.cluster.change(PODS, "default", name, _succeed)

    def _registered(self, state: Any) -> set[tuple[str, str]]:
        return {(uid, pod) for uid, job in state._jobs.items() for pod in job.agents}


def training_job(name: str = "llama", **workers: Any) -> dict[str, Any]:
    spec = {
        "workers": {"replicas": 2, "accelerator": {"device": "cpu"}, **workers},
        "trainer": {"steps": 40, "batch": {"globalSize": 12, "microSize": 1}},
    }
    return {"metadata": {"name": name, "generation": 1}, "spec": spec}


def lose_node(workers: Workers, node: str) -> None:
    """The machine is gone: its pod stays in the API server for a while, its agent is silent."""
    workers.lost_nodes.add(node)
    workers.cluster.change(NODES, "", node, lambda raw: raw["status"]["conditions"][0].update(status="Unknown"))


async def until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while not condition():
        if loop.time() > deadline:
            raise AssertionError(f"not within {seconds} s: {what}")
        await asyncio.sleep(0.1)


def _node(name: str) -> dict[str, Any]:
    ready = {"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}
    return {"metadata": {"name": name}, "spec": {}, "status": {"conditions": [ready]}}


def _bind(node: str, number: int) -> Callable[[dict[str, Any]], None]:
    def change(raw: dict[str, Any]) -> None:
        raw["spec"]["nodeName"] = node
        raw["status"] = {
            "phase": "Running",
            "podIP": f"10.0.0.{number + 1}",
            "conditions": [{"type": "PodScheduled", "status": "True"}, {"type": "Ready", "status": "True"}],
            "containerStatuses": [{"name": "worker", "state": {"running": {}}}],
        }

    return change


def _succeed(raw: dict[str, Any]) -> None:
    raw["status"]["phase"] = "Succeeded"
    ended = {"exitCode": 0, "reason": "Completed", "finishedAt": "2026-01-01T01:00:00Z"}
    raw["status"]["containerStatuses"] = [{"name": "worker", "state": {"terminated": ended}}]

"""The simulated agents of a whole fleet in one process: one for each Running worker pod, from when they are let go.

Commands come as JSON lines on standard input and are answered on standard output (`control.AgentsProcess`). Every
token is asked from the API server, bound to its pod, as a kubelet does; the authority comes from the job's ConfigMap,
which a worker has mounted. Times in answers are of the machine's monotonic clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import sys
from typing import TYPE_CHECKING, Any

from benchmarks.fleetlab.agents.agent import Agent, Job, Pod
from benchmarks.fleetlab.agents.wire import Endpoint
from benchmarks.fleetlab.kube import Kube, PodWatch, RefusedError
from trainium_contract.wire.messages import WorkerPhase
from trainium_contract.wire.worker_env import LABEL_JOB, LABEL_ROLE, ROLE_WORKER, TOKEN_AUDIENCE
from trainium_devcluster.cluster import Cluster
from trainium_operator.memory import settle

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.fleetlab.kube import Seen

Command = dict[str, Any]
TOKENS_IN_FLIGHT = 16
_WARM_SECONDS = 5.0
_PAUSE_SECONDS = 2.0
"""After a collection of garbage: until what waited for its end has been worked off."""
_TOKEN_LENGTH = 1100
"""Of a token that is bound to a pod and its node."""


class Agents:
    """All agents of one job."""

    def __init__(
        self, kube: Kube, job: str, addresses: list[tuple[str, int]], name: str, *, streams: bool = True
    ) -> None:
        self._kube = kube
        self._job = job
        self._addresses = addresses
        self._name = name
        self._context: ssl.SSLContext | None = None
        self._shared = Job(streams=streams)
        self._agents: dict[str, Agent] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._going = False
        self._holding = False
        self._tokens = asyncio.Semaphore(TOKENS_IN_FLIGHT)
        self._changed = asyncio.Event()
        self._watch: asyncio.Future[PodWatch] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Follow the job's pods until cancelled."""
        selector = f"{LABEL_ROLE}={ROLE_WORKER},{LABEL_JOB}={self._job}"
        async with PodWatch(self._kube, selector, on_change=self._pod_changed) as watch:
            self._watch.set_result(watch)
            await asyncio.Event().wait()

    async def answer(self, command: Command) -> Command:
        """Carry out one command."""
        match command["op"]:
            case "go":
                await self._go()
            case "hold":
                self._holding = True  # pods that run from now on stay without an agent
            case "silence":
                self._agents[command["pod"]].silent = True
                self._shared.stall()
            case "crash":
                self._crash(command["pod"])
            case "registered":
                count = int(command["count"])
                await self._until(lambda: self._count(lambda agent: agent.registered) >= count, command)
            case "learned":
                return await self._learned(command)
            case "forget":
                self._shared.served.clear()
            case "served":
                return await self._served(command)
            case "settle":
                settle()  # a pause of this process's collector would count as the coordinator's
                await asyncio.sleep(_PAUSE_SECONDS)
                latency_of(self._shared)
            case "latency":
                return latency_of(self._shared)
            case "bare":
                return await self._bare(command)
            case "state":
                return self._state()
            case other:
                raise ValueError(f"no command {other!r}")
        return {}

    async def _go(self) -> None:
        config = await self._kube.request("GET", f"/api/v1/namespaces/default/configmaps/{self._job}-config")
        self._context = ssl.create_default_context(cadata=config["data"]["ca.crt"])
        watch = await self._watch
        self._going = True
        for name, seen in list(watch.pods.items()):
            self._pod_changed(name, seen, False)

    def _pod_changed(self, name: str, seen: Seen, gone: bool) -> None:
        if not self._going:
            return
        running = seen.running is not None and not seen.failed and not gone
        task = self._tasks.get(name)
        if running and task is None and not self._holding:
            self._tasks[name] = asyncio.create_task(self._live(name, seen))
            self._tasks[name].add_done_callback(_tell_defect)
        elif not running and task is not None:
            task.cancel()
            del self._tasks[name]
            agent = self._agents.pop(name, None)
            if agent is not None and agent.member and agent.known == max(self._shared.learned):
                self._shared.stall()
            self._changed.set()

    async def _live(self, name: str, seen: Seen) -> None:
        assert self._context is not None
        token = await self._token(name, seen.uid)
        pod = Pod(namespace="default", job=self._job, name=name, uid=seen.uid, ip=seen.ip, node=seen.node, token=token)
        endpoints = [Endpoint(ip, port, self._name, self._context) for ip, port in self._addresses]
        agent = Agent(pod, self._shared, endpoints, on_change=self._changed.set)
        self._agents[name] = agent
        await agent.run()

    async def _token(self, name: str, uid: str) -> str:
        bound = {"kind": "Pod", "apiVersion": "v1", "name": name, "uid": uid}
        body = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"audiences": [TOKEN_AUDIENCE], "expirationSeconds": 3600, "boundObjectRef": bound},
        }
        async with self._tokens:
            try:
                answer = await self._kube.request(
                    "POST", "/api/v1/namespaces/default/serviceaccounts/default/token", body
                )
            except RefusedError:  # the pod went meanwhile
                await asyncio.Event().wait()
        return str(answer["status"]["token"])

    def _crash(self, pod: str) -> None:
        hit = self._agents[pod]
        for agent in self._agents.values():
            if agent.member and agent.generation == hit.generation:
                agent.crash(here=agent is hit)

    async def _learned(self, command: Command) -> Command:
        """When the last of `count` agents heard of a generation from `generation` on."""
        wanted, count = int(command["generation"]), int(command["count"])
        heard: dict[str, float] = {}

        def enough() -> bool:
            heard.clear()
            for generation, times in self._shared.learned.items():
                if generation >= wanted:
                    for uid, at in times.items():
                        heard[uid] = min(at, heard.get(uid, at))
            return len(heard) >= count

        await self._until(enough, command)
        times = sorted(heard.values())[:count]
        return {"first": times[0], "last": times[-1], "newest": max(self._shared.learned)}

    async def _served(self, command: Command) -> Command:
        """When the first and the last of `count` agents registered since `forget`."""
        served = self._shared.served
        await self._until(lambda: len(served) >= int(command["count"]), command)
        return {"first": min(served.values()), "last": max(served.values())}

    async def _bare(self, command: Command) -> Command:
        """Heartbeat latencies of as many agents at a server that does nothing; they are gone afterwards."""
        context = ssl.create_default_context(cadata=command["authority"])
        endpoints = [Endpoint(command["host"], int(command["port"]), self._name, context)]
        shared, told = Job(streams=False), self._changed.set
        agents = [Agent(_nobody(each), shared, endpoints, on_change=told) for each in range(int(command["count"]))]
        tasks = [asyncio.create_task(agent.run()) for agent in agents]
        try:
            await self._until(lambda: all(agent.registered for agent in agents), command)
            await asyncio.sleep(_WARM_SECONDS)
            settle()
            await asyncio.sleep(_PAUSE_SECONDS)
            latency_of(shared)
            await asyncio.sleep(float(command["measure"]))
            return latency_of(shared)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _state(self) -> Command:
        return {
            "agents": len(self._agents),
            "registered": self._count(lambda agent: agent.registered),
            "members": self._count(lambda agent: agent.member),
            "training": self._count(lambda agent: agent.phase is WorkerPhase.TRAINING),
            "newest": max(self._shared.learned, default=0),
            "errors": self._shared.errors,
        }

    def _count(self, what: Callable[[Agent], bool]) -> int:
        return sum(map(what, self._agents.values()))

    async def _until(self, condition: Callable[[], bool], command: Command) -> None:
        async with asyncio.timeout(float(command["seconds"])):
            while not condition():
                self._changed.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.2):
                        await self._changed.wait()
                # What waits is told soon, not after each of a thousand changes.
                await asyncio.sleep(0.005)


def latency_of(*shared: Job) -> Command:
    """Heartbeat latencies since the last time that this was asked."""
    taken = sorted(latency for job in shared for latency in job.latencies)
    errors = {kind: sum(job.errors.get(kind, 0) for job in shared) for job in shared for kind in job.errors}
    for job in shared:
        job.latencies.clear()
        job.errors.clear()
    if not taken:
        return {"count": 0, "errors": errors}

    def share(part: float) -> float:
        return taken[min(len(taken) - 1, int(part * len(taken)))]

    return {"count": len(taken), "p50": share(0.5), "p99": share(0.99), "max": taken[-1], "errors": errors}


def _nobody(number: int) -> Pod:
    """An agent without a pod; what it sends is as long as what others send."""
    name = f"fleet-w-{number}"
    uid = f"00000000-0000-0000-0000-{number:012}"
    ip, token = f"10.0.{number >> 8}.{number & 255}", "x" * _TOKEN_LENGTH
    return Pod(namespace="default", job="fleet", name=name, uid=uid, ip=ip, node=f"node-{number}", token=token)


def _tell_defect(task: asyncio.Task[None]) -> None:
    """An agent that dies of a defect here would look like a fault of the operator."""
    if not task.cancelled() and (error := task.exception()) is not None:
        print(f"   an agent died: {error!r}", file=sys.stderr, flush=True)


async def _serve(options: Command) -> None:
    cluster = Cluster.connect(options["cluster"])
    async with Kube(cluster) as kube:
        addresses = [(ip, int(port)) for ip, port in options["addresses"]]
        name, streams = options["name"], options["streams"]
        agents = {job: Agents(kube, job, addresses, name, streams=streams) for job in options["jobs"]}
        following = [asyncio.create_task(each.run()) for each in agents.values()]
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        pending: set[asyncio.Task[None]] = set()
        async for line in reader:
            command = json.loads(line)
            task = asyncio.create_task(_carry_out(agents[command.get("job", options["jobs"][0])], command))
            pending.add(task)
            task.add_done_callback(pending.discard)
        for each in following:
            each.cancel()


async def _carry_out(agents: Agents, command: Command) -> None:
    try:
        answer = await agents.answer(command)
    except Exception as error:  # noqa: BLE001 - told to whoever asked
        state = agents.answer({"op": "state"})
        answer = {"error": f"{type(error).__name__}: {error}", "state": await state}
    sys.stdout.write(json.dumps({"id": command["id"], **answer}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(_serve(json.loads(sys.argv[1])))

"""Run the simulated agents of a fleet in one process: one for each Running worker pod, after the command `start`.

Commands come over a control socket (`AgentsProcess`). Every token is requested from the API server, bound to its pod,
as a kubelet does; the CA comes from the job's ConfigMap, which a worker mounts. Times in responses are of the
machine's monotonic clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import ssl
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from benchmarks.fleet.agent import Agent, JobState, Pod
from benchmarks.fleet.kube import PodWatch, create_admin_client
from benchmarks.fleet.stream_connection import Endpoint
from trainium_contract.api_server.errors import ApiError
from trainium_contract.wire.messages import WorkerPhase
from trainium_contract.wire.worker_env import LABEL_JOB, LABEL_ROLE, ROLE_WORKER, TOKEN_AUDIENCE
from trainium_devcluster import control_socket
from trainium_devcluster.cluster import Cluster
from trainium_devcluster.errors import ClusterError
from trainium_devcluster.state import shorten_socket_path
from trainium_operator.memory import freeze_gc

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.fleet.kube import PodState
    from trainium_devcluster.node.api.client import Api

Command = dict[str, Any]
_TOKENS_IN_FLIGHT = 16
_SETTLE_SECONDS = 2.0
"""Time for delayed work to complete after a garbage collection."""
_RESPONSE_SECONDS = 30.0
_START_POLL_SECONDS = 0.05
_ROOT = Path(__file__).parents[2]


class Agents:
    """Runs all agents of one job."""

    def __init__(self, kube: Api, job: str, addresses: list[tuple[str, int]], name: str) -> None:
        self._kube = kube
        self._job = job
        self._addresses = addresses
        self._name = name
        self._context: ssl.SSLContext | None = None
        self._shared = JobState()
        self._agents: dict[str, Agent] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._started = False
        self._tokens = asyncio.Semaphore(_TOKENS_IN_FLIGHT)
        self._changed = asyncio.Event()
        self._watch: asyncio.Future[PodWatch] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Follow the job's pods until cancelled."""
        selector = f"{LABEL_ROLE}={ROLE_WORKER},{LABEL_JOB}={self._job}"
        async with PodWatch(self._kube, selector, on_change=self._handle_pod) as watch:
            self._watch.set_result(watch)
            await asyncio.Event().wait()

    async def execute(self, command: Command) -> Command:
        """Execute a command and return its response."""
        match command["op"]:
            case "start":
                await self._start()
            case "silence":
                self._agents[command["pod"]].silent = True
                self._shared.stall()
            case "crash":
                self._crash(command["pod"])
            case "wait_for_membership":
                return await self._wait_for_membership(command)
            case "reset_registrations":
                self._shared.registered_at.clear()
            case "wait_for_registrations":
                return await self._wait_for_registrations(command)
            case "freeze_gc":
                freeze_gc()  # a garbage collection in this process would count as latency of the coordinator
                await asyncio.sleep(_SETTLE_SECONDS)
                pop_latencies(self._shared)
            case "latency":
                return pop_latencies(self._shared)
            case other:
                raise ClusterError(f"The agents know no command {other!r}.")
        return {}

    async def _start(self) -> None:
        config = await self._kube.get(f"/api/v1/namespaces/default/configmaps/{self._job}-config")
        self._context = ssl.create_default_context(cadata=config["data"]["ca.crt"])
        watch = await self._watch
        self._started = True
        for name, pod_state in list(watch.pods.items()):
            self._handle_pod(name, pod_state, False)

    def _handle_pod(self, name: str, pod_state: PodState, deleted: bool) -> None:
        if not self._started:
            return
        running = pod_state.running_at is not None and not pod_state.failed and not deleted
        task = self._tasks.get(name)
        if running and task is None:
            self._tasks[name] = asyncio.create_task(self._run_agent(name, pod_state))
            self._tasks[name].add_done_callback(_print_exception)
        elif not running and task is not None:
            task.cancel()
            del self._tasks[name]
            agent = self._agents.pop(name, None)
            if agent is not None and agent.member and agent.newest_generation == max(self._shared.received_at):
                self._shared.stall()
            self._changed.set()

    async def _run_agent(self, name: str, pod_state: PodState) -> None:
        assert self._context is not None
        token = await self._fetch_token(name, pod_state.uid)
        pod = Pod(
            namespace="default",
            job=self._job,
            name=name,
            uid=pod_state.uid,
            ip=pod_state.ip,
            node=pod_state.node,
            token=token,
        )
        endpoints = [Endpoint(ip, port, self._name, self._context) for ip, port in self._addresses]
        agent = Agent(pod, self._shared, endpoints, on_change=self._changed.set)
        self._agents[name] = agent
        await agent.run()

    async def _fetch_token(self, name: str, uid: str) -> str:
        bound = {"kind": "Pod", "apiVersion": "v1", "name": name, "uid": uid}
        body = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"audiences": [TOKEN_AUDIENCE], "expirationSeconds": 3600, "boundObjectRef": bound},
        }
        async with self._tokens:
            try:
                response = await self._kube.create("/api/v1/namespaces/default/serviceaccounts/default/token", body)
            except ApiError:  # the pod was deleted
                await asyncio.Event().wait()
        return str(response["status"]["token"])

    def _crash(self, pod: str) -> None:
        crashed = self._agents[pod]
        for agent in self._agents.values():
            if agent.member and agent.generation == crashed.generation:
                agent.crash(in_this_pod=agent is crashed)

    async def _wait_for_membership(self, command: Command) -> Command:
        """Wait for `count` agents to receive `generation` or a newer one.

        Return the first and last time, and the newest generation.
        """
        min_generation, count = int(command["generation"]), int(command["count"])
        received: dict[str, float] = {}

        def have_all_received() -> bool:
            received.clear()
            for generation, times in self._shared.received_at.items():
                if generation >= min_generation:
                    for uid, received_at in times.items():
                        received[uid] = min(received_at, received.get(uid, received_at))
            return len(received) >= count

        await self._wait_until(have_all_received, command)
        times = sorted(received.values())[:count]
        return {"first": times[0], "last": times[-1], "newest": max(self._shared.received_at)}

    async def _wait_for_registrations(self, command: Command) -> Command:
        """Wait for `count` registrations since `reset_registrations`; return the first and last time."""
        registered_at = self._shared.registered_at
        await self._wait_until(lambda: len(registered_at) >= int(command["count"]), command)
        return {"first": min(registered_at.values()), "last": max(registered_at.values())}

    def _summarize_state(self) -> Command:
        return {
            "agents": len(self._agents),
            "registered": self._count(lambda agent: agent.registered),
            "members": self._count(lambda agent: agent.member),
            "training": self._count(lambda agent: agent.phase is WorkerPhase.TRAINING),
            "newest": max(self._shared.received_at, default=0),
            "errors": self._shared.errors,
        }

    def _count(self, predicate: Callable[[Agent], bool]) -> int:
        return sum(map(predicate, self._agents.values()))

    async def _wait_until(self, condition: Callable[[], bool], command: Command) -> None:
        try:
            async with asyncio.timeout(float(command["seconds"])):
                while not condition():
                    self._changed.clear()
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(0.2):
                            await self._changed.wait()
                    # Check a waiting command every few milliseconds, not after each of a thousand changes.
                    await asyncio.sleep(0.005)
        except TimeoutError:
            raise ClusterError(f"not in time: {command}; {self._summarize_state()}") from None


def pop_latencies(job: JobState) -> Command:
    """Return heartbeat latencies since the last call."""
    latencies, errors = sorted(job.latencies), dict(job.errors)
    job.latencies.clear()
    job.errors.clear()
    if not latencies:
        return {"count": 0, "errors": errors}

    def compute_quantile(fraction: float) -> float:
        return latencies[min(len(latencies) - 1, int(fraction * len(latencies)))]

    return {"count": len(latencies), "p50": compute_quantile(0.5), "p99": compute_quantile(0.99), "errors": errors}


def _print_exception(task: asyncio.Task[None]) -> None:
    """Print an error of an agent, which would otherwise appear to be a fault of the operator."""
    if not task.cancelled() and (error := task.exception()) is not None:
        print(f"   an agent ended: {error!r}", file=sys.stderr, flush=True)


class AgentsProcess:
    """Controls the process with the agents of a job, which ends with the `async with` block."""

    def __init__(self, cluster: Cluster, job: str, *, addresses: Sequence[tuple[str, int]], name: str) -> None:
        self._socket = shorten_socket_path(cluster.paths.root / "agents.sock")
        self._options = {"cluster": cluster.name, "job": job, "addresses": list(addresses), "name": name}
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Self:
        self._socket.unlink(missing_ok=True)
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "benchmarks.fleet.agents_process",
            json.dumps(self._options | {"socket": str(self._socket)}),
            stdin=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(_ROOT)},
        )
        while not control_socket.accepts_requests(self._socket):
            if self._process.returncode is not None:
                raise ClusterError(f"the agents' process ended with {self._process.returncode}")
            await asyncio.sleep(_START_POLL_SECONDS)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()

    @property
    def pid(self) -> int:
        """Process id."""
        assert self._process is not None
        return self._process.pid

    async def request(self, op: str, *, seconds: float = 60.0, **fields: Any) -> dict[str, Any]:
        """Send a command and return its response; raises ClusterError if it failed."""
        command = {"op": op, "seconds": seconds, **fields}
        return await asyncio.to_thread(control_socket.request, self._socket, command, seconds + _RESPONSE_SECONDS)


async def _serve(options: Command) -> None:
    """Execute commands until standard input ends, with the benchmark that started this process."""
    cluster = Cluster.connect(options["cluster"])
    async with create_admin_client(cluster) as kube:
        addresses = [(ip, int(port)) for ip, port in options["addresses"]]
        agents = Agents(kube, options["job"], addresses, options["name"])
        pod_watch = asyncio.create_task(agents.run())
        server = await control_socket.serve(Path(options["socket"]), agents.execute)
        await asyncio.to_thread(sys.stdin.read)
        server.close()
        pod_watch.cancel()


if __name__ == "__main__":
    asyncio.run(_serve(json.loads(sys.argv[1])))

"""A Deployment of operators in virtual time: replicas that are started again when they end, and a cluster to act on."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any, Protocol, Self, TypeVar

from tests.testing.api.fake_api_server import FakeApiServer, http_error
from tests.testing.api.objects import training_job
from tests.testing.virtual.fake_workers import Workers
from tests.testing.virtual.operator_process import OperatorProcess, until, wall_clock
from trainium_contract.job import TrainingJobStatus
from trainium_contract.status.internal import unpack_internal
from trainium_contract.wire.recorded_membership import parse_refused_status
from trainium_contract.wire.worker_env import LABEL_ROLE
from trainium_operator.cluster.api.resources import CONFIG_MAPS, EVENTS, JOBS, PODS
from trainium_operator.cluster.cache.membership_record import read_membership
from trainium_operator.settings import Settings


class WorkerCluster:
    """A fake cluster whose nodes run workers, and what a test reads in it."""

    def __init__(self, nodes: int, total_steps: int) -> None:
        self.cluster = FakeApiServer(wall_clock)
        self.workers = Workers(self.cluster, nodes, total_steps)

    def status(self, name: str = "llama") -> dict[str, Any]:
        """Return the newest status: the job's, or the one that was refused so far."""
        status = self.stored_status(name)
        record = self.cluster.objects.get((CONFIG_MAPS.plural, "default", f"{name}-membership"), {})
        refused = parse_refused_status(record) or {}
        return refused if refused.get("refusedWrites", 0) > status.get("refusedWrites", 0) else status

    def stored_status(self, name: str = "llama") -> dict[str, Any]:
        """Return the job's status, with the operator's internal fields in their places."""
        stored = self.cluster.get(JOBS, "default", name).get("status")
        return TrainingJobStatus().to_wire() | unpack_internal(stored) if stored else {}

    def condition(self, kind: str, name: str = "llama") -> dict[str, Any]:
        conditions = self.status(name).get("conditions", ())
        return next((condition for condition in conditions if condition["type"] == kind), {})

    def membership(self, name: str = "llama") -> dict[str, Any]:
        recorded = read_membership(self.cluster.get(CONFIG_MAPS, "default", f"{name}-membership"))
        assert recorded is not None
        return recorded.to_wire()

    def pods(self) -> dict[str, str]:
        """Return the uids of existing pods by name."""
        return {name: self.cluster.get(PODS, "default", name)["metadata"]["uid"] for name in self.cluster.names(PODS)}

    def event_messages(self) -> list[str]:
        """Return the texts of all events."""
        return [raw["message"] for key, raw in self.cluster.objects.items() if key[0] == EVENTS.plural]

    def role_pods(self, role: str) -> list[str]:
        """Return the names of the pods with this label."""
        pods = ((name, self.cluster.get(PODS, "default", name)) for name in self.cluster.names(PODS))
        return [name for name, raw in pods if raw["metadata"]["labels"][LABEL_ROLE] == role]

    @contextlib.contextmanager
    def refused_pods(self, role: str, message: str) -> Iterator[None]:
        """Refuse to create pods with this label, within the context."""
        create = self.cluster._create

        def create_or_refuse(resource: Any, namespace: str, body: dict[str, Any]) -> Any:
            is_refused = resource == PODS and body["metadata"]["labels"].get(LABEL_ROLE) == role
            return http_error(403, "Forbidden", message) if is_refused else create(resource, namespace, body)

        self.cluster._create = create_or_refuse  # type: ignore[method-assign]
        try:
            yield
        finally:
            self.cluster._create = create  # type: ignore[method-assign]

    async def wait_for_steps(self, steps: int = 5, seconds: float = 120, job: str = "llama") -> None:
        """Wait for at least this many new steps."""
        target = self.workers.step_of(job) + steps
        await until(lambda: self.workers.step_of(job) >= target, f"{steps} new steps of {job}", seconds)


class Scenario(WorkerCluster):
    """A cluster with workers and one operator, which run within the context."""

    def __init__(
        self, *jobs: dict[str, Any], nodes: int = 4, total_steps: int = 10**6, settings: Settings | None = None
    ) -> None:
        super().__init__(nodes, total_steps)
        for job in jobs:
            self.cluster.add(JOBS, job)
        self.process = OperatorProcess(self.cluster, settings=settings)
        self.workers.operator = self.process

    async def __aenter__(self) -> Self:
        self._agents = asyncio.create_task(self.workers.run())
        await self.process.start()
        return self

    async def __aexit__(self, *_error: object) -> None:
        self._agents.cancel()
        await asyncio.gather(self._agents, return_exceptions=True)
        await self.process.kill()


RESTART_SECONDS = 2.0
"""What a kubelet takes to start a container that has ended."""


class OperatorDeployment(WorkerCluster):
    """One cluster with nodes, one or more operators, and jobs."""

    def __init__(self, *, nodes: int = 6, total_steps: int = 10**6, **settings: Any) -> None:
        super().__init__(nodes, total_steps)
        self.cluster.graceful_pods = True
        self.clock_error = 0.0
        """Seconds by which the operators' wall clocks are wrong."""
        self.latency = 0.0
        self.cut: set[str] = set()
        """Replicas that cannot reach the API server."""
        self.processes: dict[str, OperatorProcess] = {}
        self._settings = settings
        self._restart_tasks: dict[str, asyncio.Task[None]] = {}

    # --- operators

    async def start_operator(self, identity: str, *, die_after_write: int | None = None) -> OperatorProcess:
        """Start a replica in a container that is restarted whenever it ends."""
        process = OperatorProcess(
            self.cluster,
            identity=identity,
            die_after_write=die_after_write,
            clock=lambda: wall_clock() + self.clock_error,
            settings=Settings(**self._settings),
        )
        process.connection.latency = self.latency
        process.connection.cut = identity in self.cut
        self.processes[identity] = process
        self.workers.operators = list(self.processes.values())
        await process.start()
        self._restart_tasks[identity] = asyncio.create_task(self._restart_on_exit(identity, process))
        return process

    async def _restart_on_exit(self, identity: str, process: OperatorProcess) -> None:
        ends = [asyncio.create_task(event.wait()) for event in (process.connection.killed, process.ended)]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in ends:
                end.cancel()
        await process.kill()
        await asyncio.sleep(RESTART_SECONDS)
        await self.start_operator(identity)

    async def kill_operator(self, identity: str) -> None:
        """Kill a replica for good, as a lost node does."""
        await self._stop_restarting(identity).kill()

    async def stop_operator(self, identity: str) -> None:
        """Delete the pod of a replica, which gets SIGTERM."""
        await self._stop_restarting(identity).stop()

    def _stop_restarting(self, identity: str) -> OperatorProcess:
        self._restart_tasks.pop(identity).cancel()
        process = self.processes.pop(identity)
        self.workers.operators = list(self.processes.values())
        return process

    def disconnect(self, identity: str) -> None:
        """Cut the network between this replica and the API server."""
        self.cut.add(identity)
        self.processes[identity].connection.cut = True

    def leader(self) -> OperatorProcess | None:
        leaders = (process for process in self.processes.values() if process.runtime.leading.is_set())
        return next((process for process in leaders if process.reachable), None)

    def leader_name(self) -> str:
        return next(name for name, process in self.processes.items() if process is self.leader())

    # --- jobs

    def job(self, name: str = "llama") -> dict[str, Any]:
        return self.cluster.get(JOBS, "default", name)

    def change_spec(self, change: Callable[[dict[str, Any]], None], name: str = "llama") -> None:
        self.cluster.change(JOBS, "default", name, lambda raw: change(raw["spec"]))

    async def wait_until_running(self, seconds: float = 120, job: str = "llama") -> None:
        """Wait until the status shows that it trains, and that nothing is open."""
        await until(lambda: self._is_stable(job), lambda: f"{job} is Running: {self.status(job)}", seconds)

    def _is_stable(self, job: str) -> bool:
        status = self.status(job)
        return status.get("phase") == "Running" and all(
            "recoveredSeconds" in entry for entry in status.get("history", ())
        )


def check_each_kill_point(
    run: Callable[[int | None], tuple[dict[str, Any], int]], stride: int, *, first_write: int = 1
) -> None:
    """Assert that a scenario ends the same whichever write the operator dies after; every `stride`-th write is tried.

    `run(write)` returns the end of the scenario and the writes of its first operator; None: nothing dies.
    """
    expected, writes = run(None)
    different = {}
    for write in range(first_write, writes + 1, stride):
        end, _ = run(write)
        if end != expected:
            different[write] = {key: (expected[key], end.get(key)) for key in expected if end.get(key) != expected[key]}
    assert different == {}


@asynccontextmanager
async def run_deployment(
    *, job: dict[str, Any] | None = None, start: bool = True, replicas: int = 2, **options: Any
) -> AsyncIterator[OperatorDeployment]:
    """Start a cluster with a job, which trains unless `start` is False."""
    deployment = OperatorDeployment(**options)
    agents = asyncio.create_task(deployment.workers.run())
    deployment.cluster.add(JOBS, job or training_job(replicas=2, spares=1))
    try:
        for number in range(replicas):
            await deployment.start_operator(f"operator-{number}")
        if start:
            await deployment.wait_until_running()
        yield deployment
    finally:
        for task in deployment._restart_tasks.values():
            task.cancel()
        for process in deployment.processes.values():
            await process.kill()
        agents.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await agents


class Kubelet(Protocol):
    """Runs pods that are no workers."""

    def __init__(self, env: OperatorDeployment) -> None: ...

    async def run(self) -> None:
        """Run until it is cancelled."""


RunningKubelet = TypeVar("RunningKubelet", bound=Kubelet)


@asynccontextmanager
async def run_with_kubelet(
    kubelet: type[RunningKubelet], job: dict[str, Any], **options: Any
) -> AsyncIterator[tuple[OperatorDeployment, RunningKubelet]]:
    """Start a cluster with a job and a kubelet for its other pods; wait for no step."""
    async with run_deployment(job=job, start=False, **options) as env:
        running = kubelet(env)
        task = asyncio.create_task(running.run())
        try:
            yield env, running
        finally:
            task.cancel()

"""Run the fleet benchmark at one cluster size: the floor, the start of the job, faults."""

from __future__ import annotations

import asyncio
import math
import sys
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.fleet.agents_process import AgentsProcess
from benchmarks.fleet.faults import SPARES, FaultRound
from benchmarks.fleet.floor import Floor, measure_floor
from benchmarks.fleet.job import NAME, training_job, worker_manifests
from benchmarks.fleet.kube import PodWatch, admin_client, delete
from benchmarks.fleet.operator_process import SERVER_NAME, ChartInstallation
from trainium_contract.wire.worker_env import LABEL_JOB
from trainium_devcluster.cluster import Cluster
from trainium_devcluster.fleet.fake_nodes import FleetShape
from trainium_operator.plan.model.names import LAYERS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from benchmarks.fleet.figures import Report
    from benchmarks.fleet.kube import Json
    from benchmarks.fleet.operator_process import OperatorProcess
    from trainium_devcluster.node.api.client import Api

JOBS = "/apis/trainium.dev/v1alpha1/namespaces/default/trainingjobs"
RATIO_GOAL = 1.15


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurementPlan:
    """Extent of the measurements at one cluster size."""

    nodes: int
    starts: int
    """Number of rounds, each of floor and job."""
    faults: int
    """Number of injections of each fault."""
    restarts: bool
    """Whether gang restart and scaling are measured."""
    steady_seconds: float
    agents: bool = True
    """Whether agents and faults are simulated; one process cannot send heartbeats for 5,000 agents."""

    @classmethod
    def for_size(cls, nodes: int, *, quick: bool) -> MeasurementPlan:
        """Return a plan that two cores can run."""
        if nodes <= 256:
            return cls(
                nodes=nodes,
                starts=3 if quick else 7,
                faults=2 if quick else 5,
                restarts=True,
                steady_seconds=15 if quick else 60,
            )
        if nodes <= 1500:
            return cls(
                nodes=nodes,
                starts=1 if quick else 3,
                faults=1 if quick else 2,
                restarts=True,
                steady_seconds=10 if quick else 30,
            )
        return cls(nodes=nodes, starts=1, faults=0, restarts=False, steady_seconds=0, agents=False)

    @property
    def timeout(self) -> float:
        """Seconds that the slowest operation may take."""
        return 120.0 + self.nodes / 5


async def run_fleet(plan: MeasurementPlan, report: Report, folder: Path) -> None:
    """Run all measurements on a cluster of `plan.nodes` nodes."""
    log(f"{plan.nodes} nodes: starting the control plane")
    # Each round of faults uses up three nodes.
    with start_cluster(math.ceil(plan.nodes * 1.1) + 8 + SPARES + 3 * plan.faults, plan.nodes) as cluster:
        async with admin_client(cluster) as kube:
            chart = ChartInstallation(cluster, folder)
            await chart.install(kube)
            await FleetRun(plan, report, cluster, kube, chart).run()


def start_cluster(nodes: int, workers: int) -> Cluster:
    """Start a control plane as in the peers' measurements, with `nodes` fake nodes for a job of `workers`."""
    # Fewer renewals than a kubelet's, because two cores run everything.
    lease = 400 if workers > 1500 else 120
    return Cluster.start(
        fleet=nodes,
        fleet_shape=FleetShape(lease_seconds=lease),
        node_monitor_grace_seconds=lease * 1.25,
        # Nodes are registered Ready; without this the controller manager would first remove a taint from each.
        apiserver_args=("--disable-admission-plugins=TaintNodesByCondition",),
        controller_manager_args=("--kube-api-qps=200", "--kube-api-burst=400"),
        scheduler_args=("--kube-api-qps=500", "--kube-api-burst=1000"),
        report=log,
    )


class FleetRun:
    """Runs the measurements at one cluster size."""

    def __init__(
        self, plan: MeasurementPlan, report: Report, cluster: Cluster, kube: Api, chart: ChartInstallation
    ) -> None:
        self.plan = plan
        self.report = report
        self.cluster = cluster
        self.kube = kube
        self.chart = chart
        n = plan.nodes
        self.smaller, self.larger = n - n // 10, n + n // 10
        self.body = training_job(n, spares=SPARES, sizes=(self.smaller, self.larger))
        self.floors: list[Floor] = []

    async def run(self) -> None:
        """Run all rounds."""
        operator = await self.chart.start()
        try:
            await operator.wait_until_leading()
            for number in range(self.plan.starts):
                await self._measure_floor(restart=number == 0 and self.plan.restarts)
                await operator.wait_until_idle()
                # Faults are injected into the last job.
                await self._run_job(operator, last=number == self.plan.starts - 1)
            if self.plan.agents:
                name = "operator memory, peak with all agents connected"
                self.report.add(name, self.plan.nodes, "MiB", operator.peak_mib())
        finally:
            await operator.stop()

    async def _measure_floor(self, *, restart: bool) -> None:
        (node,) = (await self.kube.get("/api/v1/nodes?limit=1"))["items"]
        layers = [label for label in LAYERS if label in node["metadata"]["labels"]]
        manifests = worker_manifests(self.body, self.plan.nodes + SPARES, layers)
        floor = await measure_floor(self.kube, manifests, restart=restart, seconds=self.plan.timeout)
        times = f"created {floor.creation_seconds:.2f} s, running {floor.running_seconds:.2f} s"
        log(f"{self.plan.nodes} nodes: floor: {times}")
        self.floors.append(floor)
        self.report.add("floor: created", self.plan.nodes, "s", floor.creation_seconds)
        self.report.add("floor: Running", self.plan.nodes, "s", floor.running_seconds)
        if floor.restart_seconds is not None:
            self.report.add("floor: fail all, delete all, create all", self.plan.nodes, "s", floor.restart_seconds)

    async def _run_job(self, operator: OperatorProcess, *, last: bool) -> None:
        """Start the job and delete it again; measure the last one while it trains."""
        async with AsyncExitStack() as stack:
            watch = await stack.enter_async_context(PodWatch(self.kube, f"{LABEL_JOB}={NAME}"))
            agents = None
            if last and self.plan.agents:
                agents = AgentsProcess(self.cluster, NAME, addresses=[(operator.host, operator.port)], name=SERVER_NAME)
                await stack.enter_async_context(agents)
                await agents.request("state")
            await self._measure_start(operator, watch)
            if agents is not None:
                await self._measure_training(operator, watch, agents)
            await delete(self.kube, f"{JOBS}/{NAME}")
            await watch.wait_until(lambda: not watch.pods, "the pods of the job are deleted", self.plan.timeout)

    async def _measure_start(self, operator: OperatorProcess, watch: PodWatch) -> None:
        n, floor = self.plan.nodes, self.floors[-1]
        cpu = operator.cpu_seconds()
        started_at = time.monotonic()
        await self.kube.create(JOBS, self.body)
        created, running = await watch.wait_until_running(n + SPARES, self.plan.timeout)
        created, running = created - started_at, running - started_at
        log(f"{n} nodes: job: created {created:.2f} s, running {running:.2f} s")
        self.report.add("created", n, "s", created)
        self.report.add("Running", n, "s", running)
        self.report.add("created over the floor", n, "x", created / floor.creation_seconds, goal=RATIO_GOAL)
        self.report.add("Running over the floor", n, "x", running / floor.running_seconds, goal=RATIO_GOAL)
        self.report.add("operator CPU for the start", n, "s", operator.cpu_seconds() - cpu)
        goal = 150.0 if n <= 1000 else None
        self.report.add("operator memory, peak until all run", n, "MiB", operator.peak_mib(), goal=goal)

    async def _measure_training(self, operator: OperatorProcess, watch: PodWatch, agents: AgentsProcess) -> None:
        n = self.plan.nodes
        cpu, started_at = operator.cpu_seconds(), time.monotonic()
        await agents.request("start")
        received = await agents.request("wait_for_membership", generation=1, count=n, seconds=self.plan.timeout)
        self.report.add("agents go → first membership with all", n, "s", received["last"] - started_at)
        await self.wait_for_status(lambda status: status.get("phase") == "Running", "phase Running")
        self.report.add("operator CPU until all agents train", n, "s", operator.cpu_seconds() - cpu)
        log(f"{n} nodes: all agents train after {time.monotonic() - started_at:.1f} s")
        faults = FaultRound(self, operator, watch, agents)
        await faults.measure_steady_state()
        if self.plan.restarts:
            await faults.measure_gang_restart()  # first, because after a few failures the creation of pods backs off
        await faults.measure_faults()

    async def status(self) -> Json:
        """Return the status of the job."""
        status: Json = (await self.kube.get(f"{JOBS}/{NAME}")).get("status", {})
        return status

    async def wait_for_status(self, condition: Callable[[Json], bool], what: str) -> Json:
        """Wait until the status satisfies the condition."""
        return await wait_for_status(self.kube, condition, what, self.plan.timeout)


async def wait_for_status(kube: Api, condition: Callable[[Json], bool], what: str, seconds: float) -> Json:
    """Wait until the status of the job satisfies the condition; raises TimeoutError with `what`."""
    deadline = time.monotonic() + seconds
    while True:
        status: Json = (await kube.get(f"{JOBS}/{NAME}")).get("status", {})
        if condition(status):
            return status
        if time.monotonic() > deadline:
            excerpt = {key: status.get(key) for key in ("phase", "readyReplicas", "spares", "membership", "conditions")}
            raise TimeoutError(f"not within {seconds:.0f} s: {what}: {excerpt}")
        await asyncio.sleep(0.1)


def log(text: str) -> None:
    """Print progress on standard error."""
    print(f"   {text}", file=sys.stderr, flush=True)

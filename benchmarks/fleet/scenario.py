"""Run the fleet benchmark at one cluster size: the floor, the start of the job, faults."""

from __future__ import annotations

import math
import sys
import time
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from benchmarks.fleet.agents_process import AgentsProcess
from benchmarks.fleet.faults import FaultRound
from benchmarks.fleet.floor import Floor, measure_floor
from benchmarks.fleet.job import JOBS, NAME, SPARES, build_training_job, build_worker_manifests, wait_for_status
from benchmarks.fleet.kube import PodWatch, create_admin_client, delete
from benchmarks.fleet.operator_process import SERVER_NAME, ChartInstallation
from trainium_contract.wire.worker_env import LABEL_JOB
from trainium_devcluster.cluster import Cluster
from trainium_devcluster.fleet.fake_nodes import FleetShape
from trainium_operator.plan.model.names import LAYERS

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.fleet.operator_process import OperatorProcess
    from benchmarks.fleet.plan import MeasurementPlan
    from benchmarks.harness.figures import Report
    from trainium_devcluster.node.api.client import Api

RATIO_GOAL = 1.15


async def run_fleet(plan: MeasurementPlan, report: Report, folder: Path) -> None:
    """Run all measurements on a cluster of `plan.nodes` nodes."""
    log(f"{plan.nodes} nodes: starting the control plane")
    # Each round of faults uses up three nodes.
    with start_cluster(math.ceil(plan.nodes * 1.1) + 8 + SPARES + 3 * plan.faults, plan.nodes) as cluster:
        async with create_admin_client(cluster) as kube:
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
        self.body = build_training_job(n, spares=SPARES, sizes=(self.smaller, self.larger))
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
                self.report.add(name, self.plan.nodes, "MiB", operator.read_peak_mib())
        finally:
            await operator.stop()

    async def _measure_floor(self, *, restart: bool) -> None:
        (node,) = (await self.kube.get("/api/v1/nodes?limit=1"))["items"]
        layers = [label for label in LAYERS if label in node["metadata"]["labels"]]
        manifests = build_worker_manifests(self.body, self.plan.nodes + SPARES, layers)
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
            await self._measure_start(operator, watch)
            if agents is not None:
                await self._measure_training(operator, watch, agents)
            await delete(self.kube, f"{JOBS}/{NAME}")
            await watch.wait_until(lambda: not watch.pods, "the pods of the job are deleted", self.plan.timeout)

    async def _measure_start(self, operator: OperatorProcess, watch: PodWatch) -> None:
        n, floor = self.plan.nodes, self.floors[-1]
        cpu = operator.read_cpu_seconds()
        started_at = time.monotonic()
        await self.kube.create(JOBS, self.body)
        created, running = await watch.wait_until_running(n + SPARES, self.plan.timeout)
        created, running = created - started_at, running - started_at
        log(f"{n} nodes: job: created {created:.2f} s, running {running:.2f} s")
        self.report.add("created", n, "s", created)
        self.report.add("Running", n, "s", running)
        self.report.add("created over the floor", n, "x", created / floor.creation_seconds, goal=RATIO_GOAL)
        self.report.add("Running over the floor", n, "x", running / floor.running_seconds, goal=RATIO_GOAL)
        self.report.add("operator CPU for the start", n, "s", operator.read_cpu_seconds() - cpu)
        goal = 150.0 if n <= 1000 else None
        self.report.add("operator memory, peak until all run", n, "MiB", operator.read_peak_mib(), goal=goal)

    async def _measure_training(self, operator: OperatorProcess, watch: PodWatch, agents: AgentsProcess) -> None:
        n = self.plan.nodes
        cpu, started_at = operator.read_cpu_seconds(), time.monotonic()
        await agents.request("start")
        received = await agents.request("wait_for_membership", generation=1, count=n, seconds=self.plan.timeout)
        self.report.add("agents go → first membership with all", n, "s", received["last"] - started_at)
        await wait_for_status(
            self.kube, lambda status: status.get("phase") == "Running", "phase Running", self.plan.timeout
        )
        self.report.add("operator CPU until all agents train", n, "s", operator.read_cpu_seconds() - cpu)
        log(f"{n} nodes: all agents train after {time.monotonic() - started_at:.1f} s")
        faults = FaultRound(
            plan=self.plan,
            report=self.report,
            cluster=self.cluster,
            kube=self.kube,
            operator=operator,
            watch=watch,
            agents=agents,
        )
        await faults.measure_steady_state()
        if self.plan.restarts:
            # First, because after a few failures the creation of pods backs off.
            floor = next(floor.restart_seconds for floor in self.floors if floor.restart_seconds is not None)
            await faults.measure_gang_restart(floor, sizes=(self.larger, n, self.smaller, n))
        await faults.measure_faults()


def log(text: str) -> None:
    """Print progress on standard error."""
    print(f"   {text}", file=sys.stderr, flush=True)

"""Measure the coordinator with 1,000 agents: heartbeats at 1 Hz, a membership change, and two handovers.

Two operator processes with the rights of the chart run on a real control plane with fake nodes. Agents speak the real
protocol over real TLS with tokens of the API server, and measure the latency. Control plane and fake nodes have the
lowest priority then, because in a cluster they run on other machines.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.fleet.agents_process import AgentsProcess
from benchmarks.fleet.job import JOBS, NAME, build_training_job, read_status, wait_for_status
from benchmarks.fleet.kube import PodWatch, create_admin_client, delete
from benchmarks.fleet.operator_process import SERVER_NAME, ChartInstallation
from benchmarks.fleet.scenario import log, start_cluster
from benchmarks.harness.figures import Report, create_parser
from trainium_contract.wire.worker_env import LABEL_JOB
from trainium_devcluster.ports import reserve_port
from trainium_devcluster.processes.process_tree import list_tree

if TYPE_CHECKING:
    import argparse

    from benchmarks.fleet.operator_process import OperatorProcess
    from trainium_devcluster.cluster import Cluster
    from trainium_devcluster.node.api.client import Api

AGENTS = 1000
HOSTS = ("127.0.0.1", "127.0.0.2")
TIMEOUT_SECONDS = 240.0


class CoordinatorRun:
    """Measures a job whose agents the leader of two operators serves."""

    def __init__(self, cluster: Cluster, kube: Api, chart: ChartInstallation, report: Report, agents: int) -> None:
        self._cluster = cluster
        self._kube = kube
        self._chart = chart
        self._report = report
        self._count = agents
        self._port = reserve_port()

    async def run(self, seconds: float) -> None:
        """Measure heartbeats, a membership change, a handover after a crash and an orderly one."""
        leader = await self._chart.start(HOSTS[0], self._port)
        await leader.wait_until_leading()
        standby = await self._chart.start(HOSTS[1], self._port)
        await standby.wait_until_ready()
        addresses = [(host, self._port) for host in HOSTS]
        async with (
            PodWatch(self._kube, f"{LABEL_JOB}={NAME}") as watch,
            AgentsProcess(self._cluster, NAME, addresses=addresses, name=SERVER_NAME) as agents,
        ):
            await self._kube.create(JOBS, build_training_job(self._count, spares=1))
            await watch.wait_until_running(self._count + 1, TIMEOUT_SECONDS)
            _lower_priority(self._cluster)
            _raise_priority(leader.pid, standby.pid, agents.pid)
            started_at, cpu = time.monotonic(), leader.read_cpu_seconds()
            await agents.request("start")
            await agents.request("wait_for_membership", generation=1, count=self._count, seconds=TIMEOUT_SECONDS)
            self._report.add("all agents connect, register and join", self._count, "s", time.monotonic() - started_at)
            self._report.add("operator CPU for that", self._count, "s", leader.read_cpu_seconds() - cpu)
            await self._wait_until_complete()
            await self._measure_heartbeats(leader, agents, seconds)
            await self._measure_membership_change(agents, watch)
            await self._measure_handover(agents, leader, crash=True)
            leader, standby = standby, await self._chart.start(HOSTS[0], self._port)
            await standby.wait_until_ready()
            await self._wait_until_complete()
            await self._measure_handover(agents, leader, crash=False)
            await self._wait_until_complete()
            await delete(self._kube, f"{JOBS}/{NAME}")
        await standby.stop()

    async def _measure_heartbeats(self, leader: OperatorProcess, agents: AgentsProcess, seconds: float) -> None:
        """Measure heartbeats of an undisturbed job."""
        await asyncio.sleep(5.0)
        await agents.request("freeze_gc")
        cpu, started_at = leader.read_cpu_seconds(), time.monotonic()
        await asyncio.sleep(seconds)
        duration = time.monotonic() - started_at
        cores = (leader.read_cpu_seconds() - cpu) / duration
        latency = await agents.request("latency")
        log(f"{latency['count'] / duration:.0f} heartbeats a second; errors: {latency['errors']}")
        self._report.add("heartbeats in full a second", self._count, "count", latency["count"] / duration)
        self._report.add("heartbeat latency, median", self._count, "ms", latency["p50"] * 1000)
        self._report.add("heartbeat latency, p99", self._count, "ms", latency["p99"] * 1000, goal=20.0)
        self._report.add("operator processor use", self._count, "cores", cores, goal=0.25)
        self._report.add(
            "operator memory, all agents connected", self._count, "MiB", leader.read_resident_mib(), goal=120.0
        )

    async def _measure_membership_change(self, agents: AgentsProcess, watch: PodWatch) -> None:
        """Fail a member; measure from the first agent that receives the new membership to the last."""
        fleet = self._cluster.fleet
        assert fleet is not None
        failing_pod = next(name for name in sorted(watch.pods) if name.endswith("-7"))
        started_at = time.monotonic()
        await asyncio.to_thread(fleet.fail_pod, "default", failing_pod, exit_code=137)
        received = await agents.request("wait_for_membership", generation=2, count=self._count, seconds=TIMEOUT_SECONDS)
        spread = received["last"] - received["first"]
        self._report.add("membership change, from the first agent to the last", self._count, "s", spread, goal=0.5)
        self._report.add("one pod fails, until the last agent knows", self._count, "s", received["last"] - started_at)
        await self._wait_until_complete()

    async def _measure_handover(self, agents: AgentsProcess, leader: OperatorProcess, *, crash: bool) -> None:
        """Stop the leader; measure until the first and the last agent are served by the standby."""
        before = (await read_status(self._kube))["membership"]["generation"]
        await agents.request("reset_registrations")
        started_at = time.monotonic()
        stopping = asyncio.create_task(leader.kill() if crash else leader.stop())
        registered = await agents.request("wait_for_registrations", count=self._count, seconds=TIMEOUT_SECONDS)
        await stopping
        name, goal = ("after a crash", 20.0) if crash else ("in order", 2.0)
        self._report.add(
            f"handover {name}: first agent served", self._count, "s", registered["first"] - started_at, goal=goal
        )
        self._report.add(f"handover {name}: all agents served", self._count, "s", registered["last"] - started_at)
        generations = float((await read_status(self._kube))["membership"]["generation"] - before)
        self._report.add(f"handover {name}: generations started", self._count, "count", generations, goal=0.0)

    async def _wait_until_complete(self) -> None:
        def is_complete(status: dict[str, Any]) -> bool:
            return status.get("phase") == "Running" and status.get("readyReplicas") == self._count

        await wait_for_status(self._kube, is_complete, "all workers train", TIMEOUT_SECONDS)


async def measure(options: argparse.Namespace, report: Report, folder: Path) -> None:
    """Measure on a new cluster."""
    with start_cluster(options.agents + 4, options.agents) as cluster:
        async with create_admin_client(cluster) as kube:
            supervisor = cluster.read_status()["supervisor"]["pid"]
            _raise_priority(os.getpid(), *list_tree([supervisor]))
            chart = ChartInstallation(cluster, folder)
            await chart.install(kube)
            seconds = 15.0 if options.quick else 60.0
            await CoordinatorRun(cluster, kube, chart, report, options.agents).run(seconds)


def _raise_priority(*pids: int, level: int = -10) -> None:
    """Raise the priority of these processes, if permitted (to root).

    If the kernel schedules by session, a priority counts only within the session, so the session is raised too.
    """
    with contextlib.suppress(OSError):
        for pid in pids:
            group = Path(f"/proc/{pid}/autogroup")
            if group.exists():
                group.write_text(str(level))
            for thread in Path(f"/proc/{pid}/task").iterdir():
                os.setpriority(os.PRIO_PROCESS, int(thread.name), level)


def _lower_priority(cluster: Cluster) -> None:
    """Lower the priority of control plane and fake nodes, for their whole life."""
    for pid in list_tree([cluster.read_status()["supervisor"]["pid"]])[1:]:
        with contextlib.suppress(OSError):  # the process has ended
            # A priority belongs to a thread; threads that start later inherit it.
            for thread in Path(f"/proc/{pid}/task").iterdir():
                os.setpriority(os.PRIO_PROCESS, int(thread.name), 19)


def main() -> None:
    """Measure, print and write the figures."""
    parser = create_parser("coordinator", __doc__)
    parser.add_argument("--agents", type=int, default=AGENTS)
    options = parser.parse_args()
    report = Report("coordinator", options.quick)
    with tempfile.TemporaryDirectory(prefix="trainium-bench-") as folder:
        asyncio.run(measure(options, report, Path(folder)))
    report.write(options.json)
    report.print()


if __name__ == "__main__":
    main()

"""A job of 128 workers is mended while neighbours flood the coordinator, beside the same faults in quiet, in one run.

A real control plane with fake nodes, the operator with the chart's rights, agents that speak the real protocol. The
attackers send 10,000 bad tokens a second, hold 2,000 TLS connections that say nothing, and send slowly over 200 more,
from 64 addresses. The operator has one core for itself; attackers, agents and the control plane share the others, the
attackers last: in a cluster each of these has machines of its own. Quiet and flood take turns, so that a slow minute of
the machine is in both.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from benchmarks.fleetlab.agents.control import AgentsProcess
from benchmarks.fleetlab.coordinator.flood import Flood
from benchmarks.fleetlab.faults import SPARES, FaultRound
from benchmarks.fleetlab.figures import Report
from benchmarks.fleetlab.job import NAME
from benchmarks.fleetlab.kube import Kube, PodWatch
from benchmarks.fleetlab.operator_site import SERVER_NAME, OperatorSite
from benchmarks.fleetlab.priority import go_first
from benchmarks.fleetlab.scenario import JOBS, FleetRun, Plan, cluster_of, say
from trainium_contract.wire.worker_env import LABEL_JOB
from trainium_devcluster.processes.process_families import descendants

if TYPE_CHECKING:
    from benchmarks.fleetlab.operator_site import OperatorRun
    from trainium_devcluster.cluster import Cluster

WORKERS = 128
TOKENS, IDLE, SLOW, SOURCES = 10_000.0, 2_000, 200, 64
RATIO_GOAL = 1.5
"""Beside the same fault in quiet."""
_RISE_SECONDS = 8.0
_REST_SECONDS = 10.0


class FloodRun:
    """One job, in quiet and under attack by turns."""

    def __init__(self, run: FleetRun, operator: OperatorRun, watch: PodWatch, agents: AgentsProcess) -> None:
        self._run = run
        self._operator = operator
        self._agents = agents
        self._round = FaultRound(run, operator, watch, agents)
        self._taken: dict[str, dict[str, list[float]]] = {}
        """Fault -> quiet or flood -> seconds."""

    async def rounds(self, count: int) -> None:
        """Quiet and flood, `count` times each."""
        for number in range(count):
            say(f"round {number + 1}: quiet")
            await self._all("quiet")
            say(f"round {number + 1}: flood")
            flood = Flood(
                self._operator.host, self._operator.port, core=0, tokens=TOKENS, idle=IDLE, slow=SLOW, sources=SOURCES
            )
            async with flood:
                await asyncio.sleep(_RISE_SECONDS)
                flood.mark()
                await self._all("flood")
                self._tell(flood.figures())

    async def _all(self, when: str) -> None:
        await self._rest(when)
        for name, seconds in (await self._round.recoveries()).items():
            self._taken.setdefault(name, {}).setdefault(when, []).append(seconds)

    async def _rest(self, when: str) -> None:
        await self._agents.ask("settle")
        cpu, began = self._operator.cpu_seconds(), time.monotonic()
        await asyncio.sleep(_REST_SECONDS)
        cores = (self._operator.cpu_seconds() - cpu) / (time.monotonic() - began)
        found = await self._agents.ask("latency")
        report = self._run.report
        report.add(f"{when}: heartbeats a second", WORKERS, "count", found["count"] / _REST_SECONDS)
        report.add(f"{when}: heartbeat latency, median", WORKERS, "ms", found["p50"] * 1000)
        report.add(f"{when}: heartbeat latency, p99", WORKERS, "ms", found["p99"] * 1000)
        report.add(f"{when}: exchanges of agents that failed", WORKERS, "count", float(sum(found["errors"].values())))
        report.add(f"{when}: operator cores", WORKERS, "cores", cores)
        report.add(f"{when}: operator memory", WORKERS, "MiB", self._operator.resident_mib())

    def _tell(self, reached: dict[str, float]) -> None:
        add = self._run.report.add
        add("flood: bad tokens sent a second", WORKERS, "count", reached["tokens"])
        add("flood: requests answered a second", WORKERS, "count", reached["answers"])
        add("flood: TLS connections opened a second", WORKERS, "count", reached["opened"])
        add("flood: connections refused a second", WORKERS, "count", reached["refused"])
        add("flood: silent connections held", WORKERS, "count", reached["idle"])
        add("flood: slow senders held", WORKERS, "count", reached["slow"])
        add("flood: attackers' processor use", WORKERS, "cores", reached["cpu"])

    def judge(self) -> None:
        """Each fault under attack over the same fault in quiet."""
        for name, by in self._taken.items():
            for when in ("quiet", "flood"):
                self._run.report.add(f"{when}: {name}", WORKERS, "s", by[when])
            ratio = median(by["flood"]) / median(by["quiet"])
            self._run.report.add(f"{name}: flood over quiet", WORKERS, "x", ratio, goal=RATIO_GOAL)


def give_cores(cluster: Cluster, operator: OperatorRun, agents: AgentsProcess) -> None:
    """The last core is the operator's alone; everybody else keeps to the others."""
    cores = sorted(os.sched_getaffinity(0))
    others = set(cores[:-1]) or set(cores)
    supervisor = cluster.status()["supervisor"]["pid"]
    for pid in (os.getpid(), agents.pid, supervisor, *descendants(supervisor)):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setaffinity(int(thread.name), others)
    for thread in Path(f"/proc/{operator.pid}/task").iterdir():
        os.sched_setaffinity(int(thread.name), {cores[-1]})
    go_first(os.getpid(), operator.pid, agents.pid, supervisor, *descendants(supervisor))


async def measure(report: Report, folder: Path, *, rounds: int) -> None:
    """On a cluster of its own."""
    plan = Plan.of(WORKERS, quick=True)
    with cluster_of(WORKERS + SPARES + 8 + 4 * rounds, WORKERS) as cluster:
        async with Kube(cluster) as kube:
            site = OperatorSite(cluster, folder)
            await site.install(kube)
            operator = await site.start()
            await operator.leads()
            run = FleetRun(plan, report, cluster, kube, site)
            async with (
                PodWatch(kube, f"{LABEL_JOB}={NAME}") as watch,
                AgentsProcess(cluster, NAME, addresses=[(operator.host, operator.port)], name=SERVER_NAME) as agents,
            ):
                await agents.ask("state")
                await kube.request("POST", JOBS, run.body)
                await watch.until_running(WORKERS + SPARES, plan.patience)
                give_cores(cluster, operator, agents)
                await agents.ask("go")
                await agents.ask("learned", generation=1, count=WORKERS, seconds=plan.patience)
                flood = FloodRun(run, operator, watch, agents)
                await flood.rounds(rounds)
                flood.judge()
                leads = "trainingjob_operator_leader 1" in await operator.metrics()
                report.add("flood: the Lease was lost", WORKERS, "count", float(not leads), goal=0.0)
                await kube.delete(f"{JOBS}/{NAME}")
            await operator.stop()


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--quick", action="store_true", help="one round")
    options = parser.parse_args()
    report = Report("flood", options.quick, of="workers")
    with tempfile.TemporaryDirectory(prefix="trainium-bench-") as folder:
        asyncio.run(measure(report, Path(folder), rounds=1 if options.quick else 2))
    report.write(options.json)
    report.print()


if __name__ == "__main__":
    main()

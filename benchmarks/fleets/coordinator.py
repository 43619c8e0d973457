"""The coordinator with 1,000 agents: heartbeats at 1 Hz, a membership change to all of them, and the standby replica.

Two operator processes with the chart's rights on a real control plane; fake nodes; agents that speak the real protocol
over real TLS with tokens that the API server made. Latency is measured where the agents are, and divided by that of the
same agents at a server that answers and does nothing else, in the same run. From then on the control plane and the fake
nodes have the lowest priority: in a cluster they have machines of their own.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.fleetlab.agents.control import AgentsProcess
from benchmarks.fleetlab.coordinator.bare import BareServer
from benchmarks.fleetlab.figures import Report
from benchmarks.fleetlab.job import NAME, training_job
from benchmarks.fleetlab.kube import Kube, PodWatch
from benchmarks.fleetlab.operator_site import SERVER_NAME, OperatorSite, free_port
from benchmarks.fleetlab.priority import give_way, go_first
from benchmarks.fleetlab.scenario import JOBS, cluster_of, say, until_status
from trainium_contract.wire.worker_env import LABEL_JOB
from trainium_devcluster.processes.process_families import descendants

if TYPE_CHECKING:
    from benchmarks.fleetlab.operator_site import OperatorRun
    from trainium_devcluster.cluster import Cluster

AGENTS = 1000
HOSTS = ("127.0.0.1", "127.0.0.2")
PATIENCE = 240.0


class CoordinatorRun:
    """One job whose agents are served by whichever operator leads."""

    def __init__(
        self, cluster: Cluster, kube: Kube, site: OperatorSite, report: Report, agents: int, *, streams: bool
    ) -> None:
        self._cluster = cluster
        self._kube = kube
        self._site = site
        self._report = report
        self._count = agents
        self._streams = streams
        self._port = free_port(HOSTS[1])

    async def run(self, seconds: float) -> None:
        """Serve, change, hand over after a crash, hand over in order."""
        leader = await self._site.start(HOSTS[0], self._port)
        await leader.leads()
        standby = await self._site.start(HOSTS[1], self._port)
        await standby.ready()
        addresses = [(host, self._port) for host in HOSTS]
        async with (
            PodWatch(self._kube, f"{LABEL_JOB}={NAME}") as watch,
            AgentsProcess(self._cluster, NAME, addresses=addresses, name=SERVER_NAME, streams=self._streams) as agents,
        ):
            await agents.ask("state")
            await self._kube.request("POST", JOBS, training_job(self._count, spares=1))
            await watch.until_running(self._count + 1, PATIENCE)
            give_way(self._cluster)
            go_first(leader.pid, standby.pid, agents.pid)
            floor = await self._bare(agents, seconds)
            began, cpu = time.monotonic(), leader.cpu_seconds()
            await agents.ask("go")
            await agents.ask("learned", generation=1, count=self._count, seconds=PATIENCE)
            self._report.add("all agents connect, register and join", self._count, "s", time.monotonic() - began)
            self._report.add("operator CPU for that", self._count, "s", leader.cpu_seconds() - cpu)
            await self._whole()
            await self._serve(leader, agents, seconds, floor)
            await self._change(agents, watch)
            await self._hand_over(agents, leader, crash=True)
            leader, standby = standby, await self._site.start(HOSTS[0], self._port)
            await standby.ready()
            await self._whole()
            await self._hand_over(agents, leader, crash=False)
            await self._whole()
            await self._kube.delete(f"{JOBS}/{NAME}")
        await standby.stop()

    async def _bare(self, agents: AgentsProcess, seconds: float) -> float:
        """The floor: p99 of heartbeats (seconds) at a server that does nothing, while the operator is idle."""
        async with BareServer() as server:
            asked = {"count": self._count, "measure": seconds, "host": server.host, "port": server.port}
            found = await agents.ask("bare", **asked, authority=server.authority, seconds=PATIENCE)
        self._report.add("floor: heartbeat latency, median", self._count, "ms", found["p50"] * 1000)
        self._report.add("floor: heartbeat latency, p99", self._count, "ms", found["p99"] * 1000)
        return float(found["p99"])

    async def _serve(self, leader: OperatorRun, agents: AgentsProcess, seconds: float, floor: float) -> None:
        """Heartbeats at rest."""
        await asyncio.sleep(5.0)
        await agents.ask("settle")
        cpu, began = leader.cpu_seconds(), time.monotonic()
        await asyncio.sleep(seconds)
        took = time.monotonic() - began
        cores = (leader.cpu_seconds() - cpu) / took
        found = await agents.ask("latency")
        say(f"{found['count'] / took:.0f} heartbeats a second; errors: {found['errors']}")
        self._report.add("heartbeats in full a second", self._count, "count", found["count"] / took)
        self._report.add("heartbeat latency, median", self._count, "ms", found["p50"] * 1000)
        self._report.add("heartbeat latency, p99", self._count, "ms", found["p99"] * 1000, goal=20.0)
        self._report.add("heartbeat latency, p99 over the floor", self._count, "x", found["p99"] / floor)
        self._report.add("operator processor use", self._count, "cores", cores, goal=0.25)
        self._report.add("operator memory, all agents connected", self._count, "MiB", leader.resident_mib(), goal=120.0)

    async def _change(self, agents: AgentsProcess, watch: PodWatch) -> None:
        """A member fails; from the first agent that hears of the new membership to the last."""
        fleet = self._cluster.fleet
        assert fleet is not None
        victim = next(name for name in sorted(watch.pods) if name.endswith("-7"))
        began = time.monotonic()
        await asyncio.to_thread(fleet.fail_pod, "default", victim, exit_code=137)
        learned = await agents.ask("learned", generation=2, count=self._count, seconds=PATIENCE)
        spread = learned["last"] - learned["first"]
        self._report.add("membership change, from the first agent to the last", self._count, "s", spread, goal=0.5)
        self._report.add("one pod fails, until the last agent knows", self._count, "s", learned["last"] - began)
        await self._whole()

    async def _hand_over(self, agents: AgentsProcess, leader: OperatorRun, *, crash: bool) -> None:
        """The leader goes; until the first and the last agent are served by the other."""
        before = (await self._status())["membership"]["generation"]
        await agents.ask("forget")
        began = time.monotonic()
        ending = asyncio.create_task(leader.kill() if crash else leader.stop())
        served = await agents.ask("served", count=self._count, seconds=PATIENCE)
        await ending
        how, goal = ("after a crash", 20.0) if crash else ("in order", 2.0)
        self._report.add(f"hand-over {how}: first agent served", self._count, "s", served["first"] - began, goal=goal)
        self._report.add(f"hand-over {how}: all agents served", self._count, "s", served["last"] - began)
        lost = float((await self._status())["membership"]["generation"] - before)
        self._report.add(f"hand-over {how}: generations begun", self._count, "count", lost, goal=0.0)

    async def _status(self) -> dict[str, Any]:
        status: dict[str, Any] = (await self._kube.request("GET", f"{JOBS}/{NAME}")).get("status", {})
        return status

    async def _whole(self) -> None:
        def whole(status: dict[str, Any]) -> bool:
            return status.get("phase") == "Running" and status.get("readyReplicas") == self._count

        await until_status(self._kube, whole, PATIENCE, "all workers train")


async def measure(options: argparse.Namespace, report: Report, folder: Path) -> None:
    """On a cluster of its own."""
    with cluster_of(options.agents + 4, options.agents) as cluster:
        async with Kube(cluster) as kube:
            supervisor = cluster.status()["supervisor"]["pid"]
            go_first(os.getpid(), supervisor, *descendants(supervisor))
            site = OperatorSite(cluster, folder)
            await site.install(kube)
            seconds = 15.0 if options.quick else 60.0
            run = CoordinatorRun(cluster, kube, site, report, options.agents, streams=not options.requests)
            await run.run(seconds)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--quick", action="store_true", help="shorter")
    parser.add_argument("--agents", type=int, default=AGENTS)
    parser.add_argument("--requests", action="store_true", help="agents of the version before: no streams")
    options = parser.parse_args()
    report = Report("coordinator", options.quick)
    with tempfile.TemporaryDirectory(prefix="trainium-bench-") as folder:
        asyncio.run(measure(options, report, Path(folder)))
    report.write(options.json)
    report.print()


if __name__ == "__main__":
    main()

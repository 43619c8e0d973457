"""What the coordinator costs as fleets grow: 1,000 agents of one job, 5,000 in 20 jobs, 10,000 in 40; cores and memory.

The operator's own server, state, authenticator and TLS in a process of their own; the API server's part is played
there, and nothing is planned, so plans and caches come on top (`coordinator` has them). Agents speak the real protocol
over real TLS from this process. Processor seconds, not wall time: the machine may be busy. Agents of the version
before, which ask request by request over two connections each, are measured beside today's in the same run.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import ssl
from pathlib import Path

from benchmarks.fleetlab.agents.agent import Agent, Job, Pod
from benchmarks.fleetlab.agents.process import latency_of
from benchmarks.fleetlab.agents.wire import Endpoint
from benchmarks.fleetlab.coordinator.alone import NAMESPACE, job_name, pod_name
from benchmarks.fleetlab.coordinator.bare import BareServer
from benchmarks.fleetlab.figures import Report
from benchmarks.fleetlab.operator_site import SERVER_NAME, cpu_seconds, memory_mib
from benchmarks.fleetlab.priority import go_first
from benchmarks.fleetlab.scenario import say
from trainium_operator.memory import settle, use_little_memory_per_connection

TOKEN_LENGTH = 1100
CASES = ((1, 1_000, False), (1, 1_000, True), (20, 250, True), (40, 250, True))
"""Jobs, agents of each, and whether they have streams."""
WINDOWS = 5
CORES_GOAL, MIB_GOAL, P99_GOAL = 0.25, 120.0, 50.0
_COMING_AT_ONCE = 40
_QUIET_SECONDS = 12.0
"""Until heartbeats are as rare as they become, and spread."""


class AgentFleet:
    """All agents of one case."""

    def __init__(self, jobs: int, each: int, *, streams: bool) -> None:
        self.shared = [Job(streams=streams) for _ in range(jobs)]
        self._each = each
        self._tasks: list[asyncio.Task[None]] = []
        self.agents: list[Agent] = []

    async def come(self, endpoint: Endpoint) -> None:
        """All of them, some at a time."""
        for number, shared in enumerate(self.shared):
            for rank in range(self._each):
                name = pod_name(number, rank)
                pod = Pod(
                    namespace=NAMESPACE,
                    job=job_name(number),
                    name=name,
                    uid=name,
                    ip=f"10.{number}.{rank >> 8}.{rank & 255}",
                    node=f"node-{number}-{rank}",
                    token=name + "x" * (TOKEN_LENGTH - len(name)),
                )
                agent = Agent(pod, shared, [endpoint])
                self.agents.append(agent)
                self._tasks.append(asyncio.create_task(agent.run()))
                if len(self.agents) % _COMING_AT_ONCE == 0:
                    await self._until_in(len(self.agents))
        await self._until_in(len(self.agents))

    async def _until_in(self, count: int) -> None:
        async with asyncio.timeout(120.0):
            while sum(agent.registered for agent in self.agents) < count:  # noqa: ASYNC110 - told by nobody
                await asyncio.sleep(0.02)

    async def go(self) -> None:
        """All of them."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def measure(report: Report, jobs: int, each: int, *, streams: bool, seconds: float) -> None:
    """One case."""
    count = jobs * each
    how = "" if streams else "as the version before: "
    say(f"{how}{count} agents in {jobs} jobs")
    async with BareServer(module="benchmarks.fleetlab.coordinator.alone", jobs=jobs, agents=each) as server:
        empty = memory_mib(server.pid)
        go_first(os.getpid(), server.pid)
        fleet = AgentFleet(jobs, each, streams=streams)
        context = ssl.create_default_context(cadata=server.authority)
        cpu = cpu_seconds(server.pid)
        await fleet.come(Endpoint(server.host, server.port, SERVER_NAME, context))
        report.add(f"{how}processor time for all to come", count, "s", cpu_seconds(server.pid) - cpu)
        await asyncio.sleep(_QUIET_SECONDS)
        settle()
        latency_of(*fleet.shared)
        for _ in range(WINDOWS):
            cpu = cpu_seconds(server.pid)
            await asyncio.sleep(seconds)
            cores = (cpu_seconds(server.pid) - cpu) / seconds
            found = latency_of(*fleet.shared)
            if found["errors"]:
                say(f"errors: {found['errors']}")
            goal = CORES_GOAL if streams and count == 1_000 else None
            report.add(f"{how}processor use at rest", count, "cores", cores, goal=goal)
            report.add(f"{how}heartbeats in full a second", count, "count", found["count"] / seconds)
            report.add(f"{how}heartbeat latency, median", count, "ms", found["p50"] * 1000)
            goal = P99_GOAL if streams and count == 5_000 else None
            report.add(f"{how}heartbeat latency, p99", count, "ms", found["p99"] * 1000, goal=goal)
        full = memory_mib(server.pid)
        report.add(f"{how}memory without agents", count, "MiB", empty)
        report.add(f"{how}memory with all of them", count, "MiB", full)
        report.add(f"{how}memory of one agent", count, "KiB", (full - empty) * 1024 / count)
        await fleet.go()


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--quick", action="store_true", help="up to 5,000 agents, for shorter")
    options = parser.parse_args()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    use_little_memory_per_connection()
    report = Report("growth", options.quick, of="agents")
    for jobs, each, streams in CASES[: 3 if options.quick else None]:
        asyncio.run(measure(report, jobs, each, streams=streams, seconds=5.0 if options.quick else 12.0))
        report.write(options.json)
    report.print()


if __name__ == "__main__":
    main()

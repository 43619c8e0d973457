"""A fault in one job beside 99 others, of which a webhook refuses five, while every write waits 200 ms longer.

Jobs of 1 to 64 workers on fake nodes. Some are measured: a worker's pod fails, and the time is taken until every
agent has the membership after it; first with one job at a time in the cluster, then beside all the others. The pods of
five jobs are refused for ever, so that the operator tries again and again.

    python -m benchmarks.fleets.fairness --json out/bench/fairness.json
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.fleetlab.agents.control import AgentsProcess
from benchmarks.fleetlab.crowd import PATIENCE, Crowd
from benchmarks.fleetlab.figures import Report
from benchmarks.fleetlab.kube import Kube
from benchmarks.fleetlab.operator_site import NAMESPACE, RELEASE, SERVER_NAME, OperatorSite
from benchmarks.fleetlab.scenario import JOBS, cluster_of, say
from benchmarks.fleetlab.slow_webhook import SlowWebhook

if TYPE_CHECKING:
    from benchmarks.fleetlab.operator_site import OperatorRun
    from trainium_devcluster.cluster import Cluster

COUNT, REFUSED = 100, 5
MEASURED = {"measured-4": 4, "measured-16": 16, "measured-64": 64}
"""Jobs whose faults are measured, with their workers."""
LARGEST = 64
WRITE_SECONDS = 0.2
GOAL = 1.5
SPARES = 1


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=COUNT)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    report = Report("fairness", quick=options.jobs != COUNT, of="workers")
    with tempfile.TemporaryDirectory(prefix="trainium-bench-") as folder:
        asyncio.run(_run(others_of(options.jobs), options.rounds, report, Path(folder)))
    report.write(options.json)
    report.print()


def others_of(jobs: int) -> dict[str, int]:
    """Names and sizes of the jobs beside the measured ones: as many small ones as large ones, by their logarithm."""
    dice = random.Random(1)
    names = [f"refused-{number}" for number in range(REFUSED)]
    names += [f"other-{number}" for number in range(jobs - REFUSED - len(MEASURED))]
    return {name: round(LARGEST ** dice.random()) for name in names}


async def _run(others: dict[str, int], rounds: int, report: Report, folder: Path) -> None:
    jobs = {**MEASURED, **others}
    nodes = sum(jobs.values()) + SPARES * len(MEASURED)
    say(f"{len(jobs)} jobs of {nodes} nodes: starting the control plane")
    # A pod that failed leaves its node alone for a while, so some are to be free.
    with cluster_of(nodes + 64, nodes) as cluster:
        async with AsyncExitStack() as stack:
            kube = await stack.enter_async_context(Kube(cluster))
            site = OperatorSite(cluster, folder)
            await site.install(kube)
            account = f"system:serviceaccount:{NAMESPACE}:{RELEASE}"
            webhook = await stack.enter_async_context(SlowWebhook(folder, account, seconds=WRITE_SECONDS))
            webhook.refuses = {name for name in jobs if name.startswith("refused-")}
            await webhook.install(kube)
            operator = await site.start()
            stack.push_async_callback(operator.stop)
            await operator.leads()
            crowd = Hurt(cluster, kube, operator)
            await stack.enter_async_context(crowd.jobs.watch)
            alone = {name: await crowd.alone(name, size, rounds) for name, size in MEASURED.items()}
            if not webhook.delayed:
                raise RuntimeError(f"no write of {account} came to the webhook")
            beside = await crowd.beside(others, rounds)
            for name, size in MEASURED.items():
                for before, after in zip(alone[name], beside[name], strict=True):
                    report.add("a pod fails, alone: new membership with every agent", size, "s", before)
                    report.add("a pod fails, beside the others: new membership with every agent", size, "s", after)
                    report.add("beside the others over alone", size, "x", after / before, goal=GOAL)
            report.add("creations of pods that were refused", len(jobs), "count", float(webhook.refused.total()))
            report.add("jobs that were refused", len(jobs), "count", float(len(webhook.refused)))
            report.add("operator memory, peak", len(jobs), "MiB", operator.peak_mib())


class Hurt:
    """Recoveries of the measured jobs."""

    def __init__(self, cluster: Cluster, kube: Kube, operator: OperatorRun) -> None:
        self._cluster = cluster
        self._kube = kube
        self._addresses = [(operator.host, operator.port)]
        self.jobs = Crowd(kube, dict.fromkeys(MEASURED, SPARES))

    async def alone(self, name: str, size: int, rounds: int) -> list[float]:
        """Seconds of each recovery of this job, with no other in the cluster."""
        async with AgentsProcess(self._cluster, name, addresses=self._addresses, name=SERVER_NAME) as agents:
            await self.jobs.create(name, size)
            await self.jobs.train(agents, {name: size})
            found = [await self._recovery(agents, name, size) for _ in range(rounds)]
        await self._kube.delete(f"{JOBS}/{name}")
        await self.jobs.watch.until(lambda: not self.jobs.watch.pods, PATIENCE, f"the pods of {name} are gone")
        return found

    async def beside(self, others: dict[str, int], rounds: int) -> dict[str, list[float]]:
        """The same of all measured jobs by turns, among the others, once all that may run do."""
        jobs = {**MEASURED, **{name: size for name, size in others.items() if not name.startswith("refused-")}}
        async with AgentsProcess(self._cluster, *jobs, addresses=self._addresses, name=SERVER_NAME) as agents:
            for name, size in {**others, **MEASURED}.items():
                await self.jobs.create(name, size)
            await self.jobs.train(agents, jobs)
            say(f"{len(jobs)} jobs train")
            found: dict[str, list[float]] = {name: [] for name in MEASURED}
            for _ in range(rounds):
                for name, size in MEASURED.items():
                    found[name].append(await self._recovery(agents, name, size))
        return found

    async def _recovery(self, agents: AgentsProcess, name: str, size: int) -> float:
        """One pod of a member fails; seconds until every agent has the membership after it."""
        status = await self.jobs.whole(name, size)
        generation = status["membership"]["generation"]
        pod = await self.jobs.member(name, size // 2)
        began = time.monotonic()
        assert self._cluster.fleet is not None
        await asyncio.to_thread(self._cluster.fleet.fail_pod, "default", pod, exit_code=137, message="killed")
        learned = await agents.ask("learned", job=name, generation=generation + 1, count=size, seconds=PATIENCE)
        seconds: float = learned["last"] - began
        say(f"{name}: {seconds:.2f} s")
        return seconds


if __name__ == "__main__":
    main()

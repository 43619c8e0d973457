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
from benchmarks.fleetlab.figures import Report
from benchmarks.fleetlab.job import training_job
from benchmarks.fleetlab.kube import Kube, PodWatch
from benchmarks.fleetlab.operator_site import NAMESPACE, RELEASE, SERVER_NAME, OperatorSite
from benchmarks.fleetlab.scenario import JOBS, cluster_of, say
from benchmarks.fleetlab.slow_webhook import SlowWebhook
from trainium_contract.wire.worker_env import LABEL_ROLE, ROLE_WORKER
from trainium_operator.cluster.cache.membership_record import membership_of

if TYPE_CHECKING:
    from benchmarks.fleetlab.kube import Json
    from benchmarks.fleetlab.operator_site import OperatorRun
    from trainium_devcluster.cluster import Cluster

COUNT, REFUSED = 100, 5
MEASURED = {"measured-4": 4, "measured-16": 16, "measured-64": 64}
"""Jobs whose faults are measured, with their workers."""
LARGEST = 64
WRITE_SECONDS = 0.2
GOAL = 1.5
SPARES = 1
_PATIENCE = 600.0
_AT_ONCE = 10
"""Jobs that are waited for side by side; more would burden the API server with questions."""


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
            crowd = Crowd(cluster, kube, operator)
            await stack.enter_async_context(crowd.watch)
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


class Crowd:
    """The jobs in the cluster."""

    def __init__(self, cluster: Cluster, kube: Kube, operator: OperatorRun) -> None:
        self._cluster = cluster
        self._kube = kube
        self._addresses = [(operator.host, operator.port)]
        self.watch = PodWatch(kube, f"{LABEL_ROLE}={ROLE_WORKER}")

    async def alone(self, name: str, size: int, rounds: int) -> list[float]:
        """Seconds of each recovery of this job, with no other in the cluster."""
        async with AgentsProcess(self._cluster, name, addresses=self._addresses, name=SERVER_NAME) as agents:
            await self._start(name, size)
            await self._train(agents, name, size)
            found = [await self._recovery(agents, name, size) for _ in range(rounds)]
        await self._kube.delete(f"{JOBS}/{name}")
        await self.watch.until(lambda: not self.watch.pods, _PATIENCE, f"the pods of {name} are gone")
        return found

    async def beside(self, others: dict[str, int], rounds: int) -> dict[str, list[float]]:
        """The same of all measured jobs by turns, among the others, once all that may run do."""
        jobs = {**MEASURED, **{name: size for name, size in others.items() if not name.startswith("refused-")}}
        async with AgentsProcess(self._cluster, *jobs, addresses=self._addresses, name=SERVER_NAME) as agents:
            for name, size in {**others, **MEASURED}.items():
                await self._start(name, size)
            turns = asyncio.Semaphore(_AT_ONCE)

            async def train(name: str, size: int) -> None:
                async with turns:
                    await self._train(agents, name, size)

            await asyncio.gather(*(train(name, size) for name, size in jobs.items()))
            say(f"{len(jobs)} jobs train")
            found: dict[str, list[float]] = {name: [] for name in MEASURED}
            for _ in range(rounds):
                for name, size in MEASURED.items():
                    found[name].append(await self._recovery(agents, name, size))
        return found

    async def _start(self, name: str, size: int) -> None:
        body = training_job(size, spares=SPARES if name in MEASURED else 0, name=name)
        await self._kube.request("POST", JOBS, body)

    async def _train(self, agents: AgentsProcess, name: str, size: int) -> None:
        """Until all of its workers run, their agents are let go, and it trains."""
        count = size + (SPARES if name in MEASURED else 0)
        await self.watch.until(lambda: self._running(name) >= count, _PATIENCE, f"{count} pods of {name} run")
        await agents.ask("go", job=name)
        await self._whole(name, size)

    def _running(self, name: str) -> int:
        pods = self.watch.pods.items()
        return sum(pod.running is not None and not pod.failed and not pod.deleting for each, pod in pods
                   if each.rpartition("-w-")[0] == name)  # fmt: skip

    async def _recovery(self, agents: AgentsProcess, name: str, size: int) -> float:
        """One pod of a member fails; seconds until every agent has the membership after it."""
        status = await self._whole(name, size)
        generation = status["membership"]["generation"]
        pod = await self._member(name, size // 2)
        began = time.monotonic()
        assert self._cluster.fleet is not None
        await asyncio.to_thread(self._cluster.fleet.fail_pod, "default", pod, exit_code=137, message="killed")
        learned = await agents.ask("learned", job=name, generation=generation + 1, count=size, seconds=_PATIENCE)
        seconds: float = learned["last"] - began
        say(f"{name}: {seconds:.2f} s")
        return seconds

    async def _member(self, name: str, rank: int) -> str:
        found = await self._kube.request("GET", f"/api/v1/namespaces/default/configmaps/{name}-membership")
        membership = membership_of(found)
        assert membership is not None
        return membership.members[rank].pod_name

    async def _whole(self, name: str, size: int) -> Json:
        """The status, once all members train, the spare is warm, and nothing is being mended."""
        spares, deadline = SPARES if name in MEASURED else 0, time.monotonic() + _PATIENCE
        while True:
            status: Json = (await self._kube.request("GET", f"{JOBS}/{name}")).get("status", {})
            mended = all(entry.get("recoveredSeconds") is not None for entry in status.get("history", []))
            trains = status.get("phase") == "Running" and status.get("readyReplicas") == size
            if trains and status.get("spares", 0) >= spares and mended and self._running(name) >= size + spares:
                return status
            if time.monotonic() > deadline:
                shown = {key: status.get(key) for key in ("phase", "readyReplicas", "spares", "conditions")}
                raise TimeoutError(f"{name} is not whole after {_PATIENCE:.0f} s: {shown}")
            await asyncio.sleep(0.2)


if __name__ == "__main__":
    main()

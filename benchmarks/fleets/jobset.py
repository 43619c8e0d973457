"""A job, a JobSet and a bare client start and restart the same pods, in one run on one warm control plane.

The three take turns in an order that is mixed anew for each round, so that a machine that is slow for a while is slow
for each of them; ratios are taken within a round. All pods have the same content (4 kB, of a worker of our operator)
and are as many as workers and spares. Our job's agents are simulated; those of the pods that a restart makes are not
started, as there are none in the others' pods. The controller manager, which makes JobSet's pods, may make 200 requests
a second, and the scheduler 500.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.fleetlab.agents.control import AgentsProcess
from benchmarks.fleetlab.faults import SPARES
from benchmarks.fleetlab.figures import Report
from benchmarks.fleetlab.floor import LABEL, fail_pods, measure_floor, of_wave
from benchmarks.fleetlab.job import NAME, training_job, worker_manifests
from benchmarks.fleetlab.jobset import JOBSETS, JobSetController, jobset_of
from benchmarks.fleetlab.kube import Kube, PodWatch
from benchmarks.fleetlab.operator_site import SERVER_NAME, OperatorSite, cpu_seconds
from benchmarks.fleetlab.scenario import JOBS, RATIO_GOAL, cluster_of, say, until_status
from trainium_contract.wire.worker_env import LABEL_JOB
from trainium_operator.plan.model.node_labels import LAYERS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from benchmarks.fleetlab.kube import Json
    from benchmarks.fleetlab.operator_site import OperatorRun
    from trainium_devcluster.cluster import Cluster

SIZES = (128, 1000)
ROUNDS = 5
JOBSET_GOAL = 0.6
WRITES_GOAL = {1000: 4100.0}
OURS, JOBSET, FLOOR, SMALL = "ours", "JobSet", "floor", "floor, pods of 0.3 kB"
_NOT_OF_A_START = ("leases", "nodes", "tokenreviews", "subjectaccessreviews", "serviceaccounts")
"""Written all the time, or by the simulated agents alone (tokens)."""
_CALM_CORES = 0.4
_CALM_SECONDS = 30


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--quick", action="store_true", help="128 nodes only, two rounds")
    parser.add_argument("--nodes", type=int, nargs="+", help="other numbers of nodes")
    parser.add_argument("--rounds", type=int, help="other than five")
    parser.add_argument("--seed", type=int, default=1, help="of the orders")
    options = parser.parse_args()
    report = Report("jobset", options.quick)
    rounds = options.rounds or (2 if options.quick else ROUNDS)
    for nodes in options.nodes or (SIZES[:1] if options.quick else SIZES):
        with tempfile.TemporaryDirectory(prefix="trainium-bench-") as folder:
            asyncio.run(_run(nodes, rounds, random.Random(options.seed), report, Path(folder)))
        report.write(options.json)
    report.print()


async def _run(nodes: int, rounds: int, dice: random.Random, report: Report, folder: Path) -> None:
    say(f"{nodes} nodes: starting the control plane")
    with cluster_of(nodes + SPARES + 8, nodes) as cluster:
        async with AsyncExitStack() as stack:
            kube = await stack.enter_async_context(Kube(cluster))
            site = OperatorSite(cluster, folder)
            await site.install(kube)
            jobset = JobSetController(cluster, folder, say)
            await jobset.install(kube)
            await stack.enter_async_context(jobset)
            operator = await site.start()
            stack.push_async_callback(operator.stop)
            await operator.leads()
            race = Race(nodes, report, cluster, kube, operator, jobset)
            await race.prepare()
            for _ in range(rounds):
                turns = [OURS, JOBSET, FLOOR, SMALL]
                dice.shuffle(turns)
                await race.round(turns)
            report.add("operator memory, peak", nodes, "MiB", operator.peak_mib())
            report.add("JobSet memory, peak", nodes, "MiB", jobset.peak_mib())


class Race:
    """The rounds at one size."""

    def __init__(
        self,
        nodes: int,
        report: Report,
        cluster: Cluster,
        kube: Kube,
        operator: OperatorRun,
        jobset: JobSetController,
    ) -> None:
        self._nodes = nodes
        self._count = nodes + SPARES
        self._report = report
        self._cluster = cluster
        self._kube = kube
        self._operator = operator
        self._jobset = jobset
        self._body = training_job(nodes, spares=SPARES)
        self._patience = 120.0 + nodes / 3
        self._manifests: list[Json] = []
        self._pids: dict[str, int] = {}

    async def prepare(self) -> None:
        """What all of them make: the pods of the operator where nodes carry the network's labels."""
        (node,) = (await self._kube.request("GET", "/api/v1/nodes?limit=1"))["items"]
        layers = [label for label in LAYERS if label in node["metadata"]["labels"]]
        self._manifests = worker_manifests(self._body, self._count, layers)
        status = await asyncio.to_thread(self._cluster.supervisor, {"op": "status"})
        self._pids = {name: row["pid"] for name, row in status["components"].items()}
        self._pids["kwok"] = status["fleet"]["pid"]

    async def round(self, turns: list[str]) -> None:
        """Each of them once."""
        times: dict[str, dict[str, float]] = {}
        for who in turns:
            await self._calm()
            match who:
                case "ours":
                    times[who] = await self._ours()
                case "JobSet":
                    times[who] = await self._their_jobset()
                case _:
                    times[who] = await self._floor(who)
            say(
                f"{self._nodes} nodes: {who}: "
                + ", ".join(f"{name} {value:.2f} s" for name, value in times[who].items())
            )
        for who, found in times.items():
            for name, seconds in found.items():
                self._report.add(f"{who}: {name}", self._nodes, "s", seconds)
        for name, seconds in times[OURS].items():
            ratio = seconds / times[JOBSET][name]
            self._report.add(f"ours over JobSet: {name}", self._nodes, "x", ratio, goal=JOBSET_GOAL)
        for who in (OURS, JOBSET):
            for name, seconds in times[who].items():
                goal = RATIO_GOAL if who == OURS else None
                self._report.add(
                    f"{who} over the floor: {name}", self._nodes, "x", seconds / times[FLOOR][name], goal=goal
                )

    async def _floor(self, who: str) -> dict[str, float]:
        pods = self._manifests if who == FLOOR else [_small(each) for each in self._manifests]
        async with self._counted(who):
            floor = await measure_floor(self._kube, pods, restart=who == FLOOR, seconds=self._patience)
        found = {"created": floor.created, "Running": floor.running}
        return found if floor.restarted is None else {**found, "all restarted": floor.restarted}

    async def _their_jobset(self) -> dict[str, float]:
        body = jobset_of("peer", of_wave(self._manifests[0], "jobset"), self._count)
        async with PodWatch(self._kube, f"{LABEL}=jobset") as watch:
            async with self._counted(JOBSET):
                began = time.monotonic()
                await self._kube.request("POST", JOBSETS, body)
                created, running = await watch.until_running(self._count, self._patience)
            restarted = await self._restarted(JOBSET, watch)
            await self._kube.delete(f"{JOBSETS}/peer")
            await watch.until(lambda: not watch.pods, self._patience, "the JobSet's pods are gone")
        return {"created": created - began, "Running": running - began, "all restarted": restarted}

    async def _ours(self) -> dict[str, float]:
        agents = AgentsProcess(
            self._cluster, NAME, addresses=[(self._operator.host, self._operator.port)], name=SERVER_NAME
        )
        async with PodWatch(self._kube, f"{LABEL_JOB}={NAME}") as watch, agents:
            await agents.ask("state")
            async with self._counted(OURS):
                began = time.monotonic()
                await self._kube.request("POST", JOBS, self._body)
                created, running = await watch.until_running(self._count, self._patience)
            # A restart is of a job that trains, so its agents have to be there.
            await agents.ask("go")
            await agents.ask("learned", generation=1, count=self._nodes, seconds=self._patience)
            await until_status(self._kube, self._whole, self._patience, "all workers train")
            await agents.ask("settle")
            await agents.ask("hold")
            restarted = await self._restarted(OURS, watch)
            await self._kube.delete(f"{JOBS}/{NAME}")
            await watch.until(lambda: not watch.pods, self._patience, "the job's pods are gone")
        return {"created": created - began, "Running": running - began, "all restarted": restarted}

    def _whole(self, status: Json) -> bool:
        ready = status.get("phase") == "Running" and status.get("readyReplicas") == self._nodes
        return ready and status.get("spares", 0) >= SPARES

    async def _restarted(self, who: str, watch: PodWatch) -> float:
        """All pods fail; seconds from the first that does until all new ones run."""
        old = {pod.uid for pod in watch.pods.values()}

        def back() -> bool:
            return sum(pod.uid not in old and pod.running is not None for pod in watch.pods.values()) >= self._count

        began = time.monotonic()
        await fail_pods(self._kube, list(watch.pods))
        failed = time.monotonic()
        last = await watch.until(back, self._patience, f"all pods of {who} run again")
        self._report.add(f"{who}: to fail all pods", self._nodes, "s", failed - began)
        return last - began

    @asynccontextmanager
    async def _counted(self, who: str) -> AsyncIterator[None]:
        """Writes of everybody, and processor time, of a start."""
        writes, cpu, own = await self._writes(), self._cpu(), self._own(who)
        yield
        n = self._nodes
        if who in (OURS, JOBSET):  # the floor's start cannot be told from its restart and its end
            goal = WRITES_GOAL.get(n) if who == OURS else None
            self._report.add(
                f"{who}: API writes of a start, all writers", n, "count", await self._writes() - writes, goal=goal
            )
            spent = {name: value - cpu[name] for name, value in self._cpu().items()}
            own = self._own(who) - own
            self._report.add(f"{who}: processor time of the controller for a start", n, "s", own)
            managers = spent["kube-controller-manager"]
            self._report.add(f"{who}: processor time of the controller manager for a start", n, "s", managers)
            self._report.add(f"{who}: processor time of everything for a start", n, "s", own + sum(spent.values()))

    async def _writes(self) -> float:
        counts = await self._kube.writes()
        return sum(count for resource, count in counts.items() if resource not in _NOT_OF_A_START)

    def _cpu(self) -> dict[str, float]:
        return {name: cpu_seconds(pid) for name, pid in self._pids.items()}

    def _own(self, who: str) -> float:
        return self._jobset.cpu_seconds() if who == JOBSET else self._operator.cpu_seconds()

    async def _calm(self) -> None:
        """Until what went before is worked off: the control plane does nothing but renew its nodes."""
        for _ in range(_CALM_SECONDS):
            before = sum(self._cpu().values()) + self._own(OURS) + self._own(JOBSET)
            await asyncio.sleep(1)
            if sum(self._cpu().values()) + self._own(OURS) + self._own(JOBSET) - before < _CALM_CORES:
                return


def _small(manifest: Json) -> Json:
    """The least pod that asks for the same devices: what peers were measured with before."""
    (worker,) = (each for each in manifest["spec"]["containers"] if each["name"] == "worker")
    container = {"name": "worker", "image": worker["image"], "resources": worker["resources"]}
    spec = {"restartPolicy": "Never", "containers": [container], "tolerations": manifest["spec"].get("tolerations", [])}
    name = f"{manifest['metadata']['name']}-small"
    return {**manifest, "metadata": {"name": name, "namespace": "default"}, "spec": spec}


if __name__ == "__main__":
    main()

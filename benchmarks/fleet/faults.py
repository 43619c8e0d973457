"""Inject faults into a running job at fleet size, and measure the duration and the cost of recoveries."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from benchmarks.fleet.floor import fail_pods
from benchmarks.fleet.job import JOBS, NAME, SPARES, read_recorded_membership, read_status, wait_for_status
from trainium_devcluster.node.api.client import MERGE_PATCH

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from benchmarks.fleet.agents_process import AgentsProcess
    from benchmarks.fleet.kube import Json, PodWatch
    from benchmarks.fleet.operator_process import OperatorProcess
    from benchmarks.fleet.plan import MeasurementPlan
    from benchmarks.harness.figures import Report
    from trainium_devcluster.cluster import Cluster
    from trainium_devcluster.node.api.client import Api


@dataclass(kw_only=True)
class FaultRound:
    """Injects faults into a training job."""

    plan: MeasurementPlan
    report: Report
    cluster: Cluster
    kube: Api
    operator: OperatorProcess
    watch: PodWatch
    agents: AgentsProcess

    def __post_init__(self) -> None:
        assert self.cluster.fleet is not None
        self._fleet = self.cluster.fleet
        self._nodes = self.plan.nodes

    async def measure_steady_state(self) -> None:
        """Measure the cost of an undisturbed job."""
        seconds = self.plan.steady_seconds
        await self.agents.request("freeze_gc")
        before, cpu, started_at = await self._count_writes(), self.operator.read_cpu_seconds(), time.monotonic()
        await asyncio.sleep(seconds)
        duration = time.monotonic() - started_at
        cores = (self.operator.read_cpu_seconds() - cpu) / duration
        writes = await self._count_writes() - before
        latency = await self.agents.request("latency")
        n = self._nodes
        self.report.add(
            "operator API writes at rest", n, "/min", writes * 60 / duration, goal=60.0 if n == 128 else None
        )
        self.report.add("operator cores at rest", n, "cores", cores)
        self.report.add("heartbeats at rest", n, "/min", latency["count"] * 60 / duration)
        self.report.add("heartbeat p99 at rest", n, "ms", latency["p99"] * 1000)

    async def _count_writes(self) -> float:
        """Count the writes of the operator: all requests except reads."""
        requests = await self.operator.count_requests()
        return sum(count for verb, count in requests.items() if verb not in ("GET", "WATCH", "LIST"))

    async def measure_faults(self) -> None:
        """Inject each fault several times, each into a complete job."""
        n = self._nodes
        for _ in range(self.plan.faults):
            pod = await self._choose_member()
            await self._measure_fault("one pod fails", partial(self._fail_pod, pod), goal=0.3 if n == 128 else None)
            await self._crash()
            pod = await self._choose_member()
            # The cache of nodes may be stale, so two seconds without a heartbeat must confirm the fault.
            await self._measure_fault("node deleted", partial(self._delete_node, pod), goal=3.0)
            pod = await self._choose_member()
            await self._measure_fault("node marked bad", partial(self._mark_unhealthy, pod), goal=1.0)
            pod = await self._choose_member()
            await self._measure_fault("node silent", partial(self._silence_node, pod), goal=8.0)

    async def _measure_fault(self, name: str, fault: Callable[[], Awaitable[None]], *, goal: float | None) -> None:
        """Measure from the fault until every agent has the new membership, then until the job is complete."""
        n = self._nodes
        await self._wait_until_complete()
        generation = (await read_status(self.kube))["membership"]["generation"]
        writes, created, cpu = await self._count_writes(), self.watch.created, self.operator.read_cpu_seconds()
        started_at = time.monotonic()
        await fault()
        received = await self.agents.request(
            "wait_for_membership", generation=generation + 1, count=n, seconds=self.plan.timeout
        )
        self.report.add(f"{name}: new membership with every agent", n, "s", received["last"] - started_at, goal=goal)
        await self._wait_until_complete()
        self.report.add(f"{name}: until all workers and spares are back", n, "s", time.monotonic() - started_at)
        self.report.add(f"{name}: pods recreated", n, "count", float(self.watch.created - created), goal=1.0)
        self.report.add(f"{name}: API writes of the operator", n, "count", await self._count_writes() - writes)
        self.report.add(f"{name}: operator CPU", n, "s", self.operator.read_cpu_seconds() - cpu)

    async def _crash(self) -> None:
        """Kill a process: the agents restart in place, and no pod changes."""
        await self._wait_until_complete()
        created, writes = self.watch.created, await self._count_writes()
        await self._restart_in_place()
        await self._wait_until_complete()
        self.report.add(
            "process crash: pods recreated", self._nodes, "count", float(self.watch.created - created), goal=0.0
        )
        self.report.add(
            "process crash: API writes of the operator", self._nodes, "count", await self._count_writes() - writes
        )

    async def _restart_in_place(self) -> None:
        """Crash a process and wait until the status counts the restart."""
        before = (await read_status(self.kube)).get("restarts", {}).get("total", 0)
        await self.agents.request("crash", pod=await self._choose_member())
        await self._wait_for_status(
            lambda status: status.get("restarts", {}).get("total", 0) > before, "the restart is counted"
        )

    async def _fail_pod(self, pod: str) -> None:
        await asyncio.to_thread(self._fleet.fail_pod, "default", pod, exit_code=137, message="killed")

    async def _delete_node(self, pod: str) -> None:
        await self.agents.request("silence", pod=pod)
        await asyncio.to_thread(self._fleet.delete_node, self.watch.pods[pod].node)

    async def _mark_unhealthy(self, pod: str) -> None:
        node = self.watch.pods[pod].node
        await asyncio.to_thread(self._fleet.set_condition, node, "NeuronHealth", "True", reason="NeuronHasError_SRAM")

    async def _silence_node(self, pod: str) -> None:
        await self.agents.request("silence", pod=pod)
        await asyncio.to_thread(self._fleet.stop_kubelet, self.watch.pods[pod].node)

    async def _choose_member(self) -> str:
        """Return a member of the current generation."""
        members = (await read_recorded_membership(self.kube)).members
        return members[len(members) // 2].pod_name

    async def _wait_for_status(self, condition: Callable[[Json], bool], what: str) -> None:
        await wait_for_status(self.kube, condition, what, self.plan.timeout)

    async def _wait_until_complete(self) -> None:
        """Wait until all members train and all spares are ready."""

        def is_complete(status: Json) -> bool:
            pods = [pod for pod in self.watch.pods.values() if pod.running_at and not pod.failed and not pod.deleting]
            return (
                len(pods) >= self._nodes + SPARES  # the status may be slightly older
                and status.get("phase") == "Running"
                and status.get("readyReplicas") == self._nodes
                and status.get("spares", 0) >= SPARES
                and all(entry.get("recoveredSeconds") is not None for entry in status.get("history", []))
            )

        try:
            await self._wait_for_status(is_complete, "all workers and spares are back")
        except TimeoutError as error:
            members = {member.pod_uid for member in (await read_recorded_membership(self.kube)).members}
            spares = [f"{name}: {pod}" for name, pod in self.watch.pods.items() if pod.uid not in members]
            raise TimeoutError(f"{error}; pods that are not members: {'; '.join(spares)}") from error

    async def measure_gang_restart(self, floor: float, *, sizes: Sequence[int]) -> None:
        """Fail every pod, then change the size of the job; `floor`: seconds of a restart without an operator."""
        n = self._nodes
        await self._wait_until_complete()
        previous_uids = {pod.uid for pod in self.watch.pods.values()}
        started_at = time.monotonic()
        await fail_pods(self.kube, list(self.watch.pods))
        failed_at = time.monotonic()

        def all_replaced() -> bool:
            pods = self.watch.pods.values()
            return sum(pod.uid not in previous_uids and pod.running_at is not None for pod in pods) >= n

        last = await self.watch.wait_until(all_replaced, "all pods run again", self.plan.timeout)
        self.report.add("all pods fail: to fail them", n, "s", failed_at - started_at)
        self.report.add("all pods fail: all Running again", n, "s", last - started_at)
        self.report.add("gang restart over the floor", n, "x", (last - started_at) / floor, goal=1.15)
        await self._wait_until_complete()
        for size in sizes:
            await self._resize(size)

    async def _resize(self, size: int) -> None:
        n = self._nodes
        generation = (await read_status(self.kube))["membership"]["generation"]
        started_at = time.monotonic()
        await self.kube.patch(f"{JOBS}/{NAME}", {"spec": {"workers": {"replicas": size}}}, MERGE_PATCH)
        received = await self.agents.request(
            "wait_for_membership", generation=generation + 1, count=size, seconds=self.plan.timeout
        )
        name = "scale: new membership with every agent"
        self.report.add(name, n, "s", received["last"] - started_at)
        self._nodes = size
        await self._wait_until_complete()
        self._nodes = n

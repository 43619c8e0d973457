"""Inject faults into a running job at fleet size, and measure the duration and the cost of recoveries."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import TYPE_CHECKING

from benchmarks.fleet.floor import fail_pods
from benchmarks.fleet.job import recorded_membership
from benchmarks.fleet.kube import count_writes
from trainium_devcluster.node.api.client import MERGE_PATCH

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from benchmarks.fleet.agents_process import AgentsProcess
    from benchmarks.fleet.kube import Json, PodWatch
    from benchmarks.fleet.operator_process import OperatorProcess
    from benchmarks.fleet.scenario import FleetRun

SPARES = 2
JOB = "/apis/trainium.dev/v1alpha1/namespaces/default/trainingjobs/fleet"


class FaultRound:
    """Injects faults into a training job."""

    def __init__(self, run: FleetRun, operator: OperatorProcess, watch: PodWatch, agents: AgentsProcess) -> None:
        assert run.cluster.fleet is not None
        self._run = run
        self._operator = operator
        self._watch = watch
        self._agents = agents
        self._fleet = run.cluster.fleet
        self._nodes = run.plan.nodes
        self._report = run.report

    async def measure_steady_state(self) -> None:
        """Measure the cost of an undisturbed job."""
        seconds = self._run.plan.steady_seconds
        await self._agents.request("freeze_gc")
        before, cpu, started_at = await self._count_writes(), self._operator.cpu_seconds(), time.monotonic()
        await asyncio.sleep(seconds)
        duration = time.monotonic() - started_at
        cores = (self._operator.cpu_seconds() - cpu) / duration
        writes = await self._count_writes() - before
        latency = await self._agents.request("latency")
        n = self._nodes
        self._report.add(
            "operator API writes at rest", n, "/min", writes * 60 / duration, goal=60.0 if n == 128 else None
        )
        self._report.add("operator cores at rest", n, "cores", cores)
        self._report.add("heartbeats at rest", n, "/min", latency["count"] * 60 / duration)
        self._report.add("heartbeat p99 at rest", n, "ms", latency["p99"] * 1000)

    async def _count_writes(self) -> float:
        """Count the writes of the operator: all requests except reads and token reviews."""
        requests = await self._operator.requests()
        writes = sum(count for verb, count in requests.items() if verb not in ("GET", "WATCH", "LIST"))
        reviews = (await asyncio.to_thread(count_writes, self._run.cluster)).get("tokenreviews", 0.0)
        return writes - reviews

    async def measure_faults(self) -> None:
        """Inject each fault several times, each into a complete job."""
        n = self._nodes
        for _ in range(self._run.plan.faults):
            pod = await self._member()
            await self._measure_fault("one pod fails", partial(self._fail_pod, pod), goal=0.3 if n == 128 else None)
            await self._crash()
            pod = await self._member()
            # The cache of nodes may be stale, so two seconds without a heartbeat must confirm the fault.
            await self._measure_fault("node deleted", partial(self._delete_node, pod), goal=3.0)
            pod = await self._member()
            await self._measure_fault("node marked bad", partial(self._mark_unhealthy, pod), goal=1.0)
            pod = await self._member()
            await self._measure_fault("node silent", partial(self._silence_node, pod), goal=8.0)

    async def _measure_fault(self, name: str, fault: Callable[[], Awaitable[None]], *, goal: float | None) -> None:
        """Measure from the fault until every agent has the new membership, then until the job is complete."""
        n = self._nodes
        await self._wait_until_complete()
        generation = (await self._run.status())["membership"]["generation"]
        writes, created, cpu = await self._count_writes(), self._watch.created, self._operator.cpu_seconds()
        started_at = time.monotonic()
        await fault()
        received = await self._agents.request(
            "wait_for_membership", generation=generation + 1, count=n, seconds=self._run.plan.timeout
        )
        self._report.add(f"{name}: new membership with every agent", n, "s", received["last"] - started_at, goal=goal)
        await self._wait_until_complete()
        self._report.add(f"{name}: until all workers and spares are back", n, "s", time.monotonic() - started_at)
        self._report.add(f"{name}: pods recreated", n, "count", float(self._watch.created - created), goal=1.0)
        self._report.add(f"{name}: API writes of the operator", n, "count", await self._count_writes() - writes)
        self._report.add(f"{name}: operator CPU", n, "s", self._operator.cpu_seconds() - cpu)

    async def _crash(self) -> None:
        """Kill a process: the agents restart in place, and no pod changes."""
        await self._wait_until_complete()
        created, writes = self._watch.created, await self._count_writes()
        await self._restart_in_place()
        await self._wait_until_complete()
        self._report.add(
            "process crash: pods recreated", self._nodes, "count", float(self._watch.created - created), goal=0.0
        )
        self._report.add(
            "process crash: API writes of the operator", self._nodes, "count", await self._count_writes() - writes
        )

    async def _restart_in_place(self) -> None:
        """Crash a process and wait until the status counts the restart."""
        before = (await self._run.status()).get("restarts", {}).get("total", 0)
        await self._agents.request("crash", pod=await self._member())
        await self._run.wait_for_status(
            lambda status: status.get("restarts", {}).get("total", 0) > before, "the restart is counted"
        )

    async def _fail_pod(self, pod: str) -> None:
        await asyncio.to_thread(self._fleet.fail_pod, "default", pod, exit_code=137, message="killed")

    async def _delete_node(self, pod: str) -> None:
        await self._agents.request("silence", pod=pod)
        await asyncio.to_thread(self._fleet.delete_node, self._watch.pods[pod].node)

    async def _mark_unhealthy(self, pod: str) -> None:
        node = self._watch.pods[pod].node
        await asyncio.to_thread(self._fleet.set_condition, node, "NeuronHealth", "True", reason="NeuronHasError_SRAM")

    async def _silence_node(self, pod: str) -> None:
        await self._agents.request("silence", pod=pod)
        await asyncio.to_thread(self._fleet.stop_kubelet, self._watch.pods[pod].node)

    async def _member(self) -> str:
        """Return a member of the current generation."""
        members = (await recorded_membership(self._run.kube)).members
        return members[len(members) // 2].pod_name

    async def _wait_until_complete(self) -> None:
        """Wait until all members train and all spares are ready."""

        def is_complete(status: Json) -> bool:
            pods = [pod for pod in self._watch.pods.values() if pod.running_at and not pod.failed and not pod.deleting]
            return (
                len(pods) >= self._nodes + SPARES  # the status may be slightly older
                and status.get("phase") == "Running"
                and status.get("readyReplicas") == self._nodes
                and status.get("spares", 0) >= SPARES
                and all(entry.get("recoveredSeconds") is not None for entry in status.get("history", []))
            )

        try:
            await self._run.wait_for_status(is_complete, "all workers and spares are back")
        except TimeoutError as error:
            members = {member.pod_uid for member in (await recorded_membership(self._run.kube)).members}
            spares = [f"{name}: {pod}" for name, pod in self._watch.pods.items() if pod.uid not in members]
            raise TimeoutError(f"{error}; pods that are not members: {'; '.join(spares)}") from error

    async def measure_gang_restart(self) -> None:
        """Fail every pod, then grow and shrink the job by a tenth."""
        n, run = self._nodes, self._run
        await self._wait_until_complete()
        floor = next(run_floor.restart_seconds for run_floor in run.floors if run_floor.restart_seconds is not None)
        previous_uids = {pod.uid for pod in self._watch.pods.values()}
        started_at = time.monotonic()
        await fail_pods(run.kube, list(self._watch.pods))
        failed_at = time.monotonic()

        def all_replaced() -> bool:
            pods = self._watch.pods.values()
            return sum(pod.uid not in previous_uids and pod.running_at is not None for pod in pods) >= n

        last = await self._watch.wait_until(all_replaced, "all pods run again", run.plan.timeout)
        self._report.add("all pods fail: to fail them", n, "s", failed_at - started_at)
        self._report.add("all pods fail: all Running again", n, "s", last - started_at)
        self._report.add("gang restart over the floor", n, "x", (last - started_at) / floor, goal=1.15)
        await self._wait_until_complete()
        for size in (run.larger, n, run.smaller, n):
            await self._resize(size)

    async def _resize(self, size: int) -> None:
        n, run = self._nodes, self._run
        generation = (await run.status())["membership"]["generation"]
        started_at = time.monotonic()
        await run.kube.patch(JOB, {"spec": {"workers": {"replicas": size}}}, MERGE_PATCH)
        received = await self._agents.request(
            "wait_for_membership", generation=generation + 1, count=size, seconds=run.plan.timeout
        )
        name = "scale: new membership with every agent"
        self._report.add(name, n, "s", received["last"] - started_at)
        self._nodes = size
        await self._wait_until_complete()
        self._nodes = n

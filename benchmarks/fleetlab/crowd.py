"""Many small jobs on one cluster of fake nodes, with their agents: started, watched until they train, hurt."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from benchmarks.fleetlab.job import training_job
from benchmarks.fleetlab.kube import PodWatch
from benchmarks.fleetlab.scenario import JOBS
from trainium_contract.wire.worker_env import LABEL_ROLE, ROLE_WORKER
from trainium_operator.cluster.cache.membership_record import membership_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from benchmarks.fleetlab.agents.control import AgentsProcess
    from benchmarks.fleetlab.kube import Json, Kube

PATIENCE = 600.0
"""Seconds that the slowest thing may take."""
_AT_ONCE = 10
"""Jobs that are waited for side by side; more would burden the API server with questions."""


class Crowd:
    """Jobs by name, each of some workers, some with spares."""

    def __init__(self, kube: Kube, spares: Mapping[str, int] | None = None) -> None:
        """`spares`: of the jobs that have any; `watch` is to be entered by the caller."""
        self._kube = kube
        self._spares = spares or {}
        self.watch = PodWatch(kube, f"{LABEL_ROLE}={ROLE_WORKER}")

    async def create(self, name: str, size: int) -> None:
        """One job."""
        await self._kube.request("POST", JOBS, training_job(size, spares=self._spares.get(name, 0), name=name))

    async def train(self, agents: AgentsProcess, jobs: Mapping[str, int]) -> None:
        """Return when all of these jobs train."""
        turns = asyncio.Semaphore(_AT_ONCE)

        async def train(name: str, size: int) -> None:
            async with turns:
                await self._train(agents, name, size)

        await asyncio.gather(*(train(name, size) for name, size in jobs.items()))

    async def _train(self, agents: AgentsProcess, name: str, size: int) -> None:
        """Until all of its workers run, their agents are let go, and it trains."""
        count = size + self._spares.get(name, 0)
        await self.watch.until(lambda: self._running(name) >= count, PATIENCE, f"{count} pods of {name} run")
        await agents.ask("go", job=name)
        await self.whole(name, size)

    def _running(self, name: str) -> int:
        pods = self.watch.pods.items()
        return sum(pod.running is not None and not pod.failed and not pod.deleting for each, pod in pods
                   if each.rpartition("-w-")[0] == name)  # fmt: skip

    async def member(self, name: str, rank: int) -> str:
        """The pod that has this node rank."""
        found = await self._kube.request("GET", f"/api/v1/namespaces/default/configmaps/{name}-membership")
        membership = membership_of(found)
        assert membership is not None
        return membership.members[rank].pod_name

    async def whole(self, name: str, size: int) -> Json:
        """The status, once all members train, the spares are warm, and nothing is being mended."""
        spares, deadline = self._spares.get(name, 0), time.monotonic() + PATIENCE
        while True:
            status: Json = (await self._kube.request("GET", f"{JOBS}/{name}")).get("status", {})
            mended = all(entry.get("recoveredSeconds") is not None for entry in status.get("history", []))
            trains = status.get("phase") == "Running" and status.get("readyReplicas") == size
            if trains and status.get("spares", 0) >= spares and mended and self._running(name) >= size + spares:
                return status
            if time.monotonic() > deadline:
                shown = {key: status.get(key) for key in ("phase", "readyReplicas", "spares", "conditions")}
                raise TimeoutError(f"{name} is not whole after {PATIENCE:.0f} s: {shown}")
            await asyncio.sleep(0.2)

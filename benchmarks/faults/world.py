"""The operator's own code in virtual time: a fake API server, replicas of the operator, workers that are played.

Invariants: each world lives in an event loop of its own, whose clock jumps, so half an hour passes in a moment; what
the tests in `tests/wire` use is used here, so the two cannot drift apart.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
from typing import TYPE_CHECKING, Any

from tests.testing.api.fake_kubernetes import FakeCluster, Write
from tests.testing.suite.virtual_time import run_virtual
from tests.testing.virtual.fake_workers import Workers, lose_node
from tests.testing.virtual.operator_process import OperatorProcess, training_job, until, wall_clock
from trainium_contract.wire.recorded_membership import recorded_text
from trainium_operator.cluster.api.resources import CONFIG_MAPS, JOBS, NODES, PODS
from trainium_operator.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from benchmarks.faults.record import Findings

Json = dict[str, Any]
RESTART_SECONDS = 2.0
NAME = "llama"
_SETTINGS = Settings(extra_priority_class="idle-nodes")


class World:
    """One job on a fake cluster, and the operator that looks after it."""

    def __init__(
        self,
        *,
        nodes: int = 5,
        steps: int = 60,
        die_after_write: int | None = None,
        change: Json | None = None,
        **workers: Any,
    ) -> None:
        """`change`: parts of the job's spec in place of the usual ones."""
        self.cluster = FakeCluster(wall_clock)
        self.cluster.graceful_pods = True
        self.cluster.after_write = self._observe
        self.workers = Workers(self.cluster, nodes=nodes, total_steps=steps)
        job = training_job(NAME, **({"replicas": 2, "spares": 1} | workers))
        job["spec"] |= change or {}
        job["spec"]["trainer"]["steps"] = steps
        self.cluster.add(JOBS, job)
        self.process = OperatorProcess(self.cluster, die_after_write=die_after_write, settings=_SETTINGS)
        self.workers.operator = self.process
        self.memberships: dict[int, set[bytes]] = {}
        self.pod_names: list[str] = []
        self.generations: list[int] = []
        self.conflicts = 0
        self.writes = 0
        self._tasks: list[asyncio.Task[Any]] = []

    # --- life ------------------------------------------------------------------------------------------------------

    async def begin(self) -> None:
        """Start nodes, operator, and what brings an operator back that was killed."""
        self._tasks = [asyncio.create_task(self.workers.run())]
        await self.process.start()
        self._tasks.append(asyncio.create_task(self._supervise()))

    async def end(self) -> None:
        """Stop everything."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.process.kill()

    async def _supervise(self) -> None:
        """What a kubelet does with the operator's container."""
        while True:
            killed = asyncio.create_task(self.process.connection.killed.wait())
            ended = asyncio.create_task(self.process.ended.wait())
            await asyncio.wait([killed, ended], return_when=asyncio.FIRST_COMPLETED)
            for waiting in (killed, ended):
                waiting.cancel()
            await self.process.kill()
            await asyncio.sleep(RESTART_SECONDS)
            await self.new_operator()

    def stop_supervision(self) -> None:
        """Nothing brings the operator back."""
        self._tasks.pop().cancel()

    async def new_operator(self) -> None:
        """A fresh process of the operator."""
        self.process = OperatorProcess(self.cluster, settings=_SETTINGS)
        self.workers.operator = self.process
        await self.process.start()

    def _observe(self, write: Write) -> None:
        self.writes += "/leases" not in write.path
        if write.status >= 400:
            self.conflicts += 1
            return
        if write.method == "POST" and write.path.endswith("/pods"):
            self.pod_names.append(write.body["metadata"]["name"])
        if "membership" in write.path or (write.body or {}).get("metadata", {}).get("name") == f"{NAME}-membership":
            raw = self._recorded()
            self.memberships.setdefault(json.loads(raw)["generation"], set()).add(raw)
        if write.path.endswith("/status"):
            self.generations.append(self.status().get("membership", {}).get("generation", 0))

    # --- look ------------------------------------------------------------------------------------------------------

    def status(self) -> Json:
        """The job's status."""
        status: Json = self.cluster.get(JOBS, "default", NAME).get("status") or {}
        return status

    def history(self) -> list[Json]:
        """Interruptions."""
        return list(self.status().get("history") or [])

    def members(self) -> list[Json]:
        """The recorded membership."""
        members: list[Json] = json.loads(self._recorded())["members"]
        return members

    def _recorded(self) -> bytes:
        return recorded_text(self.cluster.get(CONFIG_MAPS, "default", f"{NAME}-membership"))

    def pod_uids(self) -> set[str]:
        """Worker pods that exist."""
        return {self.cluster.get(PODS, "default", name)["metadata"]["uid"] for name in self.cluster.names(PODS)}

    async def until_step(self, step: int, seconds: float = 240) -> None:
        """Return when the workers have done `step`."""
        await until(lambda: self.workers.step >= step, seconds, f"step {step}, it is {self.workers.step}")

    async def until_phase(self, phase: str, seconds: float = 600) -> None:
        """Return when the status says so."""
        await until(lambda: self.status().get("phase") == phase, seconds, f"{phase}, it is {self.status()}")

    def lose(self, rank: int) -> str:
        """The node of a member loses its power and is NotReady at once; its name."""
        node: str = self.members()[rank]["nodeName"]
        lose_node(self.workers, node)
        return node

    def size(self) -> int:
        """Nodes of the generation in force."""
        return int(self.status().get("membership", {}).get("size", 0))

    async def until_size(self, size: int, seconds: float = 240) -> None:
        """Return when so many nodes train."""

        def there() -> bool:
            return self.size() == size and self.status().get("phase") == "Running"

        await until(there, seconds, f"{size} nodes, it is {self.status()}")

    # --- nodes -----------------------------------------------------------------------------------------------------

    def give_machines(self) -> dict[str, str]:
        """A provider ID and devices for each node; node -> provider ID."""
        machines = {name: f"aws:///us-east-1a/i-{number:017x}" for number, name in enumerate(self._node_names())}
        for name, machine in machines.items():
            self.cluster.change(NODES, "", name, functools.partial(_equip, machine=machine))
        return machines

    def set_condition(self, node: str, kind: str, status: str, reason: str) -> None:
        """A condition of a node, as a health monitor sets it."""
        condition = {"type": kind, "status": status, "reason": reason, "lastTransitionTime": self.cluster.now}
        self.cluster.change(NODES, "", node, lambda raw: raw["status"]["conditions"].append(condition))

    def rename_node(self, old: str, new: str, machine: str) -> None:
        """The machine comes back, healthy, as a node of another name."""
        self.cluster.remove(NODES, "", old)
        ready = {"type": "Ready", "status": "True", "lastTransitionTime": self.cluster.now}
        raw: Json = {"metadata": {"name": new}, "spec": {}, "status": {"conditions": [ready]}}
        _equip(raw, machine)
        self.cluster.add(NODES, raw)

    def remembered(self, machine: str) -> str:
        """What the fleet's memory says of a machine, as text; empty when nothing."""
        for name in self.cluster.names(CONFIG_MAPS, "system"):
            for text in (self.cluster.get(CONFIG_MAPS, "system", name).get("data") or {}).values():
                if machine in text and "state:" in text:
                    return str(text)
        return ""

    def pod_affinity(self, pod: str) -> str:
        """The node affinity of a pod, as text."""
        affinity = self.cluster.get(PODS, "default", pod)["spec"].get("affinity") or {}
        return json.dumps(affinity.get("nodeAffinity") or {})

    def _node_names(self) -> list[str]:
        return self.cluster.names(NODES, "")

    # --- judge -----------------------------------------------------------------------------------------------------

    def judge(self, found: Findings, *, rungs: list[str], total: int) -> None:
        """What must hold whatever happened to the operator: the same end, no rank twice, no name twice."""
        status = self.status()
        found.expect(status.get("phase") == "Completed", f"the job ended as {status.get('phase')}")
        twice = [number for number, contents in self.memberships.items() if len(contents) != 1]
        found.expect(not twice, f"generations {twice} had two memberships")
        found.expect(len(self.pod_names) == len(set(self.pod_names)), "a pod's name was used twice")
        found.expect(self.generations == sorted(self.generations), "the generation in status went back")
        seen = [entry["rung"] for entry in status.get("history") or []]
        found.expect(seen == rungs, f"answered by {seen}, expected {rungs}")
        restarts = status.get("restarts", {}).get("total", 0)
        found.expect(restarts == total, f"{restarts} interruptions were counted, expected {total}")


def _equip(raw: Json, machine: str) -> None:
    raw["spec"]["providerID"] = machine
    raw["status"]["capacity"] = {"aws.amazon.com/neuron": "16"}
    raw["status"]["allocatable"] = {"aws.amazon.com/neuron": "16"}


def play(make: Callable[[], World], story: Callable[[World], Awaitable[None]]) -> World:
    """Run a story to its end in virtual time; the world as it then is."""

    async def tell() -> World:
        world = make()
        await world.begin()
        try:
            await story(world)
            await asyncio.sleep(5)
        finally:
            await world.end()
        return world

    logging.disable(logging.CRITICAL)  # the operator has much to say about the storms that are made here
    try:
        return run_virtual(tell())
    finally:
        logging.disable(logging.NOTSET)

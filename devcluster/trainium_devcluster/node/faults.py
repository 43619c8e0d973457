"""Fault controls of one node: what a test or a person may do to its containers, conditions and connections.

Invariants: a fault acts on exactly what was named, or answers with a sentence and does nothing; every fault but a
kill can be taken back.
"""

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from trainium_devcluster.node.api.client import Api
from trainium_devcluster.node.api.objects import Json, name, namespace
from trainium_devcluster.node.network.sockets import SocketFilter
from trainium_devcluster.node.pods.container import Container
from trainium_devcluster.node.pods.pod import PodRunner
from trainium_devcluster.node.processes import process_trees
from trainium_devcluster.node.registration import ForcedCondition, Registration

OPERATIONS = (
    "status",
    "processes",
    "kill-container",
    "freeze-container",
    "thaw-container",
    "set-condition",
    "clear-condition",
    "slow",
    "partition",
)
_SLOW_PERIOD = 0.1  # seconds of one stop-and-go cycle
_PARTITION_SCAN = 0.02  # seconds between looks for new sockets


class FaultError(ValueError):
    """A fault control was asked for something that does not exist."""


@dataclass(slots=True, eq=False)
class NodeFaults:
    """Executes fault requests."""

    api: Api
    registration: Registration
    runners: Callable[[], Iterable[PodRunner]]
    _slow: asyncio.Task[None] | None = None
    _cut: asyncio.Task[None] | None = None
    _filter: SocketFilter = field(default_factory=SocketFilter)

    async def handle(self, request: Json) -> Json:
        """Carry out `request` and answer with what happened.

        Raises:
            FaultError: when it names something that does not exist.
        """
        match request.get("op"):
            case "status":
                return self._status()
            case "processes":
                return {"processes": self._processes(request)}
            case "kill-container":
                return self._signal_one(request, _signal(request.get("signal") or "KILL"))
            case "freeze-container":
                return self._signal_many(request, signal.SIGSTOP)
            case "thaw-container":
                return self._signal_many(request, signal.SIGCONT)
            case "set-condition":
                self.registration.set_condition(_condition(request))
            case "clear-condition":
                self.registration.clear_condition(str(request["type"]))
            case "slow":
                await self._set_slow(float(request["factor"]))
            case "partition":
                return await self._set_partition(bool(request["on"]))
            case other:
                raise FaultError(f"unknown op {other!r}; known are {', '.join(OPERATIONS)}")
        return {}

    async def stop(self) -> None:
        """Take back what lasts."""
        for task in (self._slow, self._cut):
            if task is not None:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task

    def _status(self) -> Json:
        pods = [
            {
                "namespace": namespace(runner.pod),
                "pod": name(runner.pod),
                "phase": runner.phase(),
                "address": runner.address,
                "containers": {c.name: c.process.pid if c.process else None for c in runner.containers},
            }
            for runner in self.runners()
        ]
        return {"pods": pods, "partitioned": self.api.partitioned, "slow": self._slow is not None}

    def _find(self, request: Json) -> Container:
        space, wanted = request.get("namespace") or "default", request.get("pod")
        for runner in self.runners():
            if namespace(runner.pod) == space and name(runner.pod) == wanted:
                container = runner.container(request.get("container"))
                if container is None:
                    raise FaultError(f"pod {space}/{wanted} has no container {request.get('container')!r}")
                if container.process is None:
                    raise FaultError(f"container {container.name} of pod {space}/{wanted} is not running")
                return container
        raise FaultError(f"pod {space}/{wanted} is not on this node")

    def _processes(self, request: Json) -> list[Json]:
        container = self._find(request)
        assert container.process is not None
        return [
            {"pid": pid, "innerPid": process_trees.inner_pid(pid), "command": process_trees.command_line(pid)}
            for pid in process_trees.process_tree(container.process.pid)
        ]

    def _matching(self, request: Json) -> list[int]:
        container = self._find(request)
        assert container.process is not None
        pattern = request.get("match") or request.get("pid_match")
        tree = process_trees.process_tree(container.process.pid)
        if not pattern:
            return tree
        found = [pid for pid in tree if re.search(pattern, process_trees.command_line(pid))]
        if not found:
            raise FaultError(f"no process of container {container.name} has a command line that matches {pattern!r}")
        return found

    def _signal_one(self, request: Json, number: signal.Signals) -> Json:
        pid = self._matching(request)[0]
        os.kill(pid, number)
        return {"pid": pid}

    def _signal_many(self, request: Json, number: signal.Signals) -> Json:
        reached: list[int] = []
        for pid in self._matching(request):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
                reached.append(pid)
        return {"pids": reached}

    def _roots(self) -> list[int]:
        return [
            c.process.pid
            for runner in self.runners()
            for c in runner.containers
            if c.process is not None and c.process.pid
        ]

    async def _set_slow(self, factor: float) -> None:
        if not 0 < factor <= 1:
            raise FaultError(
                f"factor {factor} must be above 0 and at most 1: the share of time that containers may run"
            )
        if self._slow is not None:
            self._slow.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._slow
            self._slow = None
        if factor < 1:
            self._slow = asyncio.create_task(self._stop_and_go(factor))

    async def _stop_and_go(self, factor: float) -> None:
        try:
            while True:
                self._signal_all(signal.SIGSTOP)
                await asyncio.sleep(_SLOW_PERIOD * (1 - factor))
                self._signal_all(signal.SIGCONT)
                await asyncio.sleep(_SLOW_PERIOD * factor)
        finally:
            self._signal_all(signal.SIGCONT)

    def _signal_all(self, number: signal.Signals) -> None:
        for pid in process_trees.trees(self._roots()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    async def _set_partition(self, on: bool) -> Json:
        self.api.partition(on)
        if self._cut is not None:
            self._cut.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._cut
            self._cut = None
        if not on:
            return {"pods": "healed"}
        if not self._filter.supported():
            return {"pods": "not cut: this kernel or user may not reach the sockets of its own processes (pidfd_getfd)"}
        self._cut = asyncio.create_task(self._keep_cut())
        return {"pods": "cut: their TCP sockets receive nothing any more; what they send may still arrive"}

    async def _keep_cut(self) -> None:
        try:
            while True:
                self._filter.cut(process_trees.trees(self._roots()))
                await asyncio.sleep(_PARTITION_SCAN)
        finally:
            self._filter.heal()


def _signal(text: str | int) -> signal.Signals:
    try:
        if isinstance(text, int) or text.isdigit():
            return signal.Signals(int(text))
        return signal.Signals["SIG" + text.upper().removeprefix("SIG")]
    except (KeyError, ValueError):
        raise FaultError(f"{text!r} is not a signal; use a name such as KILL or TERM, or a number") from None


def _condition(request: Json) -> ForcedCondition:
    kind, status = request.get("type"), request.get("status")
    if not kind or status not in {"True", "False", "Unknown"}:
        raise FaultError("set-condition needs a type, and a status of True, False or Unknown")
    return ForcedCondition(
        str(kind), status, request.get("reason") or "FaultInjected", request.get("message") or "set by a fault control"
    )

"""Inject faults into one node: its containers, conditions and connections.

Guarantees:
- A fault acts on exactly the named target, or does nothing and answers with a sentence.
- Every fault except a kill can be reverted.
"""

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from trainium_devcluster.errors import ClusterError
from trainium_devcluster.node.api.client import Api
from trainium_devcluster.node.api.objects import Json, get_name, get_namespace
from trainium_devcluster.node.network.sockets import SocketFilter
from trainium_devcluster.node.pods.container import Container
from trainium_devcluster.node.pods.pod import PodRunner
from trainium_devcluster.node.registration import ForcedCondition, Registration
from trainium_devcluster.processes.process_tree import list_tree, read_command_line, send_signal

_THROTTLE_PERIOD_SECONDS = 0.1  # one stop-and-go cycle
_SOCKET_SCAN_SECONDS = 0.02  # between two searches for new sockets


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
        """Execute `request` and return the outcome. Raises ClusterError if it names something unknown."""
        match request["op"]:
            case "kill-container":
                os.kill(self._find_matching_pids(request)[0], request["signal"])
            case "freeze-container":
                send_signal(self._find_matching_pids(request), signal.SIGSTOP)
            case "thaw-container":
                send_signal(self._find_matching_pids(request), signal.SIGCONT)
            case "set-condition":
                fields = (request[key] for key in ("type", "status", "reason", "message"))
                self.registration.set_condition(ForcedCondition(*fields))
            case "clear-condition":
                self.registration.clear_condition(request["type"])
            case "slow":
                await _cancel(self._slow)
                self._slow = None
                if request["factor"] < 1:
                    self._slow = asyncio.create_task(self._throttle(request["factor"]))
            case "partition":
                return await self._set_partition(request["on"])
            case other:
                raise ClusterError(f"The node knows no operation {other!r}.")
        return {}

    async def stop(self) -> None:
        """Revert the active faults."""
        for task in (self._slow, self._cut):
            await _cancel(task)

    def _find(self, request: Json) -> Container:
        pod_namespace, pod_name = request["namespace"], request["pod"]
        for runner in self.runners():
            if get_namespace(runner.pod) == pod_namespace and get_name(runner.pod) == pod_name:
                container = runner.find_container(request.get("container"))
                if container is None:
                    raise ClusterError(f"Pod {pod_namespace}/{pod_name} has no container {request['container']!r}.")
                return container
        raise ClusterError(f"Pod {pod_namespace}/{pod_name} is not on this node.")

    def _find_matching_pids(self, request: Json) -> list[int]:
        """Return the processes of a container whose command line matches, parents before children."""
        container = self._find(request)
        if container.process is None:
            raise ClusterError(f"Container {container.name} of pod {request['pod']} is not running.")
        tree, pattern = list_tree([container.process.pid]), request.get("match")
        matching = [pid for pid in tree if re.search(pattern, read_command_line(pid))] if pattern else tree
        if not matching:
            raise ClusterError(f"No process of container {container.name} has a command line that matches {pattern!r}.")
        return matching

    def _list_pod_pids(self) -> list[int]:
        """Return the processes of all pods."""
        return list_tree(
            c.process.pid
            for runner in self.runners()
            for c in runner.containers
            if c.process is not None and c.process.pid
        )

    async def _throttle(self, factor: float) -> None:
        try:
            while True:
                send_signal(self._list_pod_pids(), signal.SIGSTOP)
                await asyncio.sleep(_THROTTLE_PERIOD_SECONDS * (1 - factor))
                send_signal(self._list_pod_pids(), signal.SIGCONT)
                await asyncio.sleep(_THROTTLE_PERIOD_SECONDS * factor)
        finally:
            send_signal(self._list_pod_pids(), signal.SIGCONT)

    async def _set_partition(self, on: bool) -> Json:
        self.api.partition(on)
        await _cancel(self._cut)
        self._cut = None
        if not on:
            return {"pods": "healed"}
        if not self._filter.is_supported():
            return {"pods": "not cut: this kernel or user may not reach the sockets of its own processes (pidfd_getfd)"}
        self._cut = asyncio.create_task(self._maintain_partition())
        return {"pods": "cut: their TCP sockets receive nothing any more; what they send may still arrive"}

    async def _maintain_partition(self) -> None:
        try:
            while True:
                self._filter.cut(self._list_pod_pids())
                await asyncio.sleep(_SOCKET_SCAN_SECONDS)
        finally:
            self._filter.heal()


async def _cancel(task: asyncio.Task[None] | None) -> None:
    """Remove an active fault."""
    if task is not None:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

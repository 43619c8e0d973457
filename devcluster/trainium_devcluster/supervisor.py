"""The process that owns a running cluster: it starts, watches, restarts and ends every component and node.

Invariants: all of a cluster hangs below this process and is killed by the kernel when it dies; it holds the cluster's lock while anything runs;
it has one thread that starts processes, the main one, because the kernel's death signal is bound to the thread that forked; an owned cluster
(a test's, `run`'s) ends when the owner closes the supervisor's standard input, which the kernel does for an owner that crashes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from trainium_devcluster import controlplane
from trainium_devcluster.api import ApiError
from trainium_devcluster.cleanup import remove_files
from trainium_devcluster.controlplane import Component, Ports
from trainium_devcluster.errors import ClusterError
from trainium_devcluster.noderun import NodeState, node_command, node_environment
from trainium_devcluster.processes import (
    ProcessId,
    become_subreaper,
    freeze_family,
    identify,
    kill_family,
    resident_bytes,
    spawn,
    thaw_family,
)
from trainium_devcluster.state import MARKER, ClusterPaths, ClusterSpec, NodeSpec, node_from_fields

logger = logging.getLogger("supervisor")

START_SECONDS = 60.0
_RESTART_DELAY = 0.5
_POLITE_SECONDS = 5.0

Message = Mapping[str, Any]
Answer = dict[str, Any]


@dataclass(slots=True)
class Child:
    """A process that was started and may have ended."""

    process: subprocess.Popen[bytes]
    identity: ProcessId
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    code: int | None = None


@dataclass(slots=True)
class Node:
    """A node: what it claims to have and its process."""

    spec: NodeSpec
    child: Child
    state: NodeState = NodeState.RUNNING


class Supervisor:
    """Runs one cluster until it is told to end it."""

    def __init__(self, paths: ClusterPaths, binaries: Path, venv_bin: Path) -> None:
        self.paths = paths
        self.spec = ClusterSpec.from_json(paths.spec.read_text())
        self.ports = controlplane.choose_ports()
        self._binaries = binaries
        self._venv_bin = venv_bin
        self._children: dict[int, Child] = {}
        self._components: dict[Component, Child] = {}
        self._stopped: set[Component] = set()
        self._restarts: dict[Component, int] = dict.fromkeys(Component, 0)
        self._nodes: dict[str, Node] = {}
        self._ready = asyncio.Event()
        self._failure: str | None = None
        self._phases: dict[str, float] = {}
        self._ending = asyncio.Event()
        self._ended = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    # --- life ---------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until the cluster is taken down."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGCHLD, self._reap)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(number, self._ending.set)
        socket_path = self.paths.control_socket
        socket_path.unlink(missing_ok=True)
        server = await asyncio.start_unix_server(self._serve, socket_path)
        starting = loop.create_task(self._start())
        try:
            await self._ending.wait()
        finally:
            starting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await starting
            await self._end()
            self._ended.set()
            await asyncio.sleep(0.05)  # lets the answer to `down` be written
            server.close()
            socket_path.unlink(missing_ok=True)

    def end(self) -> None:
        """Begin to take the cluster down."""
        asyncio.get_running_loop().remove_reader(0)
        self._ending.set()

    async def _start(self) -> None:
        begun = time.monotonic()

        def phase(name: str) -> None:
            self._phases[name] = round(time.monotonic() - begun, 2)

        try:
            controlplane.prepare(self.paths, self.ports)
            phase("certificates")
            self._start_component(Component.ETCD)
            # An API server that meets no etcd tries again only after a second.
            await self._until(lambda: controlplane.listens(self.ports.etcd), "etcd did not listen")
            phase("etcd")
            self._start_component(Component.APISERVER)
            await self._until_ready(Component.APISERVER)
            phase("apiserver")
            self._start_component(Component.CONTROLLER_MANAGER)
            self._start_component(Component.SCHEDULER)
            await asyncio.to_thread(self._bootstrap)
            await self._until_ready(Component.CONTROLLER_MANAGER)
            phase("controller-manager")
            await self._until_ready(Component.SCHEDULER)
            phase("scheduler")
            for node in self.spec.nodes:
                self._start_node(node)
            await self._until(self._has_default_account, "The controller manager made no default ServiceAccount")
            phase("ready")
        except (ClusterError, OSError) as error:
            logger.exception("start failed")
            self._failure = str(error)
        finally:
            self._ready.set()

    def _bootstrap(self) -> None:
        with controlplane.admin_client(self.paths, self.ports) as client:
            controlplane.bootstrap(client)

    def _has_default_account(self) -> bool:
        try:
            with controlplane.admin_client(self.paths, self.ports) as client:
                client.get("/api/v1/namespaces/default/serviceaccounts/default")
        except ApiError:
            return False
        return True

    async def _until_ready(self, component: Component) -> None:
        await self._until(
            lambda: controlplane.is_ready(component, self.paths, self.ports),
            f"{component} was not ready within {START_SECONDS:.0f} s; its log is {self.paths.logs / f'{component}.log'}",
        )

    async def _until(self, condition: Callable[[], bool], failure: str) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not await asyncio.to_thread(condition):
            self._complain_about_dead()
            if time.monotonic() > deadline:
                raise ClusterError(failure + ".")
            await asyncio.sleep(0.05)

    def _complain_about_dead(self) -> None:
        """A component that ends while the cluster starts for the first time has been given bad flags or a bad machine."""
        for component, child in self._components.items():
            if child.code is not None and component not in self._stopped:
                log = self.paths.logs / f"{component}.log"
                raise ClusterError(f"{component} ended with code {child.code} while it started; {log} ends: {_last_line(log)}")

    async def _end(self) -> None:
        """Stop nodes politely (they unmount and tidy), everything else at once: its data goes with the folder."""
        self._stopped.update(Component)
        for node in self._nodes.values():
            self._thaw(node)
            node.child.identity.signal(signal.SIGTERM)
        waits = [asyncio.create_task(_ended(node.child)) for node in self._nodes.values()]
        if waits:
            await asyncio.wait(waits, timeout=_POLITE_SECONDS)
        for node in self._nodes.values():
            self._kill_node(node)
        for child in self._components.values():
            child.identity.signal(signal.SIGKILL)
        kill_family(None, MARKER, f"{self.paths.root}/", prefix=True)
        for task in self._tasks:
            task.cancel()

    # --- processes ----------------------------------------------------------------------------------------------------

    def _reap(self) -> None:
        """Collect every ended child, adopted orphans included."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            child = self._children.pop(pid, None)
            if child is not None:
                child.code = os.waitstatus_to_exitcode(status)
                child.process.returncode = child.code
                child.ended.set()

    def _spawn(self, name: str, command: list[str], environment: Mapping[str, str]) -> Child:
        process = spawn(
            command, log=self.paths.logs / f"{name}.log", environment=environment, folder=self.paths.root
        )
        identity = identify(process.pid)
        if identity is None:
            raise ClusterError(f"{name} ended at once; its log is {self.paths.logs / f'{name}.log'}.")
        child = Child(process, identity)
        self._children[process.pid] = child
        self.paths.pids.mkdir(exist_ok=True)
        identity.write(self.paths.pids / f"{name}.json")
        return child

    def _background(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _start_component(self, component: Component) -> None:
        self._stopped.discard(component)
        flags = controlplane.arguments(component, self.spec, self.paths, self.ports)
        child = self._spawn(component, [str(self._binaries / component), *flags], dict(os.environ))
        self._components[component] = child
        self._background(self._keep(component, child))

    async def _keep(self, component: Component, child: Child) -> None:
        """Start a component again that ended by itself, as a kubelet does with the control plane of a real cluster."""
        await child.ended.wait()
        if component in self._stopped or not self._ready.is_set() or self._failure is not None:
            return
        logger.warning("%s ended with code %s; starting it again", component, child.code)
        await asyncio.sleep(_RESTART_DELAY)
        if component not in self._stopped:
            self._restarts[component] += 1
            self._start_component(component)

    async def _stop_component(self, component: Component, seconds: float) -> None:
        child = self._components[component]
        self._stopped.add(component)
        if seconds > 0:
            child.identity.signal(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(child.ended.wait(), seconds)
        child.identity.signal(signal.SIGKILL)
        await child.ended.wait()

    def _start_node(self, spec: NodeSpec) -> None:
        controlplane.issue_node(self.paths, self.ports, spec.name)
        command = node_command(spec, self.paths, self.ports, self._venv_bin)
        environment = node_environment(dict(os.environ), self.paths, spec.name, self._binaries)
        child = self._spawn(f"node-{spec.name}", command, environment)
        self._nodes[spec.name] = Node(spec, child)
        self._background(self._bury(self._nodes[spec.name]))

    async def _bury(self, node: Node) -> None:
        """When a node has ended, whatever way, nothing of it may go on running."""
        await node.child.ended.wait()
        if node.state is NodeState.RUNNING:
            logger.warning("node %s ended with code %s", node.spec.name, node.child.code)
        node.state = NodeState.DEAD
        kill_family(None, MARKER, self.paths.marker(node.spec.name))

    def _kill_node(self, node: Node) -> None:
        node.state = NodeState.DEAD
        kill_family(self._pid(node), MARKER, self.paths.marker(node.spec.name))

    def _thaw(self, node: Node) -> None:
        pid = self._pid(node)
        if node.state is NodeState.FROZEN and pid is not None:
            thaw_family(pid, MARKER, self.paths.marker(node.spec.name))
            node.state = NodeState.RUNNING

    @staticmethod
    def _pid(node: Node) -> int | None:
        return node.child.identity.pid if node.child.identity.is_alive() else None

    # --- commands -----------------------------------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            message = json.loads(await reader.readline())
            answer = {"ok": True, **await self._answer(message)}
        except (ClusterError, OSError) as error:
            answer = {"ok": False, "error": str(error)}
        except (KeyError, TypeError, ValueError) as error:
            answer = {"ok": False, "error": f"The request is malformed: {error!r}."}
        with contextlib.suppress(OSError):
            writer.write(json.dumps(answer).encode() + b"\n")
            await writer.drain()
            writer.close()

    async def _answer(self, message: Message) -> Answer:
        operation = message["op"]
        if operation == "wait-ready":
            await self._ready.wait()
            if self._failure is not None:
                raise ClusterError(self._failure)
            return {"phases": self._phases}
        if operation == "status":
            return self._status()
        if operation == "down":
            self._ending.set()
            await self._ended.wait()
            return {}
        if operation == "stop-component":
            await self._stop_component(Component(message["component"]), float(message["seconds"]))
            return {}
        if operation == "start-component":
            component = Component(message["component"])
            if self._components[component].code is not None:
                self._start_component(component)
            return {}
        return await self._answer_node(operation, message)

    async def _answer_node(self, operation: str, message: Message) -> Answer:
        if operation == "add-node":
            return self._add_node(node_from_fields(message["node"]))
        node = self._node(message["node"])
        if operation == "kill-node":
            self._kill_node(node)
            await node.child.ended.wait()
        elif operation == "stop-node":
            self._thaw(node)
            node.state = NodeState.STOPPING
            node.child.identity.signal(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(node.child.ended.wait(), float(message["seconds"]))
            self._kill_node(node)
            await node.child.ended.wait()
        elif operation == "start-node":
            if node.child.code is None:
                raise ClusterError(f"Node {node.spec.name!r} runs already.")
            self._start_node(node.spec)
        elif operation == "forget-node":
            self._kill_node(node)
            await node.child.ended.wait()
            del self._nodes[node.spec.name]
        elif operation == "freeze-node":
            self._freeze(node)
        elif operation == "thaw-node":
            self._thaw(node)
        else:
            raise ClusterError(f"The supervisor knows no operation {operation!r}.")
        return {"pid": node.child.identity.pid}

    def _freeze(self, node: Node) -> None:
        pid = self._pid(node)
        if pid is None:
            raise ClusterError(f"Node {node.spec.name!r} is not running, so it cannot be frozen.")
        freeze_family(pid, MARKER, self.paths.marker(node.spec.name))
        node.state = NodeState.FROZEN

    def _add_node(self, spec: NodeSpec) -> Answer:
        if spec.name in self._nodes:
            raise ClusterError(f"Cluster {self.paths.name!r} has a node {spec.name!r} already; choose another name.")
        self._start_node(spec)
        return {"pid": self._nodes[spec.name].child.identity.pid}

    def _node(self, name: str) -> Node:
        if name not in self._nodes:
            known = ", ".join(sorted(self._nodes)) or "none"
            raise ClusterError(f"Cluster {self.paths.name!r} has no node {name!r}; its nodes: {known}.")
        return self._nodes[name]

    def _status(self) -> Answer:
        def row(child: Child, state: str) -> Answer:
            pid = child.identity.pid
            return {"pid": pid, "state": state, "code": child.code, "bytes": resident_bytes(pid)}

        components = {
            component.value: {
                **row(child, "running" if child.code is None else "stopped"),
                "restarts": self._restarts[component],
            }
            for component, child in self._components.items()
        }
        nodes = {name: row(node.child, node.state.value) for name, node in self._nodes.items()}
        own = {"pid": os.getpid(), "state": "running", "code": None, "bytes": resident_bytes(os.getpid())}
        return {
            "ready": self._ready.is_set() and self._failure is None,
            "failure": self._failure,
            "phases": self._phases,
            "server": self.ports.server,
            "supervisor": own,
            "components": components,
            "nodes": nodes,
        }


async def _ended(child: Child) -> None:
    await child.ended.wait()


def _last_line(log: Path) -> str:
    with contextlib.suppress(OSError):
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if "rror" in line]
        return (errors or lines or ["nothing"])[-1][:400]
    return "nothing"


def _lock(paths: ClusterPaths) -> TextIO:
    file = paths.lock.open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ClusterError(f"Cluster {paths.name!r} runs already.") from None
    return file


def main() -> None:
    """Run the supervisor of the cluster in `--root`; with `--owned`, until standard input ends."""
    parser = argparse.ArgumentParser(description="Supervisor of one development cluster; started by trainium-devcluster.")
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--binaries", type=Path, required=True)
    parser.add_argument("--venv-bin", type=Path, required=True)
    parser.add_argument("--owned", action="store_true")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    paths = ClusterPaths(options.root)
    with _lock(paths):
        become_subreaper()
        asyncio.run(_supervise(paths, options.binaries, options.venv_bin, owned=options.owned))
        if not (paths.root / "keep").exists():
            remove_files(paths)


async def _supervise(paths: ClusterPaths, binaries: Path, venv_bin: Path, *, owned: bool) -> None:
    supervisor = Supervisor(paths, binaries, venv_bin)
    if owned:
        # Readable only when the owner closed its end: the owner never writes.
        asyncio.get_running_loop().add_reader(0, supervisor.end)
    await supervisor.run()


if __name__ == "__main__":
    main()

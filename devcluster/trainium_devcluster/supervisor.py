"""Run the supervisor of a cluster: start, watch, restart and stop every component and node.

Guarantees:
- All processes of a cluster are descendants of the supervisor, and the kernel kills them when it dies.
- It holds the cluster's lock while any of them runs.
- Its main thread starts all processes, because the kernel's death signal is bound to the thread that forked.
- An owned cluster (of a test or of `run`) ends when the owner closes the supervisor's standard input; the kernel closes
  it if the owner crashes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

from trainium_contract.api_server.errors import ApiError, ClientError
from trainium_devcluster import control_socket
from trainium_devcluster.controlplane import components
from trainium_devcluster.controlplane.bootstrap import bootstrap
from trainium_devcluster.controlplane.components import Component
from trainium_devcluster.errors import ClusterError
from trainium_devcluster.nodepool.pool import NodePool
from trainium_devcluster.processes.children import Child, Children
from trainium_devcluster.processes.cleanup import remove_folder
from trainium_devcluster.processes.process_tree import kill_tree, read_resident_bytes
from trainium_devcluster.processes.syscalls import become_subreaper
from trainium_devcluster.state import MARKER, ClusterPaths, ClusterSpec, parse_node

logger = logging.getLogger("supervisor")

START_SECONDS = 120.0
_RESTART_DELAY_SECONDS = 0.5
_GRACE_SECONDS = 5.0
_GO_COLLECTOR_PERCENT = "400"
"""Growth of the heap between two runs of Go's garbage collector: a small cluster has more memory than processors."""

Message = Mapping[str, Any]
Answer = dict[str, Any]


class ClusterSupervisor:
    """Runs one cluster until it is stopped."""

    def __init__(self, paths: ClusterPaths, binaries: Path, venv_bin: Path) -> None:
        self._paths = paths
        self._spec = ClusterSpec.from_json(paths.spec.read_text())
        self._ports = components.choose_ports()
        self._binaries = binaries
        self._children = Children(paths)
        self._nodes = NodePool(
            paths,
            self._ports,
            self._children,
            binaries=binaries,
            venv_bin=venv_bin,
            heartbeat_seconds=self._spec.heartbeat_seconds,
            kubernetes=self._spec.kubernetes,
        )
        self._components: dict[Component, Child] = {}
        self._programs: dict[str, Child] = {}
        """Programs beside the control plane: kwok, which simulates kubelets, and Kueue."""
        self._stopped: set[Component] = set()
        self._restarts: dict[Component, int] = dict.fromkeys(Component, 0)
        self._started = asyncio.Event()
        self._failure: str | None = None
        self._phases: dict[str, float] = {}
        self._ending = asyncio.Event()
        self._ended = asyncio.Event()

    # --- life --------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until the cluster is stopped."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGCHLD, self._children.reap)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._ending.set)
        server = await control_socket.serve(self._paths.control_socket, self._handle)
        starting = loop.create_task(self._start())
        try:
            await self._ending.wait()
        finally:
            starting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await starting
            await self._shut_down()
            self._ended.set()
            await asyncio.sleep(0.05)  # time to write the answer to `down`
            server.close()
            self._paths.control_socket.unlink(missing_ok=True)

    def end(self) -> None:
        """Stop the cluster, because its owner has ended."""
        asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
        self._ending.set()

    async def _start(self) -> None:
        started = time.monotonic()

        def record_phase(name: str) -> None:
            self._phases[name] = round(time.monotonic() - started, 2)

        try:
            components.prepare(self._paths, self._ports)
            self._start_component(Component.ETCD)
            # An API server that finds no etcd retries only after a second.
            await self._wait_until(lambda: components.is_listening(self._ports.etcd), "etcd did not listen")
            record_phase("etcd")
            self._start_component(Component.APISERVER)
            await self._wait_until_ready(Component.APISERVER)
            record_phase("apiserver")
            # Not earlier: without the API server's first roles the controller manager fails.
            self._start_component(Component.CONTROLLER_MANAGER)
            self._start_component(Component.SCHEDULER)
            await asyncio.to_thread(self._bootstrap)
            for node in self._spec.nodes:
                self._nodes.add(node)
            await self._wait_until_ready(Component.CONTROLLER_MANAGER)
            record_phase("controller-manager")
            await self._wait_until_ready(Component.SCHEDULER)
            record_phase("scheduler")
            await self._wait_until(
                self._has_default_account, "The controller manager created no default ServiceAccount"
            )
            record_phase("ready")
        except (ClientError, ClusterError, OSError) as error:
            logger.exception("start failed")
            self._failure = str(error)
        finally:
            self._started.set()

    def _bootstrap(self) -> None:
        with components.create_admin_client(self._paths, self._ports.apiserver) as client:
            bootstrap(client)

    def _has_default_account(self) -> bool:
        try:
            with components.create_admin_client(self._paths, self._ports.apiserver) as client:
                client.get("/api/v1/namespaces/default/serviceaccounts/default")
        except ApiError:
            return False
        return True

    async def _wait_until_ready(self, component: Component) -> None:
        def ready() -> bool:
            return components.is_ready(component, self._paths, self._ports)

        await self._wait_until(ready, f"{component} was not ready; see {self._log(component)}")

    async def _wait_until(self, condition: Callable[[], bool], failure: str) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not await asyncio.to_thread(condition):
            self._check_components()
            if time.monotonic() > deadline:
                raise ClusterError(f"{failure} (waited {START_SECONDS:.0f} s).")
            await asyncio.sleep(0.05)

    def _check_components(self) -> None:
        """Fail if a component ended during its first start: its flags are wrong, or the machine cannot run it."""
        for component, child in self._components.items():
            if child.code is not None and component not in self._stopped:
                log = self._log(component)
                last = _read_last_line(log)
                raise ClusterError(f"{component} ended with code {child.code} while it started; {log} ends: {last}")

    async def _shut_down(self) -> None:
        self._stopped.update(Component)
        await self._nodes.stop_all(_GRACE_SECONDS)
        everything = [*self._components.values(), *self._programs.values()]
        for child in everything:
            child.identity.signal(signal.SIGKILL)  # its data is removed with the folder
        for child in everything:
            await child.ended.wait()
        self._children.cancel_background()
        kill_tree(None, MARKER, f"{self._paths.root}/", prefix=True)

    # --- components --------------------------------------------------------------------------------------------------

    def _start_component(self, component: Component) -> None:
        self._stopped.discard(component)
        flags = components.list_arguments(component, self._spec, self._paths, self._ports)
        environment = {"GOGC": _GO_COLLECTOR_PERCENT, **os.environ}
        child = self._children.start(component, [str(self._binaries / component), *flags], environment)
        self._components[component] = child
        self._children.run_in_background(self._restart_on_exit(component, child))

    async def _restart_on_exit(self, component: Component, child: Child) -> None:
        """Restart a component that ended unexpectedly, as a kubelet restarts a real control plane."""
        await child.ended.wait()
        if component in self._stopped or not self._started.is_set() or self._failure is not None:
            return
        logger.warning("%s ended with code %s; starting it again", component, child.code)
        await asyncio.sleep(_RESTART_DELAY_SECONDS)
        if component not in self._stopped:
            self._restarts[component] += 1
            self._start_component(component)

    async def _stop_component(self, component: Component, seconds: float) -> None:
        child = self._components[component]
        self._stopped.add(component)
        if seconds > 0:
            child.identity.signal(signal.SIGTERM)
            await child.wait(seconds)
        child.identity.signal(signal.SIGKILL)
        await child.ended.wait()

    async def _start_program(self, name: str, message: Message, *flags: str) -> None:
        """Start a program; replace a running one, so that it reads its configuration again."""
        running = self._programs.get(name)
        if running is not None:
            running.identity.signal(signal.SIGKILL)
            await running.ended.wait()
        command = [message["program"], f"--config={message['configuration']}", f"--kubeconfig={self._paths.kubeconfig}"]
        self._programs[name] = self._children.start(name, [*command, *flags], dict(os.environ))

    def _log(self, component: Component) -> Path:
        return self._paths.logs / f"{component}.log"

    # --- requests ----------------------------------------------------------------------------------------------------

    async def _handle(self, message: Message) -> Answer:
        match message["op"]:
            case "wait-ready":
                await self._started.wait()
                if self._failure is not None:
                    raise ClusterError(self._failure)
                return {"phases": self._phases}
            case "status":
                return self._build_status()
            case "down":
                self._ending.set()
                await self._ended.wait()
            case "stop-component":
                await self._stop_component(Component(message["component"]), float(message["seconds"]))
            case "start-component":
                component = Component(message["component"])
                if self._components[component].code is not None:
                    self._start_component(component)
            case "start-fleet":
                if "kwok" in self._programs and self._programs["kwok"].code is None:
                    raise ClusterError(f"Cluster {self._paths.name!r} already has a fleet.")
                await self._start_program("kwok", message, "--v=WARN")
            case "start-kueue":
                await self._start_program("kueue", message)
            case operation:
                await self._handle_node(operation, message)
        return {}

    async def _handle_node(self, operation: str, message: Message) -> None:
        match operation:
            case "add-node":
                self._nodes.add(parse_node(message["node"]))
            case "start-node":
                self._nodes.start(message["node"])
            case "kill-node":
                await self._nodes.kill(message["node"])
            case "stop-node":
                await self._nodes.stop(message["node"], float(message["seconds"]))
            case "delete-node":
                await self._nodes.remove(message["node"])
            case "freeze-node":
                self._nodes.freeze(message["node"])
            case "thaw-node":
                self._nodes.thaw(message["node"])
            case _:
                raise ClusterError(f"The supervisor knows no operation {operation!r}.")

    def _build_program_status(self, name: str) -> Answer | None:
        child = self._programs.get(name)
        return None if child is None else child.build_status_row("running" if child.pid else "ended")

    def _build_status(self) -> Answer:
        components = {
            component.value: {
                **child.build_status_row("running" if child.code is None else "stopped"),
                "restarts": self._restarts[component],
            }
            for component, child in self._components.items()
        }
        own = {"pid": os.getpid(), "state": "running", "code": None, "bytes": read_resident_bytes(os.getpid())}
        return {
            "ready": self._started.is_set() and self._failure is None,
            "failure": self._failure,
            "phases": self._phases,
            "server": self._ports.server,
            "supervisor": own,
            "components": components,
            "fleet": self._build_program_status("kwok"),
            "kueue": self._build_program_status("kueue"),
            "nodes": self._nodes.read_status(),
        }


def main() -> None:
    """Run the supervisor of the cluster in `--root`; with `--owned`, until standard input ends."""
    parser = argparse.ArgumentParser(description="Supervisor of a development cluster; trainium-devcluster starts it.")
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
        if not paths.keep.exists():
            remove_folder(paths.root)


async def _supervise(paths: ClusterPaths, binaries: Path, venv_bin: Path, *, owned: bool) -> None:
    supervisor = ClusterSupervisor(paths, binaries, venv_bin)
    if owned:
        # The owner never writes, so this is readable only when the owner's end of the pipe is closed.
        asyncio.get_running_loop().add_reader(sys.stdin.fileno(), supervisor.end)
    await supervisor.run()


def _lock(paths: ClusterPaths) -> TextIO:
    file = paths.lock.open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ClusterError(f"Cluster {paths.name!r} already runs.") from None
    return file


def _read_last_line(log: Path) -> str:
    """Return the last line that reports an error, else the last."""
    with contextlib.suppress(OSError):
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if "rror" in line]
        return (errors or lines or ["nothing"])[-1][:400]
    return "nothing"


if __name__ == "__main__":
    main()

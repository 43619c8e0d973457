"""Start, use and stop a development cluster, for tests, demos and the command line.

Guarantees:
- A cluster that `start` created belongs to this process: it ends with the `with` block and with the process, even if
  that is killed (unless the cluster is detached).
- A cluster reached by `connect` continues to run.
- Every method either succeeds or raises ClusterError.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import time
from typing import TYPE_CHECKING, Any, Self

from trainium_contract.api_server.errors import ApiError
from trainium_devcluster.binaries import Binaries, Program, ensure_binaries
from trainium_devcluster.binaries.catalog import find_kubernetes
from trainium_devcluster.errors import ClusterError
from trainium_devcluster.faults import Faults
from trainium_devcluster.fleet.fake_nodes import KwokFleet
from trainium_devcluster.handle import ClusterHandle
from trainium_devcluster.kueue import install_kueue
from trainium_devcluster.launch import launch_supervisor, reserve_name
from trainium_devcluster.node.api.objects import is_ready
from trainium_devcluster.processes.cleanup import end_leftovers, remove_folder
from trainium_devcluster.processes.process_tree import ProcessId, identify
from trainium_devcluster.progress import ReportProgress, ignore_progress
from trainium_devcluster.state import ClusterPaths, ClusterSpec, NodeSpec

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path
    from types import TracebackType

    from trainium_devcluster.fleet.fake_nodes import FleetShape

_START_SECONDS = 200.0
_NODE_SECONDS = 120.0
_STOP_SECONDS = 20.0
_HELM_SECONDS = 180.0
_SYSTEM = ("dedicated", "system")


class Cluster(ClusterHandle):
    """A running cluster, with its kubeconfig, tools, nodes and faults."""

    def __init__(self, paths: ClusterPaths, binaries: Binaries, owner: subprocess.Popen[bytes] | None = None) -> None:
        super().__init__(paths)
        self.binaries = binaries
        self.faults = Faults(self)
        self.fleet: KwokFleet | None = None
        """Fake nodes that this object created."""
        self._owner = owner

    # --- life --------------------------------------------------------------------------------------------------------

    @classmethod
    def start(
        cls,
        name: str | None = None,
        nodes: Sequence[NodeSpec] = (),
        *,
        fleet: int = 0,
        fleet_shape: FleetShape | None = None,
        kueue: bool = False,
        kubernetes: str | None = None,
        node_monitor_grace_seconds: float | None = None,
        apiserver_args: Sequence[str] = (),
        controller_manager_args: Sequence[str] = (),
        scheduler_args: Sequence[str] = (),
        detached: bool = False,
        keep_files: bool = False,
        venv_bin: Path | None = None,
        report: ReportProgress = ignore_progress,
    ) -> Cluster:
        """Start a cluster and wait until its control plane and nodes are ready.

        `fleet` fake nodes of `fleet_shape` are also registered; their pods are Running without processes. With `kueue`
        the real Kueue controller runs, without queues. `kubernetes` is the version, by default TRAINIUM_KUBERNETES or
        1.36. `venv_bin` is the folder of programs on the PATH of pods; by default that of this interpreter. A detached
        cluster runs until `stop`, any other ends with this process. `keep_files` keeps logs and data.
        """
        name = name or f"c{os.getpid()}-{secrets.token_hex(3)}"
        spec = ClusterSpec(
            name=name,
            nodes=tuple(nodes),
            kubernetes=find_kubernetes(kubernetes).number,
            node_monitor_grace_seconds=node_monitor_grace_seconds,
            apiserver_args=tuple(apiserver_args),
            controller_manager_args=tuple(controller_manager_args),
            scheduler_args=tuple(scheduler_args),
        )
        paths = ClusterPaths.of(name)
        binaries = ensure_binaries(kubernetes=spec.kubernetes, report=report)
        with reserve_name(paths):
            report(f"starting cluster {name}: etcd, API server, controller manager, scheduler")
            supervisor = launch_supervisor(
                spec, paths, binaries.folder, venv_bin, detached=detached, keep_files=keep_files
            )
        cluster = cls(paths, binaries, supervisor)
        try:
            cluster.request_supervisor({"op": "wait-ready"}, timeout=_START_SECONDS)
            if nodes:
                report(f"waiting for {len(nodes)} node{'s' if len(nodes) > 1 else ''}")
                cluster.wait_for_nodes([node.name for node in nodes])
            if fleet:
                cluster.fleet = KwokFleet.create(cluster, fleet, fleet_shape, report=report)
            if kueue:
                install_kueue(cluster, report=report)
        except BaseException:
            if detached:  # keep the logs for debugging
                paths.keep.touch()
            cluster.stop()
            raise
        return cluster

    @classmethod
    def connect(cls, name: str) -> Cluster:
        """Return a running cluster; raises ClusterError if it does not run."""
        paths = ClusterPaths.of(name)
        if not paths.is_running():
            raise ClusterError(f"Cluster {name!r} is not running; start it with: trainium-devcluster up --name {name}")
        spec = ClusterSpec.from_json(paths.spec.read_text())
        return cls(paths, ensure_binaries(kubernetes=spec.kubernetes))

    def stop(self) -> None:
        """Stop the cluster and all its processes. Idempotent."""
        if self._api is not None:
            self._api.close()
        supervisor: ProcessId | None = None
        if self.paths.is_running():
            with contextlib.suppress(ClusterError):
                supervisor = identify(self.read_status()["supervisor"]["pid"])
                self.request_supervisor({"op": "down"}, timeout=30.0)
        if self._owner is not None:
            if self._owner.stdin is not None:
                self._owner.stdin.close()
            _end_process(self._owner)
            self._owner = None
        else:
            _wait_until_stopped(self.paths, supervisor, _STOP_SECONDS)
        remove_leftovers(self.paths)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.stop()

    # --- use ---------------------------------------------------------------------------------------------------------

    @property
    def kubeconfig(self) -> Path:
        """The administrator's kubeconfig."""
        return self.paths.kubeconfig

    def list_variables(self) -> dict[str, str]:
        """Return the variables that `env` exports: KUBECONFIG, and a PATH with kubectl and helm."""
        path = os.environ.get("PATH", "/usr/bin:/bin")
        return {"KUBECONFIG": str(self.kubeconfig), "PATH": f"{self.binaries.folder}:{path}"}

    def kubectl(self, *arguments: str, stdin: str = "", timeout: float = 60.0) -> str:
        """Run kubectl and return its standard output; raises ClusterError with its message."""
        return self._run_tool(Program.KUBECTL, arguments, stdin, timeout)

    def helm(self, *arguments: str) -> str:
        """Run helm and return its standard output; raises ClusterError with its message."""
        return self._run_tool(Program.HELM, arguments, "", _HELM_SECONDS)

    def _run_tool(self, tool: Program, arguments: Iterable[str], stdin: str, timeout: float) -> str:
        command = [str(self.binaries.find_path(tool)), *arguments]
        shown = " ".join([tool, *command[1:]])
        variables = {**os.environ, **self.list_variables()}
        try:
            done = subprocess.run(
                command, input=stdin, env=variables, capture_output=True, text=True, check=False, timeout=timeout
            )
        except subprocess.TimeoutExpired:
            raise ClusterError(f"`{shown}` did not end within {timeout:.0f} s.") from None
        if done.returncode != 0:
            raise ClusterError(f"`{shown}` failed: {done.stderr.strip() or done.stdout.strip() or done.returncode}")
        return done.stdout

    # --- nodes -------------------------------------------------------------------------------------------------------

    def add_node(self, node: NodeSpec, *, wait: bool = True) -> None:
        """Start one more node; with `wait`, return when it is Ready."""
        fields = {key: getattr(node, key) for key in NodeSpec.__slots__}
        self.request_supervisor({"op": "add-node", "node": {**fields, "labels": dict(node.labels)}})
        if wait:
            self.wait_for_nodes([node.name])

    def remove_node(self, node: str) -> None:
        """Shut a node down gracefully and remove it from the cluster."""
        self.request_supervisor({"op": "stop-node", "node": node, "seconds": 10.0})
        self.request_supervisor({"op": "delete-node", "node": node})
        self.api.delete(f"/api/v1/nodes/{node}")

    def read_node_readiness(self) -> dict[str, bool]:
        """Return for each Node object whether it is Ready."""
        return {item["metadata"]["name"]: is_ready(item) for item in self.api.get("/api/v1/nodes")["items"]}

    def wait_for_nodes(self, names: Iterable[str], *, ready: bool = True) -> None:
        """Wait until the nodes are Ready (or NotReady, if `ready` is false)."""
        expected = set(names)
        deadline = time.monotonic() + _NODE_SECONDS
        while True:
            states: Mapping[str, bool] = {}
            with contextlib.suppress(ApiError):
                states = self.read_node_readiness()
            late = sorted(name for name in expected if states.get(name, False) is not ready)
            if not late:
                return
            if ready:
                self._check_nodes(late)
            if time.monotonic() > deadline:
                what = "not Ready" if ready else "still Ready"
                raise ClusterError(
                    f"{', '.join(late)}: {what} after {_NODE_SECONDS:.0f} s; logs are in {self.paths.logs}."
                )
            time.sleep(0.1)

    def _check_nodes(self, names: Iterable[str]) -> None:
        nodes = self.read_status()["nodes"]
        for name in names:
            if name in nodes and nodes[name]["code"] is not None:
                log = self.paths.logs / f"node-{name}.log"
                lines = log.read_text(errors="replace").strip().splitlines() if log.is_file() else []
                last = lines[-1] if lines else "nothing"
                raise ClusterError(f"Node {name!r} ended with code {nodes[name]['code']}; {log} ends: {last}")


def create_node_specs(count: int, *, prefix: str = "node", **fields: Any) -> list[NodeSpec]:
    """Return `count` equal nodes named `<prefix>-1` and so on; `fields` are arguments of NodeSpec."""
    if count < 0:
        raise ClusterError(f"A cluster cannot have {count} nodes; use 0 or more.")
    return [NodeSpec(name=f"{prefix}-{index}", **fields) for index in range(1, count + 1)]


def create_system_node() -> NodeSpec:
    """Return a node without devices for pods that select it, as `create_system_values` does."""
    return NodeSpec(
        name="system",
        neuron=0,
        efa=0,
        cpu="2",
        memory="4Gi",
        labels=dict([_SYSTEM]),
        taints=(f"{'='.join(_SYSTEM)}:NoSchedule",),
    )


def create_system_values() -> dict[str, Any]:
    """Return chart values that place the pods on the system node, away from the nodes with injected faults."""
    key, value = _SYSTEM
    return {
        "nodeSelector": {key: value},
        "tolerations": [{"key": key, "value": value, "effect": "NoSchedule"}],
    }


def remove_leftovers(paths: ClusterPaths, *, even_kept: bool = False) -> int:
    """End processes of a dead supervisor and remove its files unless they are kept; return the number of processes."""
    if paths.is_running() or not paths.root.exists():
        return 0
    ended = end_leftovers(paths)
    if even_kept or not paths.keep.exists():
        remove_folder(paths.root)
    return ended


def _end_process(process: subprocess.Popen[bytes]) -> None:
    """Wait for a process to end, then terminate it, then kill it."""
    for act in (process.terminate, process.kill):
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_SECONDS)
            return
        act()
    process.wait()


def _wait_until_stopped(paths: ClusterPaths, supervisor: ProcessId | None, seconds: float) -> None:
    """Wait until the lock is free and the process that held it, which ends shortly after, has ended."""
    deadline = time.monotonic() + seconds
    while paths.is_running() or (supervisor is not None and supervisor.is_alive()):
        if time.monotonic() > deadline:
            return
        time.sleep(0.05)

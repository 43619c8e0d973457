"""The cluster's places, and how a fault of the schedule strikes there: the same rules as `simulate.virtual.world`.

Invariants: a place holds one node at a time, whatever its name; only the newest repair of a place ends it; what the API
server has to be asked for waits until it answers. Processes are found on this machine, so a rank can be hit meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.faults.api import ApiError
from tests.testing.cluster.access import CommandError
from tests.testing.cluster.installed import NAMESPACE as OPERATOR_NAMESPACE
from tests.testing.suite.patience import NotInTimeError
from trainium_devcluster.errors import ClusterError
from trainium_devcluster.state import MARKER, NodeSpec
from trainium_simulator.virtual.nodes import NOTICE

if TYPE_CHECKING:
    import signal
    from collections.abc import Callable

    from benchmarks.faults.patient import Json, Patient
    from benchmarks.faults.stage import Stage
    from trainium_devcluster.cluster import Cluster

KERNEL_LOG = "/dev/shm/kmsg"  # a volume of the pod that stands for the node's /dev/kmsg
DEVICE_LINE = (
    "neuron:nd0: NEURON_HW_ERR=HBM_UNCORRECTABLE_ERROR instance-id=i-0 hostname=node nd-id=0 nc-id=1 serial-num=0 "
    "action=TERMINATE"
)
CONDITION = "AcceleratedHardwareReady"
_PATIENCE_SECONDS = 90.0
_EXPECTED = (ApiError, ClusterError, CommandError, NotInTimeError, OSError, KeyError, TimeoutError)


@dataclass(slots=True)
class Place:
    """One place, and the node in it."""

    number: int
    node: str
    up: bool = True
    repair: int = 0
    serial: int = 0


class Places:
    """All places of the job, in the order in which the simulator fills them: ranks first, then spares."""

    def __init__(self, stage: Stage, patient: Patient) -> None:
        assert stage.site.cluster is not None
        self._stage = stage
        self._patient = patient
        self._cluster: Cluster = stage.site.cluster
        self._lines = 0
        self.returns: list[tuple[float, float]] = []
        """When (Unix seconds) a machine was started, and how long it took until its node was Ready."""
        ranked = [member["nodeName"] for member in sorted(patient.members(), key=lambda one: int(one["nodeRank"]))]
        others = [node for node in stage.site.worker_nodes() if node not in ranked]
        self.places = [Place(number, node) for number, node in enumerate((*ranked, *others))]

    def rack_of(self, number: int, nodes: int) -> list[Place]:
        """Places that share a switch with this one."""
        return [each for each in self.places if each.number // nodes == number // nodes]

    # --- processes --------------------------------------------------------------------------------------------------

    def member_on(self, place: Place) -> str:
        """Pod of the member in this place; empty when there is none."""
        found = [member["podName"] for member in self._patient.members() if member["nodeName"] == place.node]
        return str(found[0]) if found else ""

    def signal_rank(self, place: Place, number: signal.Signals) -> bool:
        """Hit the training process in this place; False when there is none."""
        for path in self._patient.orders.glob("pid-*-0"):
            with contextlib.suppress(OSError, ValueError):
                found = _outside(int(path.read_text()), self._cluster.paths.marker(place.node), path.name)
                if found is not None:
                    os.kill(found, number)
                    return True
        return False

    def write_device_line(self, place: Place) -> bool:
        """A line of the kernel about a broken device, where a worker reads it; False when nobody is there."""

        def write() -> bool:
            pod = self.member_on(place)
            if pod:
                self._lines += 1
                record = f"3,{self._lines},{int(time.monotonic() * 1e6)},-;{DEVICE_LINE}"
                self._patient.shell(pod, f"echo '{record}' >> {KERNEL_LOG}")
            return bool(pod)

        return bool(self._asked(write))

    def slow_down(self, place: Place, factor: float | None) -> None:
        """Steps take so many times as long on this node; None: as long as elsewhere."""
        path = self._patient.orders / f"straggle-{place.node}"
        if factor is None:
            path.unlink(missing_ok=True)
        else:
            path.write_text(f"{factor:g}")
            path.chmod(0o666)

    # --- nodes ------------------------------------------------------------------------------------------------------

    def condemn(self, place: Place) -> None:
        """The node monitor reports the broken device."""
        self._asked(
            lambda: self._cluster.faults.set_condition(place.node, CONDITION, "False", "NeuronHBMUncorrectableError")
        )

    def power_off(self, place: Place) -> None:
        """The node is gone, and tells nobody."""
        place.up = False
        self._cluster.faults.kill_node(place.node)

    def give_notice(self, place: Place) -> None:
        """The machine is to be taken away."""
        self._asked(lambda: self._stage.taint(place.node, NOTICE, "NoSchedule"))

    def restore(self, place: Place, *, same_machine: bool) -> None:
        """What was broken is whole: the same machine, or another one with another name."""
        self.slow_down(place, None)
        began = time.time()
        if same_machine:
            node = place.node
            with contextlib.suppress(ClusterError):  # it may be up: a notice that was taken back
                self._cluster.faults.start_node(node)
            self._asked(lambda: self._stage.untaint(node, NOTICE))
        else:
            old = place.node
            place.serial += 1
            place.node = f"place-{place.number}-{place.serial}"
            self._cluster.add_node(NodeSpec(name=place.node, cpu="4", memory="8Gi"), wait=False)
            with contextlib.suppress(ClusterError):
                self._cluster.faults.kill_node(old)
            self._cluster.supervisor({"op": "forget-node", "node": old})
            self._asked(lambda: self._stage.api.delete(f"/api/v1/nodes/{old}"))
        place.up = True
        if self._asked(lambda: self._is_ready(place.node)):
            self.returns.append((began, time.time() - began))

    def _is_ready(self, node: str) -> bool:
        # By the stage's client: that of the cluster has one connection, and these actions run in threads.
        conditions = self._stage.api.get(f"/api/v1/nodes/{node}")["status"].get("conditions") or []
        if not any(each["type"] == "Ready" and each["status"] == "True" for each in conditions):
            raise TimeoutError(f"node {node} is not Ready")
        return True

    # --- the whole cluster ------------------------------------------------------------------------------------------

    def stop_api_server(self) -> None:
        """Nobody can ask it."""
        self._cluster.faults.stop_apiserver()

    def start_api_server(self) -> None:
        """It is back."""
        self._cluster.faults.start_apiserver()

    def lose_operator(self) -> None:
        """Its process is gone at once; the Deployment makes another."""
        self._asked(self._stage.operator.kill)

    def ask_for(self, nodes: int) -> None:
        """A person changes the size."""
        self._asked(lambda: self._patient.patch({"spec": {"workers": {"replicas": nodes}}}))

    def operator_pods(self) -> list[Json]:
        """Of the operator."""
        return list(self._stage.api.get(f"/api/v1/namespaces/{OPERATOR_NAMESPACE}/pods")["items"])

    def _asked(self, act: Callable[[], object]) -> object:
        """Do it, again and again while the API server does not answer; raises what it last said."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while True:
            try:
                return act()
            except _EXPECTED:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.3)


def _outside(pid: int, marker: str, name: str) -> int | None:
    """The process on this machine that a container of this node knows by this pid."""
    pod = name.removeprefix("pid-").rpartition("-")[0]
    wanted = {f"{MARKER}={marker}".encode(), f"TRAINIUM_POD_NAME={pod}".encode()}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            status = (folder / "status").read_text()
            inner = [line.split()[-1] for line in status.splitlines() if line.startswith("NSpid:")]
            if inner != [str(pid)] or "State:\tZ" in status:
                continue
            if wanted <= set((folder / "environ").read_bytes().split(b"\0")):
                return int(folder.name)
    return None

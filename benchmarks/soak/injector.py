"""Inject the faults of a schedule, each at its time, and repair the nodes.

Guarantees:
- A slot holds one node at a time; only the newest repair of a slot ends it.
- A node without power gets no fault; a rank is stopped only while steps are made.
- Requests to the API server are repeated until it answers.
- A fault that cannot be injected is reported and does not end the soak.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import signal
import threading
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.faults.row import EXPECTED_ERRORS
from benchmarks.faults.rows.nodes import KERNEL_LINES, KERNEL_LOG
from benchmarks.soak.schedule import NODES, NOTICE_SECONDS, RACK_NODES, STRAGGLER_FACTOR, Fault, Kind
from trainium_devcluster.errors import ClusterError
from trainium_devcluster.state import MARKER, NodeSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.faults.environment import FaultEnvironment
    from benchmarks.faults.target import TargetJob

NOTICE = "aws-node-termination-handler/scheduled-maintenance"
CONDITION = "AcceleratedHardwareReady"
_REPORT_SECONDS = 1.0
"""Time until the node monitor reports a broken device."""
_REQUEST_SECONDS = 90.0
_STEP_SECONDS = 2.5
"""Without a new step for so long, training is considered stopped."""


@dataclass(slots=True)
class Slot:
    """A place for a node."""

    number: int
    node: str
    up: bool = True
    repair: int = 0
    serial: int = 0


class Injector:
    """Inject a schedule into a job; actions run in threads, so that a slow one delays no other."""

    def __init__(
        self, env: FaultEnvironment, target: TargetJob, faults: Sequence[Fault], log: Callable[[str], None]
    ) -> None:
        assert env.site.cluster is not None
        self.errors: list[str] = []
        self.injected = 0
        self._env, self._target, self._cluster, self._log = env, target, env.site.cluster, log
        self._start = time.time()
        ranked = [member["nodeName"] for member in target.members()]
        others = [node for node in env.site.worker_nodes() if node not in ranked]
        self._slots = [Slot(number, node) for number, node in enumerate((*ranked, *others))]
        self._numbers = itertools.count()
        self._actions: list[tuple[float, int, Callable[[], None]]] = []
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._resizes = 0
        for fault in faults:
            self._at(fault.at, partial(self._inject, fault))

    @property
    def _now(self) -> float:
        return time.time() - self._start

    def run(self, until: float) -> None:
        """Run everything that is due before `until` (seconds), then repair all nodes at once."""
        while True:
            with self._changed:
                deadline = min(self._actions[0][0] if self._actions else until, until)
                if deadline > self._now:
                    self._changed.wait(deadline - self._now)
                    continue
                if deadline >= until:
                    break
                act = heapq.heappop(self._actions)[2]
            thread = threading.Thread(target=self._do, args=(act,), daemon=True)
            self._threads.append(thread)
            thread.start()
        for thread in self._threads:
            thread.join(120)
        while self._actions:
            self._do(heapq.heappop(self._actions)[2])

    def _do(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:  # noqa: BLE001 - reported at the end
            self.errors.append(f"an action failed: {type(error).__name__}: {error}")

    def _at(self, when: float, act: Callable[[], None]) -> None:
        with self._changed:
            heapq.heappush(self._actions, (when, next(self._numbers), act))
            self._changed.notify_all()

    def _after(self, seconds: float, act: Callable[[], None]) -> None:
        self._at(self._now + seconds, act)

    def _inject(self, fault: Fault) -> None:
        slot = self._slots[fault.slot]
        hit = True
        match fault.kind:
            case Kind.API_SERVER_DOWN:
                self._cluster.faults.stop_apiserver()
                self._after(fault.seconds, self._cluster.faults.start_apiserver)
            case Kind.OPERATOR_KILLED:
                self._request(self._env.operator.kill)
            case Kind.RESIZE:
                self._resize(fault)
            case _ if not slot.up:
                hit = False
            case Kind.KILLED_RANK:
                hit = self._signal_rank(slot, signal.SIGKILL)
            case Kind.STOPPED_RANK:
                metrics = self._target.job.folder / "metrics.jsonl"
                hit = time.time() - metrics.stat().st_mtime < _STEP_SECONDS and self._signal_rank(slot, signal.SIGSTOP)
            case Kind.DEVICE_ERROR:
                self._break_device(slot, fault)
            case Kind.NODE_LOST:
                self._fail_nodes([slot], fault)
            case Kind.RACK_LOST:
                rack = slot.number // RACK_NODES
                self._fail_nodes([each for each in self._slots if each.number // RACK_NODES == rack and each.up], fault)
            case Kind.MAINTENANCE:
                self._announce_maintenance(slot, fault)
            case Kind.STRAGGLER:
                self._slow_down(slot, fault)
        self.injected += hit
        self._log(f"{self._now:7.1f} {fault.kind} at {fault.slot}{'' if hit else ' (nothing to inject into)'}")

    def _signal_rank(self, slot: Slot, number: signal.Signals) -> bool:
        for path in self._target.commands.glob("pid-*-0"):
            with contextlib.suppress(OSError, ValueError):
                pid = _outer_pid(int(path.read_text()), self._cluster.paths.marker(slot.node), path.name)
                if pid is not None:
                    os.kill(pid, number)
                    return True
        return False

    def _break_device(self, slot: Slot, fault: Fault) -> None:
        record = f"3,{next(self._numbers)},{int(time.monotonic() * 1e6)},-;{KERNEL_LINES[2]}"

        def write() -> None:
            for member in self._target.members():
                if member["nodeName"] == slot.node:
                    self._target.shell(member["podName"], f"echo '{record}' >> {KERNEL_LOG}")

        self._request(write)
        repair = self._begin_repair(slot)

        def report() -> None:
            if slot.repair == repair and slot.up:
                reason = "NeuronHBMUncorrectableError"
                self._request(lambda: self._cluster.faults.set_condition(slot.node, CONDITION, "False", reason))

        self._after(_REPORT_SECONDS, report)
        self._repair_after(slot, fault, repair)

    def _fail_nodes(self, slots: list[Slot], fault: Fault) -> None:
        for slot in slots:
            repair = self._begin_repair(slot)
            slot.up = False
            self._cluster.faults.kill_node(slot.node)
            self._repair_after(slot, fault, repair)

    def _announce_maintenance(self, slot: Slot, fault: Fault) -> None:
        repair = self._begin_repair(slot)
        self._request(lambda: self._env.taint(slot.node, NOTICE, "NoSchedule"))

        def fail() -> None:
            if slot.repair == repair and slot.up:
                self._fail_nodes([slot], fault)

        self._after(NOTICE_SECONDS, fail)

    def _slow_down(self, slot: Slot, fault: Fault) -> None:
        path = self._target.commands / f"straggle-{slot.node}"
        path.write_text(f"{STRAGGLER_FACTOR:g}")
        path.chmod(0o666)
        self._after(fault.seconds, lambda: path.unlink(missing_ok=True))

    def _resize(self, fault: Fault) -> None:
        self._resizes += 1
        resize = self._resizes
        self._request(lambda: self._target.patch({"spec": {"workers": {"replicas": fault.slot}}}))

        def resize_back() -> None:
            if resize == self._resizes:
                self._request(lambda: self._target.patch({"spec": {"workers": {"replicas": NODES}}}))

        self._after(fault.seconds, resize_back)

    def _begin_repair(self, slot: Slot) -> int:
        slot.repair += 1
        return slot.repair

    def _repair_after(self, slot: Slot, fault: Fault, repair: int) -> None:
        def restore() -> None:
            if slot.repair == repair:
                self._restore(slot, same_machine=fault.same_machine)

        self._after(fault.seconds, restore)

    def _restore(self, slot: Slot, *, same_machine: bool) -> None:
        if same_machine:
            with contextlib.suppress(ClusterError):  # the node may run
                self._cluster.faults.start_node(slot.node)
            self._request(lambda: self._env.untaint(slot.node, NOTICE))
            self._request(lambda: self._cluster.faults.clear_condition(slot.node, CONDITION))
        else:
            old = slot.node
            slot.serial += 1
            slot.node = f"slot-{slot.number}-{slot.serial}"
            self._cluster.add_node(NodeSpec(name=slot.node, cpu="4", memory="8Gi"), wait=False)
            with contextlib.suppress(ClusterError):
                self._cluster.faults.kill_node(old)
            self._cluster.supervisor({"op": "forget-node", "node": old})
            self._request(lambda: self._env.api.delete(f"/api/v1/nodes/{old}"))
        slot.up = True

    def _request(self, act: Callable[[], object]) -> None:
        """Repeat an action while the API server does not answer."""
        deadline = time.monotonic() + _REQUEST_SECONDS
        while True:
            try:
                act()
            except (*EXPECTED_ERRORS, KeyError):
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.3)
            else:
                return


def _outer_pid(pid: int, marker: str, name: str) -> int | None:
    """Return the pid on this machine of a process that has `pid` in a container of the node with this marker."""
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

"""Register the Node object, and keep its conditions and its lease.

Guarantees:
- The lease is renewed once a heartbeat and only then.
- Status is written when it changes, every five minutes, and when a heartbeat finds another status in the API server
  (the controller manager sets a silent node to Unknown, and only the node reverts that).
- A condition set by a fault remains until it is cleared, and overrides the node's own.
"""

import asyncio
import logging
import os
import platform
import time
from dataclasses import dataclass, field
from pathlib import Path

from trainium_contract.api_server.errors import ApiError, ConnectionFailedError
from trainium_contract.rfc3339 import format_micro_time, format_rfc3339
from trainium_devcluster.node.api.client import Api
from trainium_devcluster.node.api.objects import Json
from trainium_devcluster.node.api.waiting import wait_for_event
from trainium_devcluster.node.options import KUBELET_PORT, NodeOptions

_log = logging.getLogger(__name__)

LEASE_SECONDS = 40
_STATUS_SECONDS = 300.0
_LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
_NOT_FOUND, _CONFLICT = 404, 409
_RETRY_SECONDS = 0.5
_HEALTHY = (
    ("MemoryPressure", "KubeletHasSufficientMemory", "kubelet has sufficient memory available"),
    ("DiskPressure", "KubeletHasNoDiskPressure", "kubelet has no disk pressure"),
    ("PIDPressure", "KubeletHasSufficientPID", "kubelet has sufficient PID available"),
)


@dataclass(frozen=True, slots=True)
class ForcedCondition:
    """A node condition set by a fault."""

    type: str
    status: str
    reason: str
    message: str


@dataclass(slots=True)
class Registration:
    """Maintains this node's object and lease."""

    api: Api
    options: NodeOptions
    address: str
    pod_cidr: str
    node: Json = field(default_factory=dict)
    _forced: dict[str, ForcedCondition] = field(default_factory=dict)
    _transitions: dict[str, tuple[str, str]] = field(default_factory=dict)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _cleared: set[str] = field(default_factory=set)
    _written: float = 0.0
    _boot_id: str = field(default_factory=lambda: os.urandom(16).hex())

    async def register(self) -> None:
        """Create the Node, or adopt an existing one, and report Ready; wait for the API server."""
        while True:
            try:
                await self._ensure_node()
                await self._write_status()
                await self._renew()
            except ApiError as error:
                _log.warning("registration: %s", error)
                await asyncio.sleep(_RETRY_SECONDS)
            else:
                return

    async def run(self) -> None:
        """Renew the lease and report status until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._renew_lease_periodically())
            group.create_task(self._update_status_periodically())

    def set_condition(self, condition: ForcedCondition) -> None:
        """Report `condition` from now on, instead of the node's own of the same type."""
        self._forced[condition.type] = condition
        self._cleared.discard(condition.type)
        self._changed.set()

    def clear_condition(self, kind: str) -> None:
        """Report the node's own condition again; others are removed."""
        if self._forced.pop(kind, None) is not None:
            self._cleared.add(kind)
        self._changed.set()

    def _build_labels(self) -> dict[str, str]:
        own = {
            "kubernetes.io/hostname": self.options.name,
            "kubernetes.io/os": "linux",
            "kubernetes.io/arch": _find_architecture(),
            "beta.kubernetes.io/os": "linux",
            "beta.kubernetes.io/arch": _find_architecture(),
        }
        return own | dict(self.options.spec.labels)

    async def _ensure_node(self) -> None:
        body = {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": self.options.name, "labels": self._build_labels()},
            "spec": {
                "podCIDR": self.pod_cidr,
                "podCIDRs": [self.pod_cidr],
                "providerID": f"process:///{self.options.name}",
                "taints": self.options.taints,
            },
        }
        try:
            self.node = await self.api.create("/api/v1/nodes", body)
        except ApiError as error:
            if error.status != _CONFLICT:
                raise
            self.node = await self.api.patch(self._path, {"metadata": {"labels": self._build_labels()}})

    @property
    def _path(self) -> str:
        return f"/api/v1/nodes/{self.options.name}"

    def _build_conditions(self) -> list[Json]:
        own = [ForcedCondition(kind, "False", reason, message) for kind, reason, message in _HEALTHY]
        own.append(ForcedCondition("Ready", "True", "KubeletReady", "the process node is posting ready status"))
        merged = {c.type: c for c in own} | self._forced
        self._cleared.difference_update(merged)
        now = format_rfc3339(time.time())
        conditions = []
        for condition in merged.values():
            status, since = self._transitions.get(condition.type, ("", now))
            if status != condition.status:
                since = now
                self._transitions[condition.type] = (condition.status, now)
            conditions.append(
                {
                    "type": condition.type,
                    "status": condition.status,
                    "reason": condition.reason,
                    "message": condition.message,
                    "lastHeartbeatTime": now,
                    "lastTransitionTime": since,
                }
            )
        return conditions + [{"type": kind, "$patch": "delete"} for kind in sorted(self._cleared)]

    async def _write_status(self) -> None:
        uname = platform.uname()
        status = {
            "capacity": self.options.capacity,
            "allocatable": self.options.capacity,
            "conditions": self._build_conditions(),
            "addresses": [
                {"type": "InternalIP", "address": self.address},
                {"type": "Hostname", "address": self.options.name},
            ],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": KUBELET_PORT}},
            "declaredFeatures": ["ExtendWebSocketsToKubelet"],
            "nodeInfo": {
                "architecture": _find_architecture(),
                "bootID": self._boot_id,
                "containerRuntimeVersion": "process://1.0.0",
                "kernelVersion": uname.release,
                "kubeProxyVersion": "",
                "kubeletVersion": f"v{self.options.kubernetes}",
                "machineID": _read_machine_id(),
                "operatingSystem": "linux",
                "osImage": "process node",
                "systemUUID": self._boot_id,
            },
        }
        self.node = await self.api.patch(f"{self._path}/status", {"status": status})
        self._written = time.monotonic()

    async def _is_stale(self) -> bool:
        """Return whether the conditions in the API server differ."""
        if time.monotonic() - self._written > _STATUS_SECONDS:
            return True
        node = await self.api.get(self._path)
        theirs = {item["type"]: item["status"] for item in node.get("status", {}).get("conditions", [])}
        return any(theirs.get(item["type"]) != item.get("status") for item in self._build_conditions())

    async def _update_status_periodically(self) -> None:
        while True:
            changed = await wait_for_event(self._changed, self.options.heartbeat_seconds)
            self._changed.clear()
            try:
                if changed or await self._is_stale():
                    await self._write_status()
            except ConnectionFailedError:
                await asyncio.sleep(_RETRY_SECONDS)
                self._changed.set()
            except ApiError as error:
                _log.warning("node status: %s", error)
                if error.status == _NOT_FOUND:
                    await self.register()

    async def _renew(self) -> None:
        body: Json = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": self.options.name, "namespace": "kube-node-lease"},
            "spec": {
                "holderIdentity": self.options.name,
                "leaseDurationSeconds": LEASE_SECONDS,
                "renewTime": format_micro_time(time.time()),
            },
        }
        if self.node:
            owner = {"apiVersion": "v1", "kind": "Node", "name": self.options.name, "uid": self.node["metadata"]["uid"]}
            body["metadata"]["ownerReferences"] = [owner]
        try:
            await self.api.patch(f"{_LEASES}/{self.options.name}", {"spec": body["spec"]})
        except ApiError as error:
            if error.status != _NOT_FOUND:
                raise
            await self.api.create(_LEASES, body)

    async def _renew_lease_periodically(self) -> None:
        while True:
            await asyncio.sleep(self.options.heartbeat_seconds)
            try:
                await self._renew()
            except ApiError as error:
                _log.warning("node lease: %s", error)


def _find_architecture() -> str:
    return {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())


def _read_machine_id() -> str:
    try:
        return Path("/etc/machine-id").read_text(encoding="ascii").strip()
    except OSError:
        return "process-node"

"""Parse resource.k8s.io objects, and the claims of pods, into small frozen views.

Invariants:
- No other module reads that JSON.
- Malformed parts are left out.
- Every view is bounded, because a driver, a kubelet or a tenant wrote the object.
"""

from __future__ import annotations

from dataclasses import dataclass
from sys import intern
from typing import TYPE_CHECKING

from trainium_contract.faults.classify import find_cause
from trainium_contract.faults.signs import SignKind
from trainium_contract.rfc3339 import parse_rfc3339
from trainium_contract.spec.claim import DRIVER
from trainium_operator.cluster.cache.parts import as_integer, as_mapping, as_mappings, as_text
from trainium_operator.plan.model.devices import DeviceTaint
from trainium_operator.plan.model.names import CLAIM

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from trainium_contract.api_server.responses import Json

MAX_TEXT_CHARACTERS = 256
MAX_DEVICES, MAX_TAINTS, MAX_PODS = 128, 16, 256
"""Limits of the API itself for a slice, a device and a claim."""
_HOLDING_BACK = frozenset({"NoSchedule", "NoExecute"})
"""Effects of taints that keep a device from being allocated."""


@dataclass(frozen=True, slots=True)
class SliceView:
    """One ResourceSlice of the Neuron driver; of other drivers, and without a node, it holds no devices."""

    node: str
    pool: str
    generation: int
    devices: Mapping[str, tuple[DeviceTaint, ...]]
    """Device -> its taints."""

    def free(self) -> Iterator[str]:
        """Yield the devices without a taint that prevents allocation."""
        for device, taints in self.devices.items():
            if not any(taint.effect in _HOLDING_BACK for taint in taints):
                yield device


@dataclass(frozen=True, slots=True)
class ClaimView:
    """One ResourceClaim: the pods that reserve it, and the devices of the Neuron driver that it holds.

    Its owners are ignored: the creator of an object sets them, while the scheduler writes reservations.
    """

    pods: tuple[str, ...]
    """Pod uids."""
    held: tuple[tuple[str, str], ...]
    """Each device as (pool, device)."""


def parse_claim_template(raw: Json) -> str:
    """Return the uid of a ResourceClaimTemplate; its name identifies the content."""
    uid: str = raw["metadata"]["uid"]
    return uid


def parse_slice(raw: Json) -> SliceView:
    """Parse a ResourceSlice."""
    spec = as_mapping(raw.get("spec"))
    pool = as_mapping(spec.get("pool"))
    name = intern(as_text(pool.get("name")))
    node = intern(as_text(spec.get("nodeName"))) if spec.get("driver") == DRIVER else ""
    devices = as_mappings(spec.get("devices"))[:MAX_DEVICES] if node else ()
    return SliceView(
        node=node,
        pool=name,
        generation=as_integer(pool.get("generation")) or 0,
        devices={intern(as_text(device.get("name"))): _parse_taints(name, device) for device in devices},
    )


def parse_claim(raw: Json) -> ClaimView:
    """Parse a ResourceClaim."""
    status = as_mapping(raw.get("status"))
    allocation = as_mapping(status.get("allocation"))
    results = as_mappings(as_mapping(allocation.get("devices")).get("results"))[:MAX_DEVICES]
    return ClaimView(
        pods=tuple(
            as_text(consumer.get("uid"))
            for consumer in as_mappings(status.get("reservedFor"))[:MAX_PODS]
            if consumer.get("resource") == "pods"
        ),
        # Requests with administrator access hold no device.
        held=tuple(
            (intern(as_text(result.get("pool"))), intern(as_text(result.get("device"))))
            for result in results
            if result.get("driver") == DRIVER and result.get("adminAccess") is not True
        ),
    )


def read_claim_template(raw: Json) -> str:
    """Return the template by which a worker pod claims its devices; empty without a claim."""
    claims = as_mappings(as_mapping(raw.get("spec")).get("resourceClaims"))
    return next((as_text(claim.get("resourceClaimTemplateName")) for claim in claims if claim.get("name") == CLAIM), "")


def read_device_health(raw: Json) -> tuple[str, str] | None:
    """Return the health of the first unhealthy claimed device, and its name with its message.

    The kubelet names a claim's resource `claim:<claim>/<request>`, and a device `<driver>/<pool>/<device>`.
    """
    for container in as_mappings(as_mapping(raw.get("status")).get("containerStatuses")):
        for claimed in as_mappings(container.get("allocatedResourcesStatus")):
            if as_text(claimed.get("name")).partition("/")[0] != f"claim:{CLAIM}":
                continue
            for device in as_mappings(claimed.get("resources"))[:MAX_DEVICES]:
                health = as_text(device.get("health"))
                if find_cause(SignKind.CLAIM_HEALTH, health) is not None:
                    reported = (as_text(device.get("resourceID")), as_text(device.get("message")))
                    return health, ": ".join(filter(None, reported))[:MAX_TEXT_CHARACTERS]
    return None


def _parse_taints(pool: str, device: Json) -> tuple[DeviceTaint, ...]:
    return tuple(
        DeviceTaint(
            device=f"{pool}/{as_text(device.get('name'))}"[:MAX_TEXT_CHARACTERS],
            key=intern(as_text(taint.get("key"))[:MAX_TEXT_CHARACTERS]),
            effect=intern(as_text(taint.get("effect"))[:MAX_TEXT_CHARACTERS]),
            value=as_text(taint.get("value"))[:MAX_TEXT_CHARACTERS],
            since=parse_rfc3339(taint.get("timeAdded")),
        )
        for taint in as_mappings(device.get("taints"))[:MAX_TAINTS]
    )

"""From raw JSON of resource.k8s.io, and of pods as far as they claim devices, to small frozen views.

Invariants: nobody else knows the shape of that JSON; what is malformed is left out; everything kept is bounded, for a
driver, a kubelet or a tenant wrote it.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from sys import intern
from typing import TYPE_CHECKING, Any

from trainium_contract.faults.classify import cause_of_claim_health
from trainium_contract.spec.claim import DRIVER
from trainium_operator.cluster.cache.parts import items_of, mapping_of, text_of, whole_of
from trainium_operator.plan.model.names import CLAIM
from trainium_operator.plan.model.observed import DeviceTaint

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from trainium_operator.cluster.api.client import Json

LONGEST_TEXT = 256
MOST_DEVICES, MOST_TAINTS, MOST_PODS = 128, 16, 256
"""Limits of the API itself for a slice, a device and a claim."""
_HOLDING_BACK = frozenset({"NoSchedule", "NoExecute"})
"""Effects of taints that keep a device from being given out."""


@dataclass(frozen=True, slots=True)
class SliceView:
    """One ResourceSlice of the Neuron driver; of other drivers, and without a node, it holds no devices."""

    node: str
    pool: str
    generation: int
    devices: Mapping[str, tuple[DeviceTaint, ...]]
    """Device -> its taints."""

    def free(self) -> Iterator[str]:
        """Yield devices that could be allocated, as far as taints allow."""
        for device, taints in self.devices.items():
            if not any(taint.effect in _HOLDING_BACK for taint in taints):
                yield device


@dataclass(frozen=True, slots=True)
class ClaimView:
    """One ResourceClaim: for which pods it is reserved, and the devices of the Neuron driver that it holds.

    Its owners are ignored: the creator of an object sets them, while the scheduler writes reservations.
    """

    pods: tuple[str, ...]
    """uids."""
    held: tuple[tuple[str, str], ...]
    """Pool and device."""


def template_view(raw: Json) -> str:
    """Return the uid of a ResourceClaimTemplate; its name identifies the content."""
    uid: str = raw["metadata"]["uid"]
    return uid


def slice_view(raw: Json) -> SliceView:
    """Parse a ResourceSlice."""
    spec = mapping_of(raw.get("spec"))
    pool = mapping_of(spec.get("pool"))
    name = intern(text_of(pool.get("name")))
    node = intern(text_of(spec.get("nodeName"))) if spec.get("driver") == DRIVER else ""
    devices = items_of(spec.get("devices"))[:MOST_DEVICES] if node else ()
    return SliceView(
        node=node,
        pool=name,
        generation=whole_of(pool.get("generation")) or 0,
        devices={intern(text_of(each.get("name"))): _taints(name, each) for each in devices},
    )


def claim_view(raw: Json) -> ClaimView:
    """Parse a ResourceClaim."""
    status = mapping_of(raw.get("status"))
    allocation = mapping_of(status.get("allocation"))
    results = items_of(mapping_of(allocation.get("devices")).get("results"))[:MOST_DEVICES]
    return ClaimView(
        pods=tuple(
            text_of(each.get("uid"))
            for each in items_of(status.get("reservedFor"))[:MOST_PODS]
            if each.get("resource") == "pods"
        ),
        # What is asked for with administrator's access is held by nobody.
        held=tuple(
            (intern(text_of(each.get("pool"))), intern(text_of(each.get("device"))))
            for each in results
            if each.get("driver") == DRIVER and each.get("adminAccess") is not True
        ),
    )


def claim_template_of(raw: Json) -> str:
    """Return the template by which a pod of ours claims its devices; empty without a claim."""
    claims = items_of(mapping_of(raw.get("spec")).get("resourceClaims"))
    return next((text_of(each.get("resourceClaimTemplateName")) for each in claims if each.get("name") == CLAIM), "")


def device_health_of(raw: Json) -> tuple[str, str] | None:
    """Return the health of the first claimed device that is not healthy, with its name and message.

    The kubelet names a claim's resource `claim:<claim>/<request>`, and a device `<driver>/<pool>/<device>`.
    """
    for container in items_of(mapping_of(raw.get("status")).get("containerStatuses")):
        for claimed in items_of(container.get("allocatedResourcesStatus")):
            if text_of(claimed.get("name")).partition("/")[0] != f"claim:{CLAIM}":
                continue
            for device in items_of(claimed.get("resources"))[:MOST_DEVICES]:
                health = text_of(device.get("health"))
                if cause_of_claim_health(health) is not None:
                    reported = (text_of(device.get("resourceID")), text_of(device.get("message")))
                    return health, ": ".join(filter(None, reported))[:LONGEST_TEXT]
    return None


def _taints(pool: str, device: Json) -> tuple[DeviceTaint, ...]:
    return tuple(
        DeviceTaint(
            device=f"{pool}/{text_of(device.get('name'))}"[:LONGEST_TEXT],
            key=intern(text_of(each.get("key"))[:LONGEST_TEXT]),
            effect=intern(text_of(each.get("effect"))[:LONGEST_TEXT]),
            value=text_of(each.get("value"))[:LONGEST_TEXT],
            since=_seconds(each.get("timeAdded")),
        )
        for each in items_of(device.get("taints"))[:MOST_TAINTS]
    )


def _seconds(value: Any) -> float | None:
    try:
        return datetime.fromisoformat(value).timestamp()
    except (ValueError, TypeError, OverflowError):
        return None

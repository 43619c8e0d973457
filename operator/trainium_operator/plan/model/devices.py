"""Devices that a job's workers claim, as plans see them. Plain frozen data.

Names are those of resource.k8s.io/v1. Invariant: only templates that the job controls are here, so none of another's is
ever touched.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class DeviceTaint:
    """One taint of a device that a worker holds."""

    device: str
    """`pool/device`."""
    key: str
    effect: str
    value: str = ""
    since: float | None = None
    """When it was added (Unix seconds, by the API server's clock); None when that is not told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicesView:
    """What is known of the devices of one job."""

    templates: Mapping[str, str] = field(default_factory=dict)
    """Name -> uid of each template that the job controls."""
    taints: Mapping[str, tuple[DeviceTaint, ...]] = field(default_factory=dict)
    """By pod uid: taints of the devices that its claim holds."""
    free_nodes: tuple[str, ...] = ()
    """Nodes with as many free devices as a worker claims: published by the driver, untainted, allocated to nobody."""
    nodes: int = 0
    """Nodes that have such devices at all, free or not."""

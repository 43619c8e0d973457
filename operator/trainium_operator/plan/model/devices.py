"""Define the claimed devices of a job as plans see them. Plain frozen data."""

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
    """When it was added (Unix seconds, by the API server's clock); None if unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicesView:
    """The devices of one job."""

    templates: Mapping[str, str] = field(default_factory=dict)
    """Name -> uid of each template that the job controls."""
    taints: Mapping[str, tuple[DeviceTaint, ...]] = field(default_factory=dict)
    """By pod uid: taints of the devices that its claim holds."""
    free_nodes: tuple[str, ...] = ()
    """Nodes with as many free devices as a worker claims: published by the driver, untainted, allocated to nobody."""
    nodes: int = 0
    """Nodes with such devices, free or not."""

"""`spec.workers.accelerator.claim`: devices by dynamic resource allocation (DRA) instead of the device plugin.

Names and limits are those of resource.k8s.io/v1 and of AWS's Neuron DRA driver (aws-neuron-sdk deploy/eks/dra.rst).
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from trainium_contract.base import ContractModel

DRIVER = "neuron.aws.com"
"""Name of the Neuron DRA driver, and of the DeviceClass that comes with it."""
MAX_DEVICES = 32
"""Largest number of results of the allocation of a claim."""

Selector = Annotated[str, Field(min_length=1, max_length=1024)]


class ClaimSpec(ContractModel):
    """Which devices each worker claims; `{}` claims all devices of the instance type."""

    device_class_name: Annotated[str, Field(min_length=1, max_length=253)] = DRIVER
    """DeviceClass of the devices; its driver must be Neuron's."""
    count: Annotated[int, Field(ge=1, le=MAX_DEVICES)] | None = None
    """Devices per worker; omitted: all of the instance type. With fewer give coresPerNode too."""
    connected: bool = False
    """Only devices that are connected with each other, of a group of 1, 4, 8 or 16; the driver publishes such groups
    for nodes with EFA."""
    logical_neuron_core: Annotated[int, Field(ge=1, le=2)] | None = None
    """Physical cores that make one that a process sees, on trn2; omitted: as the node is set. With 1 give coresPerNode
    too, which counts the cores that processes see."""
    selectors: Annotated[tuple[Selector, ...], Field(max_length=8)] = ()
    """Further conditions that each device must meet, in CEL, as in a claim; for instance a version of the driver."""

"""`spec.workers`: number, kind and pod template of the nodes."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from trainium_contract.accelerators import INSTANCES, TOPOLOGY_LABEL_DOMAINS, ULTRA_SERVER_LABEL, Device, Instance
from trainium_contract.base import ContractModel
from trainium_contract.spec.claim import ClaimSpec
from trainium_contract.spec.pod_template import PodTemplate

MAX_NODES = 10_000

DEVICE_MISSING = (
    "name the device of a worker: workers.accelerator.instanceType (for instance trn1.32xlarge), or resources and "
    "coresPerNode, or device: cpu"
)
"""Refusal of a job that names no device, by the definition and by `trainium-trainer check`."""

NodeCount = Annotated[int, Field(ge=1, le=MAX_NODES)]
Quantity = Annotated[str, Field(min_length=1, max_length=32)]


MAX_UNIT_NODES = 36
"""Nodes of the largest UltraServer (Neuron documentation, "Trn3 Architecture", Gen2)."""
_TOPOLOGY_KEY = (
    f"^({'|'.join(TOPOLOGY_LABEL_DOMAINS).replace('.', '[.]')})[A-Za-z0-9]([A-Za-z0-9._-]{{0,61}}[A-Za-z0-9])?$"
)


class Unit(StrEnum):
    """Part of a cluster that is placed, lost and replaced as a whole."""

    NODE = "Node"
    ULTRA_SERVER = "UltraServer"


class AcceleratorSpec(ContractModel):
    """Resources of one node: a known EC2 instance type, or a device with an explicit number of cores."""

    instance_type: Annotated[str, Field(max_length=63)] | None = None
    """EC2 instance type, for instance trn1.32xlarge; sets devices, cores, EFA interfaces and the node selector."""
    device: Device = Device.NEURON
    """`cpu` runs anywhere; `cuda` asks for nvidia.com/gpu."""
    cores_per_node: Annotated[int, Field(ge=1, le=256)] | None = None
    """Training processes per node; omitted: the instance type's cores, else 1."""
    resources: Annotated[dict[Annotated[str, Field(max_length=317)], Quantity], Field(max_length=16)] = {}
    """Extended resources per worker in place of the instance type's, for instance {aws.amazon.com/neuron: "16"}."""
    claim: ClaimSpec | None = None
    """Claim Neuron devices by dynamic resource allocation; omitted: the device plugin allocates them."""

    @property
    def is_given(self) -> bool:
        """Whether the job names its devices."""
        named = self.instance_type or self.resources or self.cores_per_node
        return self.device is Device.CPU or bool(named)

    def instance(self) -> Instance | None:
        """Return the known instance type's figures; None without a type, or if it is unknown."""
        return INSTANCES.get(self.instance_type or "")

    def cores(self) -> int:
        """Training processes per node."""
        instance = self.instance()
        return self.cores_per_node or (instance.cores if instance else 1)

    def count_claimed_devices(self) -> int:
        """Return the devices that a worker claims; 0 without a claim, and if the spec gives no number."""
        if self.claim is None:
            return 0
        instance = self.instance()
        return self.claim.count or (instance.devices if instance else 0)


class WorkerAcceleratorSpec(AcceleratorSpec):
    """Resources of one node of the workers, and which nodes belong together."""

    unit: Unit = Unit.NODE
    """`UltraServer`: sizes and spares are whole UltraServers, the ranks of one are neighbours on one, and a node that
    fails takes the others of its UltraServer out of the job."""
    unit_nodes: Annotated[int, Field(ge=2, le=MAX_UNIT_NODES)] | None = None
    """Nodes that work as one UltraServer; omitted: all that the instance type's has, 4 of trn2u.48xlarge."""
    unit_topology_key: Annotated[str, Field(max_length=317, pattern=_TOPOLOGY_KEY)] | None = None
    """Label whose value the nodes of one UltraServer share; omitted: Neuron's ultraserver-server-id-N of trn2u."""

    def count_nodes_per_unit(self) -> int:
        """Return the number of nodes that are placed, lost and replaced together; 1 by default."""
        if self.unit is Unit.NODE:
            return 1
        instance = self.instance()
        return self.unit_nodes or max(instance.ultra_server_nodes if instance else (), default=1)

    def find_unit_label(self) -> str:
        """Return the label whose value the nodes of a unit share."""
        return self.unit_topology_key or ULTRA_SERVER_LABEL.format(self.count_nodes_per_unit())


class WorkersSpec(ContractModel):
    """Number and kind of nodes, and the template of their pods."""

    replicas: NodeCount = 1
    """Nodes to train on; the scale subresource. Nodes that would save no pass of a step are kept warm in reserve, and a
    later size that is not legal is rounded down to a legal one; status reports it."""
    min_replicas: NodeCount | None = None
    """Elastic floor: the job may shrink to it while capacity is missing. Omitted: rigid, it waits instead."""
    max_replicas: NodeCount | None = None
    """Elastic ceiling for `kubectl scale`, autoscalers, and growth onto idle nodes (elasticity.idleNodes). Omitted:
    unbounded."""
    spares: Annotated[int, Field(ge=0, le=64)] = 0
    """Warm workers outside the membership, that replace a lost one without waiting for a pod; whole units of
    accelerator.unit."""
    accelerator: WorkerAcceleratorSpec = WorkerAcceleratorSpec()
    """Resources of one node."""
    template: PodTemplate = {}
    """Partial PodTemplateSpec, merged into the operator's own; containers and volumes are matched by name. The training
    container is `worker`; containers with another name run beside it."""

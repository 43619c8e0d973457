"""Define what each kind of accelerator is called in Kubernetes, and what each EC2 instance type has.

Another accelerator is one row of `DEVICES`, another instance type one row of `INSTANCES`. A figure that no page of the
vendor states is absent: 0 stands for unknown.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


class Device(StrEnum):
    """Device of a worker."""

    NEURON = "neuron"
    CUDA = "cuda"
    CPU = "cpu"


EFA = "vpc.amazonaws.com/efa"
"""Extended resource of EFA interfaces (EKS user guide, "Manage EFA devices")."""
EFA_ENVIRONMENT = {"FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1", "FI_EFA_FORK_SAFE": "1"}
"""Variables of libfabric for collectives over EFA (AWS's launch scripts for Neuron)."""
LOGICAL_CORE = "NEURON_LOGICAL_NC_CONFIG"
"""Variable of the Neuron runtime: physical cores in one that a process sees, 1 or 2 (Neuron documentation, "Logical
NeuronCore configuration")."""


ULTRA_SERVER_LABEL = "neuron.amazonaws.com/ultraserver-server-id-{}"
"""Label of a node with the UltraServer, or the half of it, that it belongs to where 4, or 2, nodes work as one (Neuron
documentation, "Schedule MPI jobs to run on Neuron UltraServer on EKS")."""
ULTRA_SERVER_NODE_LABEL = "neuron.amazonaws.com/ultraserver-node-id-{}"
"""Label with the number of the node in it, from 0 (the same page)."""
TOPOLOGY_LABEL_DOMAINS = ("topology.k8s.aws/", "neuron.amazonaws.com/")
"""Labels that show which nodes belong together: those of EC2 (`ultraserver-id` on SageMaker HyperPod,
`capacity-block-id`, which "identifies instances within the UltraServer domain" by EC2's API reference of
InstanceTopology), and those of Neuron's device plugin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceNames:
    """Names of one kind of device in Kubernetes."""

    resource: str = ""
    """Extended resource of its device plugin; empty if it needs none."""
    taint: str = ""
    """Key of the taint that keeps other pods away from its nodes."""
    one_per_process: bool = False
    """Whether a worker requests one for each process; otherwise all those of its instance type."""
    is_counted: bool = False
    """Whether the agent checks that it finds as many as the worker was given."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of its workers."""


DEVICES: Mapping[Device, DeviceNames] = {
    # Neuron documentation, "Kubernetes environment setup" (device plugin; its DaemonSet tolerates the taint).
    Device.NEURON: DeviceNames(resource="aws.amazon.com/neuron", taint="aws.amazon.com/neuron", is_counted=True),
    # NVIDIA k8s-device-plugin, README.
    Device.CUDA: DeviceNames(resource="nvidia.com/gpu", taint="nvidia.com/gpu", one_per_process=True),
    Device.CPU: DeviceNames(environment={"OMP_NUM_THREADS": "1"}),
}
NEURON = DEVICES[Device.NEURON].resource
DEVICE_RESOURCES = frozenset(names.resource for names in DEVICES.values() if names.resource)


@dataclass(frozen=True, slots=True)
class Instance:
    """Devices of one EC2 instance type, as its device plugins report them."""

    devices: int
    cores: int
    efa: int
    core_bytes: int = 0
    """Device memory of a core; 0 if unknown."""
    host_bytes: int = 0
    """Memory of the node; 0 if unknown, as are the vCPUs then."""
    vcpus: int = 0
    core_parts: int = 1
    """Physical cores in one of `cores`; a job may let its processes use them singly."""
    ultra_server_nodes: tuple[int, ...] = ()
    """Numbers of nodes of its UltraServer that can work as one, the largest last; empty if it is in none."""

    def compute_core_memory(self, physical_cores: int | None = None) -> int:
        """Return the bytes of a core of this many physical ones, by default of `core_parts`; 0 if unknown."""
        return self.core_bytes * (physical_cores or self.core_parts) // self.core_parts


_GIB = 1 << 30

# trn1: Neuron documentation, "Trn1/Trn1n Architecture" (devices, vCPUs, memory; a device has 2 cores and 32 GiB) and
# "How to prepare trn1.32xlarge for multi-node execution" (8 and 16 EFA interfaces, none on the 2xlarge).
# trn2: "Trn2 Architecture" (devices, vCPUs, memory; 4 trn2u.48xlarge are an UltraServer; a 3xlarge uses no EFA) and
# "Trainium2 Architecture" (8 physical cores and 96 GiB a device). `cores` are those of the default LNC of 2, so a
# device has 4 of 24 GiB. 16 EFA interfaces: EC2's instance type table. 2 or 4 nodes of an UltraServer:
# "Schedule MPI jobs to run on Neuron UltraServer on EKS".
_TRN2_48XLARGE = Instance(
    devices=16, cores=64, efa=16, core_bytes=24 * _GIB, host_bytes=2048 * _GIB, vcpus=192, core_parts=2
)
INSTANCES: Mapping[str, Instance] = {
    "trn1.2xlarge": Instance(devices=1, cores=2, efa=0, core_bytes=16 * _GIB, host_bytes=32 * _GIB, vcpus=8),
    "trn1.32xlarge": Instance(devices=16, cores=32, efa=8, core_bytes=16 * _GIB, host_bytes=512 * _GIB, vcpus=128),
    "trn1n.32xlarge": Instance(devices=16, cores=32, efa=16, core_bytes=16 * _GIB, host_bytes=512 * _GIB, vcpus=128),
    "trn2.3xlarge": Instance(
        devices=1, cores=4, efa=0, core_bytes=24 * _GIB, host_bytes=128 * _GIB, vcpus=12, core_parts=2
    ),
    "trn2.48xlarge": _TRN2_48XLARGE,
    "trn2u.48xlarge": replace(_TRN2_48XLARGE, ultra_server_nodes=(2, 4)),
}
"""Devices, interfaces and memory by instance type.

Trn3 is absent. "Trn3 Architecture" describes UltraServers of 4 servers x 16 devices (Gen1) and of 36 x 4 (Gen2), but no
page names an EC2 instance type, its number of EFA interfaces or its default LNC, so a job states `resources` and
`coresPerNode` itself."""

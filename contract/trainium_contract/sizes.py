"""Legal sizes and batch arithmetic; pure functions that the CRD's rules, the planner and the trainer share.

A size is a number of nodes. World = nodes x cores per node; data-parallel degree = world / (tensor x pipeline).
A size is legal when the world is divisible by tensor x pipeline and the global batch by data parallel x micro-batch.
The global batch is the same at every size; gradient accumulation changes (`accumulation`).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShape:
    """What decides which sizes are legal; all counts are >= 1."""

    cores_per_node: int
    tensor: int
    pipeline: int
    global_batch_size: int
    micro_batch_size: int

    def data_parallel(self, nodes: int) -> int:
        """Data-parallel degree at `nodes` nodes; 0 when the world is not divisible by tensor x pipeline."""
        world = nodes * self.cores_per_node
        return 0 if world % (self.tensor * self.pipeline) else world // (self.tensor * self.pipeline)

    def accumulation(self, nodes: int) -> int:
        """Micro-batches per optimizer step and data-parallel rank; 0 when the size is not legal."""
        samples = self.data_parallel(nodes) * self.micro_batch_size
        return 0 if samples == 0 or self.global_batch_size % samples else self.global_batch_size // samples

    def is_legal(self, nodes: int) -> bool:
        """Whether a job of this shape can train on `nodes` nodes."""
        return nodes >= 1 and self.accumulation(nodes) > 0

    def legal_sizes(self, smallest: int, largest: int) -> tuple[int, ...]:
        """Every legal size in [smallest, largest], ascending; empty when there is none."""
        return tuple(nodes for nodes in range(max(1, smallest), largest + 1) if self.is_legal(nodes))

    def floor(self, nodes: int, smallest: int = 1) -> int:
        """The largest legal size <= nodes and >= smallest; 0 when there is none."""
        return max(self.legal_sizes(smallest, nodes), default=0)


@dataclass(frozen=True, slots=True)
class Instance:
    """Devices of one EC2 instance type, as its device plugins report them."""

    devices: int
    cores: int
    efa: int


INSTANCES: dict[str, Instance] = {
    # trn2 cores are logical cores at the default LNC of 2 (8 physical, 4 logical per device).
    "trn1.2xlarge": Instance(devices=1, cores=2, efa=0),
    "trn1.32xlarge": Instance(devices=16, cores=32, efa=8),
    "trn1n.32xlarge": Instance(devices=16, cores=32, efa=16),
    "trn2.48xlarge": Instance(devices=16, cores=64, efa=16),
    "trn2u.48xlarge": Instance(devices=16, cores=64, efa=16),
}
"""`aws.amazon.com/neuron` and `vpc.amazonaws.com/efa` capacities (Neuron and EKS device-plugin documentation)."""

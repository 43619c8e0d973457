"""Compute the resource requests of a worker pod, and whether the instance type can hold the job.

A worker uses a known instance type as a whole, or its share of devices. It requests what its processes, snapshots and
saves need (`memory_estimate`), at most 85 % of that share, so that the node's reserve never excludes it. For unknown
nodes a worker requests little and uses what is free.

Invariants: a request never excludes a suitable node. It grows with model and processes. Nothing is refused that the
trainer would accept.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from trainium_contract.accelerators import NEURON, Device
from trainium_contract.requirements.memory_estimate import (
    MemoryEstimate,
    MemorySetting,
    TrainedParameters,
    WeightLayout,
    estimate_memory,
)
from trainium_contract.trainer.parallelism import BackendChoice

if TYPE_CHECKING:
    from trainium_contract.sizes import BatchShape
    from trainium_contract.spec.workers import AcceleratorSpec
    from trainium_contract.trainer.config import TrainingConfig

_MIB = 1 << 20
_GIB = 1 << 30
SHARED_MEMORY_SHARE = 0.5
"""Share of a node's memory that /dev/shm may use (also tmpfs' default)."""
_MAX_NODE_SHARE = 0.85
"""Largest share of a node's memory and CPUs in a request; the rest is for the kubelet and the system."""
_MIN_PROCESS_BYTES = 256 * _MIB
"""Request for a process on a node of unknown type."""
_MIN_PROCESS_MILLI_CPU = 100
"""The same in thousandths of a CPU."""
_OTHER_SHARED_BYTES = _GIB
"""Bytes of /dev/shm besides snapshots: batches of loader processes, rings of collectives."""


@dataclass(frozen=True, slots=True)
class WorkerRequests:
    """Resource requests of a worker pod."""

    memory: int
    """Bytes."""
    milli_cpu: int
    """Thousandths of a CPU."""
    shared_memory: int | None
    """Bytes of /dev/shm; None if neither the node nor the model is known."""


def build_memory_setting(
    config: TrainingConfig,
    *,
    data_parallel: int,
    processes_per_node: int,
    micro_batches: int,
    instance_type: str,
    on_host: bool,
    trained: TrainedParameters | None = None,
) -> MemorySetting:
    """Return the inputs of the memory estimate for a configuration at this data-parallel degree."""
    automatic = config.backend is BackendChoice.AUTO and instance_type.startswith("trn1")
    nxd = config.backend is BackendChoice.NXD or automatic
    return MemorySetting(
        moments=len(config.optimizer.kind.moments),
        tensor=config.parallelism.tensor,
        pipeline=config.parallelism.pipeline,
        data_parallel=data_parallel * config.parallelism.context,
        context=config.parallelism.context,
        masked=config.data.masked,
        whole_logits=config.tuning.objective is not None,
        processes_per_node=processes_per_node,
        mode=config.data_parallel,
        precision=config.precision,
        recompute=config.recompute,
        sequence=config.parallelism.sequence,
        micro_size=config.batch.micro_size * config.data.rows_per_sample,
        length=config.data.sequence_length,
        micro_batches=micro_batches,
        snapshots=config.checkpoint.memory.every_steps > 0,
        buddies=config.checkpoint.memory.buddies > 0,
        layout=WeightLayout.NXD if nxd else WeightLayout.NATIVE,
        on_host=on_host and not instance_type.startswith("trn"),
        trained=trained,
    )


def estimate_at_size(
    config: TrainingConfig | None, accelerator: AcceleratorSpec, shape: BatchShape, nodes: int
) -> MemoryEstimate | None:
    """Return the memory of a node if the job trains on `nodes`; None for an illegal size or an unknown model.

    Only a worker knows a model that a file describes, and the frozen part of one; without a configuration only the
    program knows it.
    """
    model = None if config is None else config.model.known_shape()
    if config is None or model is None or config.tuning.freezes or not shape.micro_batches(nodes):
        return None
    setting = build_memory_setting(
        config,
        data_parallel=shape.data_parallel(nodes),
        processes_per_node=shape.cores_per_node,
        micro_batches=shape.micro_batches(nodes),
        instance_type=accelerator.instance_type or "",
        on_host=accelerator.device is Device.CPU,
    )
    return estimate_memory(model, setting)


def compute_worker_requests(
    config: TrainingConfig | None, accelerator: AcceleratorSpec, shape: BatchShape
) -> WorkerRequests:
    """Return the requests of a worker pod, enough for any size, because a pod stays when the job grows or shrinks.

    Without a known model they are the least that any process needs.
    """
    processes, share = shape.cores_per_node, _compute_node_share(accelerator)
    memory_size = share.host_bytes
    # Divided state is largest on the fewest nodes, and copies for a buddy need two.
    likely = range(1, 2 * shape.group * shape.unit_nodes + 1)
    sizes = islice(filter(shape.is_legal, likely), 2)
    estimates = [estimate_at_size(config, accelerator, shape, nodes) for nodes in sizes]
    reasons = [estimate for estimate in estimates if estimate is not None]
    if memory_size:
        memory = max((estimate.host for estimate in reasons), default=processes * _GIB)
        return WorkerRequests(
            memory=min(memory, int(memory_size * _MAX_NODE_SHARE)),
            milli_cpu=min(1000 * (processes + 1), int(1000 * share.vcpus * _MAX_NODE_SHARE)),  # one for the agent
            shared_memory=int(memory_size * SHARED_MEMORY_SHARE),
        )
    shared = max((estimate.shared_memory for estimate in reasons), default=None)
    return WorkerRequests(
        memory=processes * _MIN_PROCESS_BYTES,
        milli_cpu=processes * _MIN_PROCESS_MILLI_CPU,
        shared_memory=None if shared is None else shared + shared // 8 + _OTHER_SHARED_BYTES,
    )


def explain_misfit(config: TrainingConfig | None, accelerator: AcceleratorSpec, shape: BatchShape, nodes: int) -> str:
    """Return why the type of instance cannot hold the job at this size, without a full stop; empty if it can, or may.

    Weights, gradients and optimizer alone must fit a core: without that no rank starts.
    """
    instance = accelerator.instance()
    if instance is None or not instance.core_bytes or accelerator.device is not Device.NEURON:
        return ""
    memory_size = instance.compute_core_memory(accelerator.claim.logical_neuron_core if accelerator.claim else None)
    estimate = estimate_at_size(config, accelerator, shape, nodes)
    if estimate is None or estimate.state <= memory_size:
        return ""
    return (
        f"A core of {accelerator.instance_type} has {_format_gib(memory_size)}, but on {nodes} nodes a process needs "
        f"{_format_gib(estimate.state)} for weights, gradients and optimizer alone ({estimate.parameters:,} "
        "parameters): raise parallelism.tensor or pipeline, divide more with trainer.dataParallel, or take a type with "
        "more memory"
    )


def find_smallest_fitting_size(
    config: TrainingConfig | None, accelerator: AcceleratorSpec, shape: BatchShape, smallest: int, largest: int
) -> int:
    """Return the fewest nodes that an elastic job may shrink to: `smallest`, or more if a node would hold too much.

    A process's part of divided state never shrinks when a node leaves. `largest` if no size fits.
    """

    def fits(nodes: int) -> bool:
        return not explain_misfit(config, accelerator, shape, nodes)

    least = next(filter(shape.is_legal, range(smallest, largest + 1)), largest)
    if fits(least):
        return smallest
    sizes = shape.legal_sizes(least, largest)
    first = bisect_left(sizes, True, key=fits)
    return sizes[first] if first < len(sizes) else largest


@dataclass(frozen=True, slots=True)
class _NodeShare:
    """A worker's share of its node; zeros if unknown."""

    host_bytes: int = 0
    vcpus: float = 0.0


def _compute_node_share(accelerator: AcceleratorSpec) -> _NodeShare:
    """Return the worker's share, by its share of the devices."""
    instance = accelerator.instance()
    if instance is None or accelerator.device is not Device.NEURON:
        return _NodeShare()
    requested = accelerator.resources.get(NEURON, "")
    devices = int(requested) if requested.isdecimal() else accelerator.count_claimed_devices() or instance.devices
    devices = min(devices, instance.devices)
    return _NodeShare(instance.host_bytes * devices // instance.devices, instance.vcpus * devices / instance.devices)


def _format_gib(size: int) -> str:
    return f"{size / _GIB:,.1f} GiB"

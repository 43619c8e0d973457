"""Estimate the memory that a configuration needs and check whether it fits: for `check` and for the start of a run.

Guarantees:
- A configuration that does not fit a core is refused.
- The memory of a device is what the machine reports, never a guess.
- One that does not fit /dev/shm or a node gets a warning that names the consequence.
"""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING

from trainium_contract.accelerators import INSTANCES, LOGICAL_CORE
from trainium_contract.models.parameters import EMBEDDING, find_parameter
from trainium_contract.requirements.memory_estimate import (
    DEVICE_RESERVE,
    MemoryEstimate,
    TrainedParameters,
    estimate_memory,
)
from trainium_contract.requirements.worker_requests import SHARED_MEMORY_SHARE, build_memory_setting
from trainium_trainer.exits import UserError
from trainium_trainer.neuron_environment import PRODUCT_NAME
from trainium_trainer.tuning.trainable import LORA_A, is_adapter

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from trainium_contract.accelerators import Instance
    from trainium_contract.models.shape import ModelShape
    from trainium_trainer.configuration.config import Settings

_GIB = 1 << 30


def estimate_run_memory(
    settings: Settings, processes_per_node: int, instance_type: str = "", *, on_host: bool = True
) -> MemoryEstimate:
    """Return the memory needs of a run; without a Trainium instance `on_host` is whether the device is the CPU."""
    config = settings.config
    setting = build_memory_setting(
        config,
        data_parallel=settings.dp_size,
        processes_per_node=processes_per_node,
        micro_batches=settings.passes,
        instance_type=instance_type,
        on_host=on_host,
        trained=find_largest_trained_part(settings) if config.tuning.freezes else None,
    )
    return estimate_memory(settings.shape, setting)


def find_largest_trained_part(settings: Settings) -> TrainedParameters:
    """Return the parameters of the rank that trains the most of them.

    Stages hold equal numbers of layers; the first also the embedding, the last also the output projection.
    """
    shape, degrees = settings.shape, settings.config.parallelism
    layers = -(-shape.num_layers // degrees.pipeline)
    by_stage = [TrainedParameters(0, 0)] * degrees.pipeline
    for name, size in settings.trainable.sizes.items():
        number = math.prod(size) // (degrees.tensor if _is_divided(shape, name) else 1)
        if name.startswith("model.layers."):
            stages = {int(name.split(".")[2]) // layers}
        else:
            first, last = name.startswith(EMBEDDING), not name.startswith(EMBEDDING) or shape.tie_embeddings
            stages = {stage for stage, holds in ((0, first), (degrees.pipeline - 1, last)) if holds}
        for stage in stages:
            before = by_stage[stage]
            by_stage[stage] = (
                TrainedParameters(before.weights, before.adapters + number)
                if is_adapter(name)
                else TrainedParameters(before.weights + number, before.adapters)
            )
    return max(by_stage, key=lambda trained: trained.weights + trained.adapters)


def _is_divided(shape: ModelShape, name: str) -> bool:
    """Return whether tensor parallelism divides a parameter; of an adapter, the matrix at the divided side."""
    if not is_adapter(name):
        return find_parameter(shape, name).dimension is not None
    projection, matrix, _ = name.rsplit(".", 2)
    return find_parameter(shape, f"{projection}.weight").dimension == (1 if matrix == LORA_A else 0)


def find_device_memory(device: torch.device, *, product_name: Path = PRODUCT_NAME) -> int | None:
    """Return the bytes of this process's device; None for a CPU or when unknown. `product_name`: file with the type."""
    if device.type == "cuda":
        import torch  # noqa: PLC0415 - `check` needs no device

        return int(torch.cuda.get_device_properties(device).total_memory)
    if device.type not in ("neuron", "xla"):
        return None
    try:
        instance = INSTANCES.get(product_name.read_text(encoding="utf-8").strip())
    except OSError:
        return None
    if instance is None or not instance.core_bytes:
        return None
    return instance.compute_core_memory(1 if os.environ.get(LOGICAL_CORE) == "1" else None)


def check_device_memory(settings: Settings, device: torch.device) -> list[str]:
    """Return warnings about this rank's device, where its memory is known. Raises UserError when the job cannot fit.

    A Neuron core must pass the check that `check` applies to its instance type. On a GPU, whose allocator frees what it
    can, the estimate of activations only warns. The memory tier itself reserves /dev/shm, or switches snapshots off.
    """
    capacity = find_device_memory(device)
    if not capacity:
        return []
    estimate = estimate_run_memory(settings, settings.launch.local_world_size, on_host=False)
    usable = capacity if device.type == "cuda" else capacity * (1 - DEVICE_RESERVE) - estimate.activations
    if estimate.state > usable:
        raise UserError(_explain_shortage(estimate, capacity, f"the device {device}"))
    if estimate.device > capacity * (1 - DEVICE_RESERVE):
        return [_explain_shortage(estimate, capacity, f"the device {device}")]
    return []


def format_lines(estimate: MemoryEstimate, *, of_node: bool) -> list[str]:
    """Format the numbers as lines; with those of a node where the number of its processes is known."""
    process = (
        f"memory of a process: {_format_gib(estimate.state)} of weights, gradients and optimizer "
        f"({estimate.parameters:,} parameters), about {_format_gib(estimate.activations)} of activations"
    )
    shared_memory = _format_gib(estimate.shared_memory)
    node = f"memory of a node: {_format_gib(estimate.host)}, of it {shared_memory} of snapshots in /dev/shm"
    return [process, node] if of_node else [process]


def refuse_too_small(estimate: MemoryEstimate, instance: Instance, instance_type: str) -> list[str]:
    """Return warnings about a node that is too small. Raises UserError for a core that is too small."""
    if instance.core_bytes and estimate.device > instance.core_bytes * (1 - DEVICE_RESERVE):
        raise UserError(_explain_shortage(estimate, instance.core_bytes, f"a core of {instance_type}"))
    warnings = []
    capacity = int(instance.host_bytes * SHARED_MEMORY_SHARE)
    if instance.host_bytes and estimate.shared_memory > capacity:
        warnings.append(
            f"snapshots need {_format_gib(estimate.shared_memory)} of /dev/shm on each node, but {instance_type} has "
            f"about {_format_gib(capacity)} there: workers without room switch them, or the copies of a buddy's, off "
            "and warn; set checkpoint.memory.buddies or everySteps to 0, or raise the limit of the volume shared-memory"
        )
    if instance.host_bytes and estimate.host > instance.host_bytes:
        warnings.append(
            f"a node needs {_format_gib(estimate.host)} of memory for snapshots, saves and processes, but "
            f"{instance_type} has {_format_gib(instance.host_bytes)}: the kernel may end processes; set "
            "checkpoint.memory.buddies or everySteps to 0"
        )
    return warnings


def _explain_shortage(estimate: MemoryEstimate, capacity: int, device: str) -> str:
    return (
        f"{device} has {_format_gib(capacity)}, but a process needs {_format_gib(estimate.state)} of weights, "
        f"gradients and optimizer and about {_format_gib(estimate.activations)} of activations, with "
        f"{DEVICE_RESERVE:.0%} left for the runtime: raise parallelism.tensor or recompute, divide more with "
        "dataParallel, or take an instance type with more memory (docs/parallelism.md, Fit the model)"
    )


def _format_gib(size: int) -> str:
    return f"{size / _GIB:,.1f} GiB"

"""Estimate a job's device memory, node memory and /dev/shm, from the sizes of model and world. Bytes everywhere.

State, gradients and snapshots follow from the allocations of backends and tiers (the table in docs/parallelism.md).
Activations are an estimate by tensors that the backward pass keeps (arXiv 2205.05198, section 4), without the runtime's
own memory, for which `DEVICE_RESERVE` of a core is left free.

Invariant: no machine is inspected here; trainer, `check` and operator use the same names for the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from trainium_contract.models.parameters import layer_parameters, non_layer_parameters
from trainium_contract.trainer.parallelism import DataParallelMode, Precision, Recompute

if TYPE_CHECKING:
    from trainium_contract.models.shape import ModelShape

SNAPSHOTS_OF_SHARD = 3
"""Snapshots of a shard that rotate in /dev/shm."""
COPIES_OF_BUDDY = 2
"""Copies of a buddy's shard."""
DEVICE_RESERVE = 0.1
"""Share of a core's memory for the runtime, its programs and the buffers of collectives."""
_ATTENTION_TILE_BYTES = 3 * (4 << 25)
"""Scores of a tile of attention, their probabilities and gradients, if the sequence is divided."""
_PROCESS_BYTES = 1 << 30
"""A training process without data or state: libraries, data loading, the compiler's client."""


def logits_chunk_tokens(width: int) -> int:
    """Return how many tokens of a micro-batch have their logits, of `width` columns, computed at a time.

    For backend Native without a pipeline: enough for a product that reads the weights as rarely as possible, and at
    most 128 MiB of float32 beyond.
    """
    return max(1024, (1 << 25) // width)


class WeightLayout(StrEnum):
    """Rules by which weights are divided."""

    NATIVE = "native"
    NXD = "nxd"
    """Key/value heads are repeated if tensor parallelism has more ranks than heads; sums of gradients are kept."""


@dataclass(frozen=True, slots=True)
class TrainedParameters:
    """Trained parameters of a rank if the rest is frozen, before data parallelism divides them."""

    weights: int
    """Parameters of the model itself."""
    adapters: int
    """Parameters of adapters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySetting:
    """Inputs of a memory estimate: division, precision, recomputation, snapshots; all counts >= 1."""

    tensor: int
    pipeline: int
    data_parallel: int
    processes_per_node: int
    mode: DataParallelMode
    precision: Precision
    recompute: Recompute
    sequence: bool
    micro_size: int
    """Sequences of a micro-batch."""
    length: int
    context: int = 1
    """Ranks that divide a sequence; they are among the data-parallel ones."""
    micro_batches: int
    """Micro-batches of one rank in a step."""
    masked: bool = False
    """Whether samples hold documents that do not attend to each other."""
    whole_logits: bool = False
    """Whether the loss needs the logits of a micro-batch as a whole (pairs of answers)."""
    snapshots: bool
    buddies: bool
    layout: WeightLayout = WeightLayout.NATIVE
    on_host: bool = False
    """Whether the device is the CPU, so that its memory is the node's."""
    trained: TrainedParameters | None = None
    """None: all of the model."""
    moments: int = 2
    """Values that the optimizer keeps of each weight."""


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Estimated memory of one rank and of its node, in bytes."""

    parameters: int
    """Parameters of the largest rank, before data parallelism divides them; a number, not bytes."""
    state: int
    """On the device: weights, gradients, master weights and moments."""
    activations: int
    shared_memory: int
    """Memory of a node in /dev/shm: snapshots and copies of a buddy's."""
    host: int
    """Memory of a node, including /dev/shm."""

    @property
    def device(self) -> int:
        """Return the device memory of one rank in bytes."""
        return self.state + self.activations


def estimate_memory(model: ModelShape, setting: MemorySetting) -> MemoryEstimate:
    """Estimate the memory of a rank and of its node."""
    parameters = count_rank_parameters(model, setting)
    sharded = setting.mode is not DataParallelMode.REPLICATED
    shards = setting.data_parallel if sharded else 1
    value_bytes = 2 if setting.precision is Precision.BFLOAT16_STOCHASTIC else 4
    trained, frozen = parameters, 0
    if setting.trained is not None:
        trained = setting.trained.weights + setting.trained.adapters
        frozen = max(0, parameters - setting.trained.weights)
    shard = (1 + setting.moments) * value_bytes * trained // shards
    """State of a rank in a checkpoint: weights and moments."""
    state, activations = (
        _estimate_state_bytes(trained, value_bytes, setting) + _estimate_frozen_bytes(frozen, setting),
        _estimate_activation_bytes(model, setting),
    )
    processes, distinct = setting.processes_per_node, _count_node_shards(setting, sharded=sharded)
    shared = distinct * shard * SNAPSHOTS_OF_SHARD if setting.snapshots else 0
    if setting.snapshots and setting.buddies and _needs_buddies(setting, sharded=sharded):
        shared += distinct * shard * COPIES_OF_BUDDY
    copies = 1 if setting.on_host else 2  # staging of a save; a device's state is fetched before it is copied
    host = shared + processes * (_PROCESS_BYTES + copies * shard)
    if setting.on_host:
        host += processes * (state + activations)
    return MemoryEstimate(trained + frozen, state, activations, shared, host)


def count_rank_parameters(model: ModelShape, setting: MemorySetting) -> int:
    """Return the parameters of a rank in the fullest stage, before data parallelism divides them."""
    tensor, heads = setting.tensor, model.num_key_value_heads
    layer = sum(parameter.numbers(tensor, heads) for parameter in layer_parameters(model).values())
    ends = [parameter.numbers(tensor, heads) for parameter in non_layer_parameters(model).values()]
    # Embedding and output projection are at the two ends of a pipeline, the last normalization is at one of them.
    outside_layers = sum(ends) if setting.pipeline == 1 else sum(ends[:2])
    return -(-model.num_layers // setting.pipeline) * layer + outside_layers


def _estimate_state_bytes(parameters: int, value_bytes: int, setting: MemorySetting) -> int:
    """Return bytes of weights, gradients and optimizer on a rank: the rows of the table in docs/parallelism.md."""
    compute_bytes = 4 if setting.precision is Precision.FLOAT32 else 2
    # If the state is divided, a narrow sum of the gradients exists beside the wide one.
    narrow_gradient_bytes = 2 if value_bytes == 2 and setting.mode is not DataParallelMode.REPLICATED else 0
    ranks, state_bytes = setting.data_parallel, (1 + setting.moments) * value_bytes + 4 + narrow_gradient_bytes
    if setting.layout is WeightLayout.NXD:
        if setting.mode is DataParallelMode.REPLICATED:
            return parameters * (state_bytes + (compute_bytes if compute_bytes != value_bytes else 0))
        return parameters * (compute_bytes + 4) + parameters * state_bytes // ranks
    if setting.mode is DataParallelMode.REPLICATED:
        return parameters * state_bytes
    if setting.mode is DataParallelMode.FULLY_SHARDED:
        return parameters * state_bytes // ranks
    return parameters * (compute_bytes + (4 if setting.micro_batches > 1 else 0)) + parameters * state_bytes // ranks


def _estimate_frozen_bytes(parameters: int, setting: MemorySetting) -> int:
    """Return bytes of weights without gradient and moments, in the type of computation.

    FSDP divides them, NxD does not.
    """
    size = parameters * (4 if setting.precision is Precision.FLOAT32 else 2)
    if setting.layout is WeightLayout.NXD or setting.mode is DataParallelMode.REPLICATED:
        return size
    gathered = size if setting.mode is DataParallelMode.SHARDED_OPTIMIZER else 0  # during a step
    return size // setting.data_parallel + gathered


def _estimate_activation_bytes(model: ModelShape, setting: MemorySetting) -> int:
    """Return what a rank's backward pass keeps.

    Per layer, in flight, the logits, and keys and values of other ranks.
    """
    size = 4 if setting.precision is Precision.FLOAT32 else 2
    tokens, tensor = setting.micro_size * setting.length // setting.context, setting.tensor
    sequence_shards = tensor if setting.sequence else 1
    """Number of ranks that divide the residual stream."""
    heads = model.num_key_value_heads
    key_value = 2 * heads * model.head_dim * max(1, tensor // heads)
    sharded_width = (2 * model.num_attention_heads * model.head_dim + key_value + 3 * model.intermediate_size) / tensor
    layer_bytes = size * tokens * (4 * model.hidden_size / sequence_shards + sharded_width)
    layer_input_bytes = size * tokens * model.hidden_size / sequence_shards
    layers = -(-model.num_layers // setting.pipeline)
    in_flight = min(setting.pipeline, max(1, setting.micro_batches))
    kept_per_layer = layer_input_bytes if setting.recompute is Recompute.FULL else layer_bytes
    width = model.vocab_size // tensor
    is_chunked = setting.layout is WeightLayout.NATIVE and setting.pipeline == 1 and not setting.whole_logits
    rows = min(tokens, logits_chunk_tokens(width)) if is_chunked else tokens
    logits = 10 * rows * width  # in the type of computation, in float32, and a gradient
    gathered = 0.0
    if setting.context > 1:
        # Of one layer: keys and values of all ranks, their gradients in float32 and as they are sent.
        gathered = (3 * size + 4) * setting.micro_size * setting.length * key_value / tensor + _ATTENTION_TILE_BYTES
    scores = 0.0
    if setting.masked and setting.layout is WeightLayout.NXD:
        # NxD's fused kernel has no mask: scores of all pairs of positions, their shares in float32 and as used.
        layers_with_scores = layers if setting.recompute is Recompute.NONE else 1
        scores = layers_with_scores * (2 * size + 4) * tokens * setting.length * model.num_attention_heads / tensor
    return int(layers * kept_per_layer * in_flight + layer_bytes + logits + gathered + scores)


def _count_node_shards(setting: MemorySetting, *, sharded: bool) -> int:
    """Return the number of different shards of the first node's ranks.

    Tensor is the fastest of pipeline x data x tensor.
    """
    if sharded:
        return setting.processes_per_node
    stage = setting.data_parallel * setting.tensor
    return len({(rank // stage, rank % setting.tensor) for rank in range(setting.processes_per_node)})


def _needs_buddies(setting: MemorySetting, *, sharded: bool) -> bool:
    """Return whether only one node holds some shard, and there is another node."""
    processes = setting.processes_per_node
    stage = setting.data_parallel * setting.tensor
    if stage * setting.pipeline <= processes:
        return False
    return sharded or stage <= processes or setting.data_parallel == 1

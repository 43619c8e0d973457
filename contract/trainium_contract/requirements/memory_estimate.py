"""PURE. What a job takes of device memory, of a node's memory and of /dev/shm, from the sizes of model and world.

Bytes everywhere. State, gradients and snapshots follow from what the backends and the tiers allocate (the table in
docs/parallelism.md); activations are an estimate by tensors that the backward pass keeps (arXiv 2205.05198, section 4),
without a runtime's own needs, which is why `DEVICE_RESERVE` of a core is left alone.

Invariant: nothing is asked of a machine here; trainer, `check` and operator give the same numbers the same names.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from trainium_contract.models.parameters import end_parameters, layer_parameters
from trainium_contract.trainer.parallelism import DataParallelMode, Precision, Recompute

if TYPE_CHECKING:
    from trainium_contract.models.shape import ModelShape

OWN_FILES = 3
"""Snapshots of a shard that rotate in /dev/shm."""
KEPT_FILES = 2
"""Copies of a buddy's shard."""
DEVICE_RESERVE = 0.1
"""Share of a core's memory, for the runtime, its programs and the buffers of collectives."""
_TILE = 3 * (4 << 25)
"""Scores of a tile of attention, their shares and gradients, where the sequence is divided."""
_PROCESS = 1 << 30
"""A training process before it holds anything: libraries, data, the compiler's client."""


def stretch_tokens(width: int) -> int:
    """Tokens of a micro-batch whose logits, of `width` columns, exist at a time (backend Native without a pipeline).

    Enough for a product that reads the weights no more often than it has to, and at most 128 MiB of float32 beyond.
    """
    return max(1024, (1 << 25) // width)


class Layouts(StrEnum):
    """Rules by which weights are divided."""

    NATIVE = "native"
    NXD = "nxd"
    """Key/value heads are repeated where tensor parallelism has more ranks than heads; sums of gradients are kept."""


@dataclass(frozen=True, slots=True)
class Trained:
    """Trained parameters of a rank where the rest is frozen, before data parallelism divides them."""

    weights: int
    """Parameters of the model itself."""
    adapters: int
    """Beside it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySetting:
    """Division of the model over ranks; all counts >= 1."""

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
    """Ranks that divide a sequence among the data-parallel ones."""
    micro_batches: int
    """In a step, of one rank."""
    masked: bool = False
    """Samples hold stretches that do not see each other."""
    whole_logits: bool = False
    """The loss needs the logits of a micro-batch as a whole (pairs of answers)."""
    snapshots: bool
    buddies: bool
    layouts: Layouts = Layouts.NATIVE
    on_host: bool = False
    """The device is the CPU: what would be on it takes the node's memory."""
    trained: Trained | None = None
    """None: all of the model."""
    moments: int = 2
    """Values that the optimizer keeps of each weight."""


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes."""

    parameters: int
    """Parameters of the largest rank, before data parallelism divides anything; a number, not bytes."""
    state: int
    """On the device: weights, gradients, master weights and moments."""
    activations: int
    shared_memory: int
    """Memory of a node in /dev/shm: snapshots and copies of a buddy's."""
    host: int
    """Memory of a node, /dev/shm included."""

    @property
    def device(self) -> int:
        """Bytes of one rank."""
        return self.state + self.activations


def estimate_memory(model: ModelShape, setting: MemorySetting) -> MemoryEstimate:
    """Estimate the memory of a rank and of its node."""
    number = parameters_of_rank(model, setting)
    sharded = setting.mode is not DataParallelMode.REPLICATED
    shards = setting.data_parallel if sharded else 1
    kept = 2 if setting.precision is Precision.BFLOAT16_STOCHASTIC else 4
    trained, frozen = number, 0
    if setting.trained is not None:
        trained = setting.trained.weights + setting.trained.adapters
        frozen = max(0, number - setting.trained.weights)
    shard = (1 + setting.moments) * kept * trained // shards
    """State of a rank in a checkpoint: weights and moments."""
    state, activations = _state(trained, kept, setting) + _frozen(frozen, setting), _activations(model, setting)
    processes, distinct = setting.processes_per_node, _shards_of_a_node(setting, sharded=sharded)
    shared = distinct * shard * OWN_FILES if setting.snapshots else 0
    if setting.snapshots and setting.buddies and _needs_buddies(setting, sharded=sharded):
        shared += distinct * shard * KEPT_FILES
    copies = 1 if setting.on_host else 2  # staging of a save; a device's state is fetched before it is copied
    host = shared + processes * (_PROCESS + copies * shard)
    if setting.on_host:
        host += processes * (state + activations)
    return MemoryEstimate(trained + frozen, state, activations, shared, host)


def parameters_of_rank(model: ModelShape, setting: MemorySetting) -> int:
    """Count the parameters that a rank of the fullest stage holds, before data parallelism divides them."""
    tensor, heads = setting.tensor, model.num_key_value_heads
    layer = sum(parameter.numbers(tensor, heads) for parameter in layer_parameters(model).values())
    ends = [parameter.numbers(tensor, heads) for parameter in end_parameters(model).values()]
    # Embedding and output projection are at the two ends of a pipeline, the last normalisation is at one of them.
    held = sum(ends) if setting.pipeline == 1 else sum(ends[:2])
    return -(-model.num_layers // setting.pipeline) * layer + held


def _state(number: int, kept: int, setting: MemorySetting) -> int:
    """Bytes of weights, gradients and optimizer on a rank; the rows of the table in docs/parallelism.md."""
    used = 4 if setting.precision is Precision.FLOAT32 else 2
    # Where state is divided, a narrow sum of the gradients exists beside the wide one.
    narrow = 2 if kept == 2 and setting.mode is not DataParallelMode.REPLICATED else 0
    ranks, divided = setting.data_parallel, (1 + setting.moments) * kept + 4 + narrow
    if setting.layouts is Layouts.NXD:
        if setting.mode is DataParallelMode.REPLICATED:
            return number * (divided + (used if used != kept else 0))
        return number * (used + 4) + number * divided // ranks
    if setting.mode is DataParallelMode.REPLICATED:
        return number * divided
    if setting.mode is DataParallelMode.FULLY_SHARDED:
        return number * divided // ranks
    return number * (used + (4 if setting.micro_batches > 1 else 0)) + number * divided // ranks


def _frozen(number: int, setting: MemorySetting) -> int:
    """Bytes of weights without gradient and moments, in the type of computation; FSDP divides them, NxD does not."""
    size = number * (4 if setting.precision is Precision.FLOAT32 else 2)
    if setting.layouts is Layouts.NXD or setting.mode is DataParallelMode.REPLICATED:
        return size
    gathered = size if setting.mode is DataParallelMode.SHARDED_OPTIMIZER else 0  # during a step
    return size // setting.data_parallel + gathered


def _activations(model: ModelShape, setting: MemorySetting) -> int:
    """Estimate what a rank's backward pass keeps: per layer, in flight, the logits, and keys and values of others."""
    size = 4 if setting.precision is Precision.FLOAT32 else 2
    tokens, tensor = setting.micro_size * setting.length // setting.context, setting.tensor
    apart = tensor if setting.sequence else 1
    """By how many ranks the residual stream is divided."""
    heads = model.num_key_value_heads
    key_value = 2 * heads * model.head_dim * max(1, tensor // heads)
    inside = (2 * model.num_attention_heads * model.head_dim + key_value + 3 * model.intermediate_size) / tensor
    whole = size * tokens * (4 * model.hidden_size / apart + inside)
    entry = size * tokens * model.hidden_size / apart
    layers = -(-model.num_layers // setting.pipeline)
    flying = min(setting.pipeline, max(1, setting.micro_batches))
    each = entry if setting.recompute is Recompute.FULL else whole
    width = model.vocab_size // tensor
    stretched = setting.layouts is Layouts.NATIVE and setting.pipeline == 1 and not setting.whole_logits
    rows = min(tokens, stretch_tokens(width)) if stretched else tokens
    logits = 10 * rows * width  # in the type of computation, in float32, and a gradient
    gathered = 0.0
    if setting.context > 1:
        # Of one layer: keys and values of all ranks, their gradients in float32 and as they are sent.
        gathered = (3 * size + 4) * setting.micro_size * setting.length * key_value / tensor + _TILE
    scores = 0.0
    if setting.masked and setting.layouts is Layouts.NXD:
        # NxD's fused kernel has no mask: scores of all pairs of positions, their shares in float32 and as used.
        kept = layers if setting.recompute is Recompute.NONE else 1
        scores = kept * (2 * size + 4) * tokens * setting.length * model.num_attention_heads / tensor
    return int(layers * each * flying + whole + logits + gathered + scores)


def _shards_of_a_node(setting: MemorySetting, *, sharded: bool) -> int:
    """Different shards of the first node's ranks; tensor is the fastest of pipeline x data x tensor."""
    if sharded:
        return setting.processes_per_node
    stage = setting.data_parallel * setting.tensor
    return len({(rank // stage, rank % setting.tensor) for rank in range(setting.processes_per_node)})


def _needs_buddies(setting: MemorySetting, *, sharded: bool) -> bool:
    """Return whether a single node holds some shard, and there is another node."""
    processes = setting.processes_per_node
    stage = setting.data_parallel * setting.tensor
    if stage * setting.pipeline <= processes:
        return False
    return sharded or stage <= processes or setting.data_parallel == 1

"""Use of devices by the trainer: backend, device, degrees of parallelism, number formats.

Invariant: every value of an enum is implemented, or refused in one sentence before a device is used.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from trainium_contract.base import ContractModel


class BackendChoice(StrEnum):
    """The library through which the trainer drives its devices."""

    AUTO = "Auto"
    """NxD where its packages are installed and TorchNeuron is not (trn1), else Native."""
    NATIVE = "Native"
    """PyTorch itself: CPU, CUDA, and Trainium 2 and 3 by TorchNeuron."""
    NXD = "Nxd"
    """neuronx-distributed on torch-xla: Trainium 1."""


class DeviceChoice(StrEnum):
    """Device of the native backend."""

    AUTO = "Auto"
    """Neuron if there is one, else CUDA, else the CPU; an unusable Neuron device is an error."""
    CPU = "Cpu"
    CUDA = "Cuda"
    NEURON = "Neuron"


class Precision(StrEnum):
    """Number formats of computation and of the state, which checkpoints hold."""

    FLOAT32 = "Float32"
    """Everything in float32."""
    BFLOAT16 = "BFloat16"
    """Computation in bfloat16; weights (the master weights), sums of gradients and moments in float32."""
    BFLOAT16_STOCHASTIC = "BFloat16Stochastic"
    """Computation, weights and moments in bfloat16, without a master copy: updates are rounded at random, so that
    small ones are not lost on average. Sums of gradients in float32."""

    @property
    def has_bfloat16_state(self) -> bool:
        """Return whether weights and moments are in bfloat16."""
        return self is Precision.BFLOAT16_STOCHASTIC


class DataParallelMode(StrEnum):
    """Division of the state over data-parallel ranks."""

    REPLICATED = "Replicated"
    """Every rank holds all of it; gradients are all-reduced. Every other rank has the state of a lost node."""
    SHARDED_OPTIMIZER = "ShardedOptimizer"
    """ZeRO's first stage (arXiv 1910.02054): each rank holds a shard of the state and, during a step, all weights in
    the number format of computation; one gather and one reduction per step, with the traffic of Replicated."""
    FULLY_SHARDED = "FullySharded"
    """FSDP2, ZeRO's third stage: weights are gathered layer by layer whenever they are needed; least memory, and with
    accumulation the most traffic. Backend Nxd has the first stage only, and uses that."""

    @property
    def is_sharded(self) -> bool:
        """Return whether a rank holds only a shard of the state."""
        return self is not DataParallelMode.REPLICATED


class Recompute(StrEnum):
    """Activations that the backward pass computes again; results are bit for bit the same."""

    NONE = "None"
    """Everything is kept: fastest, most memory."""
    SELECTIVE = "Selective"
    """Values that are large but cheap are computed again. Native keeps matrix products, attention and sums over ranks;
    Nxd keeps all except the inside of attention."""
    FULL = "Full"
    """Only the input of each layer is kept: least memory, about a third more computation."""


class TorchCompile(StrEnum):
    """Scope of torch.compile (backend Native)."""

    NONE = "None"
    """Nothing: operations run one by one, and the first step is as fast as the others."""
    LAYERS = "Layers"
    """Each layer, forward and backward; the first step after every start waits for the compilation. On Neuron devices
    by the vendor's compiler, elsewhere by Inductor, which needs a C++ compiler in the image."""


class ParallelismConfig(ContractModel):
    """Degrees of model parallelism; the data-parallel degree follows from the size."""

    tensor: Annotated[int, Field(ge=1, le=128)] = 1
    """Tensor-parallel degree."""
    pipeline: Annotated[int, Field(ge=1, le=256)] = 1
    """Pipeline-parallel degree: the layers are cut into as many stages, at least one layer each."""
    context: Annotated[int, Field(ge=1, le=128)] = 1
    """Context-parallel degree: the sequence is divided over as many ranks (backend Native); 2 x context divides
    data.sequenceLength."""
    sequence: bool = False
    """Sequence parallelism within the tensor-parallel group."""

    @property
    def group(self) -> int:
        """Return the ranks that train on the same samples."""
        return self.tensor * self.pipeline * self.context

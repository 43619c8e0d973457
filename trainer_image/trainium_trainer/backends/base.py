"""The interface of a device to the training loop and the checkpoint manager: a mesh, a state, and five verbs.

Guarantees:
- Nothing here names a device library.
- All ranks of the job call every method marked *collective* in the same order.
- Tensors of a state keep their identity for the life of the process, so that a snapshot may hold references.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from trainium_trainer.checkpoint.interfaces import MeshPlace

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch
    from torch.distributed import ProcessGroup

    from trainium_trainer.checkpoint.interfaces import TrainingState
    from trainium_trainer.data.batches.loader import MicroBatch
    from trainium_trainer.monitor.figures import Rewards
    from trainium_trainer.weights.adapter import AdapterWeights
    from trainium_trainer.weights.base import BaseWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh(MeshPlace):
    """Coordinates, device and process groups of this rank."""

    device: torch.device
    world: ProcessGroup
    pp: ProcessGroup | None = None
    """None exactly when `pp_size` is 1."""
    dp: ProcessGroup | None
    """None exactly when `dp_size` is 1."""
    cp: ProcessGroup | None = None
    """None exactly when `cp_size` is 1."""
    cp_rank: int = 0
    cp_size: int = 1
    """Ranks that hold parts of the same sequences; neighbours among the data-parallel ones."""
    tp: ProcessGroup | None
    """None exactly when `tp_size` is 1."""

    @property
    def data_rank(self) -> int:
        """Number of this rank's share of the samples."""
        return self.dp_rank // self.cp_size

    @property
    def data_size(self) -> int:
        """Number of shares of the samples."""
        return self.dp_size // self.cp_size

    @property
    def counts_loss(self) -> bool:
        """Whether this rank speaks for the loss of its tokens: one rank of the stage that computes it."""
        return self.tp_rank == 0 and self.pp_rank == self.pp_size - 1

    @property
    def counts_tokens(self) -> bool:
        """Whether this rank speaks for the tokens and the pairs of its share of the samples."""
        return self.counts_loss and self.cp_rank == 0

    @property
    def counts_samples(self) -> bool:
        """Whether this rank speaks for the samples of its share."""
        return self.tp_rank == 0 and self.pp_rank == 0 and self.cp_rank == 0


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Loss on held-back samples."""

    loss: float
    """Mean over valid tokens, or over pairs; nan when there is none."""
    rewards: Rewards | None = None
    """Figures of pairs; None for other data."""


@dataclass(frozen=True, slots=True)
class StepTotals:
    """The numbers that all ranks agree on after the micro-batches of a step; the host has them without the device."""

    tokens: int
    """Valid tokens of the global batch."""
    divisor: int
    """Number by which the global batch's summed loss is divided: its valid tokens, or its pairs."""
    stop: bool
    """Whether any rank was asked to leave."""
    memory_ends: bool
    """Whether any rank's node memory goes with it."""
    votes: int
    """Sum of what the ranks' checkpoint managers voted."""
    rewards: Rewards | None = None
    """Figures of pairs; None for other data."""


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """The outcome of one optimizer step; the same on all ranks, except for `culprits`."""

    loss: float
    """Mean loss of a valid token, or of a pair, of the global batch before the update; nan when there was none."""
    gradient_norm: float
    """Norm of the mean loss's gradient over all ranks, before clipping."""
    culprits: tuple[str, ...] = ()
    """Where the loss was finite and the norm was not: the parameters with such a gradient that this rank has, from
    input to output; empty where a backend does not look."""
    origins: tuple[int, ...] = ()
    """Where loss or norm were not finite: the ranks whose own loss or gradients were not before they were summed with
    those of other ranks, ascending; empty where that cannot be known."""

    @property
    def applied(self) -> bool:
        """Whether the state was updated: loss and norm were finite."""
        return math.isfinite(self.loss) and math.isfinite(self.gradient_norm)


class Backend(Protocol):
    """One device family behind the loop."""

    @property
    def mesh(self) -> Mesh:
        """Where this rank is."""
        ...

    @property
    def state(self) -> TrainingState:
        """The training state, allocated but not initialised until `initialize` or a checkpoint fills it."""
        ...

    def build(self) -> None:
        """Create model, optimizer and buffers on the device. Collective."""
        ...

    def load_frozen(self, base: BaseWeights) -> None:
        """Fill what is not trained, which is in no checkpoint. Raises UserError, StorageError."""
        ...

    def initialize(self, seed: int, base: BaseWeights | None = None, adapter: AdapterWeights | None = None) -> None:
        """Fill what is trained: from `base` and `adapter` what they have, the rest from a seed.

        The same values at every tensor- and data-parallel size. Raises UserError, StorageError.
        """
        ...

    def agree(self, value: int) -> bool:
        """Return whether all ranks passed the same 62-bit number. Collective."""
        ...

    def accumulate(self, batch: MicroBatch, *, last: bool) -> None:
        """Add the gradients of the batch's summed loss; `last` marks the final micro-batch of the step. Collective."""
        ...

    def totals(self, *, stop: bool, memory_ends: bool, vote: int) -> StepTotals:
        """Sum tokens, stop requests and votes over the job. Collective."""
        ...

    def step(self, *, divisor: int, learning_rate: float, clip_norm: float) -> StepOutcome:
        """Reduce the gradients, divide by `divisor` (see `StepTotals`), clip, one AdamW step; forget the gradients.

        The state stays as it is when loss or norm is not finite. One call, so that a device which runs whole graphs is
        asked for its numbers once, after the update was sent to it. Collective.
        """
        ...

    def evaluate(self, batches: Iterable[MicroBatch]) -> Evaluation:
        """Measure the loss on all ranks' batches, without gradients.

        Every rank passes the same number of micro-batches. Only between two steps. Collective.
        """
        ...

    def reference_log_probs(self, batches: Iterable[MicroBatch]) -> torch.Tensor:
        """Return the log-probabilities of the answers of pairs, of all rows one after another, float32 on the CPU.

        By the weights that the state has, without adapters. NaN on ranks that do not compute them. Every rank passes
        the same number of micro-batches of one size. Only between two steps. Collective.
        """
        ...

    def parameter_norm(self) -> float:
        """Norm of all parameters of the model. Only between two steps. Collective."""
        ...

    def barrier(self) -> None:
        """Return when all ranks have come here. Collective."""
        ...

    def close(self) -> None:
        """Leave the process group in peace; only after the last collective of every rank."""
        ...

"""The interface of a device to the training loop and the checkpoint manager: a mesh, a state and the operations.

Guarantees:
- This module does not depend on a device library.
- All ranks of the job call every method marked *collective* in the same order.
- Tensors of a state keep their identity for the life of the process, so that a snapshot may hold references.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from trainium_trainer.checkpoint.interfaces import MeshCoordinates

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch
    from torch.distributed import ProcessGroup

    from trainium_trainer.checkpoint.interfaces import TrainingState
    from trainium_trainer.data.loader import MicroBatch
    from trainium_trainer.monitor.step_metrics import Rewards
    from trainium_trainer.weights.adapter import AdapterWeights
    from trainium_trainer.weights.base import BaseWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh(MeshCoordinates):
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
    """The ranks that hold parts of the same sequences; they are adjacent among the data-parallel ranks."""
    tp: ProcessGroup | None
    """None exactly when `tp_size` is 1."""

    @property
    def data_rank(self) -> int:
        """The index of this rank's share of the samples."""
        return self.dp_rank // self.cp_size

    @property
    def data_size(self) -> int:
        """The number of shares of the samples."""
        return self.dp_size // self.cp_size

    @property
    def counts_loss(self) -> bool:
        """Whether this rank contributes the loss of its tokens to sums: one rank of the stage that computes it."""
        return self.tp_rank == 0 and self.pp_rank == self.pp_size - 1

    @property
    def counts_tokens(self) -> bool:
        """Whether this rank contributes the tokens and pairs of its share of the samples to sums."""
        return self.counts_loss and self.cp_rank == 0

    @property
    def counts_samples(self) -> bool:
        """Whether this rank contributes the samples of its share to sums."""
        return self.tp_rank == 0 and self.pp_rank == 0 and self.cp_rank == 0


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The loss on held-back samples."""

    loss: float
    """The mean over valid tokens, or over pairs; nan if there are none."""
    rewards: Rewards | None = None
    """The rewards of pairs; None for other data."""


@dataclass(frozen=True, slots=True)
class StepTotals:
    """Sums over all ranks after the micro-batches of a step, available on the host without the device."""

    tokens: int
    """Valid tokens of the global batch."""
    divisor: int
    """The divisor of the global batch's summed loss: its valid tokens, or its pairs."""
    stop: bool
    """Whether any rank was asked to stop."""
    memory_ends: bool
    """Whether a rank that stops loses its node's memory."""
    votes: int
    """The sum of the votes of the ranks' checkpoint managers."""
    rewards: Rewards | None = None
    """The rewards of pairs; None for other data."""


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """The outcome of one optimizer step; the same on all ranks, except for `nonfinite_parameters`."""

    loss: float
    """The mean loss per valid token, or per pair, of the global batch before the update; nan if there were none."""
    gradient_norm: float
    """The norm of the gradient of the mean loss over all ranks, before clipping."""
    nonfinite_parameters: tuple[str, ...] = ()
    """If the loss was finite and the norm was not: this rank's parameters with a nonfinite gradient, from input to
    output; empty if a backend does not check.
    """
    nonfinite_ranks: tuple[int, ...] = ()
    """If loss or norm were not finite: the ranks whose loss or gradients were not finite before the reduction,
    ascending; empty if unknown.
    """

    @property
    def applied(self) -> bool:
        """Whether the state was updated: loss and norm were finite."""
        return math.isfinite(self.loss) and math.isfinite(self.gradient_norm)


class Backend(Protocol):
    """The operations of one device family."""

    @property
    def mesh(self) -> Mesh:
        """The coordinates and process groups of this rank."""
        ...

    @property
    def state(self) -> TrainingState:
        """The training state, allocated but not initialized until `initialize` or a checkpoint fills it."""
        ...

    def build(self) -> None:
        """Create model, optimizer and buffers on the device. Collective."""
        ...

    def load_frozen(self, base: BaseWeights) -> None:
        """Load the frozen weights, which are in no checkpoint. Raises UserError, StorageError."""
        ...

    def initialize(self, seed: int, base: BaseWeights | None = None, adapter: AdapterWeights | None = None) -> None:
        """Initialize the trained weights from `base` and `adapter`, and those in neither from a seed.

        The values are the same at every tensor- and data-parallel size. Raises UserError, StorageError.
        """
        ...

    def accumulate(self, batch: MicroBatch, *, last: bool) -> None:
        """Add the gradients of the batch's summed loss; `last` marks the final micro-batch of the step. Collective."""
        ...

    def all_reduce_totals(self, *, stop: bool, memory_ends: bool, vote: int) -> StepTotals:
        """Sum tokens, stop requests and votes over the job. Collective."""
        ...

    def step(self, *, divisor: int, learning_rate: float, clip_norm: float) -> StepOutcome:
        """Reduce the gradients, divide by `divisor` (see `StepTotals`), clip, update, and zero the gradients.

        The state does not change if loss or norm is not finite. It is one call, so that a device which runs whole
        graphs is synchronized once, after the update was launched. Collective.
        """
        ...

    def evaluate(self, batches: Iterable[MicroBatch]) -> Evaluation:
        """Compute the loss on all ranks' batches, without gradients.

        Every rank passes the same number of micro-batches. Call it only between two steps. Collective.
        """
        ...

    def compute_reference_log_probs(self, batches: Iterable[MicroBatch]) -> torch.Tensor:
        """Return the log-probabilities of the answers of pairs, of all rows one after another, float32 on the CPU.

        They are computed with the weights of the state, without adapters; NaN on ranks that do not compute them. Every
        rank passes the same number of micro-batches of one size. Call it only between two steps. Collective.
        """
        ...

    def compute_parameter_norm(self) -> float:
        """Return the norm of all parameters of the model. Call it only between two steps. Collective."""
        ...

"""What the training loop and the checkpoint manager know of a device: a mesh, a state, and five verbs.

Invariants: nothing here names a device library; every method marked *collective* is called by all ranks of the job in
the same order; tensors of a state keep their identity for the life of the process, so a snapshot may hold references.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from trainium_contract.trainer import DataParallelMode
    from trainium_trainer.data.loader import MicroBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Coordinates and process groups of this rank; tensor parallel is the fastest dimension."""

    rank: int
    world_size: int
    dp_rank: int
    dp_size: int
    tp_rank: int
    tp_size: int
    dp_mode: DataParallelMode
    device: torch.device
    world: ProcessGroup
    dp: ProcessGroup | None
    """None exactly when `dp_size` is 1."""
    tp: ProcessGroup | None
    """None exactly when `tp_size` is 1."""


@dataclass(frozen=True, slots=True)
class StepTotals:
    """What all ranks agree on after the micro-batches of a step."""

    loss_sum: float
    """Sum of the token losses of the global batch."""
    tokens: int
    """Valid tokens of the global batch."""
    stop: bool
    """Whether any rank was asked to leave."""
    memory_ends: bool
    """Whether any rank's node memory goes with it."""
    votes: float
    """Sum of what the ranks' checkpoint managers voted."""

    @property
    def loss(self) -> float:
        """Mean loss of a valid token."""
        return self.loss_sum / self.tokens if self.tokens else float("nan")


class TrainState(Protocol):
    """Weights and optimizer moments of this rank."""

    def state_dict(self) -> dict[str, Any]:
        """Flat names to tensors or DTensors that alias the live state; copy before the next update."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Copy values in; accepts the dictionary of `state_dict` after it was loaded in place."""
        ...

    def local_tensors(self) -> dict[str, torch.Tensor]:
        """This rank's buffers, aliasing the live state: clone them for a snapshot, copy into them to restore."""
        ...


class Backend(Protocol):
    """One device family behind the loop."""

    @property
    def mesh(self) -> Mesh:
        """Where this rank is."""
        ...

    @property
    def state(self) -> TrainState:
        """The training state, allocated but not initialised until `initialize` or a checkpoint fills it."""
        ...

    def build(self) -> None:
        """Create model, optimizer and buffers on the device. Collective."""
        ...

    def initialize(self, seed: int) -> None:
        """Fill the weights from a seed; the same values at every tensor- and data-parallel size."""
        ...

    def agree(self, value: int) -> bool:
        """Whether all ranks passed the same 62-bit number. Collective."""
        ...

    def accumulate(self, batch: MicroBatch, *, last: bool) -> None:
        """Add the gradients of the batch's summed loss; `last` marks the final micro-batch of the step. Collective."""
        ...

    def totals(self, *, stop: bool, memory_ends: bool, vote: float) -> StepTotals:
        """Sum loss, tokens, stop requests and votes over the job. Collective."""
        ...

    def gradient_norm(self, tokens: int) -> float:
        """Norm over all ranks of the gradient of the mean loss of `tokens` tokens. Collective."""
        ...

    def update(self, *, learning_rate: float, gradient_scale: float) -> None:
        """One AdamW step with the accumulated gradients times `gradient_scale`; then forget the gradients."""
        ...

    def discard(self) -> None:
        """Forget the accumulated gradients of a step that is skipped."""
        ...

    def barrier(self) -> None:
        """Return when all ranks have come here. Collective."""
        ...

    def close(self) -> None:
        """Leave the process group in peace; only after the last collective of every rank."""
        ...

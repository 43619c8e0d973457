"""The interface between checkpoints and the trainer, and the few values that both exchange.

Guarantees:
- Everything here is a Protocol or a frozen value, so that no backend and no loop is imported.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from trainium_contract.trainer.parallelism import DataParallelMode


@dataclass(frozen=True, slots=True, order=True)
class Position:
    """The position of the run: equal on all ranks and valid at every data-parallel size."""

    step: int
    """Optimizer steps completed."""
    samples: int
    """Global samples consumed by those steps."""
    tokens: int
    """Valid tokens trained on."""
    loss: float | None = field(default=None, compare=False)
    """Loss of the last step, for its record: a rank may be lost between a step's end and the writing of its line. None
    in positions of durable checkpoints, which are committed after all lines were written."""
    grad_norm: float | None = field(default=None, compare=False)
    """Norm of the last step, before clipping; None like `loss`. Ranks compare neither of them."""
    batch: int | None = field(default=None, compare=False)
    """Samples of the last step; None like `loss`, and in snapshots of versions at which all steps were alike."""


class ResumeSource(StrEnum):
    """Source of a rank's state when the run (re)started."""

    MEMORY = "memory"
    """A snapshot in this node's memory."""
    PEER = "peer"
    """A snapshot that another node sent."""
    DURABLE = "durable"
    """A committed checkpoint on storage."""
    FRESH = "fresh"
    """Nothing was found: the initial weights."""


class TrainingState(Protocol):
    """The state that is saved and restored: parameters and optimizer, tensors only."""

    def state_dict(self) -> dict[str, Any]:
        """Return live tensors and DTensors by names that are the same at every parallel size; cheap, no copies.

        They alias the live state: copy before the next update.
        """
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a `state_dict()` that was filled in place, or copy its values."""
        ...

    def local_tensors(self) -> dict[str, torch.Tensor]:
        """Return this rank's live local shards, optimizer moments included, from construction on.

        They alias the live state: clone them for a snapshot, copy into them to restore.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshPlace:
    """Coordinates of this rank in pipeline x data x tensor; tensor is the fastest dimension.

    Ranks that hold parts of the same sequences are data-parallel ones here: their parameters are the same.
    """

    rank: int
    world_size: int
    pp_rank: int = 0
    pp_size: int = 1
    dp_rank: int
    dp_size: int
    tp_rank: int
    tp_size: int
    dp_mode: DataParallelMode

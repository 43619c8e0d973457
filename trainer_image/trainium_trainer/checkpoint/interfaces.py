"""The interface between checkpoints and the trainer, and the few values that both exchange.

Guarantees:
- Everything here is structural (Protocols) or a frozen value, so that no backend and no loop is imported.
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
    """Of the last step, for its record: a rank may be lost between a step's end and the writing of its line. None in
    positions of durable checkpoints, which are committed after all lines were written."""
    grad_norm: float | None = field(default=None, compare=False)
    """Of the last step, before clipping; None like `loss`. Ranks compare neither of them."""
    batch: int | None = field(default=None, compare=False)
    """Samples of the last step; None like `loss`, and in snapshots of versions at which all steps were alike."""


class ResumeSource(StrEnum):
    """Where a rank's state came from when the run (re)started."""

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
        """Live tensors and DTensors under names that are the same at every parallel size; cheap, no copies."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a `state_dict()` whose tensors were filled in place."""
        ...

    def local_tensors(self) -> dict[str, torch.Tensor]:
        """Return this rank's live local shards, optimizer moments included, from construction on; restored in place."""
        ...


class MeshPlace(Protocol):
    """The place of this rank in the device mesh."""

    @property
    def rank(self) -> int: ...  # noqa: D102 - the names are enough
    @property
    def world_size(self) -> int: ...  # noqa: D102
    @property
    def pp_rank(self) -> int: ...  # noqa: D102
    @property
    def pp_size(self) -> int: ...  # noqa: D102
    @property
    def dp_rank(self) -> int: ...  # noqa: D102
    @property
    def dp_size(self) -> int: ...  # noqa: D102
    @property
    def tp_rank(self) -> int: ...  # noqa: D102
    @property
    def tp_size(self) -> int: ...  # noqa: D102
    @property
    def dp_mode(self) -> DataParallelMode: ...  # noqa: D102

"""The interface between checkpoints and the trainer, and the values that they exchange.

Guarantees:
- Everything here is a Protocol or a frozen value, so that no backend and no loop is imported.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from torch.distributed import ProcessGroup

    from trainium_contract.trainer.checkpoint import CheckpointConfig
    from trainium_contract.trainer.parallelism import DataParallelMode
    from trainium_trainer.storage.protocol import Retry, Storage


@dataclass(frozen=True, slots=True, order=True)
class Position:
    """The position of a run: equal on all ranks and valid at every data-parallel size."""

    step: int
    """Optimizer steps completed."""
    samples: int
    """Global samples consumed by those steps."""
    tokens: int
    """Valid tokens trained on."""
    loss: float | None = field(default=None, compare=False)
    """The loss of the last step, because a rank may fail between the end of a step and the writing of its line in the
    history. None in positions of durable checkpoints, which are committed after all lines were written.
    """
    grad_norm: float | None = field(default=None, compare=False)
    """The gradient norm of the last step before clipping; None like `loss`. Ranks do not compare the two."""
    batch: int | None = field(default=None, compare=False)
    """The samples of the last step; None like `loss`."""

    def encode(self) -> str:
        """Return the position, without its step, as the details of a snapshot's version."""
        return json.dumps([self.samples, self.tokens, self.loss, self.grad_norm, self.batch])

    @staticmethod
    def decode(step: int, details: str) -> Position:
        """Return the position of a snapshot of this step."""
        return Position(step, *json.loads(details))


class ResumeSource(StrEnum):
    """The source of a rank's state at a start of the run."""

    MEMORY = "memory"
    """A snapshot in this node's memory."""
    PEER = "peer"
    """A snapshot that another node sent."""
    DURABLE = "durable"
    """A committed checkpoint on storage."""
    FRESH = "fresh"
    """The initial weights, because nothing was found."""


class TrainingState(Protocol):
    """The state that is saved and restored: parameters and optimizer, tensors only."""

    def state_dict(self) -> dict[str, Any]:
        """Return live tensors and DTensors by names that are the same at every parallel size, without copies.

        They alias the live state: copy before the next update.
        """
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a `state_dict()`: adopt one that was filled in place, or copy its values."""
        ...

    def list_local_tensors(self) -> dict[str, torch.Tensor]:
        """Return this rank's live local shards with the optimizer's moments, available from construction on.

        They alias the live state: clone them for a snapshot, copy into them to restore.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshCoordinates:
    """Coordinates of this rank in pipeline x data x tensor; tensor is the fastest dimension.

    Ranks that hold parts of the same sequences count as data-parallel: their parameters are the same.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """One start of this rank, created once all ranks are connected."""

    state: TrainingState
    mesh: MeshCoordinates
    group: ProcessGroup | None
    """Process group of checkpoints alone; None for a single rank."""
    storage: Storage
    retry: Retry
    config: CheckpointConfig
    settings: Mapping[str, Any]
    """The settings that must not change between the runs of one history, by name; JSON values."""
    config_digest: str
    """The digest of the settings of this start."""

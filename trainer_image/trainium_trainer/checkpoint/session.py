"""The values that the parts of one start of a rank share: the agreement where to resume, and the saves after it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.distributed import ProcessGroup

    from trainium_contract.trainer.checkpoint import CheckpointConfig
    from trainium_trainer.checkpoint.interfaces import MeshPlace, TrainingState
    from trainium_trainer.storage.protocol import Retry, Storage


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """One start of this rank, from the moment that all ranks are connected."""

    state: TrainingState
    mesh: MeshPlace
    group: ProcessGroup | None
    """Process group of checkpoints alone; None for a single rank."""
    storage: Storage
    retry: Retry
    config: CheckpointConfig
    settings: Mapping[str, Any]
    """Settings that must not change between the runs of one history, by name; values that JSON can hold."""
    config_digest: str
    """Digest of the settings of this start."""

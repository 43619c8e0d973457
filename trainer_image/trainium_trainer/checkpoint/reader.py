"""The reader of durable checkpoints for torch's distributed checkpoint (DCP), which plans what each rank needs.

Invariant: what DCP asks for is a box of a stored part and a place for it; `contents` reads and verifies it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from trainium_trainer.checkpoint.contents import Contents, Part, Wanted

if TYPE_CHECKING:
    import os

    from trainium_trainer.checkpoint.storage import Retry, Storage
    from trainium_trainer.checkpoint.survey import Committed


class ShardReader(StorageReader):
    """Reads a checkpoint that `ShardWriter` wrote, at any size."""

    def __init__(self, storage: Storage, checkpoint: Committed, retry: Retry) -> None:
        super().__init__()
        self._contents = Contents(storage, checkpoint, retry)
        self._parts: dict[MetadataIndex, Part] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing to do: a reader reads one checkpoint."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """What the index says."""
        tensors: dict[str, Any] = {}
        for name, stored in self._contents.tensors.items():
            chunks: list[ChunkStorageMetadata] = []
            for part in stored.parts:
                offsets = torch.Size(part.offsets)
                chunks.append(ChunkStorageMetadata(offsets, torch.Size(part.sizes)))
                self._parts[MetadataIndex(name, offsets)] = part
            properties = TensorProperties(dtype=stored.dtype)
            tensors[name] = TensorStorageMetadata(properties, torch.Size(stored.shape), chunks)
        return Metadata(state_dict_metadata=tensors, storage_data=self._parts)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to do."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The planner's plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The planners' plans as they are."""
        return plans

    @torch.no_grad()
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the planner's tensors."""
        targets: list[torch.Tensor] = []
        wanted: list[Wanted] = []
        for item in plan.items:
            if item.type != LoadItemType.TENSOR:
                raise ValueError(f"{item.storage_index.fqn}: checkpoints hold tensors only")
            target: torch.Tensor = planner.resolve_tensor(item).detach()
            targets.append(target)
            stored = self._contents.tensors[item.storage_index.fqn]
            part = self._parts[item.storage_index]
            wanted.append(Wanted(part, stored.dtype, tuple(item.storage_offsets), target))
        self._contents.fill(wanted)
        for item, target in zip(plan.items, targets, strict=True):
            planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:  # noqa: ARG003 - DCP's signature
        """Any id; it is not used."""
        return True

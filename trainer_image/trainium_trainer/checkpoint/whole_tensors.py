"""Write a checkpoint from whole tensors, one after the other: for conversions, which run in one process.

For readers, each file is a pipeline stage of one rank.

Guarantees:
- One tensor is in memory at a time, besides the one being hashed and written.
- The result is an ordinary checkpoint that any number of ranks loads.
- It is committed last, into a root without checkpoints.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainium_contract.wire.checkpoint_manifest import CheckpointKind, Manifest, folder_name
from trainium_trainer.checkpoint.format.layout import CheckpointLayout, TensorMetadata
from trainium_trainer.checkpoint.format.writer import SAFETENSORS_TYPES, WrittenFile, write_shard, write_tables
from trainium_trainer.checkpoint.root.commit import FenceToken, claim_fence, prepare_commit, publish
from trainium_trainer.checkpoint.root.survey import survey
from trainium_trainer.checkpoint.sharding import Grid
from trainium_trainer.exits import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import torch

    from trainium_trainer.checkpoint.interfaces import Position
    from trainium_trainer.storage.protocol import Retry, Storage

_FILE_BYTES = 2 << 30


@dataclass(frozen=True, slots=True)
class TensorSource:
    """A tensor that is loaded when it is written."""

    name: str
    dtype: torch.dtype
    shape: torch.Size
    load: Callable[[], torch.Tensor]

    @property
    def size(self) -> int:
        """Bytes."""
        return self.shape.numel() * self.dtype.itemsize


def write_whole(
    storage: Storage, sources: Sequence[TensorSource], position: Position, settings: Mapping[str, Any], retry: Retry
) -> str:
    """Write and commit the checkpoint of a position; return the name of its folder.

    `settings` are the known ones; a run is compared with only these. Raises UserError when the root already holds
    checkpoints.
    """
    location = storage.location
    retry.run(storage.prepare, location)
    existing = retry.run(lambda: survey(storage), location)
    if existing.committed or existing.damaged or existing.other_versions:
        raise UserError(f"{location} holds checkpoints already: choose another folder")
    token = FenceToken(0, "", secrets.token_hex(6))
    retry.run(lambda: claim_fence(storage, token), location)
    folder = folder_name(position.step)
    attempt = f"{folder}/{token.attempt}"
    groups = list(_group_tensors(sources))
    layout = CheckpointLayout(
        Grid(pipeline=max(1, len(groups))),
        [
            TensorMetadata(source.name, SAFETENSORS_TYPES[source.dtype], tuple(source.shape), stage, ())
            for stage, group in enumerate(groups)
            for source in group
        ],
    )
    named = {source.name: source for source in sources}
    files: dict[int, WrittenFile] = {}
    for stage in range(layout.grid.pipeline):
        file = write_shard(
            storage,
            attempt,
            stage,
            layout.plan_items(stage),
            lambda item: named[item.name].load().to(named[item.name].dtype),
            retry,
        )
        if file is not None:
            files[stage] = file
    manifest = Manifest(
        kind=CheckpointKind.STATE,
        step=position.step,
        samples=position.samples,
        tokens=position.tokens,
        generation=0,
        world_size=1,
        data_parallel=1,
        tensor_parallel=1,
        config_digest="",
        settings=dict(settings),
        created=time.time(),
        files=tuple(write_tables(storage, attempt, layout, files, retry)),
    )
    publish(storage, prepare_commit(storage, folder, manifest, token, retry), retry)
    return folder


def _group_tensors(sources: Sequence[TensorSource]) -> Iterator[list[TensorSource]]:
    """Group the tensors into files of limited size; wide types first keeps every tensor aligned."""
    group: list[TensorSource] = []
    size = 0
    for source in sorted(sources, key=lambda source: -source.dtype.itemsize):
        if group and size + source.size > _FILE_BYTES:
            yield group
            group, size = [], 0
        group.append(source)
        size += source.size
    if group:
        yield group

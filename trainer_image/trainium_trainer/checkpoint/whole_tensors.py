"""Writes a checkpoint from whole tensors, one after the other: for conversions, where no ranks share the work.

To readers each file is a pipeline stage of one rank.

Guarantees:
- One tensor is in memory at a time, beside what is being hashed and written.
- The result is an ordinary checkpoint that any number of ranks loads.
- It is committed last, into a root that held none.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainium_contract.wire.checkpoint_manifest import CheckpointKind, Manifest, folder_name
from trainium_trainer.checkpoint.dividing import Divided, Grid, Scheme
from trainium_trainer.checkpoint.format.shards import SAFETENSORS_TYPES, WrittenFile, write_shard, write_tables
from trainium_trainer.checkpoint.root.commit import FenceToken, claim_fence, prepare_commit, publish
from trainium_trainer.checkpoint.root.survey import survey
from trainium_trainer.exits import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import torch

    from trainium_trainer.checkpoint.interfaces import Position
    from trainium_trainer.storage.protocol import Retry, Storage

_FILE_BYTES = 2 << 30


@dataclass(frozen=True, slots=True)
class TensorSource:
    """A tensor that can be had."""

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
    """Write and commit the checkpoint of a position; the name of its folder.

    `settings`: as far as they are known; a run is held to them and to no others. UserError when the root holds
    checkpoints already.
    """
    where = storage.location
    retry.run(storage.prepare, where)
    found = retry.run(lambda: survey(storage), where)
    if found.committed or found.damaged or found.newer:
        raise UserError(f"{where} holds checkpoints already: choose another folder")
    token = FenceToken(0, "", secrets.token_hex(6))
    retry.run(lambda: claim_fence(storage, token), where)
    folder = folder_name(position.step)
    attempt = f"{folder}/{token.attempt}"
    groups = list(_groups(sources))
    scheme = Scheme(
        Grid(pipeline=max(1, len(groups))),
        [
            Divided(source.name, SAFETENSORS_TYPES[source.dtype], tuple(source.shape), stage, ())
            for stage, group in enumerate(groups)
            for source in group
        ],
    )
    named = {source.name: source for source in sources}
    files: dict[int, WrittenFile] = {}
    for stage in range(scheme.grid.pipeline):
        file = write_shard(
            storage,
            attempt,
            stage,
            scheme.file(stage),
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
        files=tuple(write_tables(storage, attempt, scheme, files, retry)),
    )
    publish(storage, prepare_commit(storage, folder, manifest, token, retry), retry)
    return folder


def _groups(sources: Sequence[TensorSource]) -> Iterator[list[TensorSource]]:
    """Files of a bearable size; wide types first keeps every tensor aligned."""
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

"""Writes a checkpoint from whole tensors, one after the other: for conversions, where no ranks share the work.

Invariants: one tensor is in memory at a time, beside what is being hashed and written; the result is an ordinary
checkpoint that any number of ranks loads; it is committed last, into a root that held none.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainium_contract.manifest import CheckpointKind, Manifest, folder_name
from trainium_trainer.checkpoint.commit import FenceToken, claim_fence, prepare_commit, publish
from trainium_trainer.checkpoint.shards import (
    SAFETENSORS_TYPES,
    WrittenFile,
    bytes_of,
    header_of,
    index_of,
    write_hashed,
    write_index,
)
from trainium_trainer.checkpoint.survey import survey
from trainium_trainer.exits import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import torch

    from trainium_trainer.checkpoint.interfaces import Position
    from trainium_trainer.checkpoint.storage import Retry, Storage

_FILE_BYTES = 2 << 30


@dataclass(frozen=True, slots=True)
class Source:
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
    storage: Storage, sources: Sequence[Source], position: Position, settings: Mapping[str, Any], retry: Retry
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
    files: list[WrittenFile] = []
    tensors: dict[str, Any] = {}
    for group in _groups(sources):
        name = f"shard-{len(files):05d}.safetensors"
        header, spans = header_of([(source.name, source.dtype, source.shape) for source in group])
        files.append(_write(storage, attempt, name, header, group, spans[-1][1], retry))
        for source, (start, end) in zip(group, spans, strict=True):
            part: dict[str, Any] = {"offsets": [0] * len(source.shape), "sizes": list(source.shape), "file": name}
            part |= {"start": start, "bytes": end - start}
            dtype = SAFETENSORS_TYPES[source.dtype]
            tensors[source.name] = {"dtype": dtype, "shape": list(source.shape), "parts": [part]}
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
        files=tuple(write_index(storage, attempt, index_of(tensors, files), files, retry)),
    )
    publish(storage, prepare_commit(storage, folder, manifest, token, retry), retry)
    return folder


def _write(
    storage: Storage, folder: str, name: str, header: bytes, group: Sequence[Source], size: int, retry: Retry
) -> WrittenFile:
    def views() -> Iterator[memoryview]:
        yield memoryview(header)
        for source in group:
            yield bytes_of(source.load().to(source.dtype))

    return retry.run(lambda: write_hashed(storage, folder, name, views(), size), f"{storage.location}/{folder}")


def _groups(sources: Sequence[Source]) -> Iterator[list[Source]]:
    """Files of a bearable size; wide types first keeps every tensor aligned."""
    group: list[Source] = []
    size = 0
    for source in sorted(sources, key=lambda source: -source.dtype.itemsize):
        if group and size + source.size > _FILE_BYTES:
            yield group
            group, size = [], 0
        group.append(source)
        size += source.size
    if group:
        yield group

"""The files of a durable checkpoint: the files that ranks write, and their tables for readers.

Every rank writes one `shard-<rank>.safetensors` that any safetensors reader opens. `index.json` describes how the
tensors are divided (`dividing.Scheme`), from which readers derive the contents of each file: it is as small at 4,096
ranks as at one. `blocks-<first rank>.json` have size, digest of the header and digests of the blocks of 8 MiB of the
files of some ranks, so that a reader fetches those of the files that it reads.

Guarantees:
- No pickle is ever read from storage.
- A file is hashed while it is written and verified while it is read, block by block, so either takes one pass.
- The tables themselves are verified by the manifest.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import sys
import threading
from bisect import bisect_right
from concurrent.futures import Future as Assignment
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from trainium_contract.wire.checkpoint_manifest import (
    BLOCK_BYTES,
    INDEX_NAME,
    ManifestFile,
    block_digest,
    blocks_name,
    digest_of,
    shard_name,
)
from trainium_trainer.checkpoint.dividing import INDEX_FORMAT, Item, Scheme, header_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from trainium_trainer.storage.protocol import Retry, Storage

SAFETENSORS_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_LOW_PRIORITY = 10
_GROUP_DIGEST_BYTES = 48 << 10
_ENTRY_BYTES = 64
"""What a file's entry costs beside its digests, about; the JSON of a group has twice these sizes."""


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A file as it was written; small, because it travels to the coordinator."""

    size: int
    """Bytes."""
    header: bytes
    """SHA-256 of the safetensors header with its length."""
    blocks: bytes
    """SHA-256 digests of its blocks, one after the other."""
    values: int
    """Numbers of the tensors in it."""

    @property
    def digest(self) -> str:
        """The manifest's."""
        return hashlib.sha256(self.blocks).hexdigest()


@dataclass(frozen=True, slots=True)
class WrittenTable:
    """A table of digests that a rank on the way to the coordinator has written, and what the manifest needs of it."""

    first: int
    """Place of the first of its files."""
    size: int
    """Bytes of the table."""
    digest: bytes
    files: tuple[tuple[int, int, bytes], ...]
    """Place, size and digest of each file."""
    values: int
    """Numbers of the tensors in its files."""


def write_shard(
    storage: Storage,
    folder: str,
    rank: int,
    items: Sequence[Item],
    values: Callable[[Item], torch.Tensor],
    retry: Retry,
) -> WrittenFile | None:
    """Write a rank's file; None when it has nothing to write. StorageError when that fails for good.

    `values` gives an item's tensor, when its turn has come.
    """
    if not items:
        return None
    header, spans = header_of(items)

    def views() -> Iterator[memoryview]:
        yield memoryview(header)
        for item in items:
            yield bytes_of(values(item))

    name, size = f"{folder}/{shard_name(rank)}", spans[-1][1]

    def write() -> bytes:
        return _giving_way(lambda: retry.run(lambda: write_hashed(storage, name, views(), size), storage.location))

    volume = sum(item.box.volume for item in items)
    return WrittenFile(size, hashlib.sha256(header).digest(), write(), volume)


def write_tables(
    storage: Storage,
    folder: str,
    scheme: Scheme,
    files: Mapping[int, WrittenFile],
    retry: Retry,
    tables: Sequence[WrittenTable] = (),
) -> list[ManifestFile]:
    """Write the index and the digests, after the last rank's last write; return the manifest's entries of all files.

    `tables`: those that other ranks have written, of other files. ValueError when the files do not hold what is in
    the scheme.
    """
    every = [*tables, *write_digests(storage, folder, files, [table.first for table in tables], retry)]
    if (found := sum(table.values for table in every)) != scheme.volume:
        raise ValueError(f"{found} values were written of {scheme.volume}")
    index = {"format": INDEX_FORMAT, "blockBytes": BLOCK_BYTES} | scheme.to_json()
    entries = [_write_json(storage, folder, INDEX_NAME, index, retry)]
    for table in every:
        entries.append(ManifestFile(name=blocks_name(table.first), size=table.size, digest=table.digest.hex()))
        entries += [ManifestFile(name=shard_name(at), size=size, digest=sha.hex()) for at, size, sha in table.files]
    return sorted(entries, key=lambda entry: entry.name)


def write_digests(
    storage: Storage, folder: str, files: Mapping[int, WrittenFile], others: Iterable[int], retry: Retry
) -> list[WrittenTable]:
    """Tables with the digests of some files, by the places of those that wrote them.

    `others`: the places at which other tables begin.
    """
    found: list[WrittenTable] = []
    for group in _groups(files, sorted(others)):
        entries = {
            shard_name(rank): {"size": file.size, "header": file.header.hex(), "blocks": file.blocks.hex()}
            for rank, file in ((rank, files[rank]) for rank in group)
        }
        entry = _write_json(storage, folder, blocks_name(group[0]), {"files": entries}, retry)
        mine = tuple((rank, files[rank].size, bytes.fromhex(files[rank].digest)) for rank in group)
        values = sum(files[rank].values for rank in group)
        found.append(WrittenTable(group[0], entry.size, bytes.fromhex(entry.digest), mine, values))
    return found


@dataclass(frozen=True, slots=True)
class DigestReport:
    """The digests of one rank's file, or of several together."""

    is_ordered: bool
    """Whether the places of these ranks are the numbers of these ranks."""
    files: tuple[tuple[int, WrittenFile], ...] = ()
    """By place; those that are in no table yet."""
    tables: tuple[WrittenTable, ...] = ()

    @staticmethod
    def of(rank: int, place: int, file: WrittenFile | None) -> DigestReport:
        """Report the file of one rank, if it has written one."""
        return DigestReport(place == rank, () if file is None else ((place, file),))


def fold_reports(
    reports: list[DigestReport], write: Callable[[Mapping[int, WrittenFile], list[int]], list[WrittenTable]]
) -> list[DigestReport]:
    """Return what a rank passes on of the reports that it has received, its own first.

    A rank that has received the digests of many files writes a table itself and passes on what the manifest needs, a
    fifth to a tenth of it; one whose ranks hold other places than their numbers passes everything on. `write` writes
    tables of some files by place, none of which reaches beyond one of the places where others begin.
    """
    files = tuple(pair for each in reports for pair in each.files)
    tables = tuple(table for each in reports for table in each.tables)
    is_ordered = all(each.is_ordered for each in reports)
    # So many that a rank writes them rather than pass them on.
    if is_ordered and 2 * sum(len(file.blocks) + _ENTRY_BYTES for _, file in files) >= _GROUP_DIGEST_BYTES:
        tables += tuple(write(dict(files), [table.first for table in tables]))
        files = ()
    return [DigestReport(is_ordered, files, tables)]


def _write_json(storage: Storage, folder: str, name: str, document: dict[str, Any], retry: Retry) -> ManifestFile:
    data = json.dumps(document, separators=(",", ":")).encode()
    write = functools.partial(storage.write_stream, f"{folder}/{name}", [memoryview(data)], len(data))
    retry.run(write, f"{storage.location}/{folder}")
    return ManifestFile(name=name, size=len(data), digest=digest_of(data))


def _groups(files: Mapping[int, WrittenFile], others: Sequence[int]) -> Iterator[list[int]]:
    """Ranks whose digests share a file, neighbours together: a reader mostly needs those.

    A reader looks into the last table that begins at its rank or before, so none reaches beyond where another begins.
    """
    group: list[int] = []
    size = 0
    for rank in sorted(files):
        beyond = group and bisect_right(others, rank) != bisect_right(others, group[0])
        if group and (beyond or size + len(files[rank].blocks) > _GROUP_DIGEST_BYTES):
            yield group
            group, size = [], 0
        group.append(rank)
        size += len(files[rank].blocks) + _ENTRY_BYTES
    if group:
        yield group


def write_hashed(storage: Storage, name: str, views: Iterable[memoryview], size: int) -> bytes:
    """Write a file of `size` bytes; the digests of its blocks, each computed while the store writes the block."""
    with ThreadPoolExecutor(1, thread_name_prefix="checkpoint-hash", initializer=_lower_priority) as pool:
        digests: list[Assignment[str]] = []

        def pieces() -> Iterator[memoryview]:
            for block in blocks_of(views):
                digests.append(pool.submit(block_digest, block))
                yield from block

        storage.write_stream(name, pieces(), size)
        return b"".join(bytes.fromhex(digest.result()) for digest in digests)


def blocks_of(views: Iterable[memoryview]) -> Iterator[list[memoryview]]:
    """Yield the bytes of the views in blocks of BLOCK_BYTES; each block is a list of pieces."""
    block: list[memoryview] = []
    space = BLOCK_BYTES
    for view in views:
        at = 0
        while at < len(view):
            piece = view[at : at + space]
            block.append(piece)
            at += len(piece)
            space -= len(piece)
            if not space:
                yield block
                block, space = [], BLOCK_BYTES
    if block:
        yield block


def _giving_way(work: Callable[[], bytes]) -> bytes:
    """Return the outcome of `work`, done at a low priority so that training goes first.

    Hashing and writing are most of a save's work and hold no lock that training needs. The thread is a daemon: a store
    that hangs must not keep the process from leaving.
    """
    outcome: list[bytes | BaseException] = []

    def run() -> None:
        _lower_priority()
        try:
            outcome.append(work())
        except BaseException as error:  # noqa: BLE001 - raised by the caller's thread
            outcome.append(error)

    thread = threading.Thread(target=run, name="checkpoint-write", daemon=True)
    thread.start()
    thread.join()
    result = outcome[0]
    if isinstance(result, BaseException):
        raise result
    return result


def _lower_priority() -> None:
    if sys.platform == "linux":  # where each thread has a priority
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOW_PRIORITY)


def bytes_of(tensor: Any) -> memoryview:
    """Return a tensor's bytes, sharing its memory when it is contiguous."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    view: memoryview = flat.numpy().data
    return view

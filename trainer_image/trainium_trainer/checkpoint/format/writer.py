"""The files of a durable checkpoint: the shards that ranks write, and the tables for readers.

Every rank writes one `shard-<rank>.safetensors` that any safetensors reader opens. `index.json` describes how the
tensors are divided (`CheckpointLayout`), from which readers derive the contents of each file; its size does not grow
with the number of ranks. `blocks-<first rank>.json` hold the size, the digest of the header and the digests of the 8
MiB blocks of the files of some ranks, so that a reader fetches only those of the files that it reads.

Guarantees:
- No pickle is ever read from storage.
- A file is hashed while it is written and verified while it is read, block by block, in one pass each.
- The manifest verifies the tables.
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
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from trainium_contract.wire.checkpoint_manifest import (
    BLOCK_BYTES,
    INDEX_NAME,
    ManifestFile,
    block_digest,
    blocks_name,
    digest_bytes,
    shard_name,
)
from trainium_trainer.checkpoint.format.layout import INDEX_FORMAT, CheckpointLayout, WriteItem, build_file_header

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
"""The approximate size of a file's entry without its digests; the JSON of a group has twice these sizes."""


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """The record of a written file; small, because it is sent to rank 0."""

    size: int
    """The size in bytes."""
    header: bytes
    """The SHA-256 digest of the safetensors header, including its length field."""
    blocks: bytes
    """The concatenated SHA-256 digests of the blocks."""
    values: int
    """The number of values in the file."""

    @property
    def digest(self) -> str:
        """The digest of the file in the manifest."""
        return hashlib.sha256(self.blocks).hexdigest()


@dataclass(frozen=True, slots=True)
class WrittenTable:
    """A table of digests that an intermediate rank of the tree has written, with its entry for the manifest."""

    first: int
    """The index of its first file."""
    size: int
    """The size of the table in bytes."""
    digest: bytes
    files: tuple[tuple[int, int, bytes], ...]
    """The index, size and digest of each file."""
    values: int
    """The number of values in its files."""


def write_shard(
    storage: Storage,
    folder: str,
    rank: int,
    items: Sequence[WriteItem],
    values: Callable[[WriteItem], torch.Tensor],
    retry: Retry,
) -> WrittenFile | None:
    """Write a rank's file; return None if the rank has nothing to write.

    `values` returns the tensor of an item when it is written. Raises StorageError when all retries fail.
    """
    if not items:
        return None
    header, spans = build_file_header(items)

    def views() -> Iterator[memoryview]:
        yield memoryview(header)
        for item in items:
            yield view_as_bytes(values(item))

    name, size = f"{folder}/{shard_name(rank)}", spans[-1][1]
    blocks = _run_at_low_priority(
        lambda: retry.run(lambda: write_hashed(storage, name, views(), size), storage.location)
    )
    volume = sum(item.box.volume for item in items)
    return WrittenFile(size, hashlib.sha256(header).digest(), blocks, volume)


def write_tables(
    storage: Storage,
    folder: str,
    layout: CheckpointLayout,
    files: Mapping[int, WrittenFile],
    retry: Retry,
    tables: Sequence[WrittenTable] = (),
) -> list[ManifestFile]:
    """Write the index and the digests after the last write of all ranks; return the manifest's entries of all files.

    `tables` are those that other ranks have written, of other files. Raises ValueError if the files do not hold all
    values of the layout.
    """
    all_tables = [*tables, *write_digests(storage, folder, files, [table.first for table in tables], retry)]
    if (written := sum(table.values for table in all_tables)) != layout.volume:
        raise ValueError(f"{written} values were written of {layout.volume}")
    index = {"format": INDEX_FORMAT, "blockBytes": BLOCK_BYTES} | layout.to_json()
    entries = [_write_json(storage, folder, INDEX_NAME, index, retry)]
    for table in all_tables:
        entries.append(ManifestFile(name=blocks_name(table.first), size=table.size, digest=table.digest.hex()))
        entries += [
            ManifestFile(name=shard_name(index), size=size, digest=sha.hex()) for index, size, sha in table.files
        ]
    return sorted(entries, key=lambda entry: entry.name)


def write_digests(
    storage: Storage, folder: str, files: Mapping[int, WrittenFile], others: Iterable[int], retry: Retry
) -> list[WrittenTable]:
    """Write tables with the digests of some files, by the indices of their writers; return the tables.

    `others` are the indices at which other tables begin.
    """
    tables: list[WrittenTable] = []
    for group in _group_ranks(files, sorted(others)):
        entries = {
            shard_name(rank): {"size": file.size, "header": file.header.hex(), "blocks": file.blocks.hex()}
            for rank, file in ((rank, files[rank]) for rank in group)
        }
        entry = _write_json(storage, folder, blocks_name(group[0]), {"files": entries}, retry)
        file_summaries = tuple((rank, files[rank].size, bytes.fromhex(files[rank].digest)) for rank in group)
        values = sum(files[rank].values for rank in group)
        tables.append(WrittenTable(group[0], entry.size, bytes.fromhex(entry.digest), file_summaries, values))
    return tables


@dataclass(frozen=True, slots=True)
class DigestReport:
    """The digests of the files of one rank or of several."""

    is_ordered: bool
    """Whether the index of each of these ranks in the grid equals its rank."""
    files: tuple[tuple[int, WrittenFile], ...] = ()
    """The files that are in no table yet, by index."""
    tables: tuple[WrittenTable, ...] = ()

    @staticmethod
    def of(rank: int, index: int, file: WrittenFile | None) -> DigestReport:
        """Create the report of one rank's file, if it has written one."""
        return DigestReport(index == rank, () if file is None else ((index, file),))


def fold_reports(
    reports: list[DigestReport], write: Callable[[Mapping[int, WrittenFile], list[int]], list[WrittenTable]]
) -> list[DigestReport]:
    """Return the reports that a rank passes on for those that it has received, its own first.

    A rank that has received the digests of many files writes a table and passes on the manifest's entries, a fifth to a
    tenth of the size. If the indices of its ranks differ from their numbers, it passes everything on. `write` writes
    tables of some files by index; no table extends beyond the start of another.
    """
    files = tuple(pair for report in reports for pair in report.files)
    tables = tuple(table for report in reports for table in report.tables)
    is_ordered = all(report.is_ordered for report in reports)
    # From this many on, a rank writes the digests instead of passing them on.
    if is_ordered and 2 * sum(len(file.blocks) + _ENTRY_BYTES for _, file in files) >= _GROUP_DIGEST_BYTES:
        tables += tuple(write(dict(files), [table.first for table in tables]))
        files = ()
    return [DigestReport(is_ordered, files, tables)]


def _write_json(storage: Storage, folder: str, name: str, document: dict[str, Any], retry: Retry) -> ManifestFile:
    data = json.dumps(document, separators=(",", ":")).encode()
    write = functools.partial(storage.write_stream, f"{folder}/{name}", [memoryview(data)], len(data))
    retry.run(write, f"{storage.location}/{folder}")
    return ManifestFile(name=name, size=len(data), digest=digest_bytes(data))


def _group_ranks(files: Mapping[int, WrittenFile], others: Sequence[int]) -> Iterator[list[int]]:
    """Yield the ranks whose digests share a table: neighbours, because a reader mostly needs those together.

    A reader uses the last table that begins at or before a rank, so no table extends beyond the start of another.
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
    """Write a file of `size` bytes; return the digests of its blocks, computed while the store writes them."""
    with ThreadPoolExecutor(1, thread_name_prefix="checkpoint-hash", initializer=_lower_priority) as pool:
        digests: list[Future[str]] = []

        def pieces() -> Iterator[memoryview]:
            for block in split_blocks(views):
                digests.append(pool.submit(block_digest, block))
                yield from block

        storage.write_stream(name, pieces(), size)
        return b"".join(bytes.fromhex(digest.result()) for digest in digests)


def split_blocks(views: Iterable[memoryview]) -> Iterator[list[memoryview]]:
    """Yield the bytes of the views in blocks of BLOCK_BYTES; each block is a list of pieces."""
    block: list[memoryview] = []
    space = BLOCK_BYTES
    for view in views:
        offset = 0
        while offset < len(view):
            piece = view[offset : offset + space]
            block.append(piece)
            offset += len(piece)
            space -= len(piece)
            if not space:
                yield block
                block, space = [], BLOCK_BYTES
    if block:
        yield block


def _run_at_low_priority(work: Callable[[], bytes]) -> bytes:
    """Run `work` at a low priority, so that training goes first, and return its outcome.

    Hashing and writing are most of the work of a save and hold no lock that training needs. The thread is a daemon,
    because a store that hangs must not keep the process from exiting.
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
    if sys.platform == "linux":  # on systems where each thread has a priority
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOW_PRIORITY)


def view_as_bytes(tensor: Any) -> memoryview:
    """Return a tensor's bytes, sharing its memory when it is contiguous."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    view: memoryview = flat.numpy().data
    return view

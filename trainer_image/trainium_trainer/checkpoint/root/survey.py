"""Survey a root of durable checkpoints (committed, damaged and leftover ones), and prune it.

Guarantees:
- A survey reads receipts, manifests and sizes, but no contents.
- A checkpoint is removed only when enough newer valid ones exist, its receipt first, so that an interrupted removal
  leaves a leftover and not a damaged checkpoint.
- Only files of attempts that the fence records are removed, by name. Everything else below the root stays: other roots,
  users' files, milestones, what was set aside and what a newer version wrote.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from pydantic import ValidationError

from trainium_contract.wire.checkpoint_manifest import (
    BLOCK_BYTES,
    COMMIT_NAME,
    FORMAT_VERSION,
    GENERATION_FENCE_NAME,
    MANIFEST_NAME,
    SET_ASIDE_NAME,
    Commit,
    Manifest,
    ManifestFile,
    block_digest,
    file_digest,
    folder_name,
    is_rank_file,
    parse_milestone,
    parse_step,
)
from trainium_trainer.checkpoint.root.commit import parse_fence, read_attempts, read_commit
from trainium_trainer.checkpoint.root.owner import OWNER_NAME
from trainium_trainer.storage.errors import DamagedFileError
from trainium_trainer.storage.protocol import Entry, Retry, Storage, read_part, read_small

if TYPE_CHECKING:
    from collections.abc import Iterable


_VERIFY_THREADS = 4
_ATTEMPT = re.compile(r"g\d+-[0-9a-f]+")
_SEARCHED_FOLDERS = 1_000


@dataclass(frozen=True, slots=True)
class CommittedCheckpoint:
    """A committed checkpoint."""

    step: int
    folder: str
    """The folder of the attempt with the manifest and the files, relative to the root."""
    manifest: Manifest

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.manifest.files)

    def drop_shards(self) -> CommittedCheckpoint:
        """Return the checkpoint without the list of shards: readers need only the tables."""
        tables = tuple(file for file in self.manifest.files if file.name.endswith(".json"))
        return replace(self, manifest=self.manifest.model_copy(update={"files": tables}))


@dataclass(slots=True)
class Survey:
    """The contents of a root."""

    committed: list[CommittedCheckpoint] = field(default_factory=list)
    """Newest first; sizes have been compared, digests have not."""
    milestones: list[CommittedCheckpoint] = field(default_factory=list)
    """The milestones, in the same order."""
    damaged: dict[str, str] = field(default_factory=dict)
    """The problem of each incomplete committed checkpoint, by folder."""
    other_versions: dict[str, str] = field(default_factory=dict)
    """A message for each checkpoint that a newer version wrote, by folder."""
    set_aside: list[str] = field(default_factory=list)
    uncommitted: list[str] = field(default_factory=list)
    """The folders of checkpoints without a receipt."""
    leftovers: list[str] = field(default_factory=list)
    """The attempts that starts of this root wrote and never committed, relative to the root."""


def survey(storage: Storage) -> Survey:
    """Survey a root."""
    result = Survey()
    own_attempts = read_attempts(storage)
    for entry in storage.list(""):
        if entry.is_folder and (parse_step(entry.name) is not None or parse_milestone(entry.name) is not None):
            _inspect_folder(storage, entry.name, own_attempts, result)
    result.committed.sort(key=lambda item: item.step, reverse=True)
    result.milestones.sort(key=lambda item: item.step, reverse=True)
    return result


def verify(storage: Storage, checkpoint: CommittedCheckpoint, retry: Retry) -> list[str]:
    """Return the problem of the contents of a checkpoint's files; empty when every digest is right.

    Raises StorageError when they cannot be read.
    """
    with ThreadPoolExecutor(_VERIFY_THREADS, thread_name_prefix="verify") as pool:
        outcomes = pool.map(
            lambda file: _verify_file(storage, checkpoint.folder, file, retry), checkpoint.manifest.files
        )
        return [outcome for outcome in outcomes if outcome]


def prune(storage: Storage, keep_last: int, known_bad: Iterable[str], newest: int) -> list[int]:
    """Remove the checkpoints older than the newest `keep_last` valid ones; return their steps.

    `newest`, which the caller has just committed, counts as valid; the folders `known_bad` do not, and are removed at
    the same age as valid ones.
    """
    checkpoints = survey(storage)
    bad = {parse_step(name) for name in known_bad} - {newest}
    good = sorted({newest, *(item.step for item in checkpoints.committed if item.step not in bad)}, reverse=True)
    if len(good) < keep_last:
        return []
    present = {item.step for item in checkpoints.committed} | {
        step for name in checkpoints.damaged if (step := parse_step(name))
    }
    outdated = sorted(step for step in present if step < good[keep_last - 1])
    return [step for step in outdated if _remove_checkpoint(storage, folder_name(step))]


def remove_attempts(storage: Storage, attempts: Iterable[str]) -> None:
    """Remove the files that ranks wrote into folders of attempts, and the folders that are then empty."""
    for attempt in attempts:
        storage.remove_files(attempt, is_rank_file)


def find_nested_root(storage: Storage) -> str | None:
    """Return the location of another root inside or around this one; None when there is none.

    The search stops after some folders: it only reports a mistake early, and no removal depends on it.
    """
    for parent in storage.iterate_parents():
        with contextlib.suppress(OSError):  # no permission to list it
            if _is_root(storage=parent, entries=parent.list("")):
                return parent.location
    pending = deque([""])
    for _ in range(_SEARCHED_FOLDERS):
        if not pending:
            break
        folder = pending.popleft()
        with contextlib.suppress(OSError):
            entries = storage.list(folder)
            if folder and _is_root(storage, entries, folder):
                return f"{storage.location}/{folder}"
            inside = (entry.name for entry in entries if entry.is_folder and not _ATTEMPT.fullmatch(entry.name))
            pending.extend(f"{folder}/{name}".lstrip("/") for name in inside)
    return None


def _is_root(storage: Storage, entries: Iterable[Entry], folder: str = "") -> bool:
    """Return whether a folder with these entries is the root of some run."""
    names = {entry.name for entry in entries if not entry.is_folder}
    if any(OWNER_NAME.match(name) for name in names):
        return True
    return (
        GENERATION_FENCE_NAME in names
        and parse_fence(storage.read(f"{folder}/{GENERATION_FENCE_NAME}".lstrip("/"))) is not None
    )


def _remove_checkpoint(storage: Storage, folder: str) -> bool:
    """Remove a checkpoint that starts of this root wrote; False when none of its attempts is theirs."""
    own_attempts = read_attempts(storage)
    attempts = [entry.name for entry in storage.list(folder) if entry.is_folder and entry.name in own_attempts]
    with contextlib.suppress(ValueError):  # a receipt that cannot be parsed is removed with an attempt of this root
        receipt = read_commit(storage, folder)
        if receipt is not None and receipt.folder not in own_attempts:
            return False
    if attempts:
        storage.remove_file(f"{folder}/{COMMIT_NAME}")
        remove_attempts(storage, (f"{folder}/{name}" for name in attempts))
    return bool(attempts)


def _inspect_folder(storage: Storage, name: str, own_attempts: frozenset[str], result: Survey) -> None:
    inside = storage.list(name)
    if _is_root(storage, inside, name):
        return
    try:
        receipt = read_commit(storage, name)
    except ValueError as error:
        result.damaged[name] = str(error)
        return
    written = [entry.name for entry in inside if entry.is_folder and entry.name in own_attempts]
    if receipt is None:
        if any(entry.name == SET_ASIDE_NAME for entry in inside):
            result.set_aside.append(name)
        else:
            result.uncommitted.append(name)
            result.leftovers += [f"{name}/{attempt}" for attempt in written]
        return
    if receipt.format_version != FORMAT_VERSION:
        age = "a newer" if receipt.format_version > FORMAT_VERSION else "an older"
        result.other_versions[name] = (
            f"{name} was written by {age} version of this trainer (format {receipt.format_version}, this one has "
            f"{FORMAT_VERSION})"
        )
        return
    result.leftovers += [f"{name}/{attempt}" for attempt in written if attempt != receipt.folder]
    outcome = _inspect(storage, name, receipt)
    if isinstance(outcome, str):
        result.damaged[name] = outcome
    elif parse_step(name) is not None:
        result.committed.append(outcome)
    else:
        result.milestones.append(outcome)


def _inspect(storage: Storage, name: str, receipt: Commit) -> CommittedCheckpoint | str:
    folder = f"{name}/{receipt.folder}"
    step = parse_step(name) if parse_step(name) is not None else parse_milestone(name)
    data = read_small(storage, f"{folder}/{MANIFEST_NAME}")
    if data is None:
        return f"{folder}/{MANIFEST_NAME} is missing"
    if receipt.step != step or hashlib.sha256(data).hexdigest() != receipt.manifest_digest:
        return f"{folder}/{MANIFEST_NAME} is not the one that was committed"
    try:
        manifest = Manifest.model_validate_json(data)
    except ValidationError:
        return f"{folder}/{MANIFEST_NAME} cannot be read"
    sizes = {entry.name: entry.size for entry in storage.list(folder)}
    for file in manifest.files:
        if file.name not in sizes:
            return f"{folder}/{file.name} is missing"
        if sizes[file.name] != file.size:
            return f"{folder}/{file.name} has {sizes[file.name]} bytes where {file.size} were written"
    return CommittedCheckpoint(receipt.step, folder, manifest)


def _verify_file(storage: Storage, folder: str, file: ManifestFile, retry: Retry) -> str | None:
    name = f"{folder}/{file.name}"
    buffer = memoryview(bytearray(min(file.size, BLOCK_BYTES)))
    blocks: list[str] = []
    for start in range(0, file.size, BLOCK_BYTES):
        block = buffer[: min(BLOCK_BYTES, file.size - start)]
        try:
            read_part(storage, name, start, block, retry)
        except DamagedFileError as error:
            return str(error)
        blocks.append(block_digest([block]))
    if file_digest(blocks) != file.digest:
        return f"{name} does not have the contents that were written"
    return None

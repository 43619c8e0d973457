"""Writes one artifact into one folder of a store, by all ranks side by side, and goes on where a killed writer was.

Invariants: the file that makes the folder count is written last, by one rank, after every other file is on stable
storage; a data file with a receipt is not written again; what a failure leaves is complete files and their receipts;
a writer that was replaced and wakes up late changes no byte of what is complete; every rank gets the same outcome.
"""

from __future__ import annotations

import functools
import json
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from pydantic import ValidationError

from trainium_trainer.artifacts.layout import PlannedFile, index_of, plan_files
from trainium_trainer.artifacts.manifest import (
    CARD_NAME,
    LAST_NAMES,
    MANIFEST_NAME,
    PLAN_NAME,
    UNFINISHED,
    ArtifactFile,
    ArtifactManifest,
    WritePlan,
    file_of,
    receipt_name,
)
from trainium_trainer.artifacts.store import kept
from trainium_trainer.artifacts.streams import write_file
from trainium_trainer.exits import UserError
from trainium_trainer.storage.protocol import Retry, Storage, read_small

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch
    from torch import Tensor

    from trainium_contract.trainer.artifacts import ArtifactKind
    from trainium_trainer.peers import Peers

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Blueprint:
    """The plan of an artifact; equal on all ranks."""

    kind: ArtifactKind
    step: int
    identity: str
    """Digest of all that the contents follow from."""
    stem: str
    """Name of the data files, without number and ending."""
    dtype: str
    """Type, as safetensors names it."""
    sizes: Mapping[str, tuple[int, ...]]
    """Tensors as the files name them, in their order."""
    rows: Callable[[str, int, int, torch.dtype], Tensor]
    """Some rows of a tensor: by its name, the first and how many, in a type."""
    companions: Callable[[], dict[str, bytes]]
    """The small files, among them the one that is written last; asked for on one rank."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """Metadata of the data files themselves."""
    largest: int | None = None
    """Bytes of tensors in a file; omitted: it follows from the number of ranks."""


def write_artifact(
    blueprint: Blueprint,
    storage: Storage,
    peers: Peers,
    *,
    retry: Retry,
    beat: Callable[[float], None] = lambda _: None,
) -> ArtifactManifest:
    """Write what is missing below the root of `storage`; `beat` is called often with the share done. Collective.

    Raises UserError when the folder holds something else, StorageError when the store fails, and what reading raises.
    """
    writer = _Writer(blueprint, storage, retry, beat)
    started = together(peers, (lambda: writer.begin(peers.size)) if peers.rank == 0 else None)[0]
    assert started is not None
    if started.done is not None:
        beat(1.0)
        return started.done
    files = writer.files(started.writers)
    missing = [file for file in files if file.name not in started.receipts]
    written = together(peers, lambda: writer.write(missing[peers.rank :: peers.size]))
    receipts = started.receipts | {entry.name: entry for entries in written for entry in entries or ()}
    entries = [receipts[file.name] for file in files]
    manifest = together(peers, (lambda: writer.commit(files, entries)) if peers.rank == 0 else None)[0]
    assert manifest is not None
    beat(1.0)
    return manifest


def together(peers: Peers, work: Callable[[], T] | None) -> list[T | None]:
    """Return the results of `work` of all ranks; the first error of any rank is raised on all of them. Collective."""
    value: T | None = None
    failure: Exception | None = None
    try:
        value = None if work is None else work()
    except Exception as error:  # noqa: BLE001 - raised below, on every rank
        failure = error
    outcomes = peers.gather((value, failure))
    for _, first in outcomes:
        if first is not None:
            raise first
    return [value for value, _ in outcomes]


def read_manifest(storage: Storage, kind: ArtifactKind, retry: Retry) -> ArtifactManifest | None:
    """Return the manifest of a complete artifact; None when there is none. StorageError when the store fails."""
    if kept(lambda: read_small(storage, LAST_NAMES[kind]), storage.location, retry) is None:
        return None
    data = kept(lambda: read_small(storage, MANIFEST_NAME), storage.location, retry)
    with suppress(ValidationError):
        return None if data is None else ArtifactManifest.model_validate_json(data)
    return None


def read_plan(storage: Storage, retry: Retry) -> WritePlan | None:
    """Return the plan of an incomplete artifact; None when there is none. StorageError when the store fails."""
    data = kept(lambda: read_small(storage, PLAN_NAME), storage.location, retry)
    with suppress(ValidationError):
        return None if data is None else WritePlan.model_validate_json(data)
    return None


def is_free(storage: Storage, retry: Retry) -> bool:
    """Return whether a folder holds nothing, or only what a writer left that was killed while it wrote its plan."""
    names = [entry.name for entry in kept(lambda: storage.list(""), storage.location, retry)]
    return not names or (names == [UNFINISHED] and not kept(lambda: storage.list(UNFINISHED), storage.location, retry))


@dataclass(frozen=True, slots=True)
class _Started:
    """Return what the folder holds before this writer writes."""

    writers: int
    receipts: dict[str, ArtifactFile] = field(default_factory=dict)
    """Data files that are whole."""
    done: ArtifactManifest | None = None
    """All is."""


class _Writer:
    """One rank's part."""

    def __init__(self, blueprint: Blueprint, storage: Storage, retry: Retry, beat: Callable[[float], None]) -> None:
        self._blueprint = blueprint
        self._storage = storage
        self._retry = retry
        self._beat = beat

    def files(self, writers: int) -> tuple[PlannedFile, ...]:
        """Return the data files."""
        blueprint = self._blueprint
        return plan_files(
            blueprint.sizes,
            blueprint.dtype,
            blueprint.stem,
            writers=writers,
            largest=blueprint.largest,
            metadata=blueprint.metadata,
        )

    def begin(self, writers: int) -> _Started:
        """On one rank: look at what is there, or make a plan for `writers` ranks."""
        blueprint, storage = self._blueprint, self._storage
        self._kept(storage.prepare)
        done, plan = read_manifest(storage, blueprint.kind, self._retry), read_plan(storage, self._retry)
        found = {entry.name: entry for entry in self._kept(lambda: storage.list(""))}
        if done is not None and done.identity == blueprint.identity:
            self._tidy()
            return _Started(writers, done=done)
        ours = plan is not None and plan.identity == blueprint.identity
        if done is not None or not (ours or is_free(storage, self._retry)):
            raise UserError(f"{storage.location} is not empty: name a folder that does not exist yet")
        with suppress(OSError):  # parts of files that a killed writer left may be what fills the store
            storage.remove_drafts()
        if plan is None:
            text = WritePlan(identity=blueprint.identity, writers=writers).model_dump_json(by_alias=True).encode()
            self._kept(lambda: storage.write(PLAN_NAME, text))
            return _Started(writers)
        whole = [file for file in self.files(plan.writers) if file.name in found and found[file.name].size == file.size]
        receipts = [receipt for file in whole if (receipt := self._receipt(file.name)) is not None]
        return _Started(plan.writers, {receipt.name: receipt for receipt in receipts})

    def _receipt(self, file: str) -> ArtifactFile | None:
        data = self._kept(lambda: read_small(self._storage, receipt_name(file)))
        with suppress(ValidationError):
            return None if data is None else ArtifactFile.model_validate_json(data)
        return None

    def write(self, files: Sequence[PlannedFile]) -> list[ArtifactFile]:
        """Write data files and a receipt of each."""
        total, done = sum(file.size for file in files), 0

        def beat(count: int) -> None:
            nonlocal done
            done += count
            self._beat(min(done / total, 1.0))

        written = []
        for file in files:
            entry = self._kept(functools.partial(write_file, self._storage, file, self._blueprint.rows, beat))
            self._put(receipt_name(file.name), entry.model_dump_json(by_alias=True).encode())
            written.append(entry)
        return written

    def commit(self, files: tuple[PlannedFile, ...], entries: Sequence[ArtifactFile]) -> ArtifactManifest:
        """On one rank, when all data files are whole: write the others, the one that counts last."""
        blueprint = self._blueprint
        small = blueprint.companions()
        if len(files) > 1:
            text = json.dumps(index_of(files), indent=2, sort_keys=True) + "\n"
            small[f"{blueprint.stem}.safetensors.index.json"] = text.encode()
        last = LAST_NAMES[blueprint.kind]
        counted = [file_of(name, data) for name, data in sorted(small.items()) if name != CARD_NAME]
        manifest = ArtifactManifest(
            kind=blueprint.kind, step=blueprint.step, identity=blueprint.identity, files=(*entries, *counted)
        )
        for name, data in small.items():
            if name != last:
                self._put(name, data)
        self._put(MANIFEST_NAME, (manifest.model_dump_json(by_alias=True, indent=2) + "\n").encode())
        self._put(last, small[last])
        self._tidy()
        return manifest

    def _put(self, name: str, data: bytes) -> None:
        self._kept(lambda: self._storage.write(name, data))

    def _tidy(self) -> None:
        with suppress(OSError):  # an untidy folder is complete all the same
            self._storage.remove_files(UNFINISHED, lambda name: name.endswith(".json"))
            self._storage.remove_drafts()

    def _kept(self, action: Callable[[], T]) -> T:
        return kept(action, self._storage.location, self._retry)

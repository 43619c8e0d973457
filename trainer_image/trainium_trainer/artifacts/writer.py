"""Write an artifact into a folder of a store, by all ranks in parallel, and continue the work of killed writers.

Guarantees:
- The file that completes the artifact is written last, by one rank, after every other file is on stable storage.
- A data file with a receipt is not written again.
- A failure leaves only complete files and their receipts.
- A replaced writer that resumes late does not change complete files.
- Every rank gets the same outcome.
"""

from __future__ import annotations

import functools
import json
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar, cast

from trainium_trainer.artifacts.data_files import PlannedFile, build_index, plan_files, write_file
from trainium_trainer.artifacts.manifest import (
    CARD_NAME,
    LAST_NAMES,
    MANIFEST_NAME,
    PLAN_NAME,
    UNFINISHED,
    ArtifactFile,
    ArtifactManifest,
    WritePlan,
    describe_file,
    format_receipt_name,
)
from trainium_trainer.exits import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch
    from torch import Tensor

    from trainium_contract.trainer.artifacts import ArtifactKind
    from trainium_trainer.artifacts.store import ArtifactStore
    from trainium_trainer.peers import Peers

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ArtifactPlan:
    """The plan of an artifact; equal on all ranks."""

    kind: ArtifactKind
    step: int
    identity: str
    """The digest of everything that determines the contents."""
    stem: str
    """The name of the data files, without number and suffix."""
    dtype: str
    """The type by safetensors' name."""
    sizes: Mapping[str, tuple[int, ...]]
    """The tensors by their names in the files, in order."""
    rows: Callable[[str, int, int, torch.dtype], Tensor]
    """Returns rows of a tensor, by name, first row and count, in a type."""
    small_files: Callable[[], dict[str, bytes]]
    """Returns the small files, including the one that is written last; called on one rank."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """The metadata of the data files."""
    max_file_bytes: int | None = None
    """The maximum bytes of tensors in a file; by default it follows from the number of ranks."""


def write_artifact(
    artifact_plan: ArtifactPlan,
    store: ArtifactStore,
    peers: Peers,
    *,
    heartbeat: Callable[[float], None] = lambda _: None,
) -> ArtifactManifest:
    """Write the missing files into the folder. Collective.

    `heartbeat` is called often with the completed fraction. Raises UserError if the folder holds other files,
    StorageError if the store fails, and errors of reading.
    """
    writer = _Writer(artifact_plan, store, heartbeat)
    started = compute_on_first_rank(peers, lambda: writer.prepare(peers.size))
    if started.done is not None:
        heartbeat(1.0)
        return started.done
    files = writer.list_files(started.writers)
    missing = [file for file in files if file.name not in started.receipts]
    written = gather_results(peers, lambda: writer.write(missing[peers.rank :: peers.size]))
    receipts = started.receipts | {entry.name: entry for entries in written for entry in entries}
    entries = [receipts[file.name] for file in files]
    manifest = compute_on_first_rank(peers, lambda: writer.commit(files, entries))
    heartbeat(1.0)
    return manifest


def compute_on_first_rank(peers: Peers, work: Callable[[], T]) -> T:
    """Return rank 0's result of `work` on every rank; its error is raised on all of them. Collective."""
    return cast("T", gather_results(peers, lambda: work() if peers.rank == 0 else None)[0])


def gather_results(peers: Peers, work: Callable[[], T]) -> list[T]:
    """Return the results of `work` of all ranks; the first error of any rank is raised on all of them. Collective."""
    value: T | None = None
    failure: Exception | None = None
    try:
        value = work()
    except Exception as error:  # noqa: BLE001 - raised below, on every rank
        failure = error
    outcomes = peers.gather((value, failure))
    for _, first in outcomes:
        if first is not None:
            raise first
    return [cast("T", result) for result, _ in outcomes]


def read_manifest(store: ArtifactStore, kind: ArtifactKind) -> ArtifactManifest | None:
    """Read the manifest of a complete artifact; None if there is none. Raises StorageError."""
    if store.read(LAST_NAMES[kind]) is None:
        return None
    return store.read_message(MANIFEST_NAME, ArtifactManifest)


def is_free(store: ArtifactStore) -> bool:
    """Return whether a folder is empty or holds only files of a writer that was killed while it wrote its plan."""
    names = [entry.name for entry in store.list()]
    return not names or (names == [UNFINISHED] and not store.list(UNFINISHED))


@dataclass(frozen=True, slots=True)
class _FolderState:
    """The contents of the folder before this writer starts."""

    writers: int
    receipts: dict[str, ArtifactFile] = field(default_factory=dict)
    """The receipts of complete data files."""
    done: ArtifactManifest | None = None
    """The manifest of a complete artifact."""


class _Writer:
    """Writes one rank's files."""

    def __init__(self, artifact_plan: ArtifactPlan, store: ArtifactStore, heartbeat: Callable[[float], None]) -> None:
        self._artifact_plan = artifact_plan
        self._store = store
        self._heartbeat = heartbeat

    def list_files(self, writers: int) -> tuple[PlannedFile, ...]:
        """Return the data files as `writers` ranks divide them."""
        artifact_plan = self._artifact_plan
        return plan_files(
            artifact_plan.sizes,
            artifact_plan.dtype,
            artifact_plan.stem,
            writers=writers,
            max_file_bytes=artifact_plan.max_file_bytes,
            metadata=artifact_plan.metadata,
        )

    def prepare(self, writers: int) -> _FolderState:
        """Read the state of the folder, or write a plan for `writers` ranks; called on one rank."""
        artifact_plan, store = self._artifact_plan, self._store
        store.run(store.storage.prepare)
        done, plan = read_manifest(store, artifact_plan.kind), store.read_message(PLAN_NAME, WritePlan)
        stored = {entry.name: entry for entry in store.list()}
        if done is not None and done.identity == artifact_plan.identity:
            self._remove_leftovers()
            return _FolderState(writers, done=done)
        is_same_plan = plan is not None and plan.identity == artifact_plan.identity
        if done is not None or not (is_same_plan or is_free(store)):
            raise UserError(f"{store.location} is not empty: name a folder that does not exist yet")
        store.remove_drafts()  # partial files of a killed writer may fill the store
        if plan is None:
            text = WritePlan(identity=artifact_plan.identity, writers=writers).model_dump_json(by_alias=True).encode()
            store.write(PLAN_NAME, text)
            return _FolderState(writers)
        complete = [
            file
            for file in self.list_files(plan.writers)
            if file.name in stored and stored[file.name].size == file.size
        ]
        receipts = [store.read_message(format_receipt_name(file.name), ArtifactFile) for file in complete]
        return _FolderState(plan.writers, {receipt.name: receipt for receipt in receipts if receipt is not None})

    def write(self, files: Sequence[PlannedFile]) -> list[ArtifactFile]:
        """Write data files and their receipts."""
        total, done = sum(file.size for file in files), 0

        def heartbeat(count: int) -> None:
            nonlocal done
            done += count
            self._heartbeat(min(done / total, 1.0))

        written = []
        for file in files:
            entry = self._store.run(
                functools.partial(write_file, self._store.storage, file, self._artifact_plan.rows, heartbeat)
            )
            self._store.write(format_receipt_name(file.name), entry.model_dump_json(by_alias=True).encode())
            written.append(entry)
        return written

    def commit(self, files: tuple[PlannedFile, ...], entries: Sequence[ArtifactFile]) -> ArtifactManifest:
        """Write the other files, the completing one last; called on one rank after all data files."""
        artifact_plan = self._artifact_plan
        small = artifact_plan.small_files()
        if len(files) > 1:
            text = json.dumps(build_index(files), indent=2, sort_keys=True) + "\n"
            small[f"{artifact_plan.stem}.safetensors.index.json"] = text.encode()
        last = LAST_NAMES[artifact_plan.kind]
        counted = [describe_file(name, data) for name, data in sorted(small.items()) if name != CARD_NAME]
        manifest = ArtifactManifest(
            kind=artifact_plan.kind,
            step=artifact_plan.step,
            identity=artifact_plan.identity,
            files=(*entries, *counted),
        )
        for name, data in small.items():
            if name != last:
                self._store.write(name, data)
        self._store.write(MANIFEST_NAME, (manifest.model_dump_json(by_alias=True, indent=2) + "\n").encode())
        self._store.write(last, small[last])
        self._remove_leftovers()
        return manifest

    def _remove_leftovers(self) -> None:
        with suppress(OSError):  # an artifact with leftovers is still complete
            self._store.storage.remove_files(UNFINISHED, lambda name: name.endswith(".json"))
            self._store.storage.remove_drafts()

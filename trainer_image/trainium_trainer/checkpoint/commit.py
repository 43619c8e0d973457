"""The commit rule of durable checkpoints: fence, manifest, commit, verification, retention.

Layout below the root: `step-<n>.tmp-g<generation>-<session>/` while ranks write, `step-<n>/` with `manifest.json` and
`COMMITTED` afterwards, `GENERATION` as the fence.

Invariants: `COMMITTED` is written last and names the digest of the manifest; only the session that claimed the fence
last commits or removes anything; a committed folder is removed only when enough newer good ones are there.
"""

from __future__ import annotations

import hashlib
import json
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pydantic import ValidationError

from trainium_contract.manifest import (
    COMMIT_NAME,
    GENERATION_FENCE_NAME,
    MANIFEST_NAME,
    Commit,
    Manifest,
    ManifestFile,
    folder_name,
    step_of,
)
from trainium_trainer.checkpoint.errors import StaleGenerationError
from trainium_trainer.checkpoint.storage import read_small, write_small

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from trainium_trainer.checkpoint.storage import Retry, Storage

_TEMPORARY = re.compile(r"^step-\d{1,15}\.tmp-")
_PIECE_BYTES = 1 << 20
_VERIFY_THREADS = 4


@dataclass(frozen=True, slots=True)
class FenceToken:
    """Who may commit below a root."""

    generation: int
    run: str
    """Identity of the job; a job made anew starts again at generation 1 and may take over an old root."""
    session: str
    """Identity of one start of the ranks; an earlier attempt of the same generation is fenced out as well."""


@dataclass(frozen=True, slots=True)
class Committed:
    """A folder that holds a valid `COMMITTED`."""

    step: int
    manifest: Manifest


@dataclass(slots=True)
class Survey:
    """What is below a root."""

    committed: list[Committed] = field(default_factory=list)
    """Newest first; sizes have been compared, digests have not."""
    damaged: dict[int, str] = field(default_factory=dict)
    """Step of a folder with `COMMITTED` that is not whole -> what is wrong."""
    leftovers: list[str] = field(default_factory=list)
    """Folders of saves that never ended."""


def temporary_folder(step: int, token: FenceToken) -> str:
    """Where the ranks of one session write a checkpoint before it is committed."""
    return f"{folder_name(step)}.tmp-g{token.generation}-{token.session}"


def read_fence(storage: Storage) -> FenceToken | None:
    """The fence; also a bare number is understood."""
    data = read_small(storage, GENERATION_FENCE_NAME)
    if data is None:
        return None
    try:
        raw = json.loads(data)
        if isinstance(raw, int):
            return FenceToken(raw, "", "")
        return FenceToken(int(raw["generation"]), str(raw.get("run", "")), str(raw.get("session", "")))
    except (ValueError, KeyError, TypeError):
        return None


def claim_fence(storage: Storage, token: FenceToken) -> None:
    """Make `token` the one that may commit; StaleGenerationError when this run has a newer generation already."""
    current = read_fence(storage)
    if current is not None and current.run == token.run and current.generation > token.generation:
        raise StaleGenerationError(_refusal(storage, current, token))
    text = json.dumps({"generation": token.generation, "run": token.run, "session": token.session})
    write_small(storage, GENERATION_FENCE_NAME, text.encode())


def check_fence(storage: Storage, token: FenceToken) -> None:
    """StaleGenerationError when somebody claimed the fence after `token` did."""
    current = read_fence(storage)
    if current != token:
        raise StaleGenerationError(_refusal(storage, current, token))


def commit(storage: Storage, folder: str, manifest: Manifest, token: FenceToken, retry: Retry) -> None:
    """Publish a fully written temporary folder as its step; on return it survives a power cut.

    Each access is tried again by itself: the sequence as a whole must not run twice, it removes what stands in its way.
    """
    data = manifest.model_dump_json(by_alias=True).encode()
    target = folder_name(manifest.step)
    where = f"{storage.location}/{target}"
    retry.run(lambda: write_small(storage, f"{folder}/{MANIFEST_NAME}", data), where)
    retry.run(lambda: check_fence(storage, token), where)
    # A folder of that name is a leftover or was found damaged: a good one would have been resumed from.
    retry.run(lambda: storage.remove(target), where)
    retry.run(lambda: storage.rename(folder, target), where)
    receipt = Commit(step=manifest.step, manifest_digest=hashlib.sha256(data).hexdigest())
    text = receipt.model_dump_json(by_alias=True).encode()
    retry.run(lambda: write_small(storage, f"{target}/{COMMIT_NAME}", text), where)


def survey(storage: Storage) -> Survey:
    """Read what is below the root: commit files, manifests and sizes, no contents."""
    found = Survey()
    for entry in storage.list(""):
        if not entry.is_folder:
            continue
        step = step_of(entry.name)
        if step is None:
            if _TEMPORARY.match(entry.name):
                found.leftovers.append(entry.name)
            continue
        receipt = read_small(storage, f"{entry.name}/{COMMIT_NAME}")
        if receipt is None:
            found.leftovers.append(entry.name)
            continue
        outcome = _inspect(storage, entry.name, step, receipt)
        if isinstance(outcome, str):
            found.damaged[step] = outcome
        else:
            found.committed.append(Committed(step, outcome))
    found.committed.sort(key=lambda item: item.step, reverse=True)
    return found


def verify(storage: Storage, checkpoint: Committed, files: Sequence[ManifestFile] | None = None) -> list[str]:
    """What is wrong with the contents of these files (all by default); empty when every digest is right."""
    folder = folder_name(checkpoint.step)
    wanted = checkpoint.manifest.files if files is None else files
    with ThreadPoolExecutor(_VERIFY_THREADS, thread_name_prefix="verify") as pool:
        outcomes = pool.map(lambda file: _verify_file(storage, folder, file), wanted)
        return [outcome for outcome in outcomes if outcome]


def prune(storage: Storage, keep_last: int, known_bad: Iterable[int], newest: int) -> list[int]:
    """Remove checkpoints found damaged at resume and good ones beyond the newest `keep_last`; returns their steps.

    `newest`, which the caller has just committed, is kept whatever else is there.
    """
    bad = set(known_bad) - {newest}
    found = survey(storage)
    good = [item.step for item in found.committed if item.step not in bad and item.step != newest]
    present = {item.step for item in found.committed} | set(found.damaged)
    doomed = [*good[keep_last - 1 :], *sorted(bad & present)]
    for step in doomed:
        # Without its commit file first, so that a removal cut short leaves a leftover and not a damaged checkpoint.
        storage.remove(f"{folder_name(step)}/{COMMIT_NAME}")
        storage.remove(folder_name(step))
    return doomed


def _inspect(storage: Storage, folder: str, step: int, receipt: bytes) -> Manifest | str:
    try:
        record = Commit.model_validate_json(receipt)
        data = read_small(storage, f"{folder}/{MANIFEST_NAME}")
        if data is None:
            return f"{folder}/{MANIFEST_NAME} is missing"
        if record.step != step or hashlib.sha256(data).hexdigest() != record.manifest_digest:
            return f"{folder}/{MANIFEST_NAME} is not the one that was committed"
        manifest = Manifest.model_validate_json(data)
    except ValidationError:
        return f"{folder}/{COMMIT_NAME} or {MANIFEST_NAME} cannot be read"
    sizes = {entry.name: entry.size for entry in storage.list(folder)}
    for file in manifest.files:
        if file.name not in sizes:
            return f"{folder}/{file.name} is missing"
        if sizes[file.name] != file.size:
            return f"{folder}/{file.name} has {sizes[file.name]} bytes where {file.size} were written"
    return manifest


def _verify_file(storage: Storage, folder: str, file: ManifestFile) -> str | None:
    digest = hashlib.sha256()
    try:
        with storage.open_read(f"{folder}/{file.name}") as source:
            while piece := source.read(_PIECE_BYTES):
                digest.update(piece)
    except OSError as error:
        return f"{folder}/{file.name} cannot be read: {error.strerror}"
    if digest.hexdigest() != file.digest:
        return f"{folder}/{file.name} does not have the contents that were written"
    return None


def _refusal(storage: Storage, current: FenceToken | None, token: FenceToken) -> str:
    owner = "nobody" if current is None else f"generation {current.generation}"
    return (
        f"{storage.location} belongs to {owner} now: this process is of generation {token.generation}, an older start "
        "of the run, and must not commit"
    )

"""The commit protocol of durable checkpoints: who may commit below a root, and how an attempt is committed.

Layout below the root (`trainium_contract.wire.checkpoint_manifest`):
- `GENERATION` is the fence; it lists the attempts of all starts that have held it;
- `step-<n>/g<generation>-<session>/` is an attempt: the folder in which the ranks of one session write;
- `step-<n>/COMMITTED` commits an attempt.

Guarantees:
- `COMMITTED` is written last and contains the digest of the manifest. It is never replaced unless its checkpoint was
  found damaged.
- Only the session that claimed the fence last commits.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

from pydantic import ValidationError

from trainium_contract.wire.checkpoint_manifest import (
    COMMIT_NAME,
    GENERATION_FENCE_NAME,
    MANIFEST_NAME,
    Commit,
    Manifest,
)
from trainium_contract.wire.messages import MAX_GENERATION
from trainium_trainer.checkpoint.errors import StaleGenerationError, refuse_older_generation
from trainium_trainer.storage.protocol import Retry, Storage, read_small


@dataclass(frozen=True, slots=True)
class FenceToken:
    """The start that may commit below a root."""

    generation: int
    run: str
    """The identity of the job; a recreated job starts again at generation 1 and may acquire an old root."""
    session: str
    """The identity of one start of the ranks; an earlier attempt of the same generation is fenced out as well."""

    @property
    def attempt(self) -> str:
        """The name of the folders that this session writes."""
        return f"g{self.generation}-{self.session}"


@dataclass(frozen=True, slots=True)
class Fence:
    """The contents of `GENERATION`."""

    token: FenceToken
    attempts: frozenset[str] = frozenset()
    """The names of the folders that holders of the fence may have written; only these are ever removed."""


def read_fence(storage: Storage) -> Fence | None:
    """Read the fence; None when there is none or it cannot be parsed."""
    data = read_small(storage, GENERATION_FENCE_NAME)
    return None if data is None else parse_fence(data)


def parse_fence(data: bytes) -> Fence | None:
    """Parse the contents of `GENERATION`; None when they cannot be parsed."""
    try:
        raw = json.loads(data)
        token = FenceToken(int(raw["generation"]), str(raw.get("run", "")), str(raw.get("session", "")))
        if not 0 <= token.generation <= MAX_GENERATION:
            return None
        return Fence(token, frozenset(map(str, raw.get("attempts", ()))))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def read_attempts(storage: Storage) -> frozenset[str]:
    """Read the names of the folders that holders of the fence may have written."""
    fence = read_fence(storage)
    return frozenset() if fence is None else fence.attempts


def claim_fence(storage: Storage, token: FenceToken) -> None:
    """Claim the fence for `token`. Raises StaleGenerationError when this run has a newer generation already."""
    fence = refuse_newer(storage, token)
    earlier = frozenset[str]() if fence is None else fence.attempts
    fields = {"generation": token.generation, "run": token.run, "session": token.session}
    text = json.dumps(fields | {"attempts": sorted(earlier | {token.attempt})})
    storage.write(GENERATION_FENCE_NAME, text.encode())


def refuse_newer(storage: Storage, token: FenceToken) -> Fence | None:
    """Return the fence. Raises StaleGenerationError when this run has a newer generation already."""
    fence = read_fence(storage)
    if fence is not None and fence.token.run == token.run:
        refuse_older_generation(storage.location, fence.token.generation, token.generation)
    return fence


def check_fence(storage: Storage, token: FenceToken) -> None:
    """Raise StaleGenerationError when another start claimed the fence after `token` did."""
    fence = refuse_newer(storage, token)
    if fence is None or fence.token != token:
        owner = "nobody" if fence is None else f"generation {fence.token.generation}"
        raise StaleGenerationError(
            f"{storage.location} belongs to {owner} now: this process is of generation {token.generation}, another "
            "start of the run, and must not commit"
        )


@dataclass(frozen=True, slots=True)
class Receipt:
    """The receipt whose publication commits a checkpoint."""

    folder: str
    """The checkpoint's folder, relative to the root."""
    text: bytes


def prepare_commit(storage: Storage, folder: str, manifest: Manifest, token: FenceToken, retry: Retry) -> Receipt:
    """Write the manifest of `token`'s attempt in a checkpoint's folder and check that it may be committed.

    Raises StaleGenerationError when another start owns the root. Each access is retried separately.
    """
    data = manifest.model_dump_json(by_alias=True).encode()
    location = f"{storage.location}/{folder}"
    retry.run(lambda: storage.write(f"{folder}/{token.attempt}/{MANIFEST_NAME}", data), location)
    retry.run(lambda: check_fence(storage, token), location)
    commit = Commit(step=manifest.step, folder=token.attempt, manifest_digest=hashlib.sha256(data).hexdigest())
    return Receipt(folder, commit.model_dump_json(by_alias=True).encode())


def publish(storage: Storage, receipt: Receipt, retry: Retry, *, damaged: bool = False) -> None:
    """Commit a checkpoint; on return it survives a power failure.

    After any error the checkpoint may be committed nevertheless. `damaged`: the checkpoint committed there was found
    damaged and may be replaced. Raises StaleGenerationError when another start has committed that checkpoint.
    """
    name, location = f"{receipt.folder}/{COMMIT_NAME}", f"{storage.location}/{receipt.folder}"

    def once() -> None:
        if damaged:
            storage.write(name, receipt.text)
            return
        try:
            storage.create(name, receipt.text)
        except FileExistsError as error:
            # The receipt is this start's if only the response of the store was lost.
            if read_small(storage, name) != receipt.text:
                raise StaleGenerationError(f"{location} was committed by another start of the run meanwhile") from error

    retry.run(once, location)


def read_commit(storage: Storage, folder: str) -> Commit | None:
    """Read the receipt in a checkpoint's folder; None when there is none. Raises ValueError for an unknown format."""
    data = read_small(storage, f"{folder}/{COMMIT_NAME}")
    if data is None:
        return None
    try:
        return Commit.model_validate_json(data)
    except ValidationError as error:
        raise ValueError(f"{folder}/{COMMIT_NAME} cannot be read") from error

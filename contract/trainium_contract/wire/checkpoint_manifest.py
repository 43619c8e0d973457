"""Define the checkpoint manifest: the content of a committed durable checkpoint, and the commit rule.

A durable checkpoint is a folder: `step-<n>` holds a whole training state, `milestone-<n>` the weights alone. Each
attempt to write one has a separate folder inside it, with the data files and `manifest.json`, which lists every other
file with its size and digest. The checkpoint counts when its folder holds `COMMITTED`, which is written last,
atomically and only if it does not exist yet. It names the attempt's folder and the digest of its manifest. A reader
that finds a missing, truncated or altered file uses the next older committed checkpoint. Nothing is renamed, so the
rule is the same on file systems and object stores.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Any

from pydantic import Field

from trainium_contract.base import ContractModel, MessageModel

MANIFEST_NAME = "manifest.json"
INDEX_NAME = "index.json"
"""The index describes the division of the tensors."""
COMMIT_NAME = "COMMITTED"
SET_ASIDE_NAME = "SET-ASIDE"
"""Instead of `COMMITTED`: a person disabled the checkpoint; its files stay and are never deleted to free space."""
GENERATION_FENCE_NAME = "GENERATION"
"""Holds the newest generation that may commit below this root; an older one is refused."""
OWNER_PREFIX = "OWNER-"
"""`OWNER-<n>` names the job that owns the folder; the largest number counts."""
FORMAT_VERSION = 3
"""The version that is written and read."""
BLOCK_BYTES = 8 << 20
"""Files are hashed in blocks of this size, so that a part of a file can be verified and blocks hashed in parallel."""

_STEP = re.compile(r"^step-(\d{1,15})$")
_RANK_FILE = re.compile(r"shard-\d{5,}\.safetensors|blocks-\d{5,}\.json|index\.json|manifest\.json")
_MILESTONE = re.compile(r"^milestone-(\d{1,15})$")


class Checksum(StrEnum):
    """Checksum algorithms a manifest may use."""

    SHA256_BLOCKS = "sha256-8MiB"
    """SHA-256 of the SHA-256 digests of the file's blocks of 8 MiB (`file_digest`)."""


class CheckpointKind(StrEnum):
    """Contents of a checkpoint."""

    STATE = "State"
    """The complete training state."""
    WEIGHTS = "Weights"
    """The weights alone: a milestone."""


class ManifestFile(ContractModel):
    """One file of a checkpoint."""

    name: str
    """Path relative to the manifest's folder."""
    size: int = Field(ge=0)
    """Bytes."""
    digest: str
    """Lower-case hex digest by the manifest's algorithm."""


class Manifest(MessageModel):
    """Contents of `manifest.json`."""

    format_version: int = FORMAT_VERSION
    kind: CheckpointKind = CheckpointKind.STATE
    step: int = Field(ge=0)
    """Optimizer steps completed."""
    samples: int = Field(ge=0)
    """Global sample position: samples consumed by those steps."""
    tokens: int = Field(ge=0)
    """Valid tokens trained on."""
    generation: int = Field(ge=0)
    """Membership generation that wrote it; 0 outside the operator."""
    world_size: int = Field(ge=1)
    data_parallel: int = Field(ge=1)
    tensor_parallel: int = Field(ge=1)
    pipeline_parallel: int = Field(ge=1, default=1)
    config_digest: str
    """Digest of `settings`."""
    settings: dict[str, Any] = {}
    """The settings that must not change between runs: model, data, sequence length, batch, seeds."""
    created: float
    """Unix seconds."""
    algorithm: Checksum = Checksum.SHA256_BLOCKS
    files: tuple[ManifestFile, ...]


class Commit(MessageModel):
    """Contents of `COMMITTED`."""

    format_version: int = FORMAT_VERSION
    step: int
    folder: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """The attempt that was committed: the folder, inside the checkpoint's, that holds `manifest.json` and the files."""
    manifest_digest: str
    """sha256 of the bytes of `manifest.json`."""


class Owner(MessageModel):
    """Contents of `OWNER-<n>`."""

    cluster: str = ""
    """uid of the namespace kube-system of the job's cluster; empty where it is not known."""
    namespace: str
    name: str
    uid: str
    """The TrainingJob's."""
    since: float = 0.0
    """Unix seconds."""
    before: tuple[str, ...] = ()
    """uids of earlier owners of the folder, newest last."""

    @property
    def label(self) -> str:
        """Namespace and name of the job."""
        return f"{self.namespace}/{self.name}"


def folder_name(step: int) -> str:
    """Return the folder name of the durable checkpoint of `step`."""
    return f"step-{step}"


def parse_step(folder: str) -> int | None:
    """Return the step of a checkpoint folder's name; None for any other name."""
    match = _STEP.match(folder)
    return int(match.group(1)) if match else None


def milestone_name(step: int) -> str:
    """Return the folder name of the milestone of `step`."""
    return f"milestone-{step}"


def parse_milestone(folder: str) -> int | None:
    """Return the step of a milestone folder's name; None for any other name."""
    match = _MILESTONE.match(folder)
    return int(match.group(1)) if match else None


def shard_name(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"shard-{rank:05d}.safetensors"


def blocks_name(first: int) -> str:
    """Return the name of the file with the digests of several ranks' files, of which this rank is the first."""
    return f"blocks-{first:05d}.json"


def is_rank_file(name: str) -> bool:
    """Return whether a file name in an attempt's folder is one that ranks write."""
    return _RANK_FILE.fullmatch(name) is not None


def block_digest(pieces: Iterable[bytes | memoryview]) -> str:
    """Return the hex SHA-256 of one block, given in pieces."""
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


def file_digest(blocks: Sequence[str]) -> str:
    """Return the digest of a file from the digests of its blocks, in order."""
    return hashlib.sha256(b"".join(bytes.fromhex(block) for block in blocks)).hexdigest()


def digest_bytes(data: bytes) -> str:
    """Return the digest of a file's contents by `Checksum.SHA256_BLOCKS`."""
    return file_digest([block_digest([data[at : at + BLOCK_BYTES]]) for at in range(0, len(data), BLOCK_BYTES)])

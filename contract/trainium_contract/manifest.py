"""The checkpoint manifest: what a committed durable checkpoint consists of, and the commit rule.

A durable checkpoint is a folder `step-<n>`. It counts only when it holds `COMMITTED`, which is written last,
atomically, and names the digest of `manifest.json`; the manifest lists every other file with its size and checksum.
A reader that finds a missing, truncated or altered file takes the next older committed folder.
"""

from __future__ import annotations

import re
from enum import StrEnum

from pydantic import Field

from trainium_contract.base import ContractModel, MessageModel

MANIFEST_NAME = "manifest.json"
COMMIT_NAME = "COMMITTED"
GENERATION_FENCE_NAME = "GENERATION"
"""Holds the newest generation that may commit below this root; an older one is refused."""
FORMAT_VERSION = 1

_FOLDER = re.compile(r"^step-(\d{1,15})$")


class Checksum(StrEnum):
    """Checksum algorithms a manifest may use."""

    SHA256 = "sha256"


class ManifestFile(ContractModel):
    """One file of a checkpoint."""

    name: str
    """Path relative to the checkpoint folder."""
    size: int = Field(ge=0)
    """Bytes."""
    digest: str
    """Lower-case hex digest by the manifest's algorithm."""


class Manifest(MessageModel):
    """Contents of `manifest.json`."""

    format_version: int = FORMAT_VERSION
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
    """Digest of the settings that must not change between runs (model, tokenizer, data, seed)."""
    created: float
    """Unix seconds."""
    algorithm: Checksum = Checksum.SHA256
    files: tuple[ManifestFile, ...]


class Commit(MessageModel):
    """Contents of `COMMITTED`."""

    step: int
    manifest_digest: str
    """sha256 of the bytes of `manifest.json`."""


def folder_name(step: int) -> str:
    """Folder of the durable checkpoint of `step`."""
    return f"step-{step}"


def step_of(folder: str) -> int | None:
    """Step of a checkpoint folder's name; None for any other name."""
    match = _FOLDER.match(folder)
    return int(match.group(1)) if match else None

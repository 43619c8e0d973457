"""The manifest of an artifact, and the plan and receipts of an incomplete one.

An artifact is a folder. Its data files are written first, then the files that describe them, then `artifact.json` with
size and SHA-256 of each, and last the file that identifies the folder as a model (`config.json`) or an adapter
(`adapter_config.json`). Until then `unfinished/` holds the plan and a receipt of each complete data file.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

from pydantic import Field

from trainium_contract.base import MessageModel
from trainium_contract.trainer.artifacts import ArtifactKind

if TYPE_CHECKING:
    from collections.abc import Iterable

MANIFEST_NAME = "artifact.json"
UNFINISHED = "unfinished"
PLAN_NAME = f"{UNFINISHED}/plan.json"
CARD_NAME = "README.md"
LAST_NAMES = {ArtifactKind.MODEL: "config.json", ArtifactKind.ADAPTER: "adapter_config.json"}
"""The file that completes an artifact, by kind."""
FORMAT_VERSION = 1


class ArtifactFile(MessageModel):
    """A file of an artifact."""

    name: str
    size: int = Field(ge=0)
    """The size in bytes."""
    digest: str
    """The lower-case hex SHA-256 of the contents."""


class ArtifactManifest(MessageModel):
    """The contents of `artifact.json`, without the model card, to which results may be added."""

    format_version: int = FORMAT_VERSION
    kind: ArtifactKind
    step: int = Field(ge=0)
    """The optimizer step of its checkpoint."""
    identity: str
    """The digest of its inputs and settings."""
    files: tuple[ArtifactFile, ...]

    @property
    def size(self) -> int:
        """The size of all files in bytes."""
        return sum(file.size for file in self.files)

    @property
    def digest(self) -> str:
        """The hex SHA-256 of names and digests of the files."""
        lines = sorted(f"{file.digest}  {file.name}\n" for file in self.files)
        return hashlib.sha256("".join(lines).encode()).hexdigest()


class WritePlan(MessageModel):
    """The contents of `unfinished/plan.json`: the decisions of the first writer, which all later ones follow."""

    format_version: int = FORMAT_VERSION
    identity: str
    writers: int = Field(ge=1)
    """The number of ranks for which the files were divided."""


def format_receipt_name(file: str) -> str:
    """Return the name of a data file's receipt, which is an `ArtifactFile`."""
    return f"{UNFINISHED}/{file}.json"


def describe_file(name: str, data: bytes) -> ArtifactFile:
    """Return the entry of a small file."""
    return ArtifactFile(name=name, size=len(data), digest=hashlib.sha256(data).hexdigest())


def hash_json(facts: Iterable[object]) -> str:
    """Return the hex digest of JSON values."""
    return hashlib.sha256(json.dumps(list(facts), sort_keys=True).encode()).hexdigest()

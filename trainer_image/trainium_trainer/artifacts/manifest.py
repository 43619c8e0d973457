"""The manifest of an artifact, and the plan and receipts of an incomplete one.

An artifact is a folder. Its data files come first, then what describes them, then `artifact.json` with size and SHA-256
of each, and last the file without which no program takes the folder for a model (`config.json`) or an adapter
(`adapter_config.json`). Until then `unfinished/` holds the plan and a receipt of each data file that is whole.
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
"""What makes a folder count, by kind."""
FORMAT_VERSION = 1


class ArtifactFile(MessageModel):
    """One file."""

    name: str
    size: int = Field(ge=0)
    """Bytes."""
    digest: str
    """Lower-case hex SHA-256 of its contents."""


class ArtifactManifest(MessageModel):
    """Contents of `artifact.json`. The model card is not among the files: results may be added to it."""

    format_version: int = FORMAT_VERSION
    kind: ArtifactKind
    step: int = Field(ge=0)
    """Optimizer step that it was made from."""
    identity: str
    """Digest of what it was made from and how."""
    files: tuple[ArtifactFile, ...]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    @property
    def digest(self) -> str:
        """Hex SHA-256 over names and digests of the files."""
        lines = sorted(f"{file.digest}  {file.name}\n" for file in self.files)
        return hashlib.sha256("".join(lines).encode()).hexdigest()


class WritePlan(MessageModel):
    """Contents of `unfinished/plan.json`: what the first writer decided and all later ones keep to."""

    format_version: int = FORMAT_VERSION
    identity: str
    writers: int = Field(ge=1)
    """Ranks that the files were divided for."""


def receipt_name(file: str) -> str:
    """Return the name of a data file's receipt, which is an `ArtifactFile`."""
    return f"{UNFINISHED}/{file}.json"


def file_of(name: str, data: bytes) -> ArtifactFile:
    """Return the entry of a small file."""
    return ArtifactFile(name=name, size=len(data), digest=hashlib.sha256(data).hexdigest())


def identity_of(facts: Iterable[object]) -> str:
    """Hex digest of facts that JSON can hold."""
    return hashlib.sha256(json.dumps(list(facts), sort_keys=True).encode()).hexdigest()

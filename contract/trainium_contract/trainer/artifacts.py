"""`trainer.artifacts`: the results of a run for other programs, in Hugging Face's and peft's formats."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from trainium_contract.base import ContractModel, MatchesPattern

_Path = Annotated[str, Field(min_length=1, max_length=1024)]


class ArtifactKind(StrEnum):
    """Kind of an artifact."""

    ADAPTER = "Adapter"
    """The adapter alone, as peft reads it; LoRA only."""
    MODEL = "Model"
    """The whole model as a Hugging Face folder; with LoRA the adapter is merged into it."""


class ArtifactPrecision(StrEnum):
    """Number format of a model's weights; adapters are written in float32."""

    FLOAT32 = "Float32"
    BFLOAT16 = "BFloat16"
    FLOAT16 = "Float16"


class PushConfig(ContractModel):
    """A repository of the Hugging Face hub that receives an artifact of the last step, after the evaluation.

    Its token is the environment variable HF_TOKEN, from a Secret. The repository is created before the first step.
    """

    repo: Annotated[
        str,
        Field(min_length=1, max_length=128),
        MatchesPattern(r"[\w.-]+/[\w.-]+", "write the name of a repository on the hub, owner/name"),
    ]
    """Name of the repository, for instance acme/llama3-support."""
    private: bool = True
    """Whether a new repository is private."""
    kind: ArtifactKind | None = None
    """Artifact that is pushed; omitted: `Model` if the run writes one, else `Adapter`."""


class ArtifactsConfig(ContractModel):
    """Artifacts that all ranks write together after the last step."""

    kinds: Annotated[tuple[ArtifactKind, ...], Field(max_length=4)] | None = None
    """Omitted: `Adapter` and `Model` for LoRA, `Model` for a run with `model.weights`, else none."""
    precision: ArtifactPrecision = ArtifactPrecision.BFLOAT16
    """Number format of `Model`; merging itself is done in float32."""
    path: _Path | None = None
    """Folder or s3://bucket/prefix to write below; omitted: `artifacts` below the checkpoints."""
    at_milestones: bool = False
    """Also at each milestone (checkpoint.milestones), during training."""
    push: PushConfig | None = None
    """Repository on the Hugging Face hub; omitted: none."""

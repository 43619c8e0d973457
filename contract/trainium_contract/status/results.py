"""Define figures of a run's newest step, its alerts, and its results: its stage, its artifacts, its evaluation.

The trainer writes these for its agent, heartbeats carry them (`messages`), and the status has them (`job`). Readers are
lenient: a kind or a stage of a newer version is shown or skipped, never refused. Everything is bounded.
"""

from __future__ import annotations

import math
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from trainium_contract.base import MessageModel, Text

_MAX_SAFE_INTEGER = 2**53
MAX_ARTIFACTS = 8
"""Newest artifacts that are reported and shown."""
MAX_FIGURES = 16
"""Figures of an evaluation that are reported and shown."""
MAX_EVALUATIONS = 32
"""Newest milestones whose figures are shown."""


class RunStage(StrEnum):
    """Stages of a run, in order; ahead-of-time compilation (`precompile`) precedes them."""

    TRAIN = "Train"
    """Training steps."""
    EXPORT = "Export"
    """Artifacts are being written: adapter, merged model."""
    EVALUATE = "Evaluate"
    """The result is being measured on held-out examples."""

    @property
    def number(self) -> int:
        """Place in the order, from 0."""
        return tuple(RunStage).index(self)

    @staticmethod
    def parse(name: str) -> RunStage:
        """Return the stage of this name; `TRAIN` for another name that a program uses."""
        return RunStage(name) if name in tuple(RunStage) else RunStage.TRAIN


StageName = Annotated[str, Field(max_length=32)]
"""A RunStage; readers treat an unknown stage as one after the last step."""


def _keep_finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


Figure = Annotated[float | None, AfterValidator(_keep_finite)]
"""A measured value; absent if it was not a finite number."""


class StepFigures(MessageModel):
    """Figures of the newest finished optimizer step; measured ones have the same name in the progress record."""

    step: int = Field(ge=0, le=_MAX_SAFE_INTEGER, default=0)
    """Newest finished optimizer step."""
    total_steps: int = Field(ge=0, le=_MAX_SAFE_INTEGER, default=0)
    """Steps of the whole run; 0 while epochs decide and the trainer has not read its data."""
    loss: Figure = None
    """Loss of that step."""
    learning_rate: Figure = None
    """Learning rate of that step."""
    grad_norm: Figure = None
    """Norm of the gradient of that step, before it is clipped."""
    tokens_per_second: Figure = None
    """Throughput of the whole job."""
    samples_per_second: Figure = None
    """Throughput of the whole job in samples: sequences, or pairs of preference tuning."""
    reward_margin: Figure = None
    """Mean difference of the rewards of two answers in that step; preference tuning only."""
    reward_accuracy: Figure = None
    """Share of that step's pairs whose preferred answer has the greater reward; preference tuning only."""


FIGURES = tuple(name for name in StepFigures.model_fields if name not in ("step", "total_steps"))
"""Names of the measured figures."""


class Alert(MessageModel):
    """An alert of the trainer's monitors."""

    kind: Annotated[str, Field(max_length=64)]
    """`LossSpike`, `LossAlarm` or `StepSkipped`."""
    step: int = Field(ge=0, le=_MAX_SAFE_INTEGER)
    """The step that raised it."""
    message: Text = ""
    """Evidence of it, and what to do."""


class ArtifactReport(MessageModel):
    """One artifact that is complete."""

    kind: Annotated[str, Field(min_length=1, max_length=32)]
    """`Adapter` or `Model`."""
    path: Annotated[str, Field(min_length=1, max_length=1024)]
    """Its place: a folder as the workers see it, or s3://bucket/prefix."""
    step: int = Field(ge=0, le=_MAX_SAFE_INTEGER)
    """Optimizer step of its weights."""
    bytes: int = Field(ge=0, le=_MAX_SAFE_INTEGER, default=0)
    """Size of all its files."""
    digest: Annotated[str, Field(max_length=128)] = ""
    """Checksum over its files; the same weights and settings give the same checksum."""
    tokens: int = Field(ge=0, le=_MAX_SAFE_INTEGER, default=0)
    """Valid tokens trained on up to that step."""


class EvaluationFigure(MessageModel):
    """One measure of the evaluation; absent if it could not be measured."""

    name: Annotated[str, Field(min_length=1, max_length=192)]
    """Which one, for instance `perplexity`, `rougeL`, `accuracy`, or a task and its measure as in `mmlu acc`."""
    before: Figure = None
    """Figure of the initial model; absent if it was not measured."""
    after: Figure = None
    """Figure of the result."""
    standard_error: Figure = None
    """Standard error of `after`; absent if unknown."""


class MilestoneEvaluation(MessageModel):
    """Figures of a milestone's model, which a pod beside the workers measures."""

    step: int = Field(ge=0, le=_MAX_SAFE_INTEGER)
    """Optimizer step of the model's weights."""
    tokens: int = Field(ge=0, le=_MAX_SAFE_INTEGER, default=0)
    """Valid tokens trained on up to that step."""
    path: Annotated[str, Field(min_length=1, max_length=1024)]
    """The model: a folder as the workers see it, or s3://bucket/prefix."""
    bytes: int = Field(ge=0, le=_MAX_SAFE_INTEGER, default=0)
    """Size of its files."""
    figures: Annotated[tuple[EvaluationFigure, ...], Field(max_length=MAX_FIGURES)] = ()
    """Figures of the model, in `after`; empty until it is measured."""
    failures: int = Field(ge=0, le=_MAX_SAFE_INTEGER, default=0)
    """Pods that failed to measure it; after three it is skipped."""
    message: Text = ""
    """Why it is not measured yet, or not at all."""
    time: Annotated[str, Field(max_length=32)] = ""
    """When it was measured, or a pod last failed to measure it, RFC 3339."""


class RunResults(MessageModel):
    """The file that a training process writes beside its progress record."""

    artifacts: Annotated[tuple[ArtifactReport, ...], Field(max_length=MAX_ARTIFACTS)] = ()
    """The newest ones, oldest first; each kind and step once."""
    evaluation: Annotated[tuple[EvaluationFigure, ...], Field(max_length=MAX_FIGURES)] = ()
    """The newest evaluation."""

    def add_artifact(self, report: ArtifactReport) -> RunResults:
        """Return the results with an artifact, which replaces an earlier report of the same kind, step and path."""
        others = tuple(
            artifact for artifact in self.artifacts if _get_artifact_key(artifact) != _get_artifact_key(report)
        )
        return self.replaced(artifacts=(*others, report)[-MAX_ARTIFACTS:])

    def set_evaluation(self, figures: tuple[EvaluationFigure, ...]) -> RunResults:
        """Return the results with this evaluation, without figures beyond the bound."""
        return self.replaced(evaluation=figures[:MAX_FIGURES])


def _get_artifact_key(report: ArtifactReport) -> tuple[str, int, str]:
    return report.kind, report.step, report.path


def get_results_path(progress: Path) -> Path:
    """Return the path of the results (a `RunResults` in JSON) that a rank writes beside its progress record."""
    return progress.with_name(f"{progress.name}.results")


def read_results(progress: Path) -> RunResults:
    """Read the results beside a record; empty if they cannot be read."""
    try:
        return RunResults.model_validate_json(get_results_path(progress).read_bytes())
    except (OSError, ValueError):
        return RunResults()

"""Read the trainer's configuration from the manifest of a TrainingJob (`spec.trainer`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from trainium_contract.job import TrainingJobSpec
from trainium_trainer.exits import UserError
from trainium_trainer.validation_errors import explain

if TYPE_CHECKING:
    from pathlib import Path


def spec_of(path: Path, document: dict[str, Any]) -> TrainingJobSpec:
    """Return the spec of a manifest that was read from `path`. Raises UserError."""
    try:
        return TrainingJobSpec.model_validate(document.get("spec") or {})
    except ValidationError as error:
        raise UserError(f"{path}: spec: {explain(error, TrainingJobSpec)}") from error

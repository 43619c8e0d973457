"""Select the checkpoint that a command reads, and read the model's shape from it.

Guarantees:
- A damaged file ends a command with an error that names it, never with an incomplete result.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from trainium_contract.models.shape import ModelShape
from trainium_trainer.checkpoint.errors import UnusableCheckpointError
from trainium_trainer.checkpoint.root.survey import CommittedCheckpoint, survey
from trainium_trainer.exits import UserError
from trainium_trainer.storage.errors import DamagedFileError, create_storage_error

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainium_trainer.storage.protocol import Storage


def choose_checkpoint(storage: Storage, root: str, step: int | None, *, milestones: bool) -> CommittedCheckpoint:
    """Return the checkpoint of a step, the newest for None.

    `milestones`, which hold only the weights, may be included. Raises UserError with the existing steps and the damage
    of unusable ones; StorageError when the store fails.
    """
    try:
        checkpoints = survey(storage)
    except OSError as error:
        raise create_storage_error(error, root) from error
    candidates: list[CommittedCheckpoint] = checkpoints.committed + (checkpoints.milestones if milestones else [])
    problems = "; ".join([*checkpoints.damaged.values(), *checkpoints.other_versions.values()])
    if not candidates:
        damage = f" that can be used ({problems})" if problems else ""
        raise UserError(
            f"there is no committed checkpoint{damage} in {root}: name the folder that holds the step-N folders"
        )
    if step is None:
        return max(candidates, key=lambda item: item.step)
    for candidate in candidates:
        if candidate.step == step:
            return candidate
    steps = ", ".join(str(number) for number in sorted({candidate.step for candidate in candidates}))
    damage = f" ({problems})" if problems else ""
    raise UserError(f"there is no committed checkpoint of step {step} in {root}{damage}: there are {steps}")


def parse_shape(checkpoint: CommittedCheckpoint) -> ModelShape:
    """Return the shape of a checkpoint's model. Raises UserError when the checkpoint does not describe its model."""
    try:
        return ModelShape.from_json(checkpoint.manifest.settings["model"])
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{checkpoint.folder} has no description of its model ({error}): take it with the version that wrote it"
        ) from error


@contextmanager
def explain_damage(root: str) -> Iterator[None]:
    """Turn DamagedFileError into UnusableCheckpointError with the remedy."""
    try:
        yield
    except DamagedFileError as error:
        raise UnusableCheckpointError(
            f"{error}: take another checkpoint with --step; `trainium-trainer inspect {root} --verify` shows which are "
            "whole"
        ) from error

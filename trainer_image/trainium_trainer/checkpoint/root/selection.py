"""The checkpoint that a command is to read, and the model that it holds.

Guarantees:
- A damaged file ends a command with a sentence that names it, never with half a result that looks whole.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from trainium_contract.models.shape import ModelShape
from trainium_trainer.checkpoint.errors import UnusableCheckpointError
from trainium_trainer.checkpoint.root.survey import Committed, survey
from trainium_trainer.exits import UserError
from trainium_trainer.storage.errors import DamagedFileError, storage_error

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainium_trainer.storage.protocol import Storage


def choose(storage: Storage, root: str, step: int | None, *, milestones: bool) -> Committed:
    """Return the checkpoint of a step, the newest for None.

    `milestones`: those, which are the weights alone, count too.

    Raises UserError with the steps that exist, and with what is wrong where one is damaged; StorageError when the
    store fails.
    """
    try:
        found = survey(storage)
    except OSError as error:
        raise storage_error(error, root) from error
    candidates: list[Committed] = found.committed + (found.milestones if milestones else [])
    problems = "; ".join([*found.damaged.values(), *found.newer.values()])
    if not candidates:
        known = f" that can be used ({problems})" if problems else ""
        raise UserError(
            f"there is no committed checkpoint{known} in {root}: name the folder that holds the step-N folders"
        )
    if step is None:
        return max(candidates, key=lambda item: item.step)
    for each in candidates:
        if each.step == step:
            return each
    steps = ", ".join(str(number) for number in sorted({each.step for each in candidates}))
    known = f" ({problems})" if problems else ""
    raise UserError(f"there is no committed checkpoint of step {step} in {root}{known}: there are {steps}")


def shape_of(checkpoint: Committed) -> ModelShape:
    """Return the model that a checkpoint holds. Raises UserError when it has no description of it."""
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

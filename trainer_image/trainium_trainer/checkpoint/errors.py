"""Errors of checkpoints with a message for the user; the base classes carry the exit code of the contract."""

from __future__ import annotations

from trainium_contract.exit_codes import ExitCode
from trainium_contract.wire.checkpoint_manifest import GENERATION_FENCE_NAME
from trainium_contract.wire.messages import MAX_GENERATION_LEAD
from trainium_trainer.exits import PeerLostError, StorageError, TrainerError, UserError


class StaleGenerationError(PeerLostError):
    """A newer start of the run owns this folder: this process is outdated and must not write."""

    def __init__(self, message: str, newer: int = 0) -> None:
        """Create the error; `newer` is the generation of the owner, 0 if it is of the same one or unknown."""
        super().__init__(message)
        self.newer = newer


class TooSlowError(TrainerError):
    """A save exceeds its time limit (81): it cannot be cancelled, so this process cannot save any more."""

    code = ExitCode.STORAGE_UNAVAILABLE


class UnusableCheckpointError(UserError):
    """This configuration cannot continue the existing checkpoints; a user must decide."""


def refuse_older_generation(location: str, newest: int, own: int) -> None:
    """Raise StaleGenerationError if `location` has a newer generation of this run.

    The operator then starts above it. Raises UnusableCheckpointError if the number is too large to be one of this run.
    """
    if newest > own + MAX_GENERATION_LEAD:
        raise UnusableCheckpointError(
            f"{location} belongs to generation {newest} of this run, and this process is of generation {own}: such a "
            f"lead is no fault of a cluster. Remove the file {GENERATION_FENCE_NAME} there if no other cluster runs "
            "this job"
        )
    if newest > own:
        raise StaleGenerationError(
            f"{location} belongs to generation {newest} now: this process is of generation {own}, an older start of "
            "the run, and must not write",
            newest,
        )


def explain_failure(error: BaseException, location: str) -> BaseException:
    """Return the error to raise on the training thread; a failure of the store becomes a StorageError."""
    if isinstance(error, OSError) and not isinstance(error, ConnectionError):
        return StorageError(f"checkpoint storage {location}: {error}")
    return error

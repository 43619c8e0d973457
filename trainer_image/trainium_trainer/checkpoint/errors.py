"""Errors of checkpoints with a message for the user; the base classes carry the exit code of the contract."""

from __future__ import annotations

from trainium_contract.exit_codes import ExitCode
from trainium_trainer.exits import PeerLostError, StorageError, TrainerError, UserError


class StaleGenerationError(PeerLostError):
    """A newer start of the run owns this folder: this process is outdated and must not write."""


class TooSlowError(TrainerError):
    """A save exceeds its time limit (81): it cannot be cancelled, so this process cannot save any more."""

    code = ExitCode.STORAGE_UNAVAILABLE


class UnusableCheckpointError(UserError):
    """This configuration cannot continue the existing checkpoints; a user must decide."""


def explain_failure(error: BaseException, where: str) -> BaseException:
    """Return the error to raise on the training thread; a failure of the store becomes a StorageError."""
    if isinstance(error, OSError) and not isinstance(error, ConnectionError):
        return StorageError(f"checkpoint storage {where}: {error}")
    return error

"""Failures of checkpoints: a sentence for a person; the base classes carry the exit code of the contract."""

from __future__ import annotations

from trainium_trainer.exits import PeerLostError, StorageError, UserError


class StaleGenerationError(PeerLostError):
    """A newer start of the run owns this folder: this process is a leftover and must not write."""


class TooSlowError(StorageError):
    """A save that does not end: it cannot be called back, so there is no other save to hope for in this process."""


class UnusableCheckpointError(UserError):
    """The checkpoints that are there cannot be continued by this configuration; a person must decide."""


def explain_failure(error: BaseException, where: str) -> BaseException:
    """Return the error to raise on the training thread: of a store's failure its sentence."""
    if isinstance(error, OSError) and not isinstance(error, ConnectionError):
        return StorageError(f"checkpoint storage {where}: {error}")
    return error

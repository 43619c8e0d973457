"""Failures of checkpoints: a sentence for a person; the base classes carry the exit code of the contract."""

from __future__ import annotations

from trainium_trainer.exits import PeerLostError, StorageError, UserError


class StaleGenerationError(PeerLostError):
    """A newer start of the run owns this folder: this process is a leftover and must not write."""


class TooSlowError(StorageError):
    """A save that does not end: it cannot be called back, so there is no other save to hope for in this process."""


class UnusableCheckpointError(UserError):
    """The checkpoints that are there cannot be continued by this configuration; a person must decide."""

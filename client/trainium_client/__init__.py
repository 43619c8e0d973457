"""The client of the cluster: `kubectl trn`, and `TrainingJob` for Python programs.

Invariants: imports only the contract, neither operator nor trainer. Needs a kubeconfig and no more rights than kubectl.
Importing this package loads nothing, so that a command starts fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainium_client.job import JobFailedError, TrainingJob
    from trainium_contract.api_server.errors import ClientError

__all__ = ["ClientError", "JobFailedError", "TrainingJob"]


def __getattr__(name: str) -> Any:
    """Load the names above when they are first used."""
    if name == "ClientError":
        from trainium_contract.api_server.errors import ClientError  # noqa: PLC0415

        return ClientError
    if name in __all__:
        from trainium_client import job  # noqa: PLC0415

        return getattr(job, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

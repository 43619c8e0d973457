"""Access the Hugging Face hub through its library.

Guarantees:
- The token comes from the environment variable HF_TOKEN and is passed only to the library.
- A refusal of the hub raises UserError; a failure of the hub or of the network raises StorageError.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from trainium_trainer.exits import StorageError, TrainerError, UserError

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")
TOKEN = "HF_TOKEN"  # noqa: S105 - the variable's name
_LOST = frozenset({"TransportError", "RequestException", "LocalEntryNotFoundError"})
"""The names of network errors in the clients."""


@dataclass(frozen=True, slots=True)
class Repository:
    """A repository of the hub, for messages about it."""

    field: str
    """The field or command that names the repository."""
    name: str
    kind: str = "model"
    revision: str | None = None
    revision_advice: str = "correct --revision or leave it out"
    access: str = "read it"
    """The permission that a token needs."""

    @property
    def where(self) -> str:
        """Return the beginning of a message."""
        return f"{self.field} {self.name}"


def find_token() -> str | bool:
    """Return the token of this process; False for none, so that no login of this machine is used."""
    return os.environ.get(TOKEN) or False


def find_endpoint() -> str | None:
    """Return the address of the hub; None for the library's default."""
    return os.environ.get("HF_ENDPOINT") or None


def create_client() -> Any:
    """Return a client."""
    from huggingface_hub import HfApi  # noqa: PLC0415 - few runs ask the hub

    return HfApi(endpoint=find_endpoint(), token=find_token())


def call_hub(request: Callable[[], T], about: Repository) -> T:
    """Return the hub's response. Raises UserError and StorageError, and unknown errors as they are."""
    try:
        return request()
    except Exception as error:
        explained = _convert_error(error, about)
        if explained is None:
            raise
        raise explained from error


def _convert_error(error: Exception, about: Repository) -> TrainerError | None:
    """Return the error to raise for an error of the hub's library; None for an unknown one."""
    from huggingface_hub import errors  # noqa: PLC0415 - as above

    where, kind = about.where, about.kind
    lost = StorageError(f"{where}: the hub cannot be reached: look at the network, then start again")
    match error:
        case errors.GatedRepoError():
            return UserError(
                f"{where}: the {kind} is gated: accept its terms on its page of the hub, and set {TOKEN} to a token of "
                "that account"
            )
        case errors.RevisionNotFoundError():
            return UserError(f"{where}: has no revision {about.revision}: {about.revision_advice}")
        case errors.RepositoryNotFoundError():
            return UserError(
                f"{where}: there is no such {kind}, or it may not be read: correct the name, or set {TOKEN} if it is "
                "private"
            )
        case errors.HFValidationError():
            return UserError(f"{where}: is not the name of a {kind}: write owner/name")
        case errors.HfHubHTTPError() if error.response.status_code in (401, 403):
            return UserError(f"{where}: the hub refused the token: set {TOKEN} to one that may {about.access}")
        case errors.HfHubHTTPError():
            status = error.response.status_code
            return StorageError(f"{where}: the hub answered {status}: start again later, what is there stays")
        case errors.LocalEntryNotFoundError() | ConnectionError() | TimeoutError():
            return lost
        case RuntimeError(__cause__=Exception() as cause):  # of a large file
            return _convert_error(cause, about)
    # By name, because the library has changed its HTTP client before.
    return lost if {kind.__name__ for kind in type(error).__mro__} & _LOST else None

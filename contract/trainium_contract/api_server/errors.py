"""Errors between a program and a cluster; each message is a sentence, with the remedy if there is one."""

from __future__ import annotations


class ClientError(Exception):
    """A command or a request cannot be carried out."""


class NoClusterError(ClientError):
    """No usable kubeconfig or ServiceAccount."""


class ApiError(ClientError):
    """The API server refused or could not be reached; `status` is 0 when there was no answer."""

    def __init__(self, message: str, *, status: int = 0, reason: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason


class UnavailableError(ApiError):
    """No answer, overloaded (429) or failing (5xx) after all retries: try again later."""


class ConnectionFailedError(UnavailableError):
    """No answer: connection refused, reset, or timed out."""


class NotFoundError(ApiError):
    """404: the object, or its kind, does not exist."""


class AlreadyExistsError(ApiError):
    """409 at creation: an object of that name exists."""


class ConflictError(ApiError):
    """409: a precondition (uid, resourceVersion) failed, or another manager owns a field: read again and recompute."""


class NotOursError(ConflictError):
    """An object with a needed name has another owner; the operator never takes it over."""


class ExpiredError(ApiError):
    """410: the resource version or continue token is too old: list again."""


class ForbiddenError(ApiError):
    """403: a right is missing (the chart's `rbac.yaml`), a quota is used up, or admission refused."""


class UnauthorizedError(ApiError):
    """401: the operator's own credentials are not valid."""


class FencedError(UnavailableError):
    """Not sent: this process may not write now, or no longer."""


class InvalidError(ApiError):
    """400 or 422: the object is invalid; a retry is useless."""


class ChangedError(ApiError):
    """The API server stored another object than was requested, and the operator cannot work with it."""


class UndeclaredFieldError(ApiError):
    """500 to a server-side apply: the object has a field that the installed definition lacks; a retry is useless."""


class StateRestoredError(Exception):
    """The API server is at an older version than it was, as after a restore of etcd from a backup.

    Cached objects may have other contents under the same version, so the process starts again.
    """


_UNDECLARED = "field not declared in schema"
_BY_STATUS: dict[int, type[ApiError]] = {
    400: InvalidError,
    401: UnauthorizedError,
    403: ForbiddenError,
    404: NotFoundError,
    409: ConflictError,
    410: ExpiredError,
    422: InvalidError,
    429: UnavailableError,
}


def build_error(status: int, reason: str, message: str) -> ApiError:
    """Return the error of an HTTP status >= 400 and the `reason` of the returned `Status` object."""
    if status == 409 and reason == "AlreadyExists":
        return AlreadyExistsError(message, status=status, reason=reason)
    if status == 500 and _UNDECLARED in message:
        return UndeclaredFieldError(message, status=status, reason=reason)
    kind = UnavailableError if status >= 500 else _BY_STATUS.get(status, ApiError)
    return kind(message, status=status, reason=reason)


def is_refusal(error: ApiError) -> bool:
    """Return whether an immediate retry is useless: 500 is a failing webhook, 504 one that does not answer."""
    refusals = ForbiddenError | InvalidError | NotOursError | ChangedError
    return isinstance(error, refusals) or error.status in (413, 500, 504)

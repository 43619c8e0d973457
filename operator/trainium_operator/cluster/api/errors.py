"""Errors of the API server: small classes, one per reaction of a caller."""

from __future__ import annotations


class ApiError(Exception):
    """The API server refused or could not be reached; `status` is 0 when there was no answer."""

    def __init__(self, message: str, *, status: int = 0, reason: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason


class UnavailableError(ApiError):
    """No answer, or overloaded (429) or failing (5xx), after all retries: try again later."""


class NotFoundError(ApiError):
    """404: the object, or its kind, does not exist."""


class AlreadyExistsError(ApiError):
    """409 at creation: an object of that name exists."""


class ConflictError(ApiError):
    """409: a precondition (uid, resourceVersion) failed, or another manager owns a field: read again and recompute."""


class NotOursError(ConflictError):
    """An object of a name that we need belongs to somebody else: it is never taken over."""


class ExpiredError(ApiError):
    """410: the resource version or continue token is too old: list again."""


class ForbiddenError(ApiError):
    """403: a right is missing (the chart's `rbac.yaml`), a quota is used up, or admission refused."""


class UnauthorizedError(ApiError):
    """401: our own credentials are not valid."""


class FencedError(UnavailableError):
    """Not sent: this process may not write (any more)."""


class InvalidError(ApiError):
    """400 or 422: the object itself is wrong; repeating does not help."""


class UndeclaredFieldError(ApiError):
    """500 to a server-side apply: it has a field that the installed definition lacks; repeating does not help."""


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


def error_of(status: int, reason: str, message: str) -> ApiError:
    """Return the error of an HTTP status >= 400 and the `reason` of the `Status` object that came with it."""
    if status == 409 and reason == "AlreadyExists":
        return AlreadyExistsError(message, status=status, reason=reason)
    if status == 500 and _UNDECLARED in message:
        return UndeclaredFieldError(message, status=status, reason=reason)
    kind = UnavailableError if status >= 500 else _BY_STATUS.get(status, ApiError)
    return kind(message, status=status, reason=reason)

"""Access to the store that artifacts are written to: retries, and what a failure is called there."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from trainium_agent.linux.write_access import FORBIDDEN, FULL, explain_forbidden
from trainium_trainer.exits import StorageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainium_trainer.storage.protocol import Retry

T = TypeVar("T")


def kept(action: Callable[[], T], where: str, retry: Retry) -> T:
    """Return the action's result; StorageError with a sentence when it fails for good."""
    try:
        return retry.run(action, where)
    except StorageError as error:
        cause = error.__cause__
        reason = getattr(cause, "strerror", None) or cause
        number = getattr(cause, "errno", None)
        if number in FULL:
            advice = "free space and start again, what is complete is not written again"
        elif number in FORBIDDEN:
            advice = f"{explain_forbidden(number, where)}, or name another place"
        else:
            advice = "look at the store and start again, what is complete is not written again"
        raise StorageError(f"artifact {where}: cannot be written ({reason}): {advice}") from cause

"""Limit forced deletions of pods, which their nodes have not confirmed, over all plans.

Such a deletion cannot be undone: the state in the worker's memory is lost. Plans have separate limits
(`plan/view/workers.py`, the fleet's circuit breaker); this one also holds if a plan is wrong, and for all jobs
together.

Guarantee: within any `WINDOW_SECONDS`, at most `MIN_DELETIONS` pods or `MAX_SHARE` of all worker pods are deleted,
whichever is more.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from trainium_contract.api_server.errors import ApiError

if TYPE_CHECKING:
    from collections.abc import Callable

WINDOW_SECONDS = 60.0
MIN_DELETIONS = 8
MAX_SHARE = 0.2


class ForceDeleteLimitError(ApiError):
    """The deletion is postponed, so that no more is lost than one fault explains."""


class ForceDeleteLimiter:
    """Permits forced deletions, one limiter for each process; times in seconds of the clock, pods by uid."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._done: deque[tuple[float, str]] = deque()

    def permit(self, pod_uid: str, pods: int) -> None:
        """Count a forced deletion; `pods` is the number of worker pods. Raises ForceDeleteLimitError.

        A repeated deletion counts once.
        """
        now = self._clock()
        while self._done and self._done[0][0] <= now - WINDOW_SECONDS:
            self._done.popleft()
        if any(uid == pod_uid for _, uid in self._done):
            return
        limit = max(MIN_DELETIONS, int(MAX_SHARE * (pods + len(self._done))))
        if len(self._done) >= limit:
            raise ForceDeleteLimitError(
                f"{len(self._done)} pods were deleted by force within {WINDOW_SECONDS:g} s, the limit; "
                "the others wait: check whether their nodes are lost or only unreachable"
            )
        self._done.append((now, pod_uid))

"""Writes that nothing waits for: a refusal is remembered for the plan, and stops nothing else.

Those of the job's NetworkPolicy and of the pod of an evaluation. What refuses them is a right that an older ClusterRole
does not give, a quota, a webhook, or another's object of the same name.

Guarantees:
- One try takes `SECONDS` at most. Pauses between tries grow up to `LONGEST_PAUSE`; no other write waits for them.
- What a new plan may answer (a conflict, an API server that is away) is an error as of any write.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from trainium_operator.cluster.api.errors import ApiError, ConflictError, NotOursError, UnavailableError
from trainium_operator.newest import Newest
from trainium_operator.plan.model.observed import WriteRefusal

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

SECONDS = 10.0
FIRST_PAUSE = 2.0
LONGEST_PAUSE = 300.0
REMEMBERED = 4_096


class OptionalWrites:
    """Objects by kind and uid of their job; times in Unix seconds of the clock."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._refusals: Newest[tuple[str, str], tuple[WriteRefusal, float]] = Newest(REMEMBERED)
        """With the pause that was given."""

    def refusal(self, kind: str, job_uid: str) -> WriteRefusal | None:
        """Return why the job's object could not be written, and when it may be tried again; None when it could."""
        known = self._refusals.get((kind, job_uid))
        return known[0] if known is not None else None

    async def write(self, kind: str, job_uid: str, work: Awaitable[None]) -> None:
        """Do the work. Raises ConflictError and UnavailableError where a new plan is the answer."""
        try:
            async with asyncio.timeout(SECONDS) as budget:
                await work
        except TimeoutError:
            if not budget.expired():
                raise
            self._refused(kind, job_uid, f"the API server did not take the {kind} within {SECONDS:.0f} s")
        except NotOursError as error:
            self._refused(kind, job_uid, str(error), taken=True)
        except ConflictError:
            raise
        except ApiError as error:
            if isinstance(error, UnavailableError) and error.status not in (500, 504):  # those are webhooks
                raise
            self._refused(kind, job_uid, str(error))
        else:
            self._refusals.pop((kind, job_uid), None)

    def _refused(self, kind: str, job_uid: str, sentence: str, *, taken: bool = False) -> None:
        known = self._refusals.get((kind, job_uid))
        pause = FIRST_PAUSE if known is None else min(LONGEST_PAUSE, 2.0 * known[1])
        self._refusals[kind, job_uid] = WriteRefusal(sentence, taken, self._clock() + pause), pause

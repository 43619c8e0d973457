"""Make writes that nothing waits for: the plan sees a refusal, which stops no other write.

These are the writes of a job's NetworkPolicy and of the pod of an evaluation. Causes of a refusal are a right that an
older ClusterRole does not grant, a quota, a webhook, or another owner's object of the same name.

Guarantees:
- One attempt takes `SECONDS` at most. Pauses between attempts grow up to `MAX_PAUSE_SECONDS`, and no other write waits
  for them.
- An error that a new plan can resolve (a conflict, an unavailable API server) is raised as for any write.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from trainium_operator.bounded_dict import BoundedDict
from trainium_operator.cluster.api.errors import ApiError, ConflictError, NotOursError, UnavailableError
from trainium_operator.plan.model.observed import WriteRefusal

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

SECONDS = 10.0
FIRST_PAUSE = 2.0
MAX_PAUSE_SECONDS = 300.0
REMEMBERED = 4_096


class OptionalWrites:
    """Optional writes by kind and job uid; times in Unix seconds of the clock."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._refusals: BoundedDict[tuple[str, str], tuple[WriteRefusal, float]] = BoundedDict(REMEMBERED)
        """Each with the pause before the next attempt."""

    def refusal(self, kind: str, job_uid: str) -> WriteRefusal | None:
        """Return why the job's object could not be written and when it may be tried again; None if it was written."""
        known = self._refusals.get((kind, job_uid))
        return known[0] if known is not None else None

    async def write(self, kind: str, job_uid: str, work: Awaitable[None]) -> None:
        """Run the write. Raises ConflictError and UnavailableError, which a new plan resolves."""
        try:
            async with asyncio.timeout(SECONDS) as budget:
                await work
        except TimeoutError:
            if not budget.expired():
                raise
            self._refused(kind, job_uid, f"the API server did not take the {kind} within {SECONDS:.0f} s")
        except NotOursError as error:
            self._refused(kind, job_uid, str(error), name_in_use=True)
        except ConflictError:
            raise
        except ApiError as error:
            if isinstance(error, UnavailableError) and error.status not in (500, 504):  # webhooks answer with these
                raise
            self._refused(kind, job_uid, str(error))
        else:
            self._refusals.pop((kind, job_uid), None)

    def _refused(self, kind: str, job_uid: str, sentence: str, *, name_in_use: bool = False) -> None:
        known = self._refusals.get((kind, job_uid))
        pause = FIRST_PAUSE if known is None else min(MAX_PAUSE_SECONDS, 2.0 * known[1])
        self._refusals[kind, job_uid] = WriteRefusal(sentence, name_in_use, self._clock() + pause), pause

"""Checks with the store that the run still belongs to this rank, when a step took clearly longer than those before it.

A process that was stopped with its whole node, and continues later, is where it was: it may find its peers' parts of a
collective in its sockets long after those were replaced and others repeated and recorded the step. They need time for
that: to miss the node, to start, to resume, and to repeat the step. So a step that took hardly longer than usual was
not repeated elsewhere meanwhile, however long steps are.

Guarantees:
- The training thread never waits for the store longer than the timeout, and not at all while an earlier query is
  unanswered.
- An answer that arrives late still counts.
- A store that fails is not waited for.
"""

from __future__ import annotations

import contextlib
import logging
import statistics
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from trainium_trainer.checkpoint.errors import StaleGenerationError
from trainium_trainer.storage.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)

LATE_SECONDS = 2.0
"""A rank whose step took so much longer than usual, and no more, has not been replaced meanwhile."""
TIMEOUT_SECONDS = 5.0
"""For the answer of a store, which normally takes milliseconds."""
_WINDOW = 15
_ENOUGH = 3
"""Steps from which what is usual follows; the first of a run are often long."""


class OwnershipCheck:
    """The watch of one rank; `confirm` is called from the training thread."""

    def __init__(
        self,
        ask: Callable[[], None],
        *,
        timeout: float = TIMEOUT_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`ask` reads the store and raises StaleGenerationError when the run belongs to another start."""
        self._ask = ask
        self._timeout = timeout
        self._clock = clock
        self._newest: deque[float] = deque(maxlen=_WINDOW)
        self._asking: threading.Thread | None = None
        self._refusal: StaleGenerationError | None = None

    def confirm(self, since: float) -> None:
        """StaleGenerationError when the run has gone on without this rank.

        `since`: a moment of the clock after which its peers still needed this rank for the step that it is about to
        record.
        """
        took = self._clock() - since
        # By the median: one long step, a validation for instance, makes nothing usual.
        usual = statistics.median_low(self._newest) if len(self._newest) >= _ENOUGH else 0.0
        self._newest.append(took)
        if took > usual + LATE_SECONDS:
            self._query()
        if self._refusal is not None:
            raise self._refusal

    def _query(self) -> None:
        if self._asking is not None and self._asking.is_alive():
            return
        # A daemon: a store that never answers does not keep the process from ending either.
        self._asking = threading.Thread(target=self._answer, name="owner", daemon=True)
        self._asking.start()
        self._asking.join(self._timeout)
        if self._asking.is_alive():
            log.warning(
                "the store has not answered within %g s who owns the run: this step continues without its answer",
                self._timeout,
            )

    def _answer(self) -> None:
        with contextlib.suppress(OSError, StorageError):
            try:
                self._ask()
            except StaleGenerationError as error:
                self._refusal = error

"""Check after a slow step that the run still belongs to this start.

A process that was paused with its whole node continues where it stopped: it may still find the parts of its peers of a
collective in its sockets, although a newer start has repeated and recorded the step. A newer start needs time to detect
the failed node, to start, to resume and to repeat the step. So a step that took hardly longer than usual was not
repeated elsewhere, and the store is queried only after a step that took clearly longer.

Guarantees:
- The training thread waits for the store at most for the timeout, and not at all while an earlier query is unanswered.
  A late answer still counts. A store that fails does not stop the step.
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

_log = logging.getLogger(__name__)

LATE_SECONDS = 2.0
"""A rank whose step took at most this much longer than usual has not been replaced."""
TIMEOUT_SECONDS = 5.0
"""The timeout for the answer of a store, which normally takes milliseconds."""
_WINDOW = 15
_ENOUGH = 3
"""The number of steps that define the usual duration; the first steps of a run are often long."""


class OwnershipCheck:
    """The check of one rank; `confirm` is called from the training thread."""

    def __init__(
        self,
        ask: Callable[[], None],
        *,
        timeout: float = TIMEOUT_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create the check; `ask` queries the store and raises StaleGenerationError if another start owns the run."""
        self._query_owner = ask
        self._timeout = timeout
        self._clock = clock
        self._durations: deque[float] = deque(maxlen=_WINDOW)
        self._thread: threading.Thread | None = None
        self._refusal: StaleGenerationError | None = None

    def confirm(self, since: float) -> None:
        """Raise StaleGenerationError if the run continued without this rank.

        `since` is a time of the clock after which the peers still needed this rank for the step that it is about to
        record.
        """
        took = self._clock() - since
        # The median ignores single long steps, such as those with a validation.
        usual = statistics.median_low(self._durations) if len(self._durations) >= _ENOUGH else 0.0
        self._durations.append(took)
        if took > usual + LATE_SECONDS:
            self._query()
        if self._refusal is not None:
            raise self._refusal

    def _query(self) -> None:
        if self._thread is not None and self._thread.is_alive():
            return
        # A daemon thread, so that a store that never answers does not keep the process from exiting.
        self._thread = threading.Thread(target=self._answer, name="owner", daemon=True)
        self._thread.start()
        self._thread.join(self._timeout)
        if self._thread.is_alive():
            _log.warning(
                "the ownership check did not finish within %g s; continuing this step without it",
                self._timeout,
            )

    def _answer(self) -> None:
        with contextlib.suppress(OSError, StorageError):
            try:
                self._query_owner()
            except StaleGenerationError as error:
                self._refusal = error

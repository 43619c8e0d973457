"""Run a case of a target in an event loop of virtual time, and raise an error for a broken invariant.

Guarantees:
- Only virtual time passes; a case that needs `SLOW_SECONDS` of a processor fails.
- Log lines, failed tasks and the loop of a case do not reach the next one.
"""

import asyncio
import gc
import logging
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from tests.testing.fuzz.cluster_target import ClusterTarget
from tests.testing.fuzz.coordinator_target import CoordinatorTarget
from tests.testing.fuzz.invariants import InvariantError, LogChecker, require
from tests.testing.fuzz.spec_target import SpecTarget
from tests.testing.suite.any_json import as_json, as_stored
from tests.testing.suite.virtual_time import VirtualLoop

SLOW_SECONDS = 60.0


class Target(Protocol):
    """An untrusted input of the operator."""

    @property
    def expected(self) -> frozenset[str]:
        """Return the names of loggers that may log an error."""
        ...

    @property
    def storable(self) -> bool:
        """Return whether its cases are objects that the API server has stored (see `as_stored`)."""
        ...

    def seeds(self) -> list[Any]:
        """Return valid cases."""
        ...

    def values(self) -> dict[str, list[Any]]:
        """Return valid and invalid values by the name of a field."""
        ...

    async def run_case(self, case: Any) -> None:
        """Run a case; raise an error for a broken invariant."""
        ...


TARGETS: dict[str, Callable[[], Target]] = {
    "coordinator": CoordinatorTarget,
    "cluster": ClusterTarget,
    "spec": SpecTarget,
}


def run_case(target: Target, case: Any) -> None:
    """Run a case; raise an error for a broken invariant. A case that is nested too deeply is ignored."""
    try:
        converted = (as_stored if target.storable else as_json)(case)
    except RecursionError:
        return
    random.seed(0)  # the operator spreads its load at random; a case must be reproducible
    unhandled: list[dict[str, Any]] = []
    log_checker = LogChecker(target.expected)
    started = time.process_time()
    with _only_handler(log_checker):
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.get_loop().set_exception_handler(lambda _, context: unhandled.append(context))
            runner.run(target.run_case(converted))
        gc.collect(0)  # a task that is not awaited reports its error when it is collected
    log_checker.check()
    for context in unhandled:
        raise InvariantError(f"a task failed: {context['message']}") from context.get("exception")
    seconds = time.process_time() - started
    require(seconds < SLOW_SECONDS, f"{seconds:.1f} s of a processor")


@contextmanager
def _only_handler(handler: logging.Handler) -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)

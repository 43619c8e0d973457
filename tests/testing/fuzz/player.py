"""Plays cases one by one, each in a quiet world of its own, and tells those that broke a promise apart.

Invariants: virtual time alone passes; a case that takes `SLOW_SECONDS` of the processor is a finding too, wherever it
is by then; what goes wrong in one case is not heard in the next.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import logging
import random
import signal
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from tests.testing.fuzz.hostile import unfolded
from tests.testing.fuzz.promises import BrokenPromiseError, Listener
from tests.testing.suite.virtual_time import VirtualLoop

if TYPE_CHECKING:
    from types import FrameType

    from tests.testing.fuzz.target import Target

SLOW_SECONDS = 4.0
"""Of the processor, so that a busy machine is no finding."""
CASES_A_LOOP = 2_000
LATEST = 40_000.0
"""Of a loop's virtual clock, at which another one is taken."""
ROOT = Path(__file__).parents[3]


@dataclass(frozen=True, slots=True)
class Finding:
    """What a case did that it should not."""

    key: str
    """The same for cases of one defect, as far as can be told: where it was raised, and which error."""
    text: str
    """With its traceback."""


class Player:
    """`play` cases of one target; a context, because it hears the log and keeps an event loop."""

    def __init__(self, target: Target, *, slow_seconds: float = SLOW_SECONDS) -> None:
        self.target = target
        self.slowest = 0.0
        """Processor seconds of the slowest case."""
        self.rejected = 0
        """Cases that were none: nested too deeply to be unfolded."""
        self._slow_seconds = slow_seconds
        self._listener = Listener(target.expected)
        self._runner: asyncio.Runner | None = None
        self._played = 0
        self._stack = ""
        self._unhandled: list[dict[str, Any]] = []
        self._thresholds = gc.get_threshold()
        self._before: tuple[list[logging.Handler], int] = ([], logging.WARNING)

    def __enter__(self) -> Self:
        root = logging.getLogger()
        self._before = (root.handlers[:], root.level)
        root.handlers[:] = [self._listener]
        root.setLevel(logging.INFO)
        signal.signal(signal.SIGPROF, self._out_of_time)
        gc.freeze()  # what was imported is looked through no more
        gc.set_threshold(20_000, 20, 20)
        return self

    def __exit__(self, *_error: object) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)
        root = logging.getLogger()
        root.handlers[:], level = self._before
        root.setLevel(level)
        self._close()
        gc.unfreeze()
        gc.set_threshold(*self._thresholds)

    def play(self, case: Any) -> Finding | None:
        """What it broke; None when every promise was kept."""
        try:
            whole = unfolded(case, storable=self.target.storable)
        except RecursionError:
            self.rejected += 1
            return None
        random.seed(0)  # the operator spreads its load by chance; a case is the same each time
        runner = self._loop()
        self._stack = ""
        began = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, self._slow_seconds)
        try:
            runner.run(self.target.play(whole))
            self._listener.heard()
            self._heard_of_tasks()
        except Exception as error:  # noqa: BLE001 - that is what is looked for
            self._close()
            return _found(error)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            self.slowest = max(self.slowest, time.process_time() - began)
        if self._stack:
            return Finding(f"slow-{_digest(self._stack.splitlines()[-2:])}", self._stack)
        return None

    def _heard_of_tasks(self) -> None:
        for context in self._unhandled:
            raise BrokenPromiseError(f"a task failed: {context['message']}") from context.get("exception")

    def _loop(self) -> asyncio.Runner:
        self._played += 1
        if self._runner is None or self._played % CASES_A_LOOP == 0 or self._runner.get_loop().time() > LATEST:
            self._close()
            self._runner = asyncio.Runner(loop_factory=VirtualLoop)
            self._runner.get_loop().set_exception_handler(lambda _loop, context: self._unhandled.append(context))
        return self._runner

    def _close(self) -> None:
        if self._runner is not None:
            self._runner.close()
            self._runner = None
            gc.collect()  # tasks that nobody waited for say so when they go
        self._unhandled.clear()

    def _out_of_time(self, _signal: int, frame: FrameType | None) -> None:
        self._stack = self._stack or "".join(traceback.format_stack(frame))


def _found(error: Exception) -> Finding:
    chain: list[BaseException] = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None and len(chain) < 10:
        chain.append(cause)
    first = chain[-1]
    ours = [frame for frame in traceback.extract_tb(first.__traceback__) if str(ROOT) in frame.filename]
    product = [frame for frame in ours if "/tests/" not in frame.filename] or ours
    where = f"{Path(product[-1].filename).stem}.{product[-1].name}" if product else "nowhere"
    said = (
        "".join(each for each in str(error) if not each.isdigit())[:60] if isinstance(error, BrokenPromiseError) else ""
    )
    key = f"{type(first).__name__}-{where}" + (f"-{_digest([said])}" if said else "")
    text = "".join(traceback.format_exception(error))
    return Finding(key, text if len(text) < 20_000 else f"{text[:10_000]}\n...\n{text[-10_000:]}")


def _digest(lines: list[str]) -> str:
    return hashlib.sha256("".join(lines).encode(errors="replace")).hexdigest()[:8]

"""Compile for other sizes of the job while this pod is an idle spare.

Guarantees:
- It never runs beside ranks, which start after `on_end`, and it runs at the lowest priority.
- A failure has no effect: the size then compiles in its first step.
- Sizes are compiled one after the other, in the order in which the job may need them. A stopped compilation restarts
  when the pod is idle again; an ended one does not.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from typing import TYPE_CHECKING

from trainium_agent.ranks.standby import StartRequest
from trainium_agent.ranks.standby_keeper import StandbyLostError
from trainium_contract.sizes import order_by_likelihood
from trainium_contract.spec.precompile import CompiledSize

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainium_agent.ranks.processes import RankProcess
    from trainium_agent.ranks.standby_keeper import StandbyKeeper
    from trainium_agent.settings import AgentSettings

_log = logging.getLogger(__name__)
_POLL_SECONDS = 0.1
_ENTRY = "trainium_trainer.cli:precompile_in_background"


class BackgroundCompiler:
    """`start` whenever the pod has become an idle spare, `stop` before it gets ranks; the event loop's."""

    def __init__(
        self,
        settings: AgentSettings,
        keeper: StandbyKeeper,
        *,
        post: Callable[[Callable[[], None]], None],
        on_compiled: Callable[[CompiledSize], None],
        on_end: Callable[[], None],
    ) -> None:
        """`post` runs a function in the event loop, from any thread.

        `on_compiled` is called for each size with graphs, `on_end` when no process of a `start` is left.
        """
        self._settings = settings
        self._keeper = keeper
        self._post = post
        self._on_compiled = on_compiled
        self._on_end = on_end
        self._left = [*settings.background_sizes]
        self._run: _Run | None = None

    def start(self, present: int) -> None:
        """Begin, unless it has been done or is under way; the others train on `present` nodes."""
        if self._run is not None:
            self._run.train_on(present)
            return
        if not self._left:
            self._post(self._on_end)
            return
        self._run = _Run(self._settings, self._keeper, (*self._left,), present, self._ended, self._over)

    def stop(self) -> None:
        """End it at once; `on_end` follows. What it compiled and shared stays."""
        if self._run is not None:
            self._run.cancel()

    # From the thread of a run.

    def _ended(self, nodes: int, seconds: float | None) -> None:
        def take() -> None:
            self._left.remove(nodes)
            if seconds is not None:
                self._on_compiled(CompiledSize(nodes=nodes, seconds=seconds))

        self._post(take)

    def _over(self) -> None:
        def take() -> None:
            self._run = None
            self._on_end()

        self._post(take)


class _Run:
    """Compile one size, in a separate thread."""

    def __init__(
        self,
        settings: AgentSettings,
        keeper: StandbyKeeper,
        sizes: tuple[int, ...],
        present: int,
        on_size: Callable[[int, float | None], None],
        on_over: Callable[[], None],
    ) -> None:
        """`on_size` gets the seconds that a size took, None where it failed; both are called from the thread."""
        self._settings = settings
        self._keeper = keeper
        self._sizes = sizes
        self._present = present
        self._on_size = on_size
        self._on_over = on_over
        self._cancelled = threading.Event()
        self._lock = threading.Lock()
        self._process: RankProcess | None = None
        threading.Thread(target=self._try, name="background-compiler", daemon=True).start()

    def train_on(self, present: int) -> None:
        """So many nodes train now; the next size is chosen by that."""
        with self._lock:
            self._present = present

    def cancel(self) -> None:
        """End the try; does not wait."""
        with self._lock:
            self._cancelled.set()
            if self._process is not None:
                self._process.signal(signal.SIGKILL)

    def _try(self) -> None:
        try:
            self._compile_all()
        except StandbyLostError as loss:
            _log.warning("the graphs of other sizes could not be compiled: %s", loss)
        finally:
            self._on_over()

    def _compile_all(self) -> None:
        while not self._keeper.warm:  # a fork of the standby is small, and its imports must not be hurried for this
            if self._cancelled.wait(_POLL_SECONDS):
                return
        left = [*self._sizes]
        while left and not self._cancelled.is_set():
            with self._lock:
                nodes = order_by_likelihood(left, self._present)[0]
            began = time.monotonic()
            code = self._compile(nodes)
            if self._cancelled.is_set():
                return
            left.remove(nodes)
            if code == 0:
                _log.info("the graphs for %d nodes are ready", nodes)
            else:
                _log.warning("the graphs for %d nodes were not all compiled (code %s)", nodes, code)
            self._on_size(nodes, time.monotonic() - began if code == 0 else None)

    def _compile(self, nodes: int) -> int | None:
        """Compile for one size; the exit code. Raises StandbyLostError."""
        arguments = ("--sizes", str(nodes), "--cores-per-node", str(self._settings.processes_per_node))
        ended = threading.Event()
        process = self._keeper.start(
            StartRequest(arguments, {}, "trainium-precompile", _ENTRY),
            local_rank=0,
            rank=0,
            attempt=-1,
            on_exit=lambda _: ended.set(),
            label="precompile",
        )
        with self._lock:
            self._process = process
            if self._cancelled.is_set():
                process.signal(signal.SIGKILL)
        ended.wait()
        return process.exit_code

"""Compile for other sizes of the job while this pod is an idle spare.

Guarantees:
- Compilation never overlaps with ranks, which start after `on_end`, and runs at the lowest priority.
- A failure has no effect: the size then compiles in its first step.
- Sizes are compiled one at a time, in the order in which the job may need them. A stopped compilation restarts when the
  pod is idle again; a completed one does not.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from functools import partial
from typing import TYPE_CHECKING

from trainium_agent.ranks.standby import StartRequest
from trainium_agent.ranks.standby_manager import StandbyLostError
from trainium_contract.sizes import order_by_likelihood
from trainium_contract.spec.precompile import CompiledSize

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainium_agent.ranks.processes import RankProcess
    from trainium_agent.ranks.standby_manager import StandbyManager
    from trainium_agent.settings import AgentSettings

_log = logging.getLogger(__name__)
_POLL_SECONDS = 0.1
_ENTRY = "trainium_trainer.cli:precompile_in_background"


class BackgroundCompiler:
    """Compiles in a separate thread while the pod is an idle spare: `start` then, `stop` before ranks start."""

    def __init__(
        self,
        settings: AgentSettings,
        standby_manager: StandbyManager,
        *,
        post: Callable[[Callable[[], None]], None],
        on_compiled: Callable[[CompiledSize], None],
        on_end: Callable[[], None],
    ) -> None:
        """`post` runs a function in the event loop, from any thread.

        `on_compiled` is called for each compiled size, `on_end` when every process of a `start` has ended.
        """
        self._settings = settings
        self._standby_manager = standby_manager
        self._post = post
        self._on_compiled = on_compiled
        self._on_end = on_end
        self._sizes = [*settings.background_sizes]
        self._cancelled: threading.Event | None = None
        """Set to end the thread; None while there is none."""
        self._lock = threading.Lock()
        self._training_nodes = 0
        self._process: RankProcess | None = None

    # In the event loop.

    def start(self, training_nodes: int) -> None:
        """Start, unless it is done or already running; the other workers train on `training_nodes` nodes."""
        with self._lock:
            self._training_nodes = training_nodes
        if self._cancelled is not None:
            return
        if not self._sizes:
            self._post(self._on_end)
            return
        self._cancelled = threading.Event()
        arguments = (self._cancelled, [*self._sizes])
        threading.Thread(target=self._run, args=arguments, name="background-compiler", daemon=True).start()

    def stop(self) -> None:
        """Stop at once; `on_end` follows. Graphs that were compiled and shared remain."""
        with self._lock:
            if self._cancelled is not None:
                self._cancelled.set()
            if self._process is not None:
                self._process.signal(signal.SIGKILL)

    def _record_size(self, nodes: int, seconds: float | None) -> None:
        self._sizes.remove(nodes)
        if seconds is not None:
            self._on_compiled(CompiledSize(nodes=nodes, seconds=seconds))

    def _record_end(self) -> None:
        self._cancelled = None
        self._on_end()

    # In the thread.

    def _run(self, cancelled: threading.Event, remaining: list[int]) -> None:
        try:
            self._compile_all(cancelled, remaining)
        except StandbyLostError as loss:
            _log.warning("the graphs of other sizes could not be compiled: %s", loss)
        finally:
            self._post(self._record_end)

    def _compile_all(self, cancelled: threading.Event, remaining: list[int]) -> None:
        while not self._standby_manager.warm:  # a fork of the standby is small, and this must not speed up its imports
            if cancelled.wait(_POLL_SECONDS):
                return
        while remaining and not cancelled.is_set():
            with self._lock:
                nodes = order_by_likelihood(remaining, self._training_nodes)[0]
            started_at = time.monotonic()
            code = self._compile(nodes, cancelled)
            if cancelled.is_set():
                return
            remaining.remove(nodes)
            if code == 0:
                _log.info("the graphs for %d nodes are ready", nodes)
            else:
                _log.warning("the graphs for %d nodes were not all compiled (code %s)", nodes, code)
            seconds = time.monotonic() - started_at if code == 0 else None
            self._post(partial(self._record_size, nodes, seconds))

    def _compile(self, nodes: int, cancelled: threading.Event) -> int | None:
        """Compile for one size and return the exit code. Raises StandbyLostError."""
        arguments = ("--sizes", str(nodes), "--cores-per-node", str(self._settings.processes_per_node))
        process = self._standby_manager.start(
            StartRequest(arguments, {}, "trainium-precompile", _ENTRY), label="precompile"
        )
        with self._lock:
            self._process = process
            if cancelled.is_set():
                process.signal(signal.SIGKILL)
        process.ended.wait()
        return process.exit_code

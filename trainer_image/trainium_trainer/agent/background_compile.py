"""Compiling for other sizes of the job while this pod is an idle spare.

Invariants: it never runs beside ranks: `stop` returns when its processes have ended; it runs at the lowest priority;
that it fails harms nothing, the size then compiles in its first step. What was stopped is begun again when the pod is
idle again, what ended is not.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from typing import TYPE_CHECKING

from trainium_trainer.agent.ranks.standby import StartRequest
from trainium_trainer.agent.ranks.standby_keeper import StandbyLostError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trainium_trainer.agent.ranks.processes import RankProcess
    from trainium_trainer.agent.ranks.standby_keeper import StandbyKeeper
    from trainium_trainer.agent.settings import AgentSettings

_log = logging.getLogger(__name__)
_POLL_SECONDS = 0.1
_LOWEST = 19
_ENTRY = "trainium_trainer.agent.background_compile:main"


class BackgroundCompiler:
    """`start` whenever the pod has become an idle spare, `stop` before it gets ranks; both from one thread."""

    def __init__(self, settings: AgentSettings, keeper: StandbyKeeper) -> None:
        self._settings = settings
        self._keeper = keeper
        self._over = not settings.background_sizes
        self._run: _Run | None = None

    def start(self) -> None:
        """Begin, unless it has been done or is under way."""
        if not self._over and self._run is None:
            self._run = _Run(self._compile)

    def stop(self) -> None:
        """End it at once; what it compiled and shared stays."""
        run, self._run = self._run, None
        if run is not None:
            run.cancel()
            run.thread.join()

    def cancel(self) -> None:
        """The pod ends; from the thread that reaps, so nothing is waited for."""
        run = self._run  # the other thread may be at `stop`
        if run is not None:
            run.cancel()

    def _compile(self, run: _Run) -> None:
        while not self._keeper.warm:  # a fork of the standby is small, and its imports must not be hurried for this
            if run.cancelled.wait(_POLL_SECONDS):
                return
        sizes, cores = self._settings.background_sizes, self._settings.processes_per_node
        arguments = ("--sizes", ",".join(map(str, sizes)), "--cores-per-node", str(cores))
        ended = threading.Event()
        try:
            process = self._keeper.start(
                StartRequest(arguments, {}, "trainium-precompile", _ENTRY),
                local_rank=0,
                rank=0,
                attempt=-1,
                on_exit=lambda _: ended.set(),
                label="precompile",
            )
        except StandbyLostError as loss:
            _log.warning("the graphs of other sizes could not be compiled: %s", loss)
            return
        run.kills(process)
        ended.wait()
        if not run.cancelled.is_set():
            self._over = True
            self._tell(process)

    def _tell(self, process: RankProcess) -> None:
        nodes = ", ".join(map(str, self._settings.background_sizes))
        if process.exit_code == 0:
            _log.info("the graphs for %s nodes are ready", nodes)
        else:
            _log.warning("the graphs for %s nodes were not all compiled (code %s)", nodes, process.exit_code)


class _Run:
    """One try, in a thread of its own."""

    def __init__(self, work: Callable[[_Run], None]) -> None:
        self.cancelled = threading.Event()
        self._lock = threading.Lock()
        self._process: RankProcess | None = None
        self.thread = threading.Thread(target=work, args=(self,), name="background-compiler", daemon=True)
        self.thread.start()

    def kills(self, process: RankProcess) -> None:
        """What `cancel` has to end, at once if it was called already."""
        with self._lock:
            self._process = process
            if self.cancelled.is_set():
                process.signal(signal.SIGKILL)

    def cancel(self) -> None:
        """End the try; does not wait."""
        with self._lock:
            self.cancelled.set()
            if self._process is not None:
                self._process.signal(signal.SIGKILL)


def main(arguments: Sequence[str]) -> object:
    """Entry of the process, forked from the standby."""
    from trainium_trainer.cli import main as command_line  # noqa: PLC0415 - the standby has imported it

    os.nice(_LOWEST)
    return command_line(["precompile", *arguments])

"""Compiling for other sizes of the job while this pod is an idle spare.

Invariants: it never runs beside ranks: `stop` returns when its processes have ended; it runs at the lowest priority;
that it fails harms nothing, the size then compiles in its first step. One size after the other, each time the one
that the job may need the soonest. What was stopped is begun again when the pod is idle again, what ended is not.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from typing import TYPE_CHECKING

from trainium_contract.sizes import likely_first
from trainium_contract.spec.precompile import CompiledSize
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

    def __init__(self, settings: AgentSettings, keeper: StandbyKeeper, tell: Callable[[CompiledSize], None]) -> None:
        """`tell` hears of each size whose graphs are there."""
        self._settings = settings
        self._keeper = keeper
        self._tell = tell
        self._left = list(settings.background_sizes)
        self._present = 0
        self._run: _Run | None = None

    def start(self, present: int) -> None:
        """Begin, unless it has been done or is under way; the others train on `present` nodes."""
        self._present = present
        if self._left and self._run is None:
            self._run = _Run(self._compile_all)

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

    def _compile_all(self, run: _Run) -> None:
        while not self._keeper.warm:  # a fork of the standby is small, and its imports must not be hurried for this
            if run.cancelled.wait(_POLL_SECONDS):
                return
        while self._left:
            nodes = likely_first(self._left, self._present)[0]
            began = time.monotonic()
            try:
                code = self._compile(run, nodes)
            except StandbyLostError as loss:
                _log.warning("the graphs of other sizes could not be compiled: %s", loss)
                return
            if run.cancelled.is_set():
                return
            self._left.remove(nodes)
            if code == 0:
                _log.info("the graphs for %d nodes are ready", nodes)
                self._tell(CompiledSize(nodes=nodes, seconds=time.monotonic() - began))
            else:
                _log.warning("the graphs for %d nodes were not all compiled (code %s)", nodes, code)

    def _compile(self, run: _Run, nodes: int) -> int | None:
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
        run.kills(process)
        ended.wait()
        return process.exit_code


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

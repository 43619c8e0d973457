"""Show the progress of a demo: a live panel on a terminal, otherwise a line per change."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from types import TracebackType

QUIET_SECONDS = 5.0
"""Longest time without a line while a job makes progress."""


class View:
    """Shows one job at a time, and a log of the latest events."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._started = time.monotonic()
        self._live: Live | None = None
        self._job: tuple[str, dict[str, Any], dict[str, Any], int] | None = None
        self._lines: list[str] = []
        self._printed, self._line = 0.0, ""

    def log(self, sentence: str) -> None:
        """Add a line to the log."""
        line = f"[{time.monotonic() - self._started:6.1f} s] {sentence}"
        self._lines = [*self._lines[-7:], line]
        if self._live is None:
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)
        else:
            self._live.console.print(line, markup=False, highlight=False, soft_wrap=True)
            self._live.update(self._panel())

    def show(self, title: str, status: dict[str, Any], newest: dict[str, Any], steps: int) -> None:
        """Show the status of a job and the newest record of its metrics."""
        self._job = (title, status, newest, steps)
        if self._live is not None:
            self._live.update(self._panel())
        elif time.monotonic() - self._printed > QUIET_SECONDS:
            line = f"           {title}: {self._sentence()}"
            if line == self._line:
                return  # nothing new
            self._printed, self._line = time.monotonic(), line
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _sentence(self) -> str:
        assert self._job is not None
        _, status, newest, steps = self._job
        loss = f", loss {newest['loss']:.4f}" if newest else ""
        return f"{_phase(status)}, step {newest.get('step', 0)}/{steps or '?'}{loss}, {_workers(status)}"

    def _panel(self) -> Panel | Text:
        if self._job is None:
            return Text("")
        title, status, newest, steps = self._job
        progress, checkpoint = status.get("progress") or {}, status.get("checkpoint") or {}
        table = Table.grid(padding=(0, 3))
        table.add_row("phase", Text(_phase(status), style="bold"), "workers", _workers(status))
        loss = f"{newest['loss']:.4f}" if newest else "-"
        rate = progress.get("tokensPerSecond")
        table.add_row("loss", loss, "tokens/s", f"{rate:,.0f}" if rate else "-")
        newest_memory, newest_durable = checkpoint.get("memoryStep", -1), checkpoint.get("durableStep", -1)
        table.add_row(
            "step",
            f"{newest.get('step', 0)} of {steps or '?'}",
            "checkpoint",
            f"memory {_step(newest_memory)}, durable {_step(newest_durable)}",
        )
        bar = ProgressBar(total=steps or None, completed=newest.get("step", 0), width=60)
        return Panel(Group(table, Text(), bar), title=title, title_align="left")

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self._live = Live(self._panel(), console=self.console, refresh_per_second=8, transient=True)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def _phase(status: dict[str, Any]) -> str:
    """Return the phase, with a stage after training: `Running (Evaluate 40 %)`."""
    phase: str = status.get("phase", "Pending")
    progress = status.get("stageProgress")
    if phase != "Running" or progress is None:
        return phase
    return f"{phase} ({status.get('stage')} {progress:.0%})"


def _workers(status: dict[str, Any]) -> str:
    size = (status.get("membership") or {}).get("size", 0)
    return f"{status.get('readyReplicas', 0)}/{size} training, {status.get('spares', 0)} spare"


def _step(step: int) -> str:
    return "-" if step < 0 else str(step)

"""Show the progress of a demo: a live panel on a terminal, otherwise a line per change."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Self

from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from trainium_contract.pages.facts import list_job_facts
from trainium_contract.views.job import build_job_view

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    from rich.console import Console

    from trainium_contract.views.job_view import JobView

QUIET_SECONDS = 5.0
"""Longest time without a line while a job makes progress."""


class View:
    """Shows one job at a time, and a log of the latest events."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._started = time.monotonic()
        self._live: Live | None = None
        self._job: JobView | None = None
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
            self._live.update(self._draw_panel())

    def show(self, job: Mapping[str, Any]) -> None:
        """Show a TrainingJob as `kubectl trn status` does."""
        self._job = build_job_view(job, now=time.time())
        if self._live is not None:
            self._live.update(self._draw_panel())
        elif time.monotonic() - self._printed > QUIET_SECONDS:
            facts = {fact.label: fact.value for fact in list_job_facts(self._job, ages=False)}
            shown = (facts[label] for label in ("Phase", "Progress", "Speed", "Size"))
            line = f"           {self._job.name}: {'; '.join(filter(None, shown))}"
            if line == self._line:
                return  # nothing new
            self._printed, self._line = time.monotonic(), line
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _draw_panel(self) -> Panel | Text:
        if self._job is None:
            return Text("")
        table = Table.grid(padding=(0, 2))
        for fact in list_job_facts(self._job, with_bar=True):
            if fact.value or fact.warning:
                table.add_row(fact.label, Text(f"{fact.value}  {fact.warning}".strip()))
        return Panel(table, title=f"TrainingJob {self._job.namespace}/{self._job.name}", title_align="left")

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self._live = Live(self._draw_panel(), console=self.console, refresh_per_second=8, transient=True)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

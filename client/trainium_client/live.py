"""Show a job that is watched from Python: in a notebook's cell, on a terminal, or as lines.

Invariants: IPython is needed only where it already runs. The curve is read in a worker once, and later points come from
the status. An interrupt only ends the watch.
"""

from __future__ import annotations

import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from trainium_contract.api_server.errors import ClientError
from trainium_contract.views.curve import LiveCurve

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from trainium_contract.views.curve import CurvePoint
    from trainium_contract.views.job_view import JobView


class Display(Protocol):
    """An output that shows a job."""

    def show(self, view: JobView, curve: Sequence[CurvePoint]) -> None:
        """Show the current state of the job."""
        ...


class NotebookDisplay:
    """The output of one cell; `display` is IPython's, or another with `display_id` and `update`."""

    def __init__(self, display: Callable[..., Any]) -> None:
        self._display = display
        self._handle: Any = None

    def show(self, view: JobView, curve: Sequence[CurvePoint]) -> None:
        """Implement Display."""
        from trainium_client.notebook import render_cell  # noqa: PLC0415 - only notebooks need it

        content = {"text/html": render_cell(view, curve), "text/plain": _format_line(view)}
        if self._handle is None:
            self._handle = self._display(content, raw=True, display_id=True)
        else:
            self._handle.update(content, raw=True)


class TerminalDisplay:
    """The screen of `kubectl trn status` in place; `live` is rich's."""

    def __init__(self, live: Any) -> None:
        self._live = live

    def show(self, view: JobView, curve: Sequence[CurvePoint]) -> None:  # noqa: ARG002 - a terminal has no curve
        """Implement Display."""
        from trainium_client.render.status import render_status  # noqa: PLC0415 - rich takes a while

        self._live.update(render_status(view, now=time.time(), width=self._live.console.width), refresh=True)


class LineDisplay:
    """A line for each change, for a pipe or a file."""

    def __init__(self, write: Callable[[str], object]) -> None:
        self._write = write
        self._last = ""

    def show(self, view: JobView, curve: Sequence[CurvePoint]) -> None:  # noqa: ARG002 - a line has no curve
        """Implement Display."""
        line = _format_line(view)
        if line != self._last:
            self._write(f"{line}\n")
        self._last = line


def watch(
    read_view: Callable[[], JobView],
    read_curve: Callable[[], Sequence[CurvePoint]],
    *,
    timeout_seconds: float,
    pause: Callable[[], None],
) -> JobView:
    """Show the job until it has ended, the timeout or an interrupt; return its last view."""
    deadline = time.monotonic() + timeout_seconds
    curve: LiveCurve | None = None
    view = read_view()
    with open_display() as display:
        try:
            while True:
                if curve is None and isinstance(display, NotebookDisplay) and view.loss is not None and not view.ended:
                    curve = LiveCurve(points=_read_curve_if_possible(read_curve))
                if curve is not None:
                    curve.add_current(view)
                display.show(view, curve.points if curve is not None else ())
                if view.ended or time.monotonic() >= deadline:
                    return view
                pause()
                view = read_view()
        except KeyboardInterrupt:
            return view


def _read_curve_if_possible(read_curve: Callable[[], Sequence[CurvePoint]]) -> Sequence[CurvePoint]:
    """Return the curve; none if it cannot be read, because the watch continues without it."""
    try:
        return read_curve()
    except ClientError:
        return ()


@contextmanager
def open_display() -> Iterator[Display]:
    """Open the display for the environment of this program."""
    notebook = find_notebook_display()
    if notebook is not None:
        yield NotebookDisplay(notebook)
    elif sys.stdout.isatty():
        from rich.live import Live  # noqa: PLC0415 - rich takes a while

        with Live(auto_refresh=False) as live:
            yield TerminalDisplay(live)
    else:
        yield LineDisplay(sys.stdout.write)


def find_notebook_display() -> Callable[..., Any] | None:
    """Return IPython's `display` if a notebook's kernel runs this program; else None."""
    package: Any = sys.modules.get("IPython")
    shell = package.get_ipython() if package is not None else None
    if shell is None or getattr(shell, "kernel", None) is None:
        return None
    display: Callable[..., Any] = package.display.display
    return display


def _format_line(view: JobView) -> str:
    from trainium_client.render.status import format_status_line  # noqa: PLC0415 - rich takes a while

    return format_status_line(view)

"""A job that is watched from Python: in a notebook's cell, on a terminal, or as lines.

Invariants: IPython is needed only where it runs already; the curve is read in a worker once, later points are what each
look sees; an interrupt stops the watch, and nothing else.
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
    from trainium_contract.views.job import JobView


class Display(Protocol):
    """Where a job is shown."""

    def show(self, view: JobView, curve: Sequence[CurvePoint]) -> None:
        """Show the job as it is now."""
        ...


class NotebookDisplay:
    """The output of one cell; `display` is IPython's, or another with `display_id` and `update`."""

    def __init__(self, display: Callable[..., Any]) -> None:
        self._display = display
        self._handle: Any = None

    def show(self, view: JobView, curve: Sequence[CurvePoint]) -> None:
        """See Display."""
        from trainium_contract.pages.notebook import cell_html  # noqa: PLC0415 - only notebooks need it

        shown = {"text/html": cell_html(view, curve), "text/plain": _line(view)}
        if self._handle is None:
            self._handle = self._display(shown, raw=True, display_id=True)
        else:
            self._handle.update(shown, raw=True)


class TerminalDisplay:
    """The screen of `kubectl trn status` in place; `live` is rich's."""

    def __init__(self, live: Any) -> None:
        self._live = live

    def show(self, view: JobView, curve: Sequence[CurvePoint]) -> None:  # noqa: ARG002 - a terminal has no curve
        """See Display."""
        from trainium_client.render.status import status_page  # noqa: PLC0415 - rich takes a while

        self._live.update(status_page(view, now=time.time(), width=self._live.console.width), refresh=True)


class LineDisplay:
    """A line for each change, for a pipe or a file."""

    def __init__(self, write: Callable[[str], object]) -> None:
        self._write = write
        self._last = ""

    def show(self, view: JobView, curve: Sequence[CurvePoint]) -> None:  # noqa: ARG002 - a line has no curve
        """See Display."""
        line = _line(view)
        if line != self._last:
            self._write(f"{line}\n")
        self._last = line


class Watched:
    """The state of one watch; displays belong to the thread that opened them."""

    def __init__(self, display: Display, until: float) -> None:
        """`until`: the end by the monotonic clock."""
        self._display = display
        self._until = until
        self._curve: LiveCurve | None = None

    def lacks_curve(self, view: JobView) -> bool:
        """Return whether what came before should be read now, once: where a curve is shown, and a worker has it."""
        drawn = isinstance(self._display, NotebookDisplay)
        return drawn and self._curve is None and not view.ended and view.loss is not None

    def begin(self, points: Sequence[CurvePoint]) -> None:
        """Set the curve so far."""
        self._curve = LiveCurve(points=points)

    def saw(self, view: JobView) -> None:
        """Show how the job is now."""
        if self._curve is not None:
            self._curve.add(view.step, view.loss, view.tokens_per_second)
        self._display.show(view, self._curve.points if self._curve is not None else ())

    def is_over(self, view: JobView, now: float) -> bool:
        """Return whether there is nothing more to see, or the time is over."""
        return view.ended or now >= self._until


def curve_so_far(metrics: Callable[[], Sequence[CurvePoint]]) -> Sequence[CurvePoint]:
    """Return the curve, or none where it cannot be read: the watch continues without it."""
    try:
        return metrics()
    except ClientError:
        return ()


@contextmanager
def open_display() -> Iterator[Display]:
    """Open the display that fits where this program runs."""
    notebook = notebook_display()
    if notebook is not None:
        yield NotebookDisplay(notebook)
    elif sys.stdout.isatty():
        from rich.live import Live  # noqa: PLC0415 - rich takes a while

        with Live(auto_refresh=False) as live:
            yield TerminalDisplay(live)
    else:
        yield LineDisplay(sys.stdout.write)


def notebook_display() -> Callable[..., Any] | None:
    """IPython's `display` where a notebook's kernel runs this program; None anywhere else."""
    package: Any = sys.modules.get("IPython")
    shell = package.get_ipython() if package is not None else None
    if shell is None or getattr(shell, "kernel", None) is None:
        return None
    found: Callable[..., Any] = package.display.display
    return found


def _line(view: JobView) -> str:
    from trainium_client.render.status import status_line  # noqa: PLC0415 - rich takes a while

    return status_line(view)

"""Render a page of text: lines of labels and values, and tables that fit any width.

Invariants: content is never parsed as markup. No line is wider than the page, or ends in spaces. Without colour there
is no escape sequence.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

RowT = TypeVar("RowT")
_GAP = 2
_STATES_BY_STYLE = {
    "green": ("Running", "Completed", "True"),
    "cyan": ("Starting", "Pending"),
    "yellow": ("Recovering", "Resizing", "Probation"),
    "magenta": ("Suspending", "Suspended"),
    "red": ("Stopping", "Quarantined"),
    "bold red": ("Failed", "Permanent"),
}
STYLES = {state: style for style, states in _STATES_BY_STYLE.items() for state in states}
"""Colours of phases and states."""


@dataclass(frozen=True, slots=True)
class Column(Generic[RowT]):
    """A column of a table of `RowT`; a narrow page omits those with the lowest `priority` first."""

    title: str
    format_cell: Callable[[RowT], str | Text]
    priority: int = 5
    right: bool = False
    fold: bool = False
    """Whether it may be wrapped; at most one column of a table should."""


def render_text(page: RenderableType, *, width: int, colour: bool) -> str:
    """Render a page as text."""
    file = io.StringIO()
    console = Console(
        file=file,
        width=max(20, width),
        force_terminal=colour,
        color_system="standard" if colour else None,
        legacy_windows=False,
        highlight=False,
        markup=False,
        emoji=False,
        no_color=not colour,
    )
    console.print(page)
    return "".join(f"{line.rstrip()}\n" for line in file.getvalue().splitlines())


def style_word(text: str, style: str = "") -> Text:
    """Style a word with its usual colour."""
    return Text(text, style or STYLES.get(text, ""))


def render_labels(rows: Iterable[tuple[str, str | Text]]) -> Table:
    """Return a grid of labels and values; omit rows without a value."""
    grid = Table.grid(padding=(0, _GAP, 0, 0))
    grid.add_column(no_wrap=True, style="bold")
    grid.add_column(overflow="fold")
    for label, value in rows:
        if value:
            grid.add_row(Text(label), value if isinstance(value, Text) else Text(value))
    return grid


def render_bullets(lines: Iterable[str], mark: str = "- ", style: str = "") -> Table:
    """Return lines with a mark in front; a wrapped line is indented behind its mark."""
    grid = Table.grid()
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for line in lines:
        grid.add_row(Text(mark), Text(line, style))
    return grid


def render_table(columns: Sequence[Column[RowT]], rows: Iterable[RowT], width: int) -> Table:
    """Render a table in kubectl's style that is no wider than the page."""
    cells = [[column.format_cell(row) for column in columns] for row in rows]
    shown = _select_fitting_columns(columns, cells, width)
    result = Table(box=None, padding=(0, _GAP, 0, 0), header_style="bold", pad_edge=False)
    for index in shown:
        column = columns[index]
        result.add_column(
            Text(column.title),
            justify="right" if column.right else "left",
            no_wrap=not column.fold,
            overflow="fold" if column.fold else "ellipsis",
        )
    for row_cells in cells:
        shown_cells = (row_cells[index] for index in shown)
        result.add_row(*(cell if isinstance(cell, Text) else Text(cell) for cell in shown_cells))
    return result


def _select_fitting_columns(
    columns: Sequence[Column[RowT]], cells: Sequence[Sequence[str | Text]], width: int
) -> list[int]:
    """Return the indices of the columns that fit; a column that wraps counts at most 24 characters."""
    widths = []
    for index, column in enumerate(columns):
        widest = max((len(row_cells[index]) for row_cells in cells), default=0)
        widths.append(max(len(column.title), min(widest, 24) if column.fold else widest) + _GAP)
    shown = list(range(len(columns)))
    while len(shown) > 1 and sum(widths[index] for index in shown) > width + _GAP:
        shown.remove(min(reversed(shown), key=lambda index: columns[index].priority))
    return shown


def render_heading(text: str) -> Text:
    """Render a heading with a line before it."""
    return Text(f"\n{text}", style="bold")


def stack_items(*items: RenderableType | None) -> Group:
    """Return the items one below the other, without those that are None."""
    return Group(*(item for item in items if item is not None))

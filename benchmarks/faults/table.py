"""All rows, in the order of their numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.faults.rows import (
    capacity,
    control,
    endings,
    misleading,
    nodes,
    pods,
    processes,
    storage,
    virtual,
)

if TYPE_CHECKING:
    from benchmarks.faults.row import Row

_FAMILIES = (
    processes.ROWS,
    pods.ROWS,
    nodes.ROWS,
    endings.ROWS,
    storage.ROWS,
    control.ROWS,
    virtual.ROWS,
    capacity.ROWS,
    misleading.ROWS,
)
ROWS: tuple[Row, ...] = tuple(
    sorted((row for family in _FAMILIES for row in family), key=lambda row: (row.number, row.part))
)

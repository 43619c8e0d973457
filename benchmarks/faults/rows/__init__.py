"""Collect all rows, in the order of their numbers."""

from __future__ import annotations

from benchmarks.faults.rows import control, endings, machines, nodes, pods, processes, programs, storage

_FAMILIES = (processes, pods, nodes, endings, storage, control, machines, programs)
ROWS = tuple(sorted((row for family in _FAMILIES for row in family.ROWS), key=lambda row: (row.number, row.part)))

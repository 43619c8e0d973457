"""Collect all rows, in the order of their numbers."""

from __future__ import annotations

from benchmarks.faults.rows import control, endings, machines, neighbours, nodes, pods, processes, programs, storage

_FAMILIES = (processes, pods, nodes, endings, storage, control, machines, programs, neighbours)
ROWS = tuple(sorted((row for family in _FAMILIES for row in family.ROWS), key=lambda row: (row.number, row.part)))

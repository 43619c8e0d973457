"""Figures of a benchmark: measured values with their goal, as a table and as JSON."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from benchmarks.fleetlab.operator_site import machine

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(slots=True)
class Figure:
    """One thing that was measured, once or several times."""

    name: str
    nodes: int
    unit: str
    """`s`, `x` (ratio to the floor of the same run), `count`, `MiB`, `cores`, `/min`."""
    values: list[float]
    goal: float | None = None
    """The largest median that is good enough."""
    floor: float | None = None
    """Median in seconds of what the ratio is taken to."""
    note: str = ""

    @property
    def median(self) -> float:
        """The middle value."""
        return statistics.median(self.values)

    @property
    def met(self) -> bool | None:
        """Whether the goal is reached; None without one."""
        return None if self.goal is None else self.median <= self.goal


@dataclass(slots=True)
class Report:
    """All figures of one benchmark."""

    benchmark: str
    quick: bool
    figures: list[Figure] = field(default_factory=list)
    of: str = "nodes"
    """What the sizes count."""

    def add(
        self,
        name: str,
        nodes: int,
        unit: str,
        values: list[float] | float,
        *,
        goal: float | None = None,
        floor: float | None = None,
        note: str = "",
    ) -> None:
        """Take a figure; several calls with the same name and size are several values of one."""
        taken = values if isinstance(values, list) else [values]
        if not taken:
            return
        for figure in self.figures:
            if (figure.name, figure.nodes) == (name, nodes):
                figure.values += taken
                return
        self.figures.append(Figure(name, nodes, unit, list(taken), goal, floor, note))

    def print(self) -> None:
        """The table."""
        table = Table(title=f"{self.benchmark} ({'quick, ' if self.quick else ''}{machine()['cores']} cores)")
        for heading in ("figure", self.of, "median", "lowest", "highest", "goal", ""):
            table.add_column(heading, justify="left" if heading in ("figure", "") else "right")
        for each in self.figures:
            met = {True: "met", False: "missed", None: ""}[each.met]
            goal = "" if each.goal is None else shown(each.goal, each.unit)
            spread = [shown(value, each.unit) for value in (each.median, min(each.values), max(each.values))]
            table.add_row(each.name, str(each.nodes or ""), *spread, goal, met or each.note)
        Console(width=150).print(table)

    def write(self, path: Path) -> None:
        """The JSON."""
        document: dict[str, Any] = {
            "benchmark": self.benchmark,
            "date": datetime.now(UTC).date().isoformat(),
            "quick": self.quick,
            "machine": machine(),
            "figures": [{**asdict(each), "median": each.median, "met": each.met} for each in self.figures],
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, indent=1) + "\n")


def shown(value: float, unit: str) -> str:
    """A value with its unit, for a table."""
    if unit == "x":
        return f"{value:.2f} x"
    if unit == "ms":
        return f"{value:.1f} ms"
    if unit in ("count", "/min"):
        return f"{value:.0f}{'' if unit == 'count' else ' /min'}"
    return f"{value:.0f} {unit}" if value >= 100 else f"{value:.2f} {unit}"

"""Collect the measured values of a benchmark with their goals, and write them as a table and as JSON.

`create_parser` has the options that benchmarks of figures share.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.harness.conditions import describe_machine, write_report


@dataclass(slots=True)
class Figure:
    """A figure with its measured values."""

    name: str
    nodes: int
    unit: str
    """`s`, `x` (ratio to the floor of the same run), `count`, `MiB`, `cores`, `/min`."""
    values: list[float]
    goal: float | None = None
    """Largest acceptable median."""

    @property
    def median(self) -> float:
        """Median of the values."""
        return statistics.median(self.values)

    @property
    def met(self) -> bool | None:
        """Whether the goal is met; None without one."""
        return None if self.goal is None else self.median <= self.goal


@dataclass(slots=True)
class Report:
    """All figures of one benchmark."""

    benchmark: str
    quick: bool
    figures: list[Figure] = field(default_factory=list)

    def add(self, name: str, nodes: int, unit: str, value: float, *, goal: float | None = None) -> None:
        """Add a value; several calls with the same name and size add to one figure."""
        for figure in self.figures:
            if (figure.name, figure.nodes) == (name, nodes):
                figure.values.append(value)
                return
        self.figures.append(Figure(name, nodes, unit, [value], goal))

    def print(self) -> None:
        """Print the table."""
        table = Table(title=f"{self.benchmark} ({'quick, ' if self.quick else ''}{describe_machine()['cores']} cores)")
        for heading in ("figure", "nodes", "median", "lowest", "highest", "goal", ""):
            table.add_column(heading, justify="left" if heading in ("figure", "") else "right")
        for figure in self.figures:
            met = {True: "met", False: "missed", None: ""}[figure.met]
            goal = "" if figure.goal is None else format_value(figure.goal, figure.unit)
            values = (figure.median, min(figure.values), max(figure.values))
            cells = [format_value(value, figure.unit) for value in values]
            table.add_row(figure.name, str(figure.nodes or ""), *cells, goal, met)
        Console(width=150).print(table)

    def write(self, path: Path) -> None:
        """Write the figures as JSON."""
        figures = [{**asdict(figure), "median": figure.median, "met": figure.met} for figure in self.figures]
        write_report(path, self.benchmark, quick=self.quick, figures=figures)


def create_parser(benchmark: str, description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options of all benchmarks: `--json` and `--quick`."""
    parser = argparse.ArgumentParser(
        prog=f"benchmarks.{benchmark}", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, default=Path(f"out/bench/{benchmark}.json"), help="file of the figures")
    parser.add_argument("--quick", action="store_true", help="smaller sizes and fewer rounds")
    return parser


def format_value(value: float, unit: str) -> str:
    """Format a value with its unit."""
    if unit == "x":
        return f"{value:.2f} x"
    if unit == "ms":
        return f"{value:.1f} ms"
    if unit in ("count", "/min"):
        return f"{value:.0f}{'' if unit == 'count' else ' /min'}"
    return f"{value:.0f} {unit}" if value >= 100 else f"{value:.2f} {unit}"

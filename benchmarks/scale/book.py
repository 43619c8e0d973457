"""The figures of the benchmark, what each may cost, and how each grows with the number of ranks.

Invariant: a figure has one name, one place (`where`) and one value for each size; the law of growth is fitted between
the sizes that were measured and nothing is extrapolated.
"""

from __future__ import annotations

import ctypes
import gc
import math
import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")
MIBIBYTE = 2**20
LINEAR = 1.1
"""Above this exponent a cost grows faster than the number of ranks; measured times scatter by a tenth."""
CONSTANT = 0.25
"""Below it growth is called constant or logarithmic: a logarithm from 8 to 4,096 ranks has 0.22."""
NOISE = {"s": 0.002, "MiB peak": 2.0, "MiB": 1e-4, "count": 0.0}
"""Values below say nothing of growth: time of the scheduler, pages of the allocator."""


@dataclass(slots=True)
class Figure:
    """One cost at several sizes."""

    section: str
    name: str
    where: str
    """Whose cost: `rank 0`, `a middle rank`, `the job`, ..."""
    unit: str
    """`s`, `MiB`, `MiB peak`, `count`."""
    values: dict[int, float] = field(default_factory=dict)
    """By ranks."""
    budget: float | None = None
    budget_at: int = 4096
    """The size for which the budget is meant."""

    @property
    def exponent(self) -> float | None:
        """Of the number of ranks, by least squares over the sizes from 64 on; None with fewer than two of them."""
        least = NOISE.get(self.unit, 0.0)
        points = [(math.log(n), math.log(v)) for n, v in sorted(self.values.items()) if n >= 64 and v > least]
        if len(points) < 2:
            return None
        mean_x = sum(x for x, _ in points) / len(points)
        mean_y = sum(y for _, y in points) / len(points)
        return sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)

    @property
    def law(self) -> str:
        """The exponent in words."""
        if self.exponent is None:
            return "too small to say"
        if self.exponent <= CONSTANT:
            return "constant or logarithmic"
        if self.exponent <= LINEAR:
            return f"N^{self.exponent:.2f}"
        return f"**N^{self.exponent:.2f}**"

    @property
    def met(self) -> bool | None:
        """Whether the budget is kept at its size; None without one, or where that size was not measured."""
        if self.budget is None or self.budget_at not in self.values:
            return None
        return self.values[self.budget_at] <= self.budget

    def to_json(self) -> dict[str, Any]:
        """For the benchmark's file."""
        return {
            "section": self.section, "name": self.name, "where": self.where, "unit": self.unit,
            "values": {str(ranks): value for ranks, value in sorted(self.values.items())},
            "budget": self.budget, "budgetAt": self.budget_at, "exponent": self.exponent, "met": self.met,
        }  # fmt: skip

    @staticmethod
    def from_json(raw: dict[str, Any]) -> Figure:
        """What `to_json` gave."""
        values = {int(ranks): float(value) for ranks, value in raw["values"].items()}
        return Figure(
            raw["section"], raw["name"], raw["where"], raw["unit"], values, raw["budget"], raw["budgetAt"]
        )  # fmt: skip


class Book:
    """All figures, in the order in which they were first taken."""

    def __init__(self) -> None:
        self.figures: list[Figure] = []

    def add(
        self, section: str, name: str, where: str, unit: str, ranks: int, value: float, *, budget: float | None = None
    ) -> None:
        """Take a value; of several with one name at one size the least, as a busy machine only adds."""
        key = (section, name, where, unit)
        for figure in self.figures:
            if (figure.section, figure.name, figure.where, figure.unit) == key:
                figure.values[ranks] = min(value, figure.values.get(ranks, value))
                return
        self.figures.append(Figure(*key, {ranks: value}, budget))

    def value(self, section: str, name: str, where: str, unit: str, ranks: int) -> float:
        """What was taken; 0 for nothing."""
        for figure in self.figures:
            if (figure.section, figure.name, figure.where, figure.unit) == (section, name, where, unit):
                return figure.values.get(ranks, 0.0)
        return 0.0


def measured(action: Callable[[], T]) -> tuple[T, float, float]:
    """What an action gives, its seconds of processor time, and how far the process's memory rose meanwhile, MiB.

    Processor time, because the page is about one rank's work and the machine is shared; what waits for a disk or for
    other processes is timed by the clock instead.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _memory("VmRSS")
    began = time.process_time()
    outcome = action()
    seconds = time.process_time() - began
    return outcome, seconds, max(0.0, (_memory("VmHWM") - before) / 1024)


def _memory(name: str) -> int:
    """KiB."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) if found else 0

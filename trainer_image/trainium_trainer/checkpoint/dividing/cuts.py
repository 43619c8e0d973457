"""The division of a tensor over the ranks of a pipeline stage: a few cuts, from which each rank's box follows.

A stage's ranks stand in a table of data x tensor parallelism. A cut divides one dimension of what the cuts before it
left along one axis of that table: into equal chunks, as DTensor does, or into windows of a given number of rows, as
ZeRO-1 over stacked weights needs. Axes without a cut hold copies.

Guarantees:
- An axis is cut along once at most.
- Boxes are a function of tensor size, cuts and coordinates and of nothing else, so every rank and every later reader
  derives the same ones.
- What meets a box is found without a look at the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterator


class Axis(StrEnum):
    """A direction in a stage's table of ranks."""

    DATA = "data"
    TENSOR = "tensor"


@dataclass(frozen=True, slots=True)
class Grid:
    """The ranks of a job: pipeline x data x tensor, tensor fastest.

    Here and in what builds on it a rank is the number of a place in this table, whatever the process at that place is
    called elsewhere.
    """

    pipeline: int = 1
    data: int = 1
    tensor: int = 1

    @property
    def size(self) -> int:
        """Ranks."""
        return self.pipeline * self.data * self.tensor

    def length(self, axis: Axis) -> int:
        """Ranks along an axis."""
        return self.data if axis is Axis.DATA else self.tensor

    def rank(self, stage: int, data: int, tensor: int) -> int:
        """Return the rank at a place."""
        return (stage * self.data + data) * self.tensor + tensor

    def place(self, rank: int) -> tuple[int, int, int]:
        """Stage, data and tensor coordinate of a rank."""
        rest, tensor = divmod(rank, self.tensor)
        return rest // self.data, rest % self.data, tensor


@dataclass(frozen=True, slots=True)
class Cut:
    """One dimension, divided along one axis: number i holds the window [i * rows - start, (i + 1) * rows - start).

    Rows are counted in what earlier cuts left; what of a window does not exist is left out.
    """

    dimension: int
    axis: Axis
    rows: int = 0
    """Length of a window; 0: the smallest for which all ranks of the axis have enough."""
    start: int = 0
    """First row within the windows' own count, where the tensor is stacked below others."""
    order: tuple[int, ...] = ()
    """Number of each rank of the axis; empty: its coordinate. Equal numbers hold copies."""

    def number(self, coordinate: int) -> int:
        """Return the window that a rank of the axis holds."""
        return self.order[coordinate] if self.order else coordinate

    def coordinates(self, number: int, length: int) -> tuple[int, ...]:
        """Return the ranks of an axis of this length that hold a window."""
        if not self.order:
            return (number,) if 0 <= number < length else ()
        return tuple(coordinate for coordinate, each in enumerate(self.order) if each == number)

    def window(self, number: int, extent: int, length: int) -> tuple[int, int]:
        """Begin and end of a window in a dimension of `extent` rows; `length` is the axis's."""
        rows = self.rows or -(-extent // length)
        begin = number * rows - self.start
        return min(max(begin, 0), extent), min(max(begin + rows, 0), extent)

    def numbers(self, low: int, high: int, extent: int, length: int) -> range:
        """Return the windows that have rows of [low, high), which lies in the dimension."""
        if high <= low:
            return range(0)
        rows = self.rows or -(-extent // length)
        return range((low + self.start) // rows, (high - 1 + self.start) // rows + 1)


Division: TypeAlias = tuple[Cut, ...]


@dataclass(frozen=True, slots=True)
class Box:
    """Part of a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def volume(self) -> int:
        """Values in it."""
        volume = 1
        for size in self.sizes:
            volume *= size
        return volume


@dataclass(frozen=True, slots=True)
class HeldBox:
    """A box, and which ranks of the stage hold it."""

    box: Box
    data: tuple[int, ...]
    tensor: tuple[int, ...]

    def holder(self, turn: int) -> tuple[int, int]:
        """Return the data and tensor coordinate of holder number `turn`; holders count by rank."""
        row, column = divmod(turn % (len(self.data) * len(self.tensor)), len(self.tensor))
        return self.data[row], self.tensor[column]


def box_at(shape: tuple[int, ...], division: Division, grid: Grid, data: int, tensor: int) -> Box:
    """Return the box of the rank at these coordinates; some size is 0 when it holds nothing."""
    offsets, sizes = [0] * len(shape), list(shape)
    for cut in division:
        at = cut.dimension
        number = cut.number(data if cut.axis is Axis.DATA else tensor)
        begin, end = cut.window(number, sizes[at], grid.length(cut.axis))
        offsets[at] += begin
        sizes[at] = end - begin
    return Box(tuple(offsets), tuple(sizes))


def holders_at(division: Division, grid: Grid, data: int, tensor: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return data and tensor coordinates of the ranks that hold the same box as the rank at these coordinates."""
    rows, columns = tuple(range(grid.data)), tuple(range(grid.tensor))
    for cut in division:
        if cut.axis is Axis.DATA:
            rows = cut.coordinates(cut.number(data), grid.data)
        else:
            columns = cut.coordinates(cut.number(tensor), grid.tensor)
    return rows, columns


def meeting(shape: tuple[int, ...], division: Division, grid: Grid, wanted: Box) -> Iterator[HeldBox]:
    """Yield the different boxes that share values with a wanted one; as many steps as there are such boxes."""
    if not wanted.volume:
        return
    lows = wanted.offsets
    highs = tuple(low + size for low, size in zip(lows, wanted.sizes, strict=True))

    def walk(left: Division, offsets: tuple[int, ...], sizes: tuple[int, ...], held: HeldBox) -> Iterator[HeldBox]:
        if not left:
            yield HeldBox(Box(offsets, sizes), held.data, held.tensor)
            return
        cut, at, length = left[0], left[0].dimension, grid.length(left[0].axis)
        low, high = max(lows[at] - offsets[at], 0), min(highs[at] - offsets[at], sizes[at])
        for number in cut.numbers(low, high, sizes[at], length):
            ranks = cut.coordinates(number, length)
            begin, end = cut.window(number, sizes[at], length)
            if ranks and end > begin:
                by_data = cut.axis is Axis.DATA
                narrowed = HeldBox(held.box, ranks if by_data else held.data, held.tensor if by_data else ranks)
                moved = (*offsets[:at], offsets[at] + begin, *offsets[at + 1 :])
                yield from walk(left[1:], moved, (*sizes[:at], end - begin, *sizes[at + 1 :]), narrowed)

    everyone = HeldBox(wanted, tuple(range(grid.data)), tuple(range(grid.tensor)))
    yield from walk(division, (0,) * len(shape), shape, everyone)


def problem_of(shape: tuple[int, ...], division: Division, grid: Grid) -> str:
    """Return why the boxes do not make up the tensor, each value in one box; empty when they do.

    Windows of one cut never overlap, so it is enough that each window that has rows belongs to a rank, whatever the
    cuts before it left: linear in the ranks of an axis, where a look at all pairs of boxes is quadratic in all ranks.
    """
    if len({cut.axis for cut in division}) < len(division):
        return "an axis is cut along twice"
    extents = {dimension: {extent} for dimension, extent in enumerate(shape)}
    for cut in division:
        if cut.dimension not in extents or cut.rows < 0 or cut.start < 0:
            return f"there is no such cut: {cut}"
        length, left = grid.length(cut.axis), set[int]()
        if cut.order and len(cut.order) != length:
            return f"{len(cut.order)} ranks are numbered where the axis {cut.axis} has {length}"
        numbers = set(cut.order) if cut.order else set(range(length))
        for extent in extents[cut.dimension]:
            needed = cut.numbers(0, extent, extent, length)
            if missing := set(needed) - numbers:
                return f"no rank along {cut.axis} holds window {min(missing)} of dimension {cut.dimension}"
            left |= {end - begin for begin, end in (cut.window(number, extent, length) for number in needed)}
        extents[cut.dimension] = left
    return ""

"""The division of tensors over the ranks of a job, as boxes.

The ranks of a stage form a grid of data x tensor parallelism. A cut divides one dimension of the box that earlier cuts
left along one axis of the grid: into equal chunks, as DTensor does, or into windows of a given number of rows, as
ZeRO-1 over stacked weights needs. Ranks along an axis without a cut hold copies.

Guarantees:
- An axis is cut along once at most.
- Boxes depend only on tensor size, cuts and coordinates, so every rank and every later reader derives the same ones.
- The boxes that overlap a given box are found without a search through all boxes.
- The module uses no torch and no I/O.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterator


class Axis(StrEnum):
    """An axis of a stage's grid of ranks."""

    DATA = "data"
    TENSOR = "tensor"


@dataclass(frozen=True, slots=True)
class Grid:
    """The ranks of a job: pipeline x data x tensor, tensor fastest.

    Here a rank is an index into this grid, which may differ from the rank of the process in the job.
    """

    pipeline: int = 1
    data: int = 1
    tensor: int = 1

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.pipeline * self.data * self.tensor

    def count_ranks(self, axis: Axis) -> int:
        """Return the number of ranks along an axis."""
        return self.data if axis is Axis.DATA else self.tensor

    def find_rank(self, stage: int, data: int, tensor: int) -> int:
        """Return the rank at coordinates."""
        return (stage * self.data + data) * self.tensor + tensor

    def find_coordinates(self, rank: int) -> tuple[int, int, int]:
        """Return the stage, data and tensor coordinate of a rank."""
        replica, tensor = divmod(rank, self.tensor)
        return replica // self.data, replica % self.data, tensor


@dataclass(frozen=True, slots=True)
class Cut:
    """A division of one dimension along one axis: window i has the rows [i * rows - start, (i + 1) * rows - start).

    Rows are relative to the box that earlier cuts left; rows of a window outside that box do not exist.
    """

    dimension: int
    axis: Axis
    rows: int = 0
    """The length of a window; 0: the smallest with which the windows of all ranks cover the dimension."""
    start: int = 0
    """The offset of the tensor in the rows of the windows, where it is stacked below others."""
    order: tuple[int, ...] = ()
    """The window of each rank of the axis; empty: its coordinate. Ranks with equal windows hold copies."""

    def find_window_number(self, coordinate: int) -> int:
        """Return the window that a rank of the axis holds."""
        return self.order[coordinate] if self.order else coordinate

    def list_coordinates(self, number: int, length: int) -> tuple[int, ...]:
        """Return the ranks of an axis of this length that hold a window."""
        if not self.order:
            return (number,) if 0 <= number < length else ()
        return tuple(coordinate for coordinate, part in enumerate(self.order) if part == number)

    def find_window(self, number: int, extent: int, length: int) -> tuple[int, int]:
        """Return the begin and end of a window in a dimension of `extent` rows; `length` is the axis's."""
        rows = self.rows or -(-extent // length)
        begin = number * rows - self.start
        return min(max(begin, 0), extent), min(max(begin + rows, 0), extent)

    def list_window_numbers(self, low: int, high: int, extent: int, length: int) -> range:
        """Return the windows that contain rows of [low, high), a range of the dimension."""
        if high <= low:
            return range(0)
        rows = self.rows or -(-extent // length)
        return range((low + self.start) // rows, (high - 1 + self.start) // rows + 1)


Division: TypeAlias = tuple[Cut, ...]


@dataclass(frozen=True, slots=True)
class Box:
    """A box of a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def volume(self) -> int:
        """The number of values in the box."""
        return math.prod(self.sizes)


@dataclass(frozen=True, slots=True)
class BoxReplicas:
    """A box and the ranks of the stage that hold it."""

    box: Box
    data: tuple[int, ...]
    tensor: tuple[int, ...]

    def find_holder(self, turn: int) -> tuple[int, int]:
        """Return the data and tensor coordinate of holder number `turn`; holders count by rank."""
        row, column = divmod(turn % (len(self.data) * len(self.tensor)), len(self.tensor))
        return self.data[row], self.tensor[column]


def find_box(shape: tuple[int, ...], division: Division, grid: Grid, data: int, tensor: int) -> Box:
    """Return the box of the rank at these coordinates; a size is 0 when the rank holds nothing."""
    offsets, sizes = [0] * len(shape), list(shape)
    for cut in division:
        dimension = cut.dimension
        number = cut.find_window_number(data if cut.axis is Axis.DATA else tensor)
        begin, end = cut.find_window(number, sizes[dimension], grid.count_ranks(cut.axis))
        offsets[dimension] += begin
        sizes[dimension] = end - begin
    return Box(tuple(offsets), tuple(sizes))


def list_holders(division: Division, grid: Grid, data: int, tensor: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return data and tensor coordinates of the ranks that hold the same box as the rank at these coordinates."""
    rows, columns = tuple(range(grid.data)), tuple(range(grid.tensor))
    for cut in division:
        if cut.axis is Axis.DATA:
            rows = cut.list_coordinates(cut.find_window_number(data), grid.data)
        else:
            columns = cut.list_coordinates(cut.find_window_number(tensor), grid.tensor)
    return rows, columns


def find_overlapping_boxes(
    shape: tuple[int, ...], division: Division, grid: Grid, wanted: Box
) -> Iterator[BoxReplicas]:
    """Yield the distinct boxes that overlap a wanted one, in time proportional to their number."""
    if not wanted.volume:
        return
    lows = wanted.offsets
    highs = tuple(low + size for low, size in zip(lows, wanted.sizes, strict=True))

    def walk(
        remaining: Division, offsets: tuple[int, ...], sizes: tuple[int, ...], boxed: BoxReplicas
    ) -> Iterator[BoxReplicas]:
        if not remaining:
            yield BoxReplicas(Box(offsets, sizes), boxed.data, boxed.tensor)
            return
        cut, at, length = remaining[0], remaining[0].dimension, grid.count_ranks(remaining[0].axis)
        low, high = max(lows[at] - offsets[at], 0), min(highs[at] - offsets[at], sizes[at])
        for number in cut.list_window_numbers(low, high, sizes[at], length):
            ranks = cut.list_coordinates(number, length)
            begin, end = cut.find_window(number, sizes[at], length)
            if ranks and end > begin:
                by_data = cut.axis is Axis.DATA
                narrowed = BoxReplicas(boxed.box, ranks if by_data else boxed.data, boxed.tensor if by_data else ranks)
                moved = (*offsets[:at], offsets[at] + begin, *offsets[at + 1 :])
                yield from walk(remaining[1:], moved, (*sizes[:at], end - begin, *sizes[at + 1 :]), narrowed)

    everyone = BoxReplicas(wanted, tuple(range(grid.data)), tuple(range(grid.tensor)))
    yield from walk(division, (0,) * len(shape), shape, everyone)


def find_partition_problem(shape: tuple[int, ...], division: Division, grid: Grid) -> str:
    """Return why the boxes do not partition the tensor; empty when each value is in exactly one box.

    Windows of one cut never overlap, so it is enough that each window with rows belongs to a rank, whatever the earlier
    cuts left. This is linear in the ranks of an axis; comparing all pairs of boxes would be quadratic in all ranks.
    """
    if len({cut.axis for cut in division}) < len(division):
        return "an axis is cut along twice"
    extents = {dimension: {extent} for dimension, extent in enumerate(shape)}
    for cut in division:
        if cut.dimension not in extents or cut.rows < 0 or cut.start < 0:
            return f"there is no such cut: {cut}"
        length, overlaps = grid.count_ranks(cut.axis), set[int]()
        if cut.order and len(cut.order) != length:
            return f"{len(cut.order)} ranks are numbered where the axis {cut.axis} has {length}"
        numbers = set(cut.order) if cut.order else set(range(length))
        for extent in extents[cut.dimension]:
            needed = cut.list_window_numbers(0, extent, extent, length)
            if missing := set(needed) - numbers:
                return f"no rank along {cut.axis} holds window {min(missing)} of dimension {cut.dimension}"
            overlaps |= {end - begin for begin, end in (cut.find_window(number, extent, length) for number in needed)}
        extents[cut.dimension] = overlaps
    return ""

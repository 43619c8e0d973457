"""The division of tensors over the ranks of a job, and which rank writes which box into its file.

The ranks of a stage form a grid of data x tensor parallelism. A cut divides one dimension of the box that earlier cuts
left along one axis of the grid: into equal chunks, as DTensor does, or into windows of a given number of rows, as
ZeRO-1 over stacked weights needs. Ranks along an axis without a cut hold copies.

One of the ranks that hold the same box writes it. Tensors that are copied in the same pattern are assigned to the
holders round-robin, largest first, so that no rank writes more than one tensor more than another. A tensor that several
pipeline stages hold is written by the first of them.

Guarantees:
- An axis is cut along once at most.
- Boxes depend only on tensor size, cuts and coordinates, so every rank and every later reader derives the same ones.
- The boxes that overlap a given box are found without a search through all boxes.
- A layout is small, whatever the number of ranks (a few numbers per tensor).
- The writer of a box and its offset in the file depend only on the layout and are part of the format of checkpoints
  (index format 3): a change needs a new format. The module uses no torch and no I/O.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import math
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence


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
        rest, tensor = divmod(rank, self.tensor)
        return rest // self.data, rest % self.data, tensor


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
        left: Division, offsets: tuple[int, ...], sizes: tuple[int, ...], boxed: BoxReplicas
    ) -> Iterator[BoxReplicas]:
        if not left:
            yield BoxReplicas(Box(offsets, sizes), boxed.data, boxed.tensor)
            return
        cut, at, length = left[0], left[0].dimension, grid.count_ranks(left[0].axis)
        low, high = max(lows[at] - offsets[at], 0), min(highs[at] - offsets[at], sizes[at])
        for number in cut.list_window_numbers(low, high, sizes[at], length):
            ranks = cut.list_coordinates(number, length)
            begin, end = cut.find_window(number, sizes[at], length)
            if ranks and end > begin:
                by_data = cut.axis is Axis.DATA
                narrowed = BoxReplicas(boxed.box, ranks if by_data else boxed.data, boxed.tensor if by_data else ranks)
                moved = (*offsets[:at], offsets[at] + begin, *offsets[at + 1 :])
                yield from walk(left[1:], moved, (*sizes[:at], end - begin, *sizes[at + 1 :]), narrowed)

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


INDEX_FORMAT = 3
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
"""The bytes of a value by safetensors' name of its type."""


@dataclass(frozen=True, slots=True)
class TensorMetadata:
    """A tensor of a checkpoint."""

    name: str
    dtype: str
    """Safetensors' name of the type."""
    shape: tuple[int, ...]
    stage: int
    """The pipeline stage that writes it."""
    division: Division

    @property
    def volume(self) -> int:
        """The number of values in the tensor."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class WriteItem:
    """A box in a file."""

    name: str
    dtype: str
    box: Box
    is_whole: bool
    """Whether the box is all of the tensor."""

    @property
    def key(self) -> str:
        """The name in the file: that of the tensor, with the offsets of a box."""
        return self.name if self.is_whole else f"{self.name}@{','.join(map(str, self.box.offsets))}"

    @property
    def size(self) -> int:
        """The size in bytes."""
        return self.box.volume * ITEM_BYTES[self.dtype]


class CheckpointLayout:
    """The tensors of one checkpoint, or of one stage of it."""

    def __init__(self, grid: Grid, tensors: Iterable[TensorMetadata]) -> None:
        self.grid = grid
        self.tensors: Mapping[str, TensorMetadata] = {
            tensor.name: tensor for tensor in sorted(tensors, key=lambda tensor: tensor.name)
        }

    @functools.cached_property
    def text(self) -> bytes:
        """The canonical JSON of the layout; equal for equal layouts."""
        return json.dumps(self.to_json(), separators=(",", ":")).encode()

    @functools.cached_property
    def digest(self) -> bytes:
        """SHA-256 of the text."""
        return hashlib.sha256(self.text).digest()

    @functools.cached_property
    def volume(self) -> int:
        """The number of values of all tensors."""
        return sum(tensor.volume for tensor in self.tensors.values())

    def select(self, wanted: Callable[[str], bool]) -> CheckpointLayout:
        """Return the layout restricted to the tensors of these names."""
        return CheckpointLayout(self.grid, [tensor for name, tensor in self.tensors.items() if wanted(name)])

    def find_problem(self) -> str:
        """Return why the layout is invalid; empty when every value of every tensor is in exactly one box."""
        seen: set[tuple[tuple[int, ...], Division]] = set()
        for tensor in self.tensors.values():
            if (tensor.shape, tensor.division) not in seen:
                seen.add((tensor.shape, tensor.division))
                if problem := find_partition_problem(tensor.shape, tensor.division, self.grid):
                    return f"{tensor.name}: {problem}"
        return ""

    def find_writers(self, name: str, wanted: Box) -> Iterator[tuple[Box, int]]:
        """Yield the written boxes of a tensor that overlap a wanted one, and the rank that writes each."""
        tensor, turn = self.tensors[name], self._turns[name]
        for replicas in find_overlapping_boxes(tensor.shape, tensor.division, self.grid, wanted):
            yield replicas.box, self.grid.find_rank(tensor.stage, *replicas.find_holder(turn))

    def plan_items(self, rank: int) -> tuple[WriteItem, ...]:
        """Return the items that a rank writes, in the order of its file.

        Wide types come first, which keeps every tensor aligned. Within a type, tensors with more copies come first, so
        that other ranks read few blocks of this file.
        """
        stage, data, tensor_rank = self.grid.find_coordinates(rank)
        holders_by_box: dict[tuple[tuple[int, ...], Division], tuple[Box, int, int]] = {}
        items: list[WriteItem] = []
        for tensor in self._tensors_by_stage.get(stage, ()):
            key = (tensor.shape, tensor.division)
            if key not in holders_by_box:
                rows, columns = list_holders(tensor.division, self.grid, data, tensor_rank)
                mine = rows.index(data) * len(columns) + columns.index(tensor_rank)
                box = find_box(tensor.shape, tensor.division, self.grid, data, tensor_rank)
                holders_by_box[key] = box, mine, len(rows) * len(columns)
            box, mine, holders = holders_by_box[key]
            if self._turns[tensor.name] % holders == mine and box.volume:
                items.append(WriteItem(tensor.name, tensor.dtype, box, box.sizes == tensor.shape))
        return tuple(items)

    @functools.cached_property
    def _tensors_by_stage(self) -> dict[int, list[TensorMetadata]]:
        """The tensors of each stage in the order of files."""
        by_stage: dict[int, list[TensorMetadata]] = {}

        def order(tensor: TensorMetadata) -> tuple[int, int, str]:
            return -ITEM_BYTES[tensor.dtype], len(tensor.division), tensor.name

        for tensor in sorted(self.tensors.values(), key=order):
            by_stage.setdefault(tensor.stage, []).append(tensor)
        return by_stage

    @functools.cached_property
    def _turns(self) -> dict[str, int]:
        """The index of each tensor among those of its stage that are copied in the same pattern, largest first."""
        patterns: dict[Any, list[TensorMetadata]] = {}
        for tensor in self.tensors.values():
            pattern = (tensor.stage, *sorted((cut.axis, cut.order) for cut in tensor.division))
            patterns.setdefault(pattern, []).append(tensor)
        turns: dict[str, int] = {}
        for tensors in patterns.values():
            tensors.sort(key=lambda tensor: (-tensor.volume * ITEM_BYTES[tensor.dtype], tensor.name))
            turns |= {tensor.name: turn for turn, tensor in enumerate(tensors)}
        return turns

    def to_json(self) -> dict[str, Any]:
        """Return the layout as JSON values: each division occurs once, and tensors refer to it by its index."""
        numbers: dict[Division, int] = {}
        tensors = {
            name: {
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "stage": tensor.stage,
                "division": numbers.setdefault(tensor.division, len(numbers)),
            }
            for name, tensor in self.tensors.items()
        }
        mesh = {"pipeline": self.grid.pipeline, "data": self.grid.data, "tensor": self.grid.tensor}
        return {"mesh": mesh, "divisions": [[_cut_to_json(c) for c in cuts] for cuts in numbers], "tensors": tensors}

    @staticmethod
    def from_json(raw: Mapping[str, Any]) -> CheckpointLayout:
        """Parse the result of `to_json`. Raises ValueError, KeyError or TypeError for anything else."""
        grid = Grid(**raw["mesh"])
        divisions = [tuple(_cut_from_json(cut) for cut in division) for division in raw["divisions"]]
        tensors = [
            TensorMetadata(name, entry["dtype"], tuple(entry["shape"]), entry["stage"], divisions[entry["division"]])
            for name, entry in raw["tensors"].items()
        ]
        for tensor in tensors:
            if tensor.dtype not in ITEM_BYTES or not 0 <= tensor.stage < grid.pipeline:
                raise ValueError(f"{tensor.name}: there is no type {tensor.dtype} or no stage {tensor.stage}")
        layout = CheckpointLayout(grid, tensors)
        if problem := layout.find_problem():
            raise ValueError(problem)
        return layout


def merge_stages(stages: Sequence[CheckpointLayout]) -> CheckpointLayout:
    """Merge the layouts of all stages: the first stage that holds a tensor writes it.

    Raises ValueError when stages hold different tensors under one name.
    """
    merged: dict[str, TensorMetadata] = {}
    for layout in stages:
        for name, tensor in layout.tensors.items():
            first = merged.setdefault(name, tensor)
            if (first.dtype, first.shape) != (tensor.dtype, tensor.shape):
                raise ValueError(f"{name} is not the same in pipeline stages {first.stage} and {tensor.stage}")
    return CheckpointLayout(stages[0].grid, merged.values())


def replace_stages(layout: CheckpointLayout, stages: Mapping[str, int]) -> CheckpointLayout:
    """Return the layout with the stages of the named tensors replaced."""
    return CheckpointLayout(
        layout.grid,
        [replace(tensor, stage=stages.get(name, tensor.stage)) for name, tensor in layout.tensors.items()],
    )


def _cut_to_json(cut: Cut) -> dict[str, Any]:
    raw: dict[str, Any] = {"dimension": cut.dimension, "axis": str(cut.axis)}
    if cut.rows:
        raw |= {"rows": cut.rows, "start": cut.start}
    if cut.order:
        raw["order"] = list(cut.order)
    return raw


def _cut_from_json(raw: Mapping[str, Any]) -> Cut:
    order = tuple(raw.get("order", ()))
    return Cut(raw["dimension"], Axis(raw["axis"]), raw.get("rows", 0), raw.get("start", 0), order)


def build_file_header(items: Sequence[WriteItem]) -> tuple[bytes, list[tuple[int, int]]]:
    """Return the safetensors header of a file and each item's start and end in the file, in bytes."""
    header = build_safetensors_header((item.key, item.dtype, item.box.sizes) for item in items)
    ends = list(itertools.accumulate((item.size for item in items), initial=len(header)))
    return header, list(itertools.pairwise(ends))


def build_safetensors_header(
    tensors: Iterable[tuple[str, str, Sequence[int]]], metadata: Mapping[str, str] | None = None
) -> bytes:
    """Return the safetensors header of tensors by name, type and shape, padded to align the tensors."""
    entries: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    offset = 0
    for name, dtype, shape in tensors:
        end = offset + math.prod(shape) * ITEM_BYTES[dtype]
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text

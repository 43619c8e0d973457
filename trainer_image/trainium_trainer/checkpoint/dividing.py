"""The division of tensors over the ranks of a job, and which rank writes which box into its file.

A stage's ranks stand in a table of data x tensor parallelism. A cut divides one dimension of what the cuts before it
left along one axis of that table: into equal chunks, as DTensor does, or into windows of a given number of rows, as
ZeRO-1 over stacked weights needs. Axes without a cut hold copies.

Of the ranks that hold the same box one writes it. Tensors that are copied in the same pattern are dealt to the holders
in turn, largest first, so no rank writes more than one tensor more than another. A tensor that several pipeline stages
hold is written by the first of them.

Guarantees:
- An axis is cut along once at most.
- Boxes are a function of tensor size, cuts and coordinates and of nothing else, so every rank and every later reader
  derives the same ones.
- What meets a box is found without a look at the others.
- A scheme is small, whatever the number of ranks (a few numbers per tensor).
- Who writes what, and where it lies in the file, is a function of the scheme alone and part of the format of
  checkpoints (index format 3): a change needs a new format. No torch, no I/O.
"""

from __future__ import annotations

import functools
import hashlib
import json
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence


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


INDEX_FORMAT = 3
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
"""Bytes of a value by safetensors' name of its type."""


@dataclass(frozen=True, slots=True)
class Divided:
    """A tensor of a checkpoint."""

    name: str
    dtype: str
    """Safetensors' name of it."""
    shape: tuple[int, ...]
    stage: int
    """The pipeline stage that writes it."""
    division: Division

    @property
    def volume(self) -> int:
        """Values in it."""
        return Box((), self.shape).volume


@dataclass(frozen=True, slots=True)
class Item:
    """A box in a file."""

    name: str
    dtype: str
    box: Box
    whole: bool
    """Whether the box is all of the tensor."""

    @property
    def key(self) -> str:
        """Its name in the file: that of the tensor, with the offsets of a box."""
        return self.name if self.whole else f"{self.name}@{','.join(map(str, self.box.offsets))}"

    @property
    def size(self) -> int:
        """Bytes."""
        return self.box.volume * ITEM_BYTES[self.dtype]


class Scheme:
    """The tensors of one checkpoint, or of one stage of it."""

    def __init__(self, grid: Grid, tensors: Iterable[Divided]) -> None:
        self.grid = grid
        self.tensors: Mapping[str, Divided] = {
            tensor.name: tensor for tensor in sorted(tensors, key=lambda tensor: tensor.name)
        }

    @functools.cached_property
    def text(self) -> bytes:
        """The digest of its JSON; equal for equal schemes."""
        return json.dumps(self.to_json(), separators=(",", ":")).encode()

    @functools.cached_property
    def digest(self) -> bytes:
        """SHA-256 of the text."""
        return hashlib.sha256(self.text).digest()

    @functools.cached_property
    def volume(self) -> int:
        """Values of all tensors."""
        return sum(tensor.volume for tensor in self.tensors.values())

    def only(self, wanted: Callable[[str], bool]) -> Scheme:
        """Return the tensors of these names alone."""
        return Scheme(self.grid, [tensor for name, tensor in self.tensors.items() if wanted(name)])

    def problem(self) -> str:
        """Return what is wrong with it; empty when every value of every tensor is in exactly one box."""
        seen: set[tuple[tuple[int, ...], Division]] = set()
        for tensor in self.tensors.values():
            if (tensor.shape, tensor.division) not in seen:
                seen.add((tensor.shape, tensor.division))
                if problem := problem_of(tensor.shape, tensor.division, self.grid):
                    return f"{tensor.name}: {problem}"
        return ""

    def writers(self, name: str, wanted: Box) -> Iterator[tuple[Box, int]]:
        """Yield the written boxes of a tensor that share values with a wanted one, and the rank that writes each."""
        tensor, turn = self.tensors[name], self._turns[name]
        for held in meeting(tensor.shape, tensor.division, self.grid, wanted):
            yield held.box, self.grid.rank(tensor.stage, *held.holder(turn))

    def file(self, rank: int) -> tuple[Item, ...]:
        """Return what a rank writes, in the order of its file.

        Wide types first, which keeps every tensor aligned; of a type those that have more copies first, so that what
        other ranks read from this file lies in few blocks.
        """
        stage, data, tensor_rank = self.grid.place(rank)
        found: dict[tuple[tuple[int, ...], Division], tuple[Box, int, int]] = {}
        items: list[Item] = []
        for tensor in self._of_stage.get(stage, ()):
            key = (tensor.shape, tensor.division)
            if key not in found:
                rows, columns = holders_at(tensor.division, self.grid, data, tensor_rank)
                mine = rows.index(data) * len(columns) + columns.index(tensor_rank)
                box = box_at(tensor.shape, tensor.division, self.grid, data, tensor_rank)
                found[key] = box, mine, len(rows) * len(columns)
            box, mine, holders = found[key]
            if self._turns[tensor.name] % holders == mine and box.volume:
                items.append(Item(tensor.name, tensor.dtype, box, box.sizes == tensor.shape))
        return tuple(items)

    @functools.cached_property
    def _of_stage(self) -> dict[int, list[Divided]]:
        """The tensors of each stage in the order of files."""
        found: dict[int, list[Divided]] = {}

        def order(tensor: Divided) -> tuple[int, int, str]:
            return -ITEM_BYTES[tensor.dtype], len(tensor.division), tensor.name

        for tensor in sorted(self.tensors.values(), key=order):
            found.setdefault(tensor.stage, []).append(tensor)
        return found

    @functools.cached_property
    def _turns(self) -> dict[str, int]:
        """Number of each tensor among those of its stage that are copied in the same pattern, largest first."""
        patterns: dict[Any, list[Divided]] = {}
        for tensor in self.tensors.values():
            pattern = (tensor.stage, *sorted((cut.axis, cut.order) for cut in tensor.division))
            patterns.setdefault(pattern, []).append(tensor)
        turns: dict[str, int] = {}
        for tensors in patterns.values():
            tensors.sort(key=lambda tensor: (-tensor.volume * ITEM_BYTES[tensor.dtype], tensor.name))
            turns |= {tensor.name: turn for turn, tensor in enumerate(tensors)}
        return turns

    def to_json(self) -> dict[str, Any]:
        """For JSON: each division is there once, and tensors name it by its number."""
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
        return {"mesh": mesh, "divisions": [[_cut_to_json(c) for c in each] for each in numbers], "tensors": tensors}

    @staticmethod
    def from_json(raw: Mapping[str, Any]) -> Scheme:
        """Return what `to_json` gave. ValueError, KeyError or TypeError for anything else."""
        grid = Grid(**raw["mesh"])
        divisions = [tuple(_cut_from_json(cut) for cut in division) for division in raw["divisions"]]
        tensors = [
            Divided(name, entry["dtype"], tuple(entry["shape"]), entry["stage"], divisions[entry["division"]])
            for name, entry in raw["tensors"].items()
        ]
        for tensor in tensors:
            if tensor.dtype not in ITEM_BYTES or not 0 <= tensor.stage < grid.pipeline:
                raise ValueError(f"{tensor.name}: there is no type {tensor.dtype} or no stage {tensor.stage}")
        scheme = Scheme(grid, tensors)
        if problem := scheme.problem():
            raise ValueError(problem)
        return scheme


def merged(stages: Sequence[Scheme]) -> Scheme:
    """Return the scheme of all stages: a tensor that several hold is written by the first.

    ValueError where they hold different things under one name.
    """
    found: dict[str, Divided] = {}
    for scheme in stages:
        for name, tensor in scheme.tensors.items():
            first = found.setdefault(name, tensor)
            if (first.dtype, first.shape) != (tensor.dtype, tensor.shape):
                raise ValueError(f"{name} is not the same in pipeline stages {first.stage} and {tensor.stage}")
    return Scheme(stages[0].grid, found.values())


def placed(scheme: Scheme, stages: Mapping[str, int]) -> Scheme:
    """Return the scheme with other stages for the tensors of these names."""
    return Scheme(
        scheme.grid,
        [replace(tensor, stage=stages.get(name, tensor.stage)) for name, tensor in scheme.tensors.items()],
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


def header_of(items: Sequence[Item]) -> tuple[bytes, list[tuple[int, int]]]:
    """Return the safetensors header of a file and each item's start and end in it, bytes."""
    entries: dict[str, Any] = {}
    offset = 0
    for item in items:
        end = offset + item.size
        entries[item.key] = {"dtype": item.dtype, "shape": item.box.sizes, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    base = 8 + len(text)
    spans = [(base + entry["data_offsets"][0], base + entry["data_offsets"][1]) for entry in entries.values()]
    return len(text).to_bytes(8, "little") + text, spans

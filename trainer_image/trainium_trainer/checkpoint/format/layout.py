"""The layout of a checkpoint: its tensors, their division, and which rank writes which box into its file.

One of the ranks that hold the same box writes it. Tensors that are copied in the same pattern are assigned to the
holders round-robin, largest first, so that no rank writes more than one tensor more than another. A tensor that several
pipeline stages hold is written by the first of them.

Guarantees:
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
from typing import TYPE_CHECKING, Any

from trainium_trainer.checkpoint.sharding import (
    Axis,
    Box,
    Cut,
    Division,
    Grid,
    find_box,
    find_overlapping_boxes,
    find_partition_problem,
    list_holders,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

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
                holder_index = rows.index(data) * len(columns) + columns.index(tensor_rank)
                box = find_box(tensor.shape, tensor.division, self.grid, data, tensor_rank)
                holders_by_box[key] = box, holder_index, len(rows) * len(columns)
            box, holder_index, holders = holders_by_box[key]
            if self._turns[tensor.name] % holders == holder_index and box.volume:
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

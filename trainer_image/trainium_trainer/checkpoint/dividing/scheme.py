"""Which tensors a checkpoint holds, how each is divided over the ranks, and which rank writes which box into its file.

Of the ranks that hold the same box one writes it. Tensors that are copied in the same pattern are dealt to the holders
in turn, largest first, so no rank writes more than one tensor more than another. A tensor that several pipeline stages
hold is written by the first of them.

Guarantees:
- A scheme is small, whatever the number of ranks (a few numbers per tensor).
- Who writes what, and where it lies in the file, is a function of the scheme alone and part of the format of
  checkpoints (index format 3): a change needs a new format. No torch, no I/O.
"""

from __future__ import annotations

import functools
import hashlib
import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from trainium_trainer.checkpoint.dividing.cuts import (
    Axis,
    Box,
    Cut,
    Division,
    Grid,
    box_at,
    holders_at,
    meeting,
    problem_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

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

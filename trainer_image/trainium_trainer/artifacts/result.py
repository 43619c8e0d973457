"""The numbers of a finished model, row by row: trained ones over frozen ones, adapters merged in float32.

Invariants: memory is a chunk and the two matrices of one adapter; a merged weight is rounded once, from float32 to the
type that is asked for; rows may be asked for by several threads at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import torch

from trainium_trainer.exits import UserError
from trainium_trainer.models.state_dict import WEIGHT, parameter_of, state_name
from trainium_trainer.tuning.choice import LORA_A, LORA_B, MAGNITUDE, module_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from torch import Tensor

    from trainium_trainer.checkpoint.format.contents import Contents
    from trainium_trainer.weights.adapter import AdapterWeights
    from trainium_trainer.weights.base import BaseWeights


class CheckpointWeights:
    """The weights in a durable checkpoint."""

    def __init__(self, contents: Contents) -> None:
        self._contents = contents
        self.names = tuple(name for key in contents.tensors if (name := parameter_of(key)) is not None)
        """Names of the trained parameters."""

    def size(self, name: str) -> torch.Size:
        """Size of a parameter; KeyError when the checkpoint has none of that name."""
        return torch.Size(self._contents.tensors[state_name(WEIGHT, name)].shape)

    def fill(self, name: str, offsets: tuple[int, ...], target: Tensor) -> None:
        """Copy a box, verified. DamagedFileError when a file is not what was written."""
        self._contents.fill(self._contents.wanted(state_name(WEIGHT, name), offsets, target))


Boxes: TypeAlias = "BaseWeights | AdapterWeights | CheckpointWeights"
"""Somewhere that parameters are read from."""


class Result:
    """The parameters that training has produced."""

    def __init__(
        self, trained: Boxes, names: Collection[str], frozen: Boxes | None, scale_of: Callable[[str], float]
    ) -> None:
        """`names` are those of `trained`; `frozen` has all others; `scale_of`: the scale of a module's adapter."""
        self._trained = trained
        self._names = frozenset(names)
        self._frozen = frozen
        self._scale_of = scale_of
        self._newest = ("", torch.empty(0))

    def check(self, sizes: dict[str, tuple[int, ...]]) -> None:
        """Raise UserError unless every parameter of these sizes can be read; rows may be left out."""
        for name, size in sizes.items():
            if name not in self._names:
                if self._frozen is None:
                    raise UserError(f"the checkpoint has no {name} and there is no base to take it from: name the base")
                continue
            found = tuple(self._trained.size(name))
            if found[1:] != size[1:] or found[0] < size[0]:
                raise UserError(
                    f"{name} has the size {list(found)}, but the model's is {list(size)}: the checkpoint is of another "
                    "model, give its configuration"
                )

    def rows(self, name: str, first: int, count: int, dtype: torch.dtype) -> Tensor:
        """Rows of a parameter in a type: [count, ...]. Raises what the sources raise."""
        trained = name in self._names
        source = self._trained if trained else self._frozen
        assert source is not None
        size = (count, *source.size(name)[1:])
        offsets = (first, *(0 for _ in size[1:]))
        module, added = module_of(name), f"{module_of(name)}.{LORA_B}.{name.rpartition('.')[2]}"
        if added not in self._names:
            rows = torch.empty(size, dtype=dtype)
            source.fill(name, offsets, rows)
            return rows
        if len(size) == 1:
            rows, bias = torch.empty(size), torch.empty(size)
            source.fill(name, offsets, rows)
            self._trained.fill(added, offsets, bias)
            return rows.add_(bias, alpha=self._scale_of(module)).to(dtype)
        narrow = self._matrix(f"{module}.{LORA_A}.weight")
        wide = torch.empty(count, narrow.shape[0])
        self._trained.fill(f"{module}.{LORA_B}.weight", (first, 0), wide)
        rows = torch.empty(size, dtype=torch.float32)
        source.fill(name, offsets, rows)
        rows.addmm_(wide, narrow, alpha=self._scale_of(module))
        magnitude = f"{module}.{MAGNITUDE}.weight"
        if magnitude in self._names:
            lengths = torch.empty(count)
            self._trained.fill(magnitude, (first,), lengths)
            rows.mul_((lengths / torch.linalg.vector_norm(rows, dim=1)).unsqueeze(1))
        return rows if dtype is torch.float32 else rows.to(dtype)

    def _matrix(self, name: str) -> Tensor:
        """All of an adapter's A in float32; the chunks of one weight come one after the other."""
        newest, whole = self._newest
        if newest != name:
            whole = torch.empty(self._trained.size(name))
            self._trained.fill(name, (0, 0), whole)
            self._newest = (name, whole)
        # Not `self._newest[1]`: by now it may be the matrix that another thread needs for the next weight.
        return whole

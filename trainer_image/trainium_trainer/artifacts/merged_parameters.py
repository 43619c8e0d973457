"""Read the values of a trained model row by row: trained over frozen weights, adapters merged in float32.

Guarantees:
- Memory holds a chunk and the two matrices of one adapter.
- A merged weight is rounded once, from float32 to the requested type.
- A finite value that the requested type cannot hold is refused.
- Several threads may read rows at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import torch

from trainium_trainer.exits import UserError
from trainium_trainer.models.state_dict import WEIGHT, format_state_name, parse_parameter_name
from trainium_trainer.tuning.trainable import LORA_A, LORA_B, MAGNITUDE, find_parent_module

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from trainium_trainer.checkpoint.format.reader import CheckpointReader
    from trainium_trainer.weights.adapter import AdapterWeights
    from trainium_trainer.weights.base import BaseWeights


class CheckpointWeights:
    """The weights in a durable checkpoint."""

    def __init__(self, reader: CheckpointReader) -> None:
        self._reader = reader
        self.names = tuple(name for key in reader.tensors if (name := parse_parameter_name(key)) is not None)
        """The names of the trained parameters."""

    def find_size(self, name: str) -> torch.Size:
        """Return the size of a parameter. Raises KeyError for an unknown name."""
        return torch.Size(self._reader.tensors[format_state_name(WEIGHT, name)].shape)

    def fill(self, name: str, offsets: tuple[int, ...], target: Tensor) -> None:
        """Copy and verify a box. Raises DamagedFileError if a file is not what was written."""
        self._reader.fill(self._reader.plan_read(format_state_name(WEIGHT, name), offsets, target))


TrainedWeights: TypeAlias = "AdapterWeights | CheckpointWeights"
"""The parameters that a run has trained, with their names."""


class MergedParameters:
    """The parameters of a trained model."""

    def __init__(
        self,
        trained: TrainedWeights,
        frozen: BaseWeights | None,
        scale_of: Callable[[str], float],
    ) -> None:
        """Combine `trained` and `frozen` parameters; `scale_of` returns the scale of a module's adapter."""
        self._trained = trained
        self._names = frozenset(trained.names)
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
            trained = tuple(self._trained.find_size(name))
            if trained[1:] != size[1:] or trained[0] < size[0]:
                raise UserError(
                    f"{name} has the size {list(trained)}, but the model's is {list(size)}: the checkpoint is of "
                    "another model, give its configuration"
                )

    def read_rows(self, name: str, first: int, count: int, dtype: torch.dtype) -> Tensor:
        """Return rows of a parameter in a type, [count, ...].

        Raises UserError for values beyond the type's range, and the errors of the sources.
        """
        rows = self._merge_rows(name, first, count, torch.float32 if dtype is torch.float16 else dtype)
        converted = rows.to(dtype)
        if converted is not rows and bool((converted.isinf() & rows.isfinite()).any()):
            largest = float(rows[rows.isfinite()].abs().max())
            raise UserError(
                f"{name} has values up to {largest:,.0f}, but {dtype} ends at {torch.finfo(dtype).max:,.0f}: write "
                "bfloat16 or float32 into another folder (--dtype, or artifacts.precision of a run)"
            )
        return converted

    def _merge_rows(self, name: str, first: int, count: int, dtype: torch.dtype) -> Tensor:
        """Return rows of a parameter, merged ones in float32 and others in a type."""
        trained = name in self._names
        source = self._trained if trained else self._frozen
        assert source is not None
        size = (count, *source.find_size(name)[1:])
        offsets = (first, *(0 for _ in size[1:]))
        module, added = find_parent_module(name), f"{find_parent_module(name)}.{LORA_B}.{name.rpartition('.')[2]}"
        if added not in self._names:
            rows = torch.empty(size, dtype=dtype)
            source.fill(name, offsets, rows)
            return rows
        if len(size) == 1:
            rows, bias = torch.empty(size), torch.empty(size)
            source.fill(name, offsets, rows)
            self._trained.fill(added, offsets, bias)
            return rows.add_(bias, alpha=self._scale_of(module))
        narrow = self._read_matrix(f"{module}.{LORA_A}.weight")
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
        return rows

    def _read_matrix(self, name: str) -> Tensor:
        """Return an adapter's whole A in float32, cached because the chunks of one weight are consecutive."""
        newest, matrix = self._newest
        if newest != name:
            matrix = torch.empty(self._trained.find_size(name))
            self._trained.fill(name, (0, 0), matrix)
            self._newest = (name, matrix)
        # Not `self._newest[1]`, which another thread may have replaced for the next weight.
        return matrix

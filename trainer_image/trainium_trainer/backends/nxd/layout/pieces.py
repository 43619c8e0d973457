"""Map whole tensors to rows of the parameters of NxD's parallel layers, and back: names, rows, replicas.

NxD computes query, key and value from one weight and gate and up from another (HLAT's coalesced layers), and repeats
key and value heads when there are more tensor-parallel ranks than heads.

Guarantees:
- Whole tensors have Hugging Face's names, local parameters those of the modules of `backends.nxd.llama`.
- Every piece of a local parameter is one box of a whole tensor.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from trainium_contract.models.parameters import Unit, find_parameter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from trainium_contract.models.shape import ModelShape


class KeyValueOrder(StrEnum):
    """The assignment of key/value heads to ranks if several ranks hold a head."""

    REPEATED = "trn1"
    """Heads 0, 1, ... on adjacent ranks, then repeated: NxD's order on trn1 and inf2."""
    INTERLEAVED = "trn2"
    """Each head on adjacent ranks: NxD's order on trn2 and later."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Some rows of a rank's local parameter that form one box of a whole tensor."""

    name: str
    """Hugging Face's name of the whole parameter."""
    whole: tuple[int, ...]
    """The size of the whole."""
    start: int
    """The first of the rows in the local parameter."""
    offsets: tuple[int, ...]
    """The offsets of the box in the whole."""
    sizes: tuple[int, ...]
    """The size of the box; its first dimension counts the rows."""
    replicas: int = 1
    """The number of tensor-parallel ranks that hold this box, including this one."""

    @property
    def end(self) -> int:
        """One past the last row in the local parameter."""
        return self.start + self.sizes[0]

    def slice_of(self, whole: Tensor) -> Tensor:
        """Return the box of a whole tensor."""
        for dimension, (offset, size) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            whole = whole.narrow(dimension, offset, size)
        return whole

    def empty(self) -> Piece:
        """Return the piece without rows."""
        return replace(self, start=0, offsets=(0,) * len(self.whole), sizes=(0, *self.sizes[1:]))

    def within(self, start: int, end: int) -> Piece | None:
        """Return the part of the piece in local rows [start, end), relative to `start`; None if empty."""
        first, last = max(self.start, start), min(self.end, end)
        if first >= last:
            return None
        return replace(
            self,
            start=first - start,
            offsets=(self.offsets[0] + first - self.start, *self.offsets[1:]),
            sizes=(last - first, *self.sizes[1:]),
        )


def list_norm_terms(pieces: Sequence[Piece]) -> tuple[tuple[int | None, int | None, int], ...]:
    """Return the terms of a rank's sum of squares of a parameter: first row, end, divisor.

    Rows on several tensor-parallel ranks are divided by their number; rows None: all rows.
    """
    copies = {piece.replicas for piece in pieces}
    if len(copies) <= 1:
        return ((None, None, next(iter(copies), 1)),)
    return tuple((piece.start, piece.end, piece.replicas) for piece in pieces)


def find_shared_rows(pieces: Sequence[Piece], size: int) -> tuple[tuple[int, int, bool], ...]:
    """Return the rows that several ranks hold: first row, end, and whether all `size` ranks of the group hold them."""
    return tuple((piece.start, piece.end, piece.replicas >= size) for piece in pieces if piece.replicas > 1)


@dataclass(frozen=True, slots=True)
class ProjectionCut:
    """The chunk of a projection's outputs or inputs on a rank."""

    whole: tuple[int, ...]
    """Outputs and inputs of the whole projection, or the outputs of a bias."""
    dimension: int
    """0 if the outputs are divided, 1 if the inputs are."""
    offset: int
    length: int
    replicas: int = 1
    """The number of tensor-parallel ranks that hold this chunk, including this one."""


@dataclass(frozen=True, slots=True)
class TensorRank:
    """A rank of the tensor-parallel group, with its division of the model."""

    shape: ModelShape
    rank: int
    size: int
    order: KeyValueOrder = KeyValueOrder.REPEATED

    @property
    def key_value_copies(self) -> int:
        """The number of ranks that hold the same key/value heads."""
        return max(1, self.size // self.shape.num_key_value_heads)

    @property
    def query_chunk(self) -> int:
        """The index of this rank's chunk of query heads: those that attend to its key/value heads."""
        copies = self.key_value_copies
        if copies == 1 or self.order is KeyValueOrder.INTERLEAVED:
            return self.rank
        heads = self.shape.num_key_value_heads
        return self.rank % heads * copies + self.rank // heads

    @property
    def key_value_chunk(self) -> int:
        """The index of this rank's chunk of key/value heads, of size / copies."""
        return self.query_chunk // self.key_value_copies

    def divide(self, name: str) -> ProjectionCut:
        """Return the division of a parameter by Hugging Face's name. Raises KeyError for other or undivided ones."""
        parameter = find_parameter(self.shape, name)
        if parameter.dimension is None:
            raise KeyError(name)
        chunk, copies = {
            Unit.QUERY_HEADS: (self.query_chunk, 1),
            Unit.KEY_VALUE_HEADS: (self.key_value_chunk, self.key_value_copies),
            Unit.FEATURES: (self.rank, 1),
        }[parameter.unit]
        length = parameter.size[parameter.dimension] * copies // self.size
        return ProjectionCut(parameter.size, parameter.dimension, chunk * length, length, copies)

    def find_pieces(self, parameter: str, *, adapter_rank: int = 0) -> tuple[Piece, ...]:
        """Return the pieces of a module's parameter. Raises KeyError for a name that the model does not have.

        `adapter_rank` is the width of the adapters, if there are any.
        """
        owner, _, leaf = parameter.rpartition(".")
        prefix, _, module = owner.rpartition(".")
        if module == "qkv_proj":
            leaf = leaf.removesuffix("_qkv")
            return self._find_stacked_rows(*(f"{prefix}.{which}_proj.{leaf}" for which in "qkv"))
        if module == "gate_up_proj":
            return self._find_stacked_rows(*(f"{prefix}.{which}_proj.{leaf}" for which in ("gate", "up")))
        if module in ("lora_A", "lora_B"):
            return (self._divide_adapter(parameter, self.divide(f"{prefix}.weight"), module == "lora_A", adapter_rank),)
        whole = find_parameter(self.shape, parameter)
        if whole.dimension is None:
            return (Piece(parameter, whole.size, 0, (0,), whole.size, self.size),)
        return (_create_piece(parameter, self.divide(parameter)),)

    def _find_stacked_rows(self, *parameters: str) -> tuple[Piece, ...]:
        """Return the rows of several stacked parameters."""
        pieces: list[Piece] = []
        for name in parameters:
            start = pieces[-1].end if pieces else 0
            pieces.append(replace(_create_piece(name, self.divide(name)), start=start))
        return tuple(pieces)

    def _divide_adapter(self, parameter: str, cut: ProjectionCut, first: bool, rank: int) -> Piece:
        """Divide A, [rank, inputs], or B, [outputs, rank], as the projection; the other one is whole."""
        side = 1 if first else 0
        whole = (rank, cut.whole[1]) if first else (cut.whole[0], rank)
        if cut.dimension == side:
            return _create_piece(parameter, replace(cut, whole=whole))
        return Piece(parameter, whole, 0, (0, 0), whole, self.size)


def _create_piece(parameter: str, cut: ProjectionCut) -> Piece:
    offsets, sizes = [0] * len(cut.whole), list(cut.whole)
    offsets[cut.dimension], sizes[cut.dimension] = cut.offset, cut.length
    return Piece(parameter, cut.whole, 0, tuple(offsets), tuple(sizes), cut.replicas)

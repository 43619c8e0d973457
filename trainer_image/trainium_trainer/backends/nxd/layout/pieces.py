"""Where the values of a model lie in the parameters of NxD's parallel layers, and back: names, rows, replicas.

NxD computes query, key and value from one weight and gate and up from another (HLAT's coalesced layers), and repeats
key and value heads when there are more tensor-parallel ranks than heads.

Guarantees:
- Names on one side are Hugging Face's, on the other those of the modules of `backends.nxd.llama`.
- Every stretch of a local parameter is one box of a whole tensor.
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
    """Which rank holds which key/value head when a head lies on several ranks."""

    REPEATED = "trn1"
    """Heads 0, 1, ... over neighbouring ranks, then all of them again: what NxD does on trn1 and inf2."""
    INTERLEAVED = "trn2"
    """Each head on neighbouring ranks: what NxD does on trn2 and later."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Some rows of a rank's local parameter, which are one box of a whole tensor."""

    name: str
    """Hugging Face's parameter name of the whole."""
    whole: tuple[int, ...]
    """Size of the whole."""
    start: int
    """First of the rows in the local parameter."""
    offsets: tuple[int, ...]
    """Where the box begins in the whole."""
    sizes: tuple[int, ...]
    """Size of the box; its first number counts the rows."""
    replicas: int = 1
    """Tensor-parallel ranks that hold this box, this one included."""

    @property
    def end(self) -> int:
        """One past the last row in the local parameter."""
        return self.start + self.sizes[0]

    def of(self, whole: Tensor) -> Tensor:
        """Return the box, of the whole tensor."""
        for dimension, (offset, size) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            whole = whole.narrow(dimension, offset, size)
        return whole

    def nothing(self) -> Piece:
        """Return the piece without rows."""
        return replace(self, start=0, offsets=(0,) * len(self.whole), sizes=(0, *self.sizes[1:]))

    def within(self, start: int, end: int) -> Piece | None:
        """Return what of the piece lies in local rows [start, end), counted from `start`; None for nothing."""
        first, last = max(self.start, start), min(self.end, end)
        if first >= last:
            return None
        return replace(
            self,
            start=first - start,
            offsets=(self.offsets[0] + first - self.start, *self.offsets[1:]),
            sizes=(last - first, *self.sizes[1:]),
        )


def norm_terms(pieces: Sequence[Piece]) -> tuple[tuple[int | None, int | None, int], ...]:
    """Return how a sum of squares goes over what a rank holds of a parameter: first row, end and by what it is divided.

    What several tensor-parallel ranks hold counts for its share on each; rows None: all of them.
    """
    copies = {piece.replicas for piece in pieces}
    if len(copies) <= 1:
        return ((None, None, next(iter(copies), 1)),)
    return tuple((piece.start, piece.end, piece.replicas) for piece in pieces)


def shared_rows(pieces: Sequence[Piece], size: int) -> tuple[tuple[int, int, bool], ...]:
    """First row, end, and whether all of a tensor-parallel group of `size` hold them, of rows that several hold."""
    return tuple((piece.start, piece.end, piece.replicas >= size) for piece in pieces if piece.replicas > 1)


@dataclass(frozen=True, slots=True)
class ProjectionCut:
    """Which run of a projection's outputs or inputs is on a rank."""

    whole: tuple[int, ...]
    """Outputs and inputs of the whole projection, or outputs alone of a bias."""
    dimension: int
    """0 where the outputs are divided, 1 where the inputs are."""
    offset: int
    length: int
    replicas: int = 1
    """Tensor-parallel ranks that hold this run, this one included."""


@dataclass(frozen=True, slots=True)
class TensorRank:
    """One rank's place in the tensor-parallel group, as the model is cut for it."""

    shape: ModelShape
    rank: int
    size: int
    order: KeyValueOrder = KeyValueOrder.REPEATED

    @property
    def key_value_copies(self) -> int:
        """Ranks that hold the same key/value heads."""
        return max(1, self.size // self.shape.num_key_value_heads)

    @property
    def query_chunk(self) -> int:
        """Which of `size` equal runs of query heads is here: those that attend to this rank's key/value heads."""
        copies = self.key_value_copies
        if copies == 1 or self.order is KeyValueOrder.INTERLEAVED:
            return self.rank
        heads = self.shape.num_key_value_heads
        return self.rank % heads * copies + self.rank // heads

    @property
    def key_value_chunk(self) -> int:
        """Which of the equal runs of key/value heads is here; there are size / copies of them."""
        return self.query_chunk // self.key_value_copies

    def cut(self, name: str) -> ProjectionCut:
        """Return how a parameter is divided, by Hugging Face's name. KeyError for an unknown one, or a whole one."""
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

    def pieces(self, parameter: str, *, adapter_rank: int = 0) -> tuple[Piece, ...]:
        """Return what a module's parameter consists of; KeyError for a name that the model does not have.

        `adapter_rank` is the width of the adapters, if there are any.
        """
        owner, _, leaf = parameter.rpartition(".")
        prefix, _, module = owner.rpartition(".")
        if module == "qkv_proj":
            leaf = leaf.removesuffix("_qkv")
            return self._stacked(*(f"{prefix}.{which}_proj.{leaf}" for which in "qkv"))
        if module == "gate_up_proj":
            return self._stacked(*(f"{prefix}.{which}_proj.{leaf}" for which in ("gate", "up")))
        if module in ("lora_A", "lora_B"):
            return (self._adapter(parameter, self.cut(f"{prefix}.weight"), module == "lora_A", adapter_rank),)
        whole = find_parameter(self.shape, parameter)
        if whole.dimension is None:
            return (Piece(parameter, whole.size, 0, (0,), whole.size, self.size),)
        return (_piece(parameter, self.cut(parameter)),)

    def _stacked(self, *parameters: str) -> tuple[Piece, ...]:
        """Return the rows of several parameters, one below the other."""
        found: list[Piece] = []
        for name in parameters:
            start = found[-1].end if found else 0
            found.append(replace(_piece(name, self.cut(name)), start=start))
        return tuple(found)

    def _adapter(self, parameter: str, cut: ProjectionCut, first: bool, rank: int) -> Piece:
        """Divide one of A, [rank, inputs], and B, [outputs, rank], as the projection; the other is whole."""
        side = 1 if first else 0
        whole = (rank, cut.whole[1]) if first else (cut.whole[0], rank)
        if cut.dimension == side:
            return _piece(parameter, replace(cut, whole=whole))
        return Piece(parameter, whole, 0, (0, 0), whole, self.size)


def _piece(parameter: str, cut: ProjectionCut) -> Piece:
    offsets, sizes = [0] * len(cut.whole), list(cut.whole)
    offsets[cut.dimension], sizes[cut.dimension] = cut.offset, cut.length
    return Piece(parameter, cut.whole, 0, tuple(offsets), tuple(sizes), cut.replicas)

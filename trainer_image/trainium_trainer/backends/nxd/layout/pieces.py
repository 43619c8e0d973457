"""Where the values of a Llama lie in the parameters of NxD's parallel layers, and back: names, rows, replicas.

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

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from trainium_trainer.models.shapes import ModelShape


EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"


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

    whole: tuple[int, int]
    """Outputs and inputs of the whole projection."""
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

    def cut(self, projection: str) -> ProjectionCut:
        """Return how a projection is divided, by Hugging Face's name of the module. KeyError for an unknown one."""
        shape, hidden = self.shape, self.shape.hidden_size
        query, key_value = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
        match projection.rpartition(".")[2]:
            case "q_proj":
                return self._cut((query, hidden), 0, self.query_chunk)
            case "k_proj" | "v_proj":
                return self._cut((key_value, hidden), 0, self.key_value_chunk, self.key_value_copies)
            case "gate_proj" | "up_proj":
                return self._cut((shape.intermediate_size, hidden), 0, self.rank)
            case "lm_head" | "embed_tokens":
                return self._cut((shape.vocab_size, hidden), 0, self.rank)
            case "o_proj":
                return self._cut((hidden, query), 1, self.query_chunk)
            case "down_proj":
                return self._cut((hidden, shape.intermediate_size), 1, self.rank)
        raise KeyError(projection)

    def _cut(self, whole: tuple[int, int], dimension: int, chunk: int, copies: int = 1) -> ProjectionCut:
        length = whole[dimension] * copies // self.size
        return ProjectionCut(whole, dimension, chunk * length, length, copies)

    def pieces(self, parameter: str, *, adapter_rank: int = 0) -> tuple[Piece, ...]:
        """Return what a module's parameter consists of; KeyError for a name that the model does not have.

        `adapter_rank` is the width of the adapters, if there are any.
        """
        owner, _, leaf = parameter.rpartition(".")
        prefix, _, module = owner.rpartition(".")
        match module, leaf:
            case (("norm" | "input_layernorm" | "post_attention_layernorm"), "weight"):
                size = (self.shape.hidden_size,)
                return (Piece(parameter, size, 0, (0,), size, self.size),)
            case "qkv_proj", "weight_qkv":
                return self._stacked(prefix, "q_proj", "k_proj", "v_proj")
            case "gate_up_proj", "weight":
                return self._stacked(prefix, "gate_proj", "up_proj")
            case (("lora_A" | "lora_B"), "weight"):
                return (self._adapter(parameter, self.cut(prefix), module == "lora_A", adapter_rank),)
            case _, "weight":
                return (_piece(parameter, self.cut(owner)),)
        raise KeyError(parameter)

    def _stacked(self, prefix: str, *projections: str) -> tuple[Piece, ...]:
        """Return the rows of several projections, one below the other."""
        found: list[Piece] = []
        for name in projections:
            start = found[-1].end if found else 0
            found.append(replace(_piece(f"{prefix}.{name}.weight", self.cut(name)), start=start))
        return tuple(found)

    def _adapter(self, parameter: str, cut: ProjectionCut, first: bool, rank: int) -> Piece:
        """Divide one of A, [rank, inputs], and B, [outputs, rank], as the projection; the other is whole."""
        side = 1 if first else 0
        whole = (rank, cut.whole[1]) if first else (cut.whole[0], rank)
        if cut.dimension == side:
            return _piece(parameter, replace(cut, whole=whole))
        return Piece(parameter, whole, 0, (0, 0), whole, self.size)


def _piece(parameter: str, cut: ProjectionCut) -> Piece:
    offsets, sizes = [0, 0], list(cut.whole)
    offsets[cut.dimension], sizes[cut.dimension] = cut.offset, cut.length
    return Piece(parameter, cut.whole, 0, tuple(offsets), tuple(sizes), cut.replicas)

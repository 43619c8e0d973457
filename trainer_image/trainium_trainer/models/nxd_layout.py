"""Where the values of a Llama lie in the parameters of NxD's parallel layers, and back: names, rows, replicas.

NxD computes query, key and value from one weight and gate and up from another (HLAT's coalesced layers), and repeats
key and value heads when there are more tensor-parallel ranks than heads. Invariants: names on one side are Hugging
Face's, on the other those of the modules of `backends.nxd.llama`; every stretch of a local parameter is one box of a
whole tensor; nothing here needs NxD, so a checkpoint can be converted anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainium_trainer.models.shapes import ModelShape

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"
LAST_NORM = "model.norm.weight"


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

    def within(self, start: int, end: int) -> Piece | None:
        """What of the piece lies in local rows [start, end), counted from `start`; None for nothing."""
        first, last = max(self.start, start), min(self.end, end)
        if first >= last:
            return None
        return replace(
            self,
            start=first - start,
            offsets=(self.offsets[0] + first - self.start, *self.offsets[1:]),
            sizes=(last - first, *self.sizes[1:]),
        )


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

    def pieces(self, parameter: str) -> tuple[Piece, ...]:
        """What a module's parameter consists of; KeyError for a name that the model does not have."""
        shape, hidden = self.shape, self.shape.hidden_size
        if parameter in (EMBEDDING, LM_HEAD):
            return self._stacked({parameter: shape.vocab_size})
        owner, _, leaf = parameter.rpartition(".")
        prefix, _, module = owner.rpartition(".")
        match module, leaf:
            case (("norm" | "input_layernorm" | "post_attention_layernorm"), "weight"):
                return (Piece(parameter, (hidden,), 0, (0,), (hidden,), self.size),)
            case "qkv_proj", "weight_qkv":
                return self._query_key_value(prefix)
            case "gate_up_proj", "weight":
                width = shape.intermediate_size
                return self._stacked({f"{prefix}.gate_proj.weight": width, f"{prefix}.up_proj.weight": width})
            case "o_proj", "weight":
                return self._columns(parameter, shape.num_attention_heads * shape.head_dim, self.query_chunk)
            case "down_proj", "weight":
                return self._columns(parameter, shape.intermediate_size, self.rank)
        raise KeyError(parameter)

    def _stacked(self, rows: dict[str, int]) -> tuple[Piece, ...]:
        """Equal shares of the rows of several tensors, one below the other."""
        found: list[Piece] = []
        start = 0
        for name, total in rows.items():
            share = total // self.size
            found.append(self._rows(name, total, start, self.rank * share, share))
            start += share
        return tuple(found)

    def _query_key_value(self, attention: str) -> tuple[Piece, ...]:
        shape, copies = self.shape, self.key_value_copies
        query, key_value = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
        own, share = query // self.size, key_value * copies // self.size
        first = self.key_value_chunk * share
        return (
            self._rows(f"{attention}.q_proj.weight", query, 0, self.query_chunk * own, own),
            self._rows(f"{attention}.k_proj.weight", key_value, own, first, share, copies),
            self._rows(f"{attention}.v_proj.weight", key_value, own + share, first, share, copies),
        )

    def _rows(self, name: str, total: int, start: int, offset: int, rows: int, replicas: int = 1) -> Piece:
        width = self.shape.hidden_size
        return Piece(name, (total, width), start, (offset, 0), (rows, width), replicas)

    def _columns(self, name: str, total: int, chunk: int) -> tuple[Piece, ...]:
        share, rows = total // self.size, self.shape.hidden_size
        return (Piece(name, (rows, total), 0, (0, chunk * share), (rows, share)),)

"""Divide the sequence over ranks: each rank holds two chunks, and its queries attend to the keys of all ranks.

Of 2c chunks rank r of c holds chunk r and chunk 2c - 1 - r, so that under the causal mask every rank has the same work
(Llama 3, arXiv 2407.21783, section 3.3.2). Keys and values are gathered over the group, and their gradients summed and
scattered.

Guarantees:
- The results equal those of one rank up to the order of additions.
- The mask of the whole sequence never exists: a tile of queries has the mask of its keys while it is computed.
- The backward pass gathers keys and values again, so that no layer keeps those of other ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import _functional_collectives as collectives

from trainium_trainer.models.regions import wait
from trainium_trainer.models.stages import list_present_layers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor
    from torch.distributed import ProcessGroup

    from trainium_trainer.models.llama import Attention, Llama
    from trainium_trainer.models.rope import AttentionContext

_TILE_VALUES = 1 << 25
"""The maximum number of scores in a tile: 128 MiB in float32."""


@dataclass(frozen=True, slots=True)
class SequenceDivision:
    """The chunks of the sequence that this rank holds."""

    group: ProcessGroup
    rank: int
    size: int
    length: int
    """The number of tokens of the whole sequence."""

    @property
    def chunk(self) -> int:
        """The number of tokens of a chunk."""
        return self.length // (2 * self.size)

    @property
    def chunks(self) -> tuple[int, int]:
        """The indices of this rank's chunks, in order."""
        return self.rank, 2 * self.size - 1 - self.rank

    def find_token_positions(self) -> Tensor:
        """Return the positions of this rank's tokens in the whole sequence, ascending int64."""
        return torch.cat([torch.arange(self.chunk) + number * self.chunk for number in self.chunks])

    def all_gather(self, part: Tensor) -> Tensor:
        """Gather [..., this rank's tokens, width] to [..., tokens, width] in the order of the sequence."""
        gathered = wait(collectives.all_gather_tensor(part.contiguous().unsqueeze(0), 0, self.group))
        parts = [half for rank in gathered for half in rank.chunk(2, dim=-2)]
        return torch.cat(parts[0::2] + parts[1::2][::-1], dim=-2)

    def reduce_scatter(self, whole: Tensor) -> Tensor:
        """Sum [..., tokens, width] over the group and return this rank's tokens of the sum."""
        chunks = whole.chunk(2 * self.size, dim=-2)
        pairs = [torch.cat((chunks[rank], chunks[-1 - rank]), dim=-2) for rank in range(self.size)]
        return wait(collectives.reduce_scatter_tensor(torch.stack(pairs), "sum", 0, self.group)).squeeze(0)


@dataclass(frozen=True, slots=True)
class ContextParallelAttention:
    """The attention of this rank's queries to all keys before them."""

    division: SequenceDivision
    scale: float | None
    window: int | None

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, table: AttentionContext) -> Tensor:
        """Return the attention, [batch, heads, this rank's tokens, width]; keys and values may have fewer heads."""
        scale = query.shape[-1] ** -0.5 if self.scale is None else self.scale
        if torch.is_autocast_enabled(query.device.type):
            # Torch's attention converts its inputs under autocast; a custom function has to do it itself.
            narrow = torch.get_autocast_dtype(query.device.type)
            query, key, value = query.to(narrow), key.to(narrow), value.to(narrow)
        out: Tensor = _AttentionFunction.apply(query, key, value, table.first, self, scale)  # type: ignore[no-untyped-call]
        return out

    def iterate_tiles(self, query: Tensor, first: Tensor | None) -> Iterator[_Tile]:
        """Yield the tiles of this rank's scores; the caller merges the results of tiles that share rows."""
        size, fused = self.division.chunk, _is_fused(query)
        for half, number in enumerate(self.division.chunks):
            begin, rows = number * size, slice(half * size, (half + 1) * size)
            if fused and first is None:
                if number:
                    yield _Tile(rows, slice(0, begin), begin)
                yield _Tile(rows, slice(begin, begin + size), begin, causal=True)
                continue
            lowest = 0 if self.window is None else max(0, begin - self.window + 1)
            heads = 1 if fused else query.shape[1]
            count = max(1, _TILE_VALUES // (query.shape[0] * heads * (begin + size - lowest)))
            for row in range(0, size, count):
                end = min(row + count, size)
                yield _Tile(
                    slice(rows.start + row, rows.start + end), slice(lowest, begin + end), begin + row, masked=True
                )


def apply_context_parallel(model: Llama, division: SequenceDivision) -> None:
    """Configure a model or a stage to compute this rank's tokens of each sequence."""
    model.token_positions = division.find_token_positions()
    for layer in list_present_layers(model):
        attention: Attention = layer.self_attn
        bounded = attention.window is not None and attention.window < division.length
        attention.context_parallel = ContextParallelAttention(
            division, attention.scale, attention.window if bounded else None
        )


@dataclass(frozen=True, slots=True)
class _Tile:
    """A range of this rank's queries with a range of all keys."""

    rows: slice
    keys: slice
    first_position: int
    """The position of the first row in the whole sequence."""
    causal: bool = False
    """Whether the n-th row attends to the first n keys."""
    masked: bool = False

    def mask(self, first: Tensor | None, query: Tensor) -> Tensor | None:
        """Return zero where a row attends to a key, else -inf, [batch or 1, 1, rows, keys] in the type of the query."""
        if not self.masked:
            return None
        keys = torch.arange(self.keys.start, self.keys.stop, device=query.device)
        rows = torch.arange(
            self.first_position, self.first_position + self.rows.stop - self.rows.start, device=query.device
        )
        sees = (keys <= rows.unsqueeze(-1)).unsqueeze(0)
        if first is not None:
            sees = sees & (keys >= first[:, self.rows].unsqueeze(-1))
        return torch.zeros((), dtype=query.dtype, device=query.device).where(sees, -torch.inf).unsqueeze(1)


class _AttentionFunction(torch.autograd.Function):
    """Attention computed tile by tile; only the log-sum-exp of the scores is saved for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        first: Tensor | None,
        attention: ContextParallelAttention,
        scale: float,
    ) -> Tensor:
        """Compute the attention; `first` [batch or 1, rows] is the first key that each row attends to."""
        keys, values = attention.division.all_gather(torch.stack((key, value)))
        out = torch.empty_like(query)
        sums = torch.empty(query.shape[:-1], dtype=torch.float32, device=query.device)
        done = 0
        for tile in attention.iterate_tiles(query, first):
            rows = tile.rows
            part, part_sums = _tile_forward(
                query[:, :, rows], keys[:, :, tile.keys], values[:, :, tile.keys], tile, first, scale
            )
            if rows.stop > done:
                out[:, :, rows], sums[:, :, rows] = part, part_sums
                done = rows.stop
                continue
            both = torch.logaddexp(sums[:, :, rows], part_sums)
            old, added = (sums[:, :, rows] - both).exp().unsqueeze(-1), (part_sums - both).exp().unsqueeze(-1)
            out[:, :, rows] = (out[:, :, rows] * old + part * added).to(out.dtype)
            sums[:, :, rows] = both
        ctx.save_for_backward(query, key, value, first, out, sums)
        ctx.attention, ctx.scale = attention, scale
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
        """Return the gradients of queries, keys and values."""
        query, key, value, first, out, sums = ctx.saved_tensors
        attention: ContextParallelAttention = ctx.attention
        keys, values = attention.division.all_gather(torch.stack((key, value)))
        of_query = torch.zeros_like(query, dtype=torch.float32)
        of_both = torch.zeros((2, *keys.shape), dtype=torch.float32, device=keys.device)
        for tile in attention.iterate_tiles(query, first):
            rows, seen = tile.rows, tile.keys
            tensors = (gradients[0][:, :, rows], query[:, :, rows], keys[:, :, seen], values[:, :, seen])
            parts = _tile_backward(*tensors, out[:, :, rows], sums[:, :, rows], tile, first, ctx.scale)
            of_query[:, :, rows] += parts[0]
            of_both[0, :, :, seen] += parts[1]
            of_both[1, :, :, seen] += parts[2]
        of_key, of_value = attention.division.reduce_scatter(of_both.to(key.dtype))
        return of_query.to(query.dtype), of_key, of_value, None, None, None


def _is_fused(query: Tensor) -> bool:
    """Return whether torch has a fused kernel that returns the log-sum-exp: private to torch, and for CPUs only."""
    return query.device.type == "cpu"


def _tile_forward(
    query: Tensor, key: Tensor, value: Tensor, tile: _Tile, first: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the attention of a tile and the log-sum-exp of its scores, [batch, heads, rows] float32."""
    mask = tile.mask(first, query)
    if _is_fused(query):
        fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001 - no public one gives sums
        out, sums = fused(query, key, value, is_causal=tile.causal, attn_mask=mask, scale=scale)
        return out, sums
    scores = _compute_scores(query, key, mask, scale)
    sums = scores.logsumexp(-1)
    shares = (scores - sums.unsqueeze(-1)).exp().to(value.dtype)
    return (shares @ value.unsqueeze(2)).flatten(1, 2), sums.flatten(1, 2)


def _tile_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    sums: Tensor,
    tile: _Tile,
    first: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a tile's gradients of queries, keys and values; `out` and `sums` are merged over all tiles of the rows."""
    mask = tile.mask(first, query)
    if _is_fused(query):
        fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward  # noqa: SLF001 - as above
        gradients: tuple[Tensor, Tensor, Tensor] = fused(
            gradient, query, key, value, out, sums, 0.0, tile.causal, attn_mask=mask, scale=scale
        )
        return gradients
    wide, gradient = _group_heads(query, key), _group_heads(gradient, key)
    shares = (_compute_scores(query, key, mask, scale) - _group_heads(sums, key).unsqueeze(-1)).exp()
    of_value = shares.to(gradient.dtype).transpose(-1, -2) @ gradient
    dots = (gradient.float() * _group_heads(out, key).float()).sum(-1, keepdim=True)
    of_scores = (shares * ((gradient @ value.unsqueeze(2).transpose(-1, -2)).float() - dots) * scale).to(query.dtype)
    of_key = of_scores.transpose(-1, -2) @ wide
    return (of_scores @ key.unsqueeze(2)).flatten(1, 2), of_key.sum(2), of_value.sum(2)


def _compute_scores(query: Tensor, key: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Return the scores, [batch, key heads, query heads of each, rows, keys] float32."""
    scores = (_group_heads(query, key) @ key.unsqueeze(2).transpose(-1, -2)).float() * scale
    return scores if mask is None else scores + mask.unsqueeze(2)


def _group_heads(x: Tensor, key: Tensor) -> Tensor:
    """Reshape [batch, heads, ...] to [batch, key heads, query heads of each, ...]."""
    return x.reshape(x.shape[0], key.shape[1], -1, *x.shape[2:])

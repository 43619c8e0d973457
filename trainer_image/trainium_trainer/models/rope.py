"""Rotary position embedding (RoFormer, arXiv 2104.09864) in Hugging Face's layout, scaled by `RopeScalingKind`.

Guarantees:
- Everything here is float32.
- Rounding happens once, when the rotated heads get the type of their input.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from trainium_contract.models.shape import RopeScalingKind

if TYPE_CHECKING:
    from trainium_contract.models.shape import ModelShape, RopeStretch


class AttentionContext(NamedTuple):
    """The rotary table, mask and positions of the samples, which all layers need."""

    cos: Tensor
    """[sequence, head width], or [batch, 1, sequence, head width] where positions differ by sample; float32."""
    sin: Tensor
    """As `cos`."""
    mask: Tensor | None = None
    """[sequence, sequence] or [batch, 1, sequence, sequence], whether a position (next to last) attends to another
    (last); None: to all earlier ones.
    """
    samples: Tensor | None = None
    """[batch] int32, a key that names each sample, for dropout; None where nothing is dropped."""
    windowed: AttentionContext | None = None
    """Rotation and mask of layers with a sliding window; None: those of the other layers."""
    token_positions: Tensor | None = None
    """[sequence] int64, the positions of the tokens where this is a part of the sequence; None: 0, 1, 2, ..."""
    query_scale: Tensor | None = None
    """Factors of the rotated queries, of the size of `cos` with the width 1; None: 1."""
    first: Tensor | None = None
    """First position that each token of a part attends to, instead of a mask: [batch or 1, sequence] int64; None: 0."""

    def select_chunk(self, chunk: slice) -> AttentionContext:
        """Return the context of some of the tokens for the output projection."""
        if self.samples is None:
            return self
        token_positions = (
            torch.arange(chunk.stop, device=self.cos.device) if self.token_positions is None else self.token_positions
        )
        return self._replace(token_positions=token_positions[chunk])


def build_context(shape: ModelShape, length: int, device: torch.device, *, masks: bool = True) -> AttentionContext:
    """Return the rotary table of `length` positions: the two halves of a head rotate against each other.

    Without `masks` the table is input for `select_tokens`.
    """
    table = _build_table(shape, length, device)
    window = shape.sliding_window
    if window is None:
        return table
    windowed = table
    if (rope := shape.windowed_rope) is not None:
        other = replace(shape, rope_theta=rope.theta or shape.rope_theta, rope_stretch=rope.stretch)
        windowed = _build_table(other, length, device)
    if masks and window < length:
        token_positions = torch.arange(length, device=device)
        distance = token_positions.unsqueeze(-1) - token_positions
        windowed = windowed._replace(mask=(distance >= 0) & (distance < window))
    return table._replace(windowed=windowed)


def _build_table(shape: ModelShape, length: int, device: torch.device) -> AttentionContext:
    positions = torch.arange(length, dtype=torch.float32, device=device)
    angles = torch.outer(positions, compute_inverse_frequencies(shape, device, length))
    angles = torch.cat((angles, angles), dim=-1)
    factor = 1.0 if shape.rope_stretch is None else shape.rope_stretch.attention_factor
    table = AttentionContext(angles.cos() * factor, angles.sin() * factor)
    if shape.query_growth is None or shape.rope_stretch is None:
        return table
    # Llama 4's factor: https://github.com/meta-llama/llama-models, llama4/model.py
    turns = torch.floor(positions / shape.rope_stretch.original_max_positions)
    return table._replace(query_scale=(1.0 + shape.query_growth * torch.log1p(turns)).unsqueeze(-1))


def select_positions(table: AttentionContext, positions: Tensor) -> AttentionContext:
    """Return the table for samples of several documents; `positions` [batch, sequence] int64, a 0 begins a document.

    A token attends to the earlier tokens of its document: at index i and position p to those from index i - p on.
    """
    token_positions = torch.arange(positions.shape[1], device=positions.device)
    begins = (token_positions - positions).unsqueeze(-1)
    same = (token_positions <= token_positions.unsqueeze(-1)) & (token_positions >= begins)

    def at_tokens(table: AttentionContext) -> AttentionContext:
        mask = same if table.mask is None else same & table.mask
        return _take_positions(table, positions)._replace(mask=mask.unsqueeze(1))

    windowed = None if table.windowed is None else at_tokens(table.windowed)
    return at_tokens(table)._replace(windowed=windowed)


def select_tokens(
    table: AttentionContext, token_positions: Tensor, positions: Tensor | None, window: int | None
) -> AttentionContext:
    """Return the table of a part of the sequence: the tokens at `token_positions`, [sequence] int64.

    `positions` [batch, sequence] are the part's, as in `select_positions`; `window` is the shape's.
    """
    begins = None if positions is None else token_positions - positions

    def at_tokens(table: AttentionContext, window: int | None) -> AttentionContext:
        first = begins
        if window is not None and window < len(table.cos):
            earliest = (token_positions - (window - 1)).clamp(min=0).unsqueeze(0)
            first = earliest if begins is None else torch.maximum(begins, earliest)
        part = _take_positions(table, token_positions if positions is None else positions)
        return part._replace(token_positions=token_positions, first=first)

    windowed = None if table.windowed is None else at_tokens(table.windowed, window)
    return at_tokens(table, None)._replace(windowed=windowed)


def _take_positions(table: AttentionContext, positions: Tensor) -> AttentionContext:
    """Return the rotation of tokens at `positions`, [sequence] or [batch, sequence] int64."""

    def take(rows: Tensor) -> Tensor:
        return rows[positions] if positions.dim() == 1 else rows[positions].unsqueeze(1)

    scale = None if table.query_scale is None else take(table.query_scale)
    return table._replace(cos=take(table.cos), sin=take(table.sin), query_scale=scale)


def compute_inverse_frequencies(shape: ModelShape, device: torch.device, length: int = 0) -> Tensor:
    """Return the radians per position of each pair of a head, [head width / 2] float32, for sequences of `length`.

    Llama 3.1 (`apply_scaling` of Meta's llama-models): waves longer than original / low are slowed down by `factor`,
    waves shorter than original / high are kept, those between are mixed in proportion to their frequency.
    """
    stretch, width, base = shape.rope_stretch, shape.head_dim, shape.rope_theta
    if stretch is not None and stretch.kind is RopeScalingKind.DYNAMIC:
        beyond = max(1.0, length / shape.max_positions)
        base *= (stretch.factor * beyond - (stretch.factor - 1)) ** (width / (width - 2))
    exponents = torch.arange(0, width, 2, dtype=torch.float32, device=device) / width
    plain = 1.0 / base**exponents
    if stretch is None or stretch.kind is RopeScalingKind.DYNAMIC:
        return plain
    slow = plain / stretch.factor
    if stretch.kind is RopeScalingKind.LINEAR:
        return slow
    if stretch.kind is RopeScalingKind.YARN:
        return torch.lerp(plain, slow, _compute_yarn_ramp(shape, stretch, device))
    turns = stretch.original_max_positions * plain / (2.0 * math.pi)
    low, high = stretch.low_frequency_factor, stretch.high_frequency_factor
    unchanged = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1.0 - unchanged) * slow + unchanged * plain


def _compute_yarn_ramp(shape: ModelShape, stretch: RopeStretch, device: torch.device) -> Tensor:
    """Return the interpolation weight of each pair, 0 to 1, from its number of rotations (arXiv 2309.00071, 3.2)."""

    def pair_of(turns: float) -> float:
        waves = stretch.original_max_positions / (turns * 2 * math.pi)
        return shape.head_dim * math.log(waves) / (2 * math.log(shape.rope_theta))

    low, high = pair_of(stretch.fast_turns), pair_of(stretch.slow_turns)
    if stretch.whole_pairs:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, shape.head_dim - 1)
    pairs = torch.arange(shape.head_dim // 2, dtype=torch.float32, device=device)
    return ((pairs - low) / (high - low if high != low else 0.001)).clamp(0.0, 1.0)


def rotate(x: Tensor, table: AttentionContext) -> Tensor:
    """Apply the rotary embedding to [batch, heads, sequence, head width]."""
    cos, sin, *_ = table
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (x.float() * cos + turned * sin).to(x.dtype)

"""Rotary position embedding (RoFormer, arXiv 2104.09864) in Hugging Face's layout, scaled by `RopeScalingKind`.

Invariant: everything here is float32; rounding happens once, when the rotated heads get the type of their input.
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


class Context(NamedTuple):
    """The positions of the samples, which all layers need."""

    cos: Tensor
    """[sequence, head width], or [batch, 1, sequence, head width] where positions differ by sample; float32."""
    sin: Tensor
    """As `cos`."""
    mask: Tensor | None = None
    """[sequence, sequence] or [batch, 1, sequence, sequence], whether a position (next to last) sees another (last);
    None: all earlier ones."""
    samples: Tensor | None = None
    """[batch] int32, a key that names each sample, for dropout; None where nothing is dropped."""
    windowed: Context | None = None
    """Rotation and mask of layers with a sliding window; None: those of the others."""
    places: Tensor | None = None
    """[sequence] int64, the places of the tokens where this is a part of the sequence; None: 0, 1, 2, ..."""
    first: Tensor | None = None
    """First place that each token of a part sees, in place of a mask: [batch or 1, sequence] int64; None: 0."""

    def at(self, stretch: slice) -> Context:
        """Return what the output projection needs of some of the tokens."""
        if self.samples is None:
            return self
        places = torch.arange(stretch.stop, device=self.cos.device) if self.places is None else self.places
        return self._replace(places=places[stretch])


def rotary(shape: ModelShape, length: int, device: torch.device, *, masks: bool = True) -> Context:
    """Return the rotary table of `length` positions: the two halves of a head rotate against each other.

    Without `masks` it is for `at_places`.
    """
    table = _table(shape, length, device)
    window = shape.sliding_window
    if window is None:
        return table
    windowed = table if shape.stretch_windowed else _table(replace(shape, rope_stretch=None), length, device)
    if masks and window < length:
        places = torch.arange(length, device=device)
        distance = places.unsqueeze(-1) - places
        windowed = windowed._replace(mask=(distance >= 0) & (distance < window))
    return table._replace(windowed=windowed)


def _table(shape: ModelShape, length: int, device: torch.device) -> Context:
    positions = torch.arange(length, dtype=torch.float32, device=device)
    angles = torch.outer(positions, inverse_frequencies(shape, device, length))
    angles = torch.cat((angles, angles), dim=-1)
    factor = 1.0 if shape.rope_stretch is None else shape.rope_stretch.attention_factor
    table = Context(angles.cos(), angles.sin())
    return table if factor == 1.0 else Context(table.cos * factor, table.sin * factor)


def at_positions(table: Context, positions: Tensor) -> Context:
    """Return the table for samples of several documents; `positions` [batch, sequence] int64, a 0 begins a document.

    A token sees the earlier tokens of its document: at place i and position p those from place i - p on.
    """
    places = torch.arange(positions.shape[1], device=positions.device)
    begins = (places - positions).unsqueeze(-1)
    same = (places <= places.unsqueeze(-1)) & (places >= begins)

    def placed(table: Context) -> Context:
        mask = same if table.mask is None else same & table.mask
        cos, sin = table.cos[positions].unsqueeze(1), table.sin[positions].unsqueeze(1)
        return table._replace(cos=cos, sin=sin, mask=mask.unsqueeze(1))

    windowed = None if table.windowed is None else placed(table.windowed)
    return placed(table)._replace(windowed=windowed)


def at_places(table: Context, places: Tensor, positions: Tensor | None, window: int | None) -> Context:
    """Return the table of a part of the sequence: of the tokens at `places`, [sequence] int64.

    `positions` [batch, sequence] are those of the part, as for `at_positions`; `window` is the shape's.
    """
    begins = None if positions is None else places - positions

    def placed(table: Context, window: int | None) -> Context:
        first = begins
        if window is not None and window < len(table.cos):
            earliest = (places - (window - 1)).clamp(min=0).unsqueeze(0)
            first = earliest if begins is None else torch.maximum(begins, earliest)
        if positions is None:
            cos, sin = table.cos[places], table.sin[places]
        else:
            cos, sin = table.cos[positions].unsqueeze(1), table.sin[positions].unsqueeze(1)
        return table._replace(cos=cos, sin=sin, places=places, first=first)

    windowed = None if table.windowed is None else placed(table.windowed, window)
    return placed(table, None)._replace(windowed=windowed)


def inverse_frequencies(shape: ModelShape, device: torch.device, length: int = 0) -> Tensor:
    """Radians per position of each pair of a head, [head width / 2], float32, for sequences of `length`.

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
        return torch.lerp(plain, slow, _yarn_ramp(shape, stretch, device))
    turns = stretch.original_max_positions * plain / (2.0 * math.pi)
    low, high = stretch.low_frequency_factor, stretch.high_frequency_factor
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1.0 - kept) * slow + kept * plain


def _yarn_ramp(shape: ModelShape, stretch: RopeStretch, device: torch.device) -> Tensor:
    """Return by how much each pair is slowed down, 0 to 1, from the turns that it makes (arXiv 2309.00071, 3.2)."""

    def pair_of(turns: float) -> float:
        waves = stretch.original_max_positions / (turns * 2 * math.pi)
        return shape.head_dim * math.log(waves) / (2 * math.log(shape.rope_theta))

    low, high = pair_of(stretch.fast_turns), pair_of(stretch.slow_turns)
    if stretch.whole_pairs:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, shape.head_dim - 1)
    pairs = torch.arange(shape.head_dim // 2, dtype=torch.float32, device=device)
    return ((pairs - low) / (high - low if high != low else 0.001)).clamp(0.0, 1.0)


def rotate(x: Tensor, table: Context) -> Tensor:
    """Apply the rotary embedding to [batch, heads, sequence, head width]."""
    cos, sin, *_ = table
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (x.float() * cos + turned * sin).to(x.dtype)

"""Rotary position embedding (RoFormer, arXiv 2104.09864) in Hugging Face's layout, plain, linear or as in Llama 3.1.

Invariant: everything here is float32; rounding happens once, when the rotated heads get the type of their input.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from trainium_contract.trainer.model import RopeScalingKind

if TYPE_CHECKING:
    from trainium_trainer.models.shapes import ModelShape


class Context(NamedTuple):
    """The positions of the samples, which all layers need."""

    cos: Tensor
    """[sequence, head width], or [batch, 1, sequence, head width] where positions differ by sample; float32."""
    sin: Tensor
    """As `cos`."""
    mask: Tensor | None = None
    """[batch, 1, sequence, sequence], whether a position (next to last) sees another (last); None: all earlier ones."""
    samples: Tensor | None = None
    """[batch] int32, a key that names each sample, for dropout; None where nothing is dropped."""


def rotary(shape: ModelShape, length: int, device: torch.device) -> Context:
    """Return the rotary table of `length` positions: the two halves of a head rotate against each other."""
    positions = torch.arange(length, dtype=torch.float32, device=device)
    angles = torch.outer(positions, inverse_frequencies(shape, device))
    angles = torch.cat((angles, angles), dim=-1)
    return Context(angles.cos(), angles.sin())


def at_positions(table: Context, positions: Tensor) -> Context:
    """Return the table for samples of several documents; `positions` [batch, sequence] int64, a 0 begins a document.

    A token sees the earlier tokens of its document: at place i and position p those from place i - p on.
    """
    places = torch.arange(positions.shape[1], device=positions.device)
    begins = (places - positions).unsqueeze(-1)
    mask = (places <= places.unsqueeze(-1)) & (places >= begins)
    return table._replace(
        cos=table.cos[positions].unsqueeze(1), sin=table.sin[positions].unsqueeze(1), mask=mask.unsqueeze(1)
    )


def inverse_frequencies(shape: ModelShape, device: torch.device) -> Tensor:
    """Radians per position of each pair of a head, [head width / 2], float32.

    Llama 3.1 (`apply_scaling` of Meta's llama-models): waves longer than original / low are slowed down by `factor`,
    waves shorter than original / high are kept, those between are mixed in proportion to their frequency.
    """
    exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float32, device=device) / shape.head_dim
    plain = 1.0 / shape.rope_theta**exponents
    stretch = shape.rope_stretch
    if stretch is None:
        return plain
    slow = plain / stretch.factor
    if stretch.kind is RopeScalingKind.LINEAR:
        return slow
    turns = stretch.original_max_positions * plain / (2.0 * math.pi)
    low, high = stretch.low_frequency_factor, stretch.high_frequency_factor
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1.0 - kept) * slow + kept * plain


def rotate(x: Tensor, table: Context) -> Tensor:
    """Apply the rotary embedding to [batch, heads, sequence, head width]."""
    cos, sin, *_ = table
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (x.float() * cos + turned * sin).to(x.dtype)

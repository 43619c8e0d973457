"""Dropout without a generator: a hash of seed, sample, module, position and feature decides what is kept.

So the mask of a sample is the same on every rank, at every size, in a recomputed layer, and after every fault; it needs
no saved state. The mixing steps are those of MurmurHash3's finaliser (Austin Appleby, public domain).

Guarantees:
- The arithmetic is that of 32-bit integers that wrap, the same on every device.
- There is no state.
- The expected fraction of values that are kept is 1 - p.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

_FIRST_MULTIPLIER = 0x85EBCA6B - (1 << 32)
_SECOND_MULTIPLIER = 0xC2B2AE35 - (1 << 32)
_GOLDEN = 0x9E3779B9 - (1 << 32)
_COMPARED_BITS = 24
"""Bits of the hash that are compared: they resolve a probability to 6e-8."""


def compute_sample_keys(sample_positions: Tensor, seed: int) -> Tensor:
    """Return int32 keys of [samples] int64 global positions, computed on the host."""
    low = (sample_positions & 0xFFFFFFFF).to(torch.int64)
    high = (sample_positions >> 32).to(torch.int64)
    mixed = (low * 0x9E3779B1 + high * 0x85EBCA77 + seed * 0xC2B2AE3D) & 0xFFFFFFFF
    return torch.where(mixed >= 1 << 31, mixed - (1 << 32), mixed).to(torch.int32)


def hash_module_name(name: str) -> int:
    """Return a signed 32-bit key of a module's name."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "little", signed=True)


def apply_dropout(
    x: Tensor,
    samples: Tensor,
    *,
    module: int,
    drop_probability: float,
    first_feature: int = 0,
    sequence_dimension: int = 1,
    token_positions: Tensor | None = None,
) -> Tensor:
    """Return `x` with a fraction of its values set to zero; the caller scales the others.

    `x` is [batch, sequence, features], or [sequence, batch, features] with `sequence_dimension` 0. Its features begin
    at index `first_feature` of the whole; `samples` are the [batch] keys of `compute_sample_keys`. `token_positions`
    [sequence] are given where `x` holds a part of the sequence.
    """
    device = x.device
    if token_positions is None:
        token_positions = torch.arange(x.shape[sequence_dimension], dtype=torch.int32, device=device)
    features = torch.arange(first_feature, first_feature + x.shape[2], dtype=torch.int32, device=device)
    rows = _mix(_mix(samples ^ module).unsqueeze(1) + token_positions.int() * _GOLDEN)  # [batch, sequence]
    if sequence_dimension == 0:
        rows = rows.transpose(0, 1)
    columns = _mix(features * _GOLDEN + module)
    bits = _mix(rows.unsqueeze(-1) ^ columns)
    # The threshold is a tensor because torch_xla would compare with a Python number in 64 bits.
    threshold = torch.full((), int(drop_probability * (1 << _COMPARED_BITS)), dtype=torch.int32, device=device)
    is_kept = (bits & ((1 << _COMPARED_BITS) - 1)) >= threshold
    return torch.where(is_kept, x, 0.0)


def _mix(bits: Tensor) -> Tensor:
    """Mix int32 values so that every bit of the result depends on every bit of the input."""
    bits = (bits ^ _shift_right(bits, 16)) * _FIRST_MULTIPLIER
    bits = (bits ^ _shift_right(bits, 13)) * _SECOND_MULTIPLIER
    return bits ^ _shift_right(bits, 16)


def _shift_right(bits: Tensor, count: int) -> Tensor:
    """Shift right logically, filling with zeros."""
    # The low bits are cleared first because torch_xla shifts by division, which rounds negative values towards zero.
    return ((bits & -(1 << count)) >> count) & ((1 << (32 - count)) - 1)

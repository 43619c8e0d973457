"""Dropout without a generator: whether a number is kept is a hash of seed, sample, module, position and feature.

So the mask of a sample is the same on every rank, at every size, in a layer that is computed again, and after every
fault; nothing has to be saved for it. Invariants: integer arithmetic of 32 bits that wraps, the same on every device;
no state; the share of numbers that are kept is 1 - p within what chance allows.

The mixing steps are those of MurmurHash3's finaliser (Austin Appleby, public domain).
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

_FIRST = 0x85EBCA6B - (1 << 32)
_SECOND = 0xC2B2AE35 - (1 << 32)
_GOLDEN = 0x9E3779B9 - (1 << 32)
_BITS = 24
"""Bits of the hash that are compared: a probability is kept to 6e-8."""


def sample_keys(places: Tensor, seed: int) -> Tensor:
    """Return int32 keys of [samples] int64 global positions, computed on the host."""
    low = (places & 0xFFFFFFFF).to(torch.int64)
    high = (places >> 32).to(torch.int64)
    mixed = (low * 0x9E3779B1 + high * 0x85EBCA77 + seed * 0xC2B2AE3D) & 0xFFFFFFFF
    return torch.where(mixed >= 1 << 31, mixed - (1 << 32), mixed).to(torch.int32)


def module_key(name: str) -> int:
    """Return a 32-bit number (signed) that names a module."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "little", signed=True)


def dropped(
    x: Tensor,
    samples: Tensor,
    *,
    module: int,
    share: float,
    first: int = 0,
    sequence: int = 1,
    places: Tensor | None = None,
) -> Tensor:
    """`x` with a share of its numbers set to zero; the others are not scaled, which the caller does.

    `x` is [batch, sequence, features] ([sequence, batch, features] with `sequence` 0), of which the features begin at
    number `first` of the whole; `samples` are the [batch] keys of `sample_keys`. `places` [sequence] are those of the
    positions where they are a part of the sequence.
    """
    device = x.device
    places = torch.arange(x.shape[sequence], dtype=torch.int32, device=device) if places is None else places.int()
    features = torch.arange(first, first + x.shape[2], dtype=torch.int32, device=device)
    rows = _mixed(_mixed(samples ^ module).unsqueeze(1) + places * _GOLDEN)  # [batch, sequence]
    if sequence == 0:
        rows = rows.transpose(0, 1)
    columns = _mixed(features * _GOLDEN + module)
    bits = _mixed(rows.unsqueeze(-1) ^ columns)
    # A number in a separate tensor: torch_xla would compare with a plain one in 64 bits.
    threshold = torch.full((), int(share * (1 << _BITS)), dtype=torch.int32, device=device)
    kept = (bits & ((1 << _BITS) - 1)) >= threshold
    return torch.where(kept, x, 0.0)


def _mixed(bits: Tensor) -> Tensor:
    """Every bit of the result depends on every bit of an int32."""
    bits = (bits ^ _shifted(bits, 16)) * _FIRST
    bits = (bits ^ _shifted(bits, 13)) * _SECOND
    return bits ^ _shifted(bits, 16)


def _shifted(bits: Tensor, count: int) -> Tensor:
    """To the right, with zeros from the left."""
    # What falls off is cleared first: torch_xla shifts by dividing, which rounds what is negative to the other side.
    return ((bits & -(1 << count)) >> count) & ((1 << (32 - count)) - 1)

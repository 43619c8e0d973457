"""Stochastic rounding of float32 to bfloat16: up or down at random, so that the mean of many roundings is the value.

With it weights can live in bfloat16 alone: an update that is smaller than half the distance to the next number, which
rounding to the nearest would always lose, is taken with a probability in proportion to its size (arXiv 1502.02551;
arXiv 2010.06192 for bfloat16 weights).

Guarantees:
- The noise is a function of seed, step and key, so that ranks which hold the same value round it the same way.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

_LOW_BITS = 16
"""Bits of a float32 that a bfloat16 does not have."""
_MASK = (1 << _LOW_BITS) - 1


def noise_generator(seed: int, step: int, key: str, device: torch.device) -> torch.Generator:
    """Return the source of noise for one value of one step."""
    digest = hashlib.blake2b(f"{seed}:{step}:{key}".encode(), digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)


def noise_like(value: Tensor, generator: torch.Generator) -> Tensor:
    """Random int64 numbers of the shape of `value`, enough for three roundings of it."""
    return torch.empty(value.shape, dtype=torch.int64, device=value.device).random_(generator=generator)


def round_into(target: Tensor, value: Tensor, noise: Tensor, *, share: int) -> None:
    """Write float32 `value` to bfloat16 `target`; `share` (0, 1 or 2) chooses the bits of `noise` to use.

    Adding uniform noise to the bits that are then cut off carries into the kept ones with just the right probability:
    floats of one sign are ordered like their bits. Infinities and NaN stay what they are.
    """
    bits = (noise >> (_LOW_BITS * share)).bitwise_and_(_MASK).to(torch.int32)
    bits.add_(value.view(torch.int32)).bitwise_and_(~_MASK)
    rounded = bits.view(torch.float32)
    target.copy_(torch.where(value.isfinite(), rounded, value))

"""Draw any box of the initial weights of a run without base weights, at the cost of that box.

A weight is drawn in tiles, each from a separate generator, so that a rank draws only the tiles that overlap its part
and gets the same values at every layout.

Guarantees:
- Values depend on the seed, the index of the parameter in the model and the position in the weight, never on its size
  (padding a vocabulary changes no other row).
- No two tiles of a model share the 32 bits of a seed that torch's generator uses.
"""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING

import torch

from trainium_contract.models.parameters import EMBEDDING, HEAD, Initial, find_parameter, layer_parameters

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from trainium_contract.models.shape import ModelShape

TILE = (64, 256)
"""Rows and columns of a tile: the most that a rank draws beyond its part; seeding takes a quarter of the time."""
_TILES_BITS = 18
_NAMES_BITS = 32 - _TILES_BITS
_ENDS = ("model.norm.weight", HEAD, EMBEDDING)


def draw_initial_slice(
    name: str, offsets: Sequence[int], sizes: Sequence[int], *, seed: int, shape: ModelShape
) -> Tensor:
    """Return a box of the initial values: normal(0, std), residual outputs divided by sqrt(2 layers), norms 1.

    That is HLAT's initialization (arXiv 2404.10630, section 3), without which its training diverged. `offsets` and
    `sizes` locate the box in the whole parameter; the values are float32.
    """
    parameter = find_parameter(shape, name)
    if parameter.initial is Initial.ONES:
        return torch.ones(*sizes)
    if parameter.initial is Initial.ZEROS:
        return torch.zeros(*sizes)
    std = shape.initial_std / (math.sqrt(2 * shape.num_layers) if parameter.initial is Initial.RESIDUAL else 1.0)
    values = torch.empty(*sizes)
    if not values.numel():
        return values
    (first_row, first_column), (rows, columns) = offsets, sizes
    tile = torch.empty(TILE)
    generator = torch.Generator()
    across = -(-parameter.size[1] // TILE[1])
    number_of_parameter = _find_parameter_index(name, shape)
    for row in range(first_row // TILE[0] * TILE[0], first_row + rows, TILE[0]):
        for column in range(first_column // TILE[1] * TILE[1], first_column + columns, TILE[1]):
            number = row // TILE[0] * across + column // TILE[1]
            tile.normal_(0.0, std, generator=generator.manual_seed(_tile_seed(seed, number_of_parameter, number)))
            top, first = max(row, first_row), max(column, first_column)
            bottom, right = min(row + TILE[0], first_row + rows), min(column + TILE[1], first_column + columns)
            inside = tile[top - row : bottom - row, first - column : right - column]
            values[top - first_row : bottom - first_row, first - first_column : right - first_column] = inside
    return values


def draw_initial_tensor(name: str, sizes: Sequence[int], *, seed: int, shape: ModelShape) -> Tensor:
    """Return all initial values of a parameter, see `draw_initial_slice`."""
    return draw_initial_slice(name, [0] * len(sizes), sizes, seed=seed, shape=shape)


def _find_parameter_index(name: str, shape: ModelShape) -> int:
    """Return the index of a drawn parameter in any model of its family, by the end of its name."""
    if name in _ENDS:
        return _ENDS.index(name)
    _, _, layer, leaf = name.split(".", 3)
    drawn = [parameter.name for parameter in layer_parameters(shape).values() if parameter.is_drawn]
    return len(_ENDS) + int(layer) * len(drawn) + drawn.index(leaf)


def _tile_seed(seed: int, parameter: int, tile: int) -> int:
    """Return a 32-bit seed that is unique in the model: an index mixed by a bijection."""
    assert parameter < 1 << _NAMES_BITS
    assert tile < 1 << _TILES_BITS
    key = int.from_bytes(hashlib.blake2b(str(seed).encode(), digest_size=4).digest(), "little")
    return _mix(_mix(parameter << _TILES_BITS | tile) ^ key)


def _mix(bits: int) -> int:
    """Apply MurmurHash3's finaliser (Austin Appleby, public domain), a permutation of the 32-bit integers."""
    bits = (bits ^ bits >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    bits = (bits ^ bits >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return bits ^ bits >> 16

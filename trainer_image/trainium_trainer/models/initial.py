"""Draw the initial weights of a run without a base: any box of them, at the cost of that box.

A weight is drawn in tiles, each from a separate generator, so that a rank draws only the tiles that its part touches
and finds the same numbers at every layout. Invariants: numbers follow from seed, place of the parameter in the model,
and place in the weight, never from its size (rows that pad a vocabulary move nothing); no two tiles of a model have the
same seed, of which torch's generator uses 32 bits.
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
"""Rows and columns: what a rank draws beyond its part is at most a border of these, and seeding takes a quarter."""
_TILES_BITS = 18
_NAMES_BITS = 32 - _TILES_BITS
_ENDS = ("model.norm.weight", HEAD, EMBEDDING)


def initial_box(name: str, offsets: Sequence[int], sizes: Sequence[int], *, seed: int, shape: ModelShape) -> Tensor:
    """Return a box of a parameter's initial value: normal(0, std), residual outputs divided by sqrt(2 layers), norms 1.

    That is HLAT's initialisation (arXiv 2404.10630, section 3), without which its training diverged. `offsets` and
    `sizes` are those of the box in the whole parameter; the numbers are float32.
    """
    parameter = find_parameter(shape, name)
    if parameter.initial is Initial.ONES:
        return torch.ones(*sizes)
    if parameter.initial is Initial.ZEROS:
        return torch.zeros(*sizes)
    std = shape.initial_std / (math.sqrt(2 * shape.num_layers) if parameter.initial is Initial.RESIDUAL else 1.0)
    made = torch.empty(*sizes)
    if not made.numel():
        return made
    (first_row, first_column), (rows, columns) = offsets, sizes
    tile = torch.empty(TILE)
    generator = torch.Generator()
    across = -(-parameter.size[1] // TILE[1])
    number_of_parameter = _number_of(name, shape)
    for row in range(first_row // TILE[0] * TILE[0], first_row + rows, TILE[0]):
        for column in range(first_column // TILE[1] * TILE[1], first_column + columns, TILE[1]):
            number = row // TILE[0] * across + column // TILE[1]
            tile.normal_(0.0, std, generator=generator.manual_seed(_seed_of(seed, number_of_parameter, number)))
            top, left = max(row, first_row), max(column, first_column)
            bottom, right = min(row + TILE[0], first_row + rows), min(column + TILE[1], first_column + columns)
            inside = tile[top - row : bottom - row, left - column : right - column]
            made[top - first_row : bottom - first_row, left - first_column : right - first_column] = inside
    return made


def initial_whole(name: str, sizes: Sequence[int], *, seed: int, shape: ModelShape) -> Tensor:
    """All of a parameter's initial value: see `initial_box`."""
    return initial_box(name, [0] * len(sizes), sizes, seed=seed, shape=shape)


def _number_of(name: str, shape: ModelShape) -> int:
    """Return the number of a drawn parameter in any model of its family, by the end of its name."""
    if name in _ENDS:
        return _ENDS.index(name)
    _, _, layer, leaf = name.split(".", 3)
    drawn = [each.name for each in layer_parameters(shape).values() if each.is_drawn]
    return len(_ENDS) + int(layer) * len(drawn) + drawn.index(leaf)


def _seed_of(seed: int, parameter: int, tile: int) -> int:
    """32 bits that no other tile of the model has: a number mixed by steps that can be undone, so none is lost."""
    assert parameter < 1 << _NAMES_BITS
    assert tile < 1 << _TILES_BITS
    key = int.from_bytes(hashlib.blake2b(str(seed).encode(), digest_size=4).digest(), "little")
    return _mixed(_mixed(parameter << _TILES_BITS | tile) ^ key)


def _mixed(bits: int) -> int:
    """MurmurHash3's finaliser (Austin Appleby, public domain), a permutation of the numbers of 32 bits."""
    bits = (bits ^ bits >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    bits = (bits ^ bits >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return bits ^ bits >> 16

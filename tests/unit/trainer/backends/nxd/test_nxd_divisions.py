"""Divide a state among ranks of backend Nxd: the boxes that they hold, and each value in one file."""

from __future__ import annotations

import itertools

import pytest

from tests.testing.trainer.schemes import assert_written_once
from trainium_contract.models.shape import ModelShape
from trainium_trainer.backends.nxd.layout.divisions import divisions, replicated, zero1
from trainium_trainer.backends.nxd.layout.parameter_names import Projections, parameters_of
from trainium_trainer.backends.nxd.layout.pieces import KeyValueOrder, TensorRank
from trainium_trainer.checkpoint.dividing import Divided, Grid, Scheme, box_at

SHAPE = ModelShape(
    vocab_size=64,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=4,
    rope_theta=10000.0,
    max_positions=32,
    norm_eps=1e-5,
    tie_embeddings=False,
)


@pytest.mark.parametrize("order", list(KeyValueOrder))
@pytest.mark.parametrize("data", [1, 2, 3, 7])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("sharded", [False, True])
def test_the_boxes_are_those_of_nxds_layers_and_zero1(
    size: int, order: KeyValueOrder, data: int, sharded: bool
) -> None:
    grid = Grid(1, data, size)
    found: dict[int, Scheme] = {}
    for tensor_rank, data_rank in itertools.product(range(size), range(data)):
        rank = TensorRank(SHAPE, tensor_rank, size, order)
        tensors: list[Divided] = []
        for name in parameters_of(SHAPE, Projections.FUSED):
            pieces, divided = rank.pieces(name), divisions(rank, name)
            rows = -(-sum(piece.sizes[0] for piece in pieces) // data)
            stored = zero1(pieces, divided, data_rank, rows) if sharded else replicated(pieces, divided)
            for each in stored:
                box = box_at(each.piece.whole, each.division, grid, data_rank, tensor_rank)
                assert (box.volume == 0 and each.piece.sizes[0] == 0) or (
                    (box.offsets, box.sizes) == (each.piece.offsets, each.piece.sizes)
                )
                tensors.append(Divided(each.piece.name, "F32", each.piece.whole, 0, each.division))
        found[grid.rank(0, data_rank, tensor_rank)] = Scheme(grid, tensors)
    assert len({scheme.digest for scheme in found.values()}) == 1
    assert found[0].problem() == ""
    assert_written_once(found[0])

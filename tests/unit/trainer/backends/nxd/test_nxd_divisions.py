"""Divide a state among ranks of backend Nxd: the boxes that they hold, and each value in one file."""

import itertools

import pytest

from tests.testing.trainer.base_models import SHAPE
from tests.testing.trainer.checkpoint_layouts import assert_written_once
from trainium_trainer.backends.nxd.layout.divisions import find_divisions, find_replicated_rows, find_zero1_rows
from trainium_trainer.backends.nxd.layout.parameter_names import Projections, list_parameters
from trainium_trainer.backends.nxd.layout.pieces import KeyValueOrder, TensorRank
from trainium_trainer.checkpoint.format.layout import CheckpointLayout, TensorMetadata
from trainium_trainer.checkpoint.sharding import Grid, find_box


@pytest.mark.parametrize("order", list(KeyValueOrder))
@pytest.mark.parametrize("data", [1, 2, 3, 7])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("sharded", [False, True])
def test_the_boxes_are_those_of_nxds_layers_and_zero1(
    size: int, order: KeyValueOrder, data: int, sharded: bool
) -> None:
    grid = Grid(1, data, size)
    layouts: dict[int, CheckpointLayout] = {}
    for tensor_rank, data_rank in itertools.product(range(size), range(data)):
        rank = TensorRank(SHAPE, tensor_rank, size, order)
        tensors: list[TensorMetadata] = []
        for name in list_parameters(SHAPE, Projections.FUSED):
            pieces, divided = rank.find_pieces(name), find_divisions(rank, name)
            rows = -(-sum(piece.sizes[0] for piece in pieces) // data)
            stored = (
                find_zero1_rows(pieces, divided, data_rank, rows) if sharded else find_replicated_rows(pieces, divided)
            )
            for row in stored:
                box = find_box(row.piece.whole, row.division, grid, data_rank, tensor_rank)
                assert (box.volume == 0 and row.piece.sizes[0] == 0) or (
                    (box.offsets, box.sizes) == (row.piece.offsets, row.piece.sizes)
                )
                tensors.append(TensorMetadata(row.piece.name, "F32", row.piece.whole, 0, row.division))
        layouts[grid.find_rank(0, data_rank, tensor_rank)] = CheckpointLayout(grid, tensors)
    assert len({layout.digest for layout in layouts.values()}) == 1
    assert layouts[0].find_problem() == ""
    assert_written_once(layouts[0])

"""Rules for every layout of a checkpoint, whichever library divides the tensors."""

import numpy as np

from trainium_trainer.checkpoint.format.layout import CheckpointLayout
from trainium_trainer.checkpoint.sharding import Box, find_box


def assert_written_once(layout: CheckpointLayout) -> None:
    """Check that one rank writes each value, that it holds the value, and that readers look for it in its file."""
    written = {name: np.zeros(tensor.shape, dtype=np.int64) for name, tensor in layout.tensors.items()}
    rank_by_box: dict[tuple[str, Box], int] = {}
    for rank in range(layout.grid.size):
        stage, data, tensor_rank = layout.grid.find_coordinates(rank)
        for item in layout.plan_items(rank):
            tensor = layout.tensors[item.name]
            assert tensor.stage == stage
            assert item.box == find_box(tensor.shape, tensor.division, layout.grid, data, tensor_rank)
            slices = tuple(slice(o, o + s) for o, s in zip(item.box.offsets, item.box.sizes, strict=True))
            written[item.name][slices] += 1
            rank_by_box[item.name, item.box] = rank
    assert {name: (counts.min(), counts.max()) for name, counts in written.items() if counts.size} == {
        name: (1, 1) for name, counts in written.items() if counts.size
    }
    for name, tensor in layout.tensors.items():
        writers = list(layout.find_writers(name, Box((0,) * len(tensor.shape), tensor.shape)))
        assert dict(writers) == {box: rank for (owner, box), rank in rank_by_box.items() if owner == name}
        assert len(writers) == len(set(writers))

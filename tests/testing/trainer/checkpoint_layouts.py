"""Rules for every layout of a checkpoint, whichever library divides the tensors."""

import numpy as np

from trainium_trainer.checkpoint.sharding import Box, CheckpointLayout, box_at


def assert_written_once(layout: CheckpointLayout) -> None:
    """Check that every value is in one file, that of a rank that holds it, and that readers find it there."""
    written = {name: np.zeros(each.shape, dtype=np.int64) for name, each in layout.tensors.items()}
    where: dict[tuple[str, Box], int] = {}
    for rank in range(layout.grid.size):
        stage, data, tensor_rank = layout.grid.coordinates(rank)
        for item in layout.plan_items(rank):
            each = layout.tensors[item.name]
            assert each.stage == stage
            assert item.box == box_at(each.shape, each.division, layout.grid, data, tensor_rank)
            slices = tuple(slice(o, o + s) for o, s in zip(item.box.offsets, item.box.sizes, strict=True))
            written[item.name][slices] += 1
            where[item.name, item.box] = rank
    assert {name: (counts.min(), counts.max()) for name, counts in written.items() if counts.size} == {
        name: (1, 1) for name, counts in written.items() if counts.size
    }
    for name, each in layout.tensors.items():
        found = list(layout.writers(name, Box((0,) * len(each.shape), each.shape)))
        assert dict(found) == {box: rank for (own, box), rank in where.items() if own == name}
        assert len(found) == len(set(found))

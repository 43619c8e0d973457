"""Rules for every scheme of a checkpoint, whichever library divides the tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from trainium_trainer.checkpoint.dividing import Box, box_at

if TYPE_CHECKING:
    from trainium_trainer.checkpoint.dividing import Scheme


def assert_written_once(scheme: Scheme) -> None:
    """Every value is in one file, in the file of a rank that holds it, and readers find it there."""
    written = {name: np.zeros(each.shape, dtype=np.int64) for name, each in scheme.tensors.items()}
    where: dict[tuple[str, Box], int] = {}
    for rank in range(scheme.grid.size):
        stage, data, tensor_rank = scheme.grid.place(rank)
        for item in scheme.file(rank):
            each = scheme.tensors[item.name]
            assert each.stage == stage
            assert item.box == box_at(each.shape, each.division, scheme.grid, data, tensor_rank)
            slices = tuple(slice(o, o + s) for o, s in zip(item.box.offsets, item.box.sizes, strict=True))
            written[item.name][slices] += 1
            where[item.name, item.box] = rank
    assert {name: (counts.min(), counts.max()) for name, counts in written.items() if counts.size} == {
        name: (1, 1) for name, counts in written.items() if counts.size
    }
    for name, each in scheme.tensors.items():
        found = list(scheme.writers(name, Box((0,) * len(each.shape), each.shape)))
        assert dict(found) == {box: rank for (own, box), rank in where.items() if own == name}
        assert len(found) == len(set(found))

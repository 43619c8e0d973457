"""The division of whole tensors over the ranks of the nxd backend, in the form of checkpoints.

Guarantees:
- The division is derived from the boxes of all ranks of the group, so it cannot differ from the layout.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from trainium_trainer.checkpoint.sharding import Axis, Cut

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainium_trainer.backends.nxd.layout.pieces import Piece, TensorRank
    from trainium_trainer.checkpoint.sharding import Division


@dataclass(frozen=True, slots=True)
class StoredRows:
    """A tensor of the checkpoint within a parameter's state."""

    piece: Piece
    """This rank's rows of the tensor, possibly none."""
    division: Division
    """The division of the tensor over all ranks."""


def find_divisions(rank: TensorRank, parameter: str, *, adapter_rank: int = 0) -> tuple[Division, ...]:
    """Return the division of each piece of a parameter over the tensor-parallel group.

    Raises KeyError like `TensorRank.find_pieces`.
    """
    group = [replace(rank, rank=index).find_pieces(parameter, adapter_rank=adapter_rank) for index in range(rank.size)]
    return tuple(_find_division([pieces[number] for pieces in group]) for number in range(len(group[0])))


def _find_division(boxes: list[Piece]) -> Division:
    """Return the division of one piece, from its boxes on all ranks of the group, which are of equal size."""
    first = boxes[0]
    for dimension, (size, whole) in enumerate(zip(first.sizes, first.whole, strict=True)):
        if size != whole:
            order = tuple(box.offsets[dimension] // size for box in boxes)
            return (Cut(dimension, Axis.TENSOR, size, order=order),)
    return ()


def find_replicated_rows(pieces: Sequence[Piece], divided: Sequence[Division]) -> tuple[StoredRows, ...]:
    """Return the stored rows of a parameter whose state every data-parallel rank holds."""
    return tuple(StoredRows(piece, division) for piece, division in zip(pieces, divided, strict=True))


def find_zero1_rows(
    pieces: Sequence[Piece], divided: Sequence[Division], rank: int, rows: int
) -> tuple[StoredRows, ...]:
    """Return the stored rows of a parameter if data-parallel rank `rank` holds its `rank`-th `rows` rows."""
    return tuple(
        StoredRows(
            piece.within(rank * rows, (rank + 1) * rows) or piece.empty(),
            (*division, Cut(0, Axis.DATA, rows, piece.start)),
        )
        for piece, division in zip(pieces, divided, strict=True)
    )

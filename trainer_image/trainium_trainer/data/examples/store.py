"""Encode the examples of one source into a prepared folder of the cache, and read them.

The folder is that of prepared text (`prepared.prepared`): a piece is an example, and `document` is the hash of its
record. Further columns:

    trained    for each token whether it is learned (list of uint8)
    answer     where the last answer of the example begins
    before     tokens of every example before it was cut or dropped, in any order; for dropped ones there are empty rows
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trainium_trainer.data.examples.encoding import encode_block, initialize_worker
from trainium_trainer.data.examples.templates import explain_empty_filter
from trainium_trainer.data.prepared.build import BuildInputs
from trainium_trainer.data.prepared.reader import PreparedData, PreparedManifest, from_arrow
from trainium_trainer.exits import UserError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from trainium_trainer.data.examples.recipe import Recipe


ROW = np.dtype([("end", "<i8"), ("answer", "<i8"), ("record", "<u8")])
BLOCK_BYTES = 1 << 20
_SHARD_TOKENS = 16 << 20


class StoredExamples:
    """The examples of an open folder; their tokens are memory-mapped."""

    def __init__(self, folder: Path) -> None:
        """Open the folder. Raises UserError, OSError."""
        self.folder = folder
        self._prepared = PreparedData(folder)
        self.manifest = self._prepared.manifest
        columns: dict[str, list[NDArray[Any]]] = {name: [] for name in ("lengths", "answer", "document", "before")}
        for number in range(len(self._prepared.batch_tokens)):
            batch = self._prepared.read_arrow_batch(number)
            columns["lengths"].append(np.diff(from_arrow(batch.column("tokens").offsets)))
            for name in ("answer", "document", "before"):
                columns[name].append(from_arrow(batch.column(name)))
        lengths, answers, records, original_lengths = (
            np.concatenate(parts or [np.empty(0, np.int64)]) for parts in columns.values()
        )
        self.original_lengths: NDArray[np.int64] = original_lengths
        self._places = np.flatnonzero(lengths)
        """The row of each example in the folder."""
        self.lengths: NDArray[np.int64] = lengths[self._places]
        """The number of tokens of each example."""
        self.answers: NDArray[np.int64] = answers[self._places]
        self.records: NDArray[np.uint64] = records[self._places]

    def __len__(self) -> int:
        return len(self._places)

    def read_example(self, number: int) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        """Return the tokens of an example, and which of them are learned."""
        piece = int(self._places[number])
        batch = int(np.searchsorted(self._prepared.piece_ends, piece, side="right"))
        row = piece - (int(self._prepared.piece_ends[batch - 1]) if batch else 0)
        values, starts, _ = self._prepared.batch(batch)
        loss_mask = from_arrow(self._prepared.read_arrow_batch(batch).column("trained").values).view(np.bool_)
        tokens = slice(int(starts[row]), int(starts[row + 1]))
        return values[tokens], loss_mask[tokens]


def build_inputs(recipe: Recipe) -> BuildInputs:
    """Return the inputs of a build of examples."""
    assert recipe.tokenizer is not None

    def refuse_empty(manifest: PreparedManifest) -> None:
        if not manifest.documents:
            raise _explain_empty(recipe, manifest)

    return BuildInputs(
        name=recipe.source,
        specs=(recipe.spec,),
        tokenizer=Path(recipe.tokenizer),
        max_bad_lines=recipe.max_bad_lines,
        prepare=(initialize_worker, (recipe,)),
        encode=encode_block,
        refuse_empty=refuse_empty,
        count_records=lambda manifest: manifest.counts.records + manifest.counts.unreadable,
        block_bytes=BLOCK_BYTES,
        shard_tokens=_SHARD_TOKENS,
        unit="records",
    )


def _explain_empty(recipe: Recipe, manifest: PreparedManifest) -> UserError:
    """Return the reason why there is no example."""
    counts, config = manifest.counts, recipe.config
    name = f"data.source {recipe.source}"
    if counts.dropped:
        return UserError(
            f"{name}: all of its {counts.dropped:,} examples are longer than data.sequenceLength "
            f"{recipe.sequence_length} (the shortest has {counts.shortest_dropped:,} tokens): raise it, or set "
            "data.examples.tooLong to CutLeft or CutRight"
        )
    if manifest.examples:
        first = manifest.examples[0]
        return UserError(f"{name}: holds no example: {manifest.skipped} records were skipped, the first: {first}")
    if counts.filtered:
        return UserError(f"{name}: {explain_empty_filter(config.where, counts.found, counts.records)}")
    if counts.left_out:
        return UserError(f"{name}: data.examples.function left all of its {counts.left_out:,} records out: correct it")
    return UserError(f"{name}: holds no record: give a source with records in it")

"""Encode the examples of one source into a prepared folder of the cache, and read them.

The folder is that of prepared text (`prepared.reader`): a piece is an example, and `document` is the hash of its
record. Further columns:

    trained    for each token whether it is learned (list of uint8)
    answer     where the last answer of the example begins
    before     tokens of every example before it was cut or dropped, in any order; for dropped ones there are empty rows
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trainium_trainer.data.examples.encoding import ExampleEncoder
from trainium_trainer.data.examples.record_filter import explain_empty_filter
from trainium_trainer.data.prepared.build import BuildInputs
from trainium_trainer.data.prepared.reader import PreparedData, PreparedManifest, from_arrow
from trainium_trainer.exits import UserError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from trainium_trainer.data.examples.recipe import Recipe


BLOCK_BYTES = 1 << 20


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


class ExampleInputs(BuildInputs):
    """The records of one source and their recipe."""

    block_bytes = BLOCK_BYTES
    shard_tokens = 16 << 20
    unit = "records"

    def __init__(self, recipe: Recipe) -> None:
        assert recipe.tokenizer is not None
        self.recipe = recipe
        self.specs = (recipe.spec,)
        self.tokenizer = Path(recipe.tokenizer)
        self.max_bad_lines = recipe.max_bad_lines

    def compute_key(self, cache_folder: Path | None) -> str:
        """See `BuildInputs.compute_key`."""
        return self.recipe.compute_key(cache_folder)

    def create_encoder(self) -> ExampleEncoder:
        """See `BuildInputs.create_encoder`."""
        return ExampleEncoder(self.recipe)

    def refuse_empty(self, manifest: PreparedManifest) -> None:
        """Raise UserError with the reason why there is no example."""
        if not manifest.documents:
            raise UserError(f"data.source {self.name}: {_explain_empty(self.recipe, manifest)}")

    def count_records(self, manifest: PreparedManifest) -> int:
        """See `BuildInputs.count_records`."""
        return manifest.counts.records + manifest.counts.unreadable


def _explain_empty(recipe: Recipe, manifest: PreparedManifest) -> str:
    counts, config = manifest.counts, recipe.config
    if counts.dropped:
        return (
            f"all of its {counts.dropped:,} examples are longer than data.sequenceLength {recipe.sequence_length} "
            f"(the shortest has {counts.shortest_dropped:,} tokens): raise it, or set data.examples.tooLong to "
            "CutLeft or CutRight"
        )
    if manifest.examples:
        return f"holds no example: {manifest.skipped} records were skipped, the first: {manifest.examples[0]}"
    if counts.filtered:
        return explain_empty_filter(config.where, counts.found, counts.records)
    if counts.left_out:
        return f"data.examples.function left all of its {counts.left_out:,} records out: correct it"
    return "holds no record: give a source with records in it"

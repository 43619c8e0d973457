"""Encode the examples of one source into a prepared folder of the cache, and read them.

The folder is that of prepared text (`prepared.prepared`): a piece is an example, `document` the hash of its record.
Further columns:

    trained    for each token whether it is learned (list of uint8)
    answer     where the last answer of the example begins
    before     tokens of every example before it was cut or dropped, in any order; for dropped ones there are empty rows
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trainium_trainer.data.examples.blocks import encode_block, install
from trainium_trainer.data.examples.templates import explain_empty_filter
from trainium_trainer.data.prepared.build import BuildInputs, BuildProgress, build
from trainium_trainer.data.prepared.prepared import Prepared, PreparedManifest, numbers_of
from trainium_trainer.exits import UserError

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from trainium_trainer.data.examples.recipe import Recipe


ROW = np.dtype([("end", "<i8"), ("answer", "<i8"), ("record", "<u8")])
BLOCK_BYTES = 1 << 20
_SHARD_TOKENS = 16 << 20


class StoredExamples:
    """The examples of an open folder; their tokens are mapped into memory."""

    def __init__(self, folder: Path) -> None:
        """Open it. Raises UserError, OSError."""
        self.folder = folder
        self._prepared = Prepared(folder)
        self.manifest = self._prepared.manifest
        columns: dict[str, list[NDArray[Any]]] = {name: [] for name in ("lengths", "answer", "document", "before")}
        for number in range(len(self._prepared.batch_tokens)):
            batch = self._prepared.arrow_batch(number)
            columns["lengths"].append(np.diff(numbers_of(batch.column("tokens").offsets)))
            for name in ("answer", "document", "before"):
                columns[name].append(numbers_of(batch.column(name)))
        lengths, answers, records, before = (
            np.concatenate(parts or [np.empty(0, np.int64)]) for parts in columns.values()
        )
        self.before: NDArray[np.int64] = before
        self._places = np.flatnonzero(lengths)
        """Row of each example among those of the folder."""
        self.lengths: NDArray[np.int64] = lengths[self._places]
        """Tokens of each example."""
        self.answers: NDArray[np.int64] = answers[self._places]
        self.records: NDArray[np.uint64] = records[self._places]

    def __len__(self) -> int:
        return len(self._places)

    def example(self, number: int) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        """Tokens of an example, and which are learned."""
        place = int(self._places[number])
        at = int(np.searchsorted(self._prepared.piece_ends, place, side="right"))
        row = place - (int(self._prepared.piece_ends[at - 1]) if at else 0)
        values, starts, _ = self._prepared.batch(at)
        trained = numbers_of(self._prepared.arrow_batch(at).column("trained").values).view(np.bool_)
        stretch = slice(int(starts[row]), int(starts[row + 1]))
        return values[stretch], trained[stretch]


def build_examples(
    folder: Path,
    recipe: Recipe,
    key: str,
    *,
    workers: int | None = None,
    progress: Callable[[BuildProgress], None] = lambda _: None,
) -> PreparedManifest:
    """Make `folder`, unless it is there. Raises UserError, StorageError, WorkerError, OSError."""
    assert recipe.tokenizer is not None

    def refuse_empty(made: PreparedManifest) -> None:
        if not made.documents:
            raise _empty(recipe, made)

    inputs = BuildInputs(
        name=recipe.source,
        specs=(recipe.spec,),
        tokenizer=Path(recipe.tokenizer),
        max_bad_lines=recipe.max_bad_lines,
        prepare=(install, (recipe,)),
        encode=encode_block,
        refuse_empty=refuse_empty,
        count_records=lambda made: made.counts.records + made.counts.unreadable,
        block_bytes=BLOCK_BYTES,
        unit="records",
    )
    return build(folder, inputs, key, workers=workers, progress=progress, shard_tokens=_SHARD_TOKENS)


def _empty(recipe: Recipe, made: PreparedManifest) -> UserError:
    """Return the reason why there is no example, in one sentence."""
    counts, config = made.counts, recipe.config
    name = f"data.source {recipe.source}"
    if counts.dropped:
        return UserError(
            f"{name}: all of its {counts.dropped:,} examples are longer than data.sequenceLength "
            f"{recipe.sequence_length} (the shortest has {counts.shortest_dropped:,} tokens): raise it, or set "
            "data.examples.tooLong to CutLeft or CutRight"
        )
    if made.examples:
        first = made.examples[0]
        return UserError(f"{name}: holds no example: {made.skipped} records were skipped, the first: {first}")
    if counts.filtered:
        return UserError(f"{name}: {explain_empty_filter(config.where, counts.found, counts.records)}")
    if counts.left_out:
        return UserError(f"{name}: data.examples.function left all of its {counts.left_out:,} records out: correct it")
    return UserError(f"{name}: holds no record: give a source with records in it")

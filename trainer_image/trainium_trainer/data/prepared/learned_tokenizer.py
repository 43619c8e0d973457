"""A tokenizer trained on the data, kept in the cache.

Invariants: trained once per machine, sources and vocabulary size; a file that is there is whole.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from trainium_trainer.data.prepared.writer import locked
from trainium_trainer.data.sources.documents import TextPiece
from trainium_trainer.data.sources.files import reading
from trainium_trainer.data.tokens.tokenizer import TOKENIZER_FILE, train_tokenizer
from trainium_trainer.data.workers.pool import Workers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from trainium_trainer.data.sources.documents import DocumentSource, FileBlock, Skipped
    from trainium_trainer.data.tokens.encoding import SourceSpec

_FORMAT = 1
_BLOCK_BYTES = 4 << 20


def learned(specs: Sequence[SourceSpec], vocab_size: int, cache: Path) -> Path:
    """The `tokenizer.json` of a tokenizer for these sources. Raises UserError, StorageError, WorkerError."""
    parts = [_FORMAT, vocab_size, [spec.open().identity(cache) for spec in specs]]
    return once(parts, cache, _learn, tuple(specs), vocab_size)


def once(parts: list[Any], cache: Path, learn: Callable[..., None], *arguments: Any) -> Path:
    """The file that `learn(*arguments, file)` makes in a process of its own, unless the cache has one for `parts`."""
    folder = cache / f"tokenizer-{hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]}"
    file = folder / TOKENIZER_FILE
    if file.exists():
        return file
    with locked(cache / f".{folder.name}.lock"):
        if not file.exists():
            folder.mkdir(exist_ok=True)
            temporary = folder / "unfinished.json"
            with Workers(1) as workers:
                workers.call(learn, *arguments, str(temporary))
            temporary.rename(file)
    return file


def _learn(specs: tuple[SourceSpec, ...], vocab_size: int, file: str) -> None:
    """Train and save; called in a process of its own, whose memory and threads go with it."""
    train_tokenizer([_texts(spec.open()) for spec in specs], vocab_size).save(file)


def _texts(source: DocumentSource) -> Iterator[str]:
    for block in source.blocks(_BLOCK_BYTES):
        for item in _items(source, block):
            if isinstance(item, TextPiece):
                yield item.text


def _items(source: DocumentSource, block: FileBlock) -> list[TextPiece | Skipped]:
    return reading(source.named(block), lambda: list(source.read(block)))

"""Tokenizers: a user's `tokenizer.json`, or a byte-level BPE trained on the data.

Invariants: the same text gives the same tokenizer; a trained one never has more entries than configured, and every byte
can be encoded, so no text has unknown tokens.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from trainium_trainer.exits import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tokenizers import Tokenizer

    from trainium_contract.trainer import TokenizerConfig
    from trainium_trainer.data.documents import Source

END_OF_DOCUMENT = "<|endoftext|>"
_END_NAMES = (END_OF_DOCUMENT, "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
_TRAINING_CHARACTERS = 64 * 1024 * 1024


def tokenizer_file(config: TokenizerConfig) -> Path:
    """The `tokenizer.json` that the configuration names. Raises UserError."""
    assert config.path is not None
    path = Path(config.path).expanduser()
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise UserError(
            f"data.tokenizer.path {config.path}: there is no tokenizer.json: correct the path or leave it out"
        )
    return file


def vocabulary_of(config: TokenizerConfig) -> int:
    """Entries of the configured tokenizer; of a file by its JSON alone. Raises UserError for an unusable file."""
    if config.path is None:
        return config.vocab_size
    file = tokenizer_file(config)
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
        model = document["model"]["vocab"]
        ids = list(model.values()) if isinstance(model, dict) else list(range(len(model)))
        ids += [token["id"] for token in document.get("added_tokens") or ()]
        size = max(ids) + 1
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"data.tokenizer.path {file}: not a tokenizer.json of the `tokenizers` library: export it in that format"
        ) from error
    return int(size)


def load_tokenizer(file: Path) -> Tokenizer:
    """Read a `tokenizer.json`. Raises UserError."""
    from tokenizers import Tokenizer  # noqa: PLC0415 - not needed when the tokens are cached

    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exceptions
        raise UserError(f"data.tokenizer.path {file}: cannot be read ({error}): replace the file") from error


def end_of_document(tokenizer: Tokenizer, file: Path) -> int:
    """Id of the token that ends a document. Raises UserError when the vocabulary has none that we know."""
    for name in _END_NAMES:
        number = tokenizer.token_to_id(name)
        if number is not None:
            return int(number)
    raise UserError(
        f"data.tokenizer.path {file}: no end-of-document token ({', '.join(_END_NAMES)}): add one to the vocabulary"
    )


def train_tokenizer(source: Source, vocab_size: int) -> Tokenizer:
    """A byte-level BPE of at most `vocab_size` entries, trained on the first 64 million characters."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: PLC0415 - as above

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_first_characters(source), trainer)
    return tokenizer


def _first_characters(source: Source) -> Iterator[str]:
    left = _TRAINING_CHARACTERS
    for piece in source.pieces():
        yield piece.text[:left]
        left -= len(piece.text)
        if left <= 0:
            return

"""Tokenizers: a user's `tokenizer.json`, or a byte-level BPE trained on the data.

Invariants: the same text gives the same tokenizer; a trained one never has more entries than configured, and every byte
can be encoded, so no text has unknown tokens; a special token that stands in the text is text, so that the token that
ends a document stands nowhere else.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

from trainium_trainer.exits import UserError

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator

    from tokenizers import Tokenizer

    from trainium_contract.trainer.data import TokenizerConfig

END_OF_DOCUMENT = "<|endoftext|>"
TOKENIZER_FILE = "tokenizer.json"
_END_NAMES = (END_OF_DOCUMENT, "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
_TRAINING_CHARACTERS = 64 * 1024 * 1024


def tokenizer_file(config: TokenizerConfig) -> Path:
    """The `tokenizer.json` that the configuration names. Raises UserError."""
    assert config.path is not None
    path = Path(config.path).expanduser()
    file = path / TOKENIZER_FILE if path.is_dir() else path
    if not file.is_file():
        raise UserError(
            f"data.tokenizer.path {config.path}: there is no tokenizer.json: correct the path or leave it out"
        )
    return file


def vocabulary_of(file: Path) -> int:
    """Entries of a tokenizer file, by its JSON alone. Raises UserError for an unusable file."""
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


def digest_of(file: Path) -> str:
    """Digest of a tokenizer: of what its file says, whatever its layout."""
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"data.tokenizer.path {file}: cannot be read ({error}): replace the file") from error
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def load_tokenizer(file: Path) -> Tokenizer:
    """Read a `tokenizer.json`. Raises UserError."""
    from tokenizers import Tokenizer  # noqa: PLC0415 - not needed when the tokens are cached

    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exceptions
        raise UserError(f"data.tokenizer.path {file}: cannot be read ({error}): replace the file") from error
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()  # some files carry a limit that was meant for another purpose
    tokenizer.no_padding()
    return tokenizer


def end_of_document(tokenizer: Tokenizer, file: Path) -> int:
    """Id of the token that ends a document. Raises UserError when the vocabulary has none that we know."""
    for name in _END_NAMES:
        number = tokenizer.token_to_id(name)
        if number is not None:
            return int(number)
    raise _endless(file)


def end_of_document_of(file: Path) -> int:
    """As `end_of_document`, by the file's JSON alone. Raises UserError."""
    ids = {text: number for number, text in vocabulary_in(file.read_bytes()).items()}
    name = known_end(ids)
    if name is None:
        raise _endless(file)
    return ids[name]


def known_end(vocabulary: Container[str]) -> str | None:
    """The text of the token that ends a document; None when the vocabulary has none that we know."""
    return next((name for name in _END_NAMES if name in vocabulary), None)


def vocabulary_in(file: bytes) -> dict[int, str]:
    """The entries of a `tokenizer.json` by their numbers."""
    document = json.loads(file)
    vocabulary = document["model"].get("vocab") or {}
    ids = vocabulary if isinstance(vocabulary, dict) else {piece[0]: number for number, piece in enumerate(vocabulary)}
    found = {int(number): str(text) for text, number in ids.items()}
    return found | {int(token["id"]): str(token["content"]) for token in document.get("added_tokens") or ()}


def _endless(file: Path) -> UserError:
    return UserError(
        f"data.tokenizer.path {file}: no end-of-document token ({', '.join(_END_NAMES)}): add one to the vocabulary"
    )


def train_tokenizer(texts: Iterable[Iterator[str]], vocab_size: int) -> Tokenizer:
    """A byte-level BPE of at most `vocab_size` entries, trained on the first 64 million characters.

    Of several streams of text each gives an equal part.
    """
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
    streams = list(texts)
    share = _TRAINING_CHARACTERS // len(streams)
    tokenizer.train_from_iterator((text for stream in streams for text in _first(stream, share)), trainer)
    return tokenizer


def _first(stream: Iterator[str], left: int) -> Iterator[str]:
    for text in stream:
        yield text[:left]
        left -= len(text)
        if left <= 0:
            return

"""From text to one memory-mapped file of tokens in the cache, built once per node whatever the number of processes.

Invariants: the file is the documents in order, each followed by the end-of-document token; its name is a digest of
everything it depends on, and it appears by an atomic rename, so a file that exists is complete; a builder that is
killed leaves nothing that counts, and its lock goes with it.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trainium_trainer.data.documents import Piece, open_source
from trainium_trainer.data.tokenizer import (
    end_of_document,
    load_tokenizer,
    tokenizer_file,
    train_tokenizer,
)
from trainium_trainer.exits import StorageError, UserError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray
    from tokenizers import Tokenizer

    from trainium_contract.trainer import DataConfig
    from trainium_trainer.data.documents import Source

_FORMAT = 2
_LASTING = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG})
_BATCH = 512  # pieces tokenised at once


@dataclass(frozen=True, slots=True)
class TokenFile:
    """A finished token file."""

    tokens: NDArray[Any]
    """Memory map, uint16 or uint32."""
    sequence_length: int
    identity: str
    """Digest of the tokens: equal on all ranks that read the same data."""

    @property
    def num_samples(self) -> int:
        """Samples of one epoch; the last one may be shorter than the others (its rest is padding)."""
        return -(-(len(self.tokens) - 1) // self.sequence_length)

    def sample(self, index: int) -> NDArray[Any]:
        """Tokens of one sample, with the token after it: at most `sequence_length` + 1 of them."""
        start = index * self.sequence_length
        return self.tokens[start : start + self.sequence_length + 1]

    @property
    def fingerprint(self) -> int:
        """The identity as a 62-bit number, to compare among ranks."""
        return int(self.identity[:16], 16) >> 2


def open_tokens(config: DataConfig) -> TokenFile:
    """The token file of a data configuration, built when the cache does not have it yet.

    Raises UserError for unusable data or a cache folder that can never be written, StorageError for a full or failing
    one.
    """
    cache = cache_directory(config)
    source = open_source(config.source, config.text_field)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        key = _key(config, source, cache)
        folder = cache / key
        if not (folder / "meta.json").exists():
            with _locked(cache / f"{key}.lock"):
                if not (folder / "meta.json").exists():
                    _build(folder, config, source)
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        tokens = np.memmap(folder / "tokens.bin", dtype=meta["dtype"], mode="r")
    except OSError as error:
        kind = UserError if error.errno in _LASTING else StorageError
        raise kind(
            f"data.cacheDirectory {cache}: cannot be used ({error.strerror or error}): "
            "free space there or set data.cacheDirectory to a folder that can be written"
        ) from error
    if len(tokens) - 1 < config.sequence_length:
        raise UserError(
            f"data.source {config.source}: holds {len(tokens)} tokens, fewer than one sequence of "
            f"{config.sequence_length} and its next token: add text or lower data.sequenceLength"
        )
    return TokenFile(tokens, config.sequence_length, meta["identity"])


def cache_directory(config: DataConfig) -> Path:
    """Where tokenizers and tokens are kept on this machine."""
    if config.cache_directory is not None:
        return Path(config.cache_directory).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111 - Path.home() may raise
    if os.access(base, os.W_OK) or os.access(Path(base).parent, os.W_OK):
        return Path(base) / "trainium-trainer"
    return Path(tempfile.gettempdir()) / f"trainium-trainer-{os.getuid()}"


def _key(config: DataConfig, source: Source, cache: Path) -> str:
    tokenizer: Any = config.tokenizer.vocab_size
    if config.tokenizer.path is not None:
        tokenizer = hashlib.sha256(tokenizer_file(config.tokenizer).read_bytes()).hexdigest()
    parts = (_FORMAT, source.identity(cache), tokenizer)
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a file lock; the kernel drops it when the holder dies."""
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _build(folder: Path, config: DataConfig, source: Source) -> None:
    """Write tokenizer, tokens and meta below a temporary name, then rename the folder."""
    # The library's thread pool does not survive a fork, and a worker's ranks are forked; one thread is enough here.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="building-") as name:
        work = Path(name) / "data"
        work.mkdir()
        if config.tokenizer.path is not None:
            file = tokenizer_file(config.tokenizer)
            tokenizer = load_tokenizer(file)
            end = end_of_document(tokenizer, file)
        else:
            tokenizer = train_tokenizer(source, config.tokenizer.vocab_size)
            end = end_of_document(tokenizer, work)
        tokenizer.save(str(work / "tokenizer.json"))
        dtype = np.dtype(np.uint16 if tokenizer.get_vocab_size() <= 2**16 else np.uint32)
        digest = hashlib.sha256()
        count = 0
        with (work / "tokens.bin").open("wb") as stream:
            for ids in _token_runs(tokenizer, source, end):
                data = np.asarray(ids, dtype=dtype).tobytes()
                digest.update(data)
                count += len(ids)
                stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        if count == 0:
            raise UserError(f"data.source {config.source}: holds no text: give a source with text in it")
        meta = {"dtype": dtype.name, "identity": digest.hexdigest(), "tokens": count}
        (work / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
        work.rename(folder)


def _token_runs(tokenizer: Tokenizer, source: Source, end: int) -> Iterator[list[int]]:
    """Token ids of the stream, batch by batch; documents without text leave no trace."""
    batch: list[Piece] = []
    open_document = False

    def encode() -> Iterator[list[int]]:
        nonlocal open_document
        encodings = tokenizer.encode_batch([piece.text for piece in batch], add_special_tokens=False)
        for piece, encoding in zip(batch, encodings, strict=True):
            ids = list(encoding.ids)
            open_document = open_document or bool(ids)
            if piece.ends_document and open_document:
                ids.append(end)
                open_document = False
            if ids:
                yield ids

    for piece in source.pieces():
        batch.append(piece)
        if len(batch) == _BATCH:
            yield from encode()
            batch = []
    yield from encode()

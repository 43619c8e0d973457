"""Open folders with a model in Hugging Face's format, without loading weights.

Invariants: no torch and no weights are touched; what cannot be used is refused in one sentence, a UserError.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from trainium_contract.trainer.addresses import is_address
from trainium_trainer.exits import StorageError, UserError
from trainium_trainer.storage.opening import open_storage
from trainium_trainer.storage.protocol import Retry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tokenizers import Tokenizer

CONFIG = "config.json"
TOKENIZER = "tokenizer.json"
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
_TOKENIZER_CONFIG = "tokenizer_config.json"
_GENERATION_CONFIG = "generation_config.json"


class ComputeType(StrEnum):
    """Number format in which a model computes."""

    AUTO = "auto"
    """float32 on a CPU, the folder's own on a GPU."""
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class ComputeDevice(StrEnum):
    """Device on which a model computes."""

    AUTO = "auto"
    """A GPU if there is one."""
    CPU = "cpu"
    CUDA = "cuda"


@dataclass(frozen=True, slots=True, kw_only=True)
class Models:
    """Locations of models: folders or s3://bucket/prefix."""

    model: str
    """The one to be measured."""
    adapter: str | None = None
    """An adapter in peft's format beside it, which is applied and not merged."""
    base: str | None = None
    """The one to measure it against."""

    @property
    def name(self) -> str:
        """Return the name of the evaluated model for people."""
        return self.model if self.adapter is None else f"{self.model} with {self.adapter}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A model that can be loaded and asked, with the tokenizer that goes with it."""

    path: Path
    adapter: Path | None
    """Folder of an adapter in peft's format that is put beside the weights."""
    tokenizer: Tokenizer
    tokenizer_folder: Path
    """Folder that the tokenizer is from: the adapter's, if it has one."""
    positions: int | None
    """Longest sequence in tokens; None where the folder does not name it."""
    vocabulary: int
    """Rows of the embedding."""
    endings: tuple[int, ...]
    """Ids of the tokens that end an answer."""
    begin: str | None
    """The text of the token that the tokenizer puts before a prompt, if it has one."""

    @property
    def name(self) -> str:
        """For sentences."""
        return str(self.path) if self.adapter is None else f"{self.path} with {self.adapter}"

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt: special tokens count as such, and those that the tokenizer adds are there once."""
        begins = self.begin is not None and text.startswith(self.begin)
        return list(self.tokenizer.encode(text, add_special_tokens=not begins).ids)

    def decode(self, ids: list[int]) -> str:
        """Return the text of an answer, without special tokens."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))


def open_candidate(path: Path, adapter: Path | None = None, *, tokenizer_from: Path | None = None) -> Candidate:
    """Look at a folder, and at the adapter that goes with it; `tokenizer_from` may hold a tokenizer that counts more.

    Raises UserError.
    """
    if not path.is_dir():
        raise UserError(
            f"{path}: there is no such folder: give one with {CONFIG}, safetensors and {TOKENIZER}, or fetch a model "
            "by trainium-trainer fetch-model"
        )
    if adapter is None and (path / ADAPTER_CONFIG).is_file() and not (path / CONFIG).is_file():
        raise UserError(f"{path} is an adapter, not a model: give its model with --base and it with --adapter")
    config = _document(path / CONFIG)
    if not any(path.glob("*.safetensors")):
        pickles = ", which only has pickled weights" if any(path.glob("*.bin")) else ""
        raise UserError(
            f"{path}{pickles}: there is no safetensors file: save the model again by transformers' save_pretrained, or "
            "give another folder"
        )
    if adapter is not None:
        _check_adapter(adapter)
    file = _tokenizer_file(tokenizer_from, adapter, path)
    tokenizer = _tokenizer(file)
    settings = _optional(file.with_name(_TOKENIZER_CONFIG))
    return Candidate(
        path=path,
        adapter=adapter,
        tokenizer=tokenizer,
        tokenizer_folder=file.parent,
        positions=_number(config.get("max_position_embeddings")),
        vocabulary=_number(config.get("vocab_size")) or tokenizer.get_vocab_size(),
        endings=tuple(sorted(set(_endings(path, config, settings, tokenizer)))),
        begin=_content(settings.get("bos_token")),
    )


def positions_of(path: Path) -> int | None:
    """Return the longest sequence of a folder's model; None where the folder does not name it. Raises UserError."""
    return _number(_optional(path / CONFIG).get("max_position_embeddings"))


def _check_adapter(adapter: Path) -> None:
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        if not (adapter / name).is_file():
            raise UserError(f"{adapter}: there is no {name}: give a folder that peft or this trainer wrote")
    kind = _document(adapter / ADAPTER_CONFIG).get("peft_type")
    if kind != "LORA":
        raise UserError(f"{adapter}: peft_type is {kind!r}, but only LORA can be used: give another adapter")


def _tokenizer_file(*folders: Path | None) -> Path:
    """Return the first tokenizer file: an adapter's or a tuned model's may have tokens that the base's lacks."""
    for folder in folders:
        if folder is not None and (folder / TOKENIZER).is_file():
            return folder / TOKENIZER
    raise UserError(
        f"{folders[-1]}: there is no {TOKENIZER}: copy the one that the model was trained with into the folder"
    )


def _tokenizer(file: Path) -> Tokenizer:
    from tokenizers import Tokenizer  # noqa: PLC0415 - not for a folder that is refused

    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exceptions
        raise UserError(f"{file}: cannot be read as a tokenizer ({error}): replace the file") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _endings(path: Path, config: dict[str, Any], settings: dict[str, Any], tokenizer: Tokenizer) -> Iterator[int]:
    """Ids that any of the folder's files names as the end of a text."""
    for document in (config, _optional(path / _GENERATION_CONFIG)):
        found = document.get("eos_token_id")
        yield from (number for number in (found if isinstance(found, list) else [found]) if isinstance(number, int))
    name = _content(settings.get("eos_token"))
    number = tokenizer.token_to_id(name) if name is not None else None
    if number is not None:
        yield number


def _content(token: Any) -> str | None:
    """Return the text of a special token, which is written as text or as an object."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) and text else None


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) and value > 0 else None


def _optional(file: Path) -> dict[str, Any]:
    return _document(file) if file.is_file() else {}


def _document(file: Path) -> dict[str, Any]:
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"{file}: cannot be read ({error.strerror}): give a folder that holds a whole Hugging Face model"
        ) from error
    except ValueError as error:
        raise UserError(f"{file}: not valid JSON ({error}): replace the file") from error
    if not isinstance(document, dict):
        raise UserError(f"{file}: holds a {type(document).__name__}, not fields: replace the file")
    return document


T = TypeVar("T")
_CHUNK = 16 << 20


@contextlib.contextmanager
def local_folder(location: str, beat: Callable[[], None] = lambda: None) -> Iterator[Path]:
    """Yield the folder itself, or a temporary copy of a remote one; `beat` is called while copying.

    Raises StorageError, and UserError when there is nothing.
    """
    if not is_address(location):
        yield Path(location).expanduser()
        return
    storage, retry = open_storage(location), Retry()
    entries = [entry for entry in _read(lambda: storage.list(""), location, retry) if not entry.is_folder]
    if not entries:
        raise UserError(f"{location}: there are no files: correct the bucket or the prefix")
    with tempfile.TemporaryDirectory(prefix="trainium-model-") as scratch:
        for entry in entries:
            with (Path(scratch) / entry.name).open("wb") as file:
                for start in range(0, entry.size, _CHUNK):
                    piece = memoryview(bytearray(min(_CHUNK, entry.size - start)))
                    _read(lambda: storage.read_into(entry.name, start, piece), location, retry)  # noqa: B023 - called at once
                    file.write(piece)
                    beat()
        yield Path(scratch)


def _read(action: Callable[[], T], location: str, retry: Retry) -> T:
    try:
        return retry.run(action, location)
    except StorageError as error:
        cause = error.__cause__
        reason = getattr(cause, "strerror", None) or cause
        raise StorageError(f"model {location}: cannot be read ({reason}): look at the store and its rights") from cause

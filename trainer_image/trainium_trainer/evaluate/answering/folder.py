"""Open folders with a model in Hugging Face's format, without loading weights.

Guarantees:
- No torch is imported and no weights are read.
- An unusable folder is refused with one sentence, as UserError.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainium_contract.trainer.addresses import is_address
from trainium_trainer.data.tokens.tokenizer import read_token_text
from trainium_trainer.exits import StorageError, UserError
from trainium_trainer.storage import open_storage
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
    """The number format in which a model computes."""

    AUTO = "auto"
    """float32 on a CPU, the folder's type on a GPU."""
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLocations:
    """The locations of models: folders or s3://bucket/prefix."""

    model: str
    """The evaluated model."""
    adapter: str | None = None
    """An adapter of the model in peft's format, which is applied without merging."""
    base: str | None = None
    """The model to compare with."""

    @property
    def name(self) -> str:
        """Return the displayed name of the evaluated model."""
        return self.model if self.adapter is None else f"{self.model} with {self.adapter}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """A model that can be loaded, with its tokenizer."""

    path: Path
    adapter: Path | None
    """The folder of an adapter in peft's format that is applied to the weights."""
    tokenizer: Tokenizer
    tokenizer_folder: Path
    """The folder of the tokenizer: the adapter's, if it has one."""
    positions: int | None
    """The maximum sequence length in tokens; None if the folder does not define it."""
    vocabulary: int
    """The number of rows of the embedding."""
    end_tokens: tuple[int, ...]
    """The ids of the tokens that end an answer."""
    bos_token: str | None
    """The text of the token that the tokenizer adds before a prompt, if any."""

    @property
    def name(self) -> str:
        """The name, for messages."""
        return str(self.path) if self.adapter is None else f"{self.path} with {self.adapter}"

    def encode(self, text: str) -> list[int]:
        """Encode a prompt: special tokens are recognized, and those that the tokenizer adds occur once."""
        begins = self.bos_token is not None and text.startswith(self.bos_token)
        return list(self.tokenizer.encode(text, add_special_tokens=not begins).ids)

    def decode(self, ids: list[int]) -> str:
        """Return the text of an answer, without special tokens."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))


def open_model_files(path: Path, adapter: Path | None = None, *, tokenizer_from: Path | None = None) -> ModelFiles:
    """Open a model folder and its adapter; a tokenizer in `tokenizer_from` takes precedence. Raises UserError."""
    if not path.is_dir():
        raise UserError(
            f"{path}: there is no such folder: give one with {CONFIG}, safetensors and {TOKENIZER}, or fetch a model "
            "by trainium-trainer fetch-model"
        )
    if adapter is None and (path / ADAPTER_CONFIG).is_file() and not (path / CONFIG).is_file():
        raise UserError(f"{path} is an adapter, not a model: give its model with --base and it with --adapter")
    config = _read_document(path / CONFIG)
    if not any(path.glob("*.safetensors")):
        pickles = ", which only has pickled weights" if any(path.glob("*.bin")) else ""
        raise UserError(
            f"{path}{pickles}: there is no safetensors file: save the model again by transformers' save_pretrained, or "
            "give another folder"
        )
    if adapter is not None:
        _check_adapter(adapter)
    file = _find_tokenizer_file(tokenizer_from, adapter, path)
    tokenizer = _load_tokenizer(file)
    settings = _read_optional(file.with_name(_TOKENIZER_CONFIG))
    return ModelFiles(
        path=path,
        adapter=adapter,
        tokenizer=tokenizer,
        tokenizer_folder=file.parent,
        positions=_parse_number(config.get("max_position_embeddings")),
        vocabulary=_parse_number(config.get("vocab_size")) or tokenizer.get_vocab_size(),
        end_tokens=tuple(sorted(set(_find_endings(path, config, settings, tokenizer)))),
        bos_token=read_token_text(settings.get("bos_token")),
    )


def read_max_positions(path: Path) -> int | None:
    """Return the maximum sequence length of a folder's model; None if it is not defined. Raises UserError."""
    return _parse_number(_read_optional(path / CONFIG).get("max_position_embeddings"))


def _check_adapter(adapter: Path) -> None:
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        if not (adapter / name).is_file():
            raise UserError(f"{adapter}: there is no {name}: give a folder that peft or this trainer wrote")
    kind = _read_document(adapter / ADAPTER_CONFIG).get("peft_type")
    if kind != "LORA":
        raise UserError(f"{adapter}: peft_type is {kind!r}, but only LORA can be used: give another adapter")


def _find_tokenizer_file(*folders: Path | None) -> Path:
    """Return the first tokenizer file, because that of an adapter or a tuned model may have additional tokens."""
    for folder in folders:
        if folder is not None and (folder / TOKENIZER).is_file():
            return folder / TOKENIZER
    raise UserError(
        f"{folders[-1]}: there is no {TOKENIZER}: copy the one that the model was trained with into the folder"
    )


def _load_tokenizer(file: Path) -> Tokenizer:
    from tokenizers import Tokenizer  # noqa: PLC0415 - not for a folder that is refused

    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exceptions
        raise UserError(f"{file}: cannot be read as a tokenizer ({error}): replace the file") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _find_endings(path: Path, config: dict[str, Any], settings: dict[str, Any], tokenizer: Tokenizer) -> Iterator[int]:
    """Return the ids that any of the folder's files names as the end of a text."""
    for document in (config, _read_optional(path / _GENERATION_CONFIG)):
        ids = document.get("eos_token_id")
        yield from (number for number in (ids if isinstance(ids, list) else [ids]) if isinstance(number, int))
    name = read_token_text(settings.get("eos_token"))
    number = tokenizer.token_to_id(name) if name is not None else None
    if number is not None:
        yield number


def _parse_number(value: Any) -> int | None:
    return value if isinstance(value, int) and value > 0 else None


def _read_optional(file: Path) -> dict[str, Any]:
    return _read_document(file) if file.is_file() else {}


def _read_document(file: Path) -> dict[str, Any]:
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


@contextlib.contextmanager
def open_models(models: ModelLocations, heartbeat: Callable[[], None] = lambda: None) -> Iterator[ModelFiles]:
    """Yield the evaluated model with its adapter, of which remote ones are temporary copies.

    `heartbeat` is called while copying. Raises UserError and StorageError.
    """
    with contextlib.ExitStack() as stack:
        path = stack.enter_context(open_local_folder(models.model, heartbeat))
        adapter = (
            stack.enter_context(open_local_folder(models.adapter, heartbeat)) if models.adapter is not None else None
        )
        yield open_model_files(path, adapter)


_CHUNK = 16 << 20


@contextlib.contextmanager
def open_local_folder(location: str, heartbeat: Callable[[], None] = lambda: None) -> Iterator[Path]:
    """Yield the folder itself, or a temporary copy of a remote one; `heartbeat` is called while copying.

    Raises StorageError, and UserError for an empty location.
    """
    if not is_address(location):
        yield Path(location).expanduser()
        return
    storage, retry = open_storage(location), Retry()
    listed = retry.run(lambda: storage.list(""), location, _create_read_error)
    entries = [entry for entry in listed if not entry.is_folder]
    if not entries:
        raise UserError(f"{location}: there are no files: correct the bucket or the prefix")
    with tempfile.TemporaryDirectory(prefix="trainium-model-") as scratch:
        for entry in entries:
            with (Path(scratch) / entry.name).open("wb") as file:
                for start in range(0, entry.size, _CHUNK):
                    piece = memoryview(bytearray(min(_CHUNK, entry.size - start)))
                    read = partial(storage.read_into, entry.name, start, piece)
                    retry.run(read, location, _create_read_error)
                    file.write(piece)
                    heartbeat()
        yield Path(scratch)


def _create_read_error(error: OSError, location: str) -> StorageError:
    return StorageError(
        f"model {location}: cannot be read ({error.strerror or error}): look at the store and its rights"
    )

"""Read a tokenizer's folder and the end of its documents.

A folder has `tokenizer.json` and the files with special tokens, added tokens and chat template that `transformers`
reads.

Guarantees:
- Tokens that only `tokenizer_config.json` or `added_tokens.json` adds get the ids that `transformers` gives them.
- A special token within a text is encoded as text, so that the end-of-document token occurs nowhere else.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainium_contract.trainer.addresses import is_address
from trainium_trainer.exits import UnreadableError, UserError
from trainium_trainer.storage import open_storage
from trainium_trainer.storage.posix import PosixStorage
from trainium_trainer.storage.protocol import Retry, read_small

if TYPE_CHECKING:
    from collections.abc import Container, Mapping

    from tokenizers import Tokenizer

    from trainium_contract.trainer.data import TokenizerConfig


END_OF_DOCUMENT = "<|endoftext|>"
TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
_ADDED_FILE = "added_tokens.json"
_MAP_FILE = "special_tokens_map.json"
TEMPLATE_FILE = "chat_template.jinja"
TOOL_TEMPLATE_FILE = "additional_chat_templates/tool_use.jinja"
TEMPLATE_FILES = (TEMPLATE_FILE, TOOL_TEMPLATE_FILE)
CHAT_TEMPLATE_SETTING = "chatTemplate"
"""The setting of a run with the template of data.examples.chat.template, which its artifacts get."""
PROCESSOR_TEMPLATE_FILE = "chat_template.json"
OTHER_FORMATS = ("tokenizer.model", "spiece.model", "tiktoken.model", "tekken.json", "vocab.json")
"""The files of a tokenizer that transformers converts."""
_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")
END_NAMES = (END_OF_DOCUMENT, "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
_TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


# ---- the folder -----------------------------------------------------------------------------------------------------


def find_tokenizer_file(config: TokenizerConfig) -> Path:
    """Return the `tokenizer.json` that the configuration names. Raises UserError."""
    assert config.path is not None
    path = _copy_from_store(config.path) if is_address(config.path) else Path(config.path).expanduser()
    file = path / TOKENIZER_FILE if path.is_dir() else path
    if file.is_file():
        return file
    if path.is_dir() and (advice := explain_conversion(path)):
        raise UserError(f"data.tokenizer.path {config.path}: {advice}")
    raise UnreadableError(
        f"data.tokenizer.path {config.path}: there is no {TOKENIZER_FILE}: correct the path or leave it out"
    )


@functools.cache
def _copy_from_store(address: str) -> Path:
    """Copy a tokenizer's files from an object store to this machine; return the folder.

    The folder is named by the contents, so that concurrent processes write the same files. Raises UserError,
    StorageError.
    """
    folder = address.removesuffix(f"/{TOKENIZER_FILE}")
    storage, retry = open_storage(folder), Retry()
    names = (TOKENIZER_FILE, CONFIG_FILE, _ADDED_FILE, _MAP_FILE, *TEMPLATE_FILES)
    contents = {
        name: data
        for name in names
        if (data := retry.run(lambda name=name: read_small(storage, name), folder)) is not None  # type: ignore[misc]
    }
    digest = hashlib.sha256(repr(sorted(contents.items())).encode()).hexdigest()[:32]
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111 - Path.home() may raise
    target = PosixStorage(Path(base) / "trainium" / f"tokenizer-{digest}")
    for name, data in contents.items():
        retry.run(lambda name=name, data=data: target.write(name, data), target.location)  # type: ignore[misc]
    return Path(target.location)


def explain_conversion(folder: Path) -> str:
    """Return how to convert a tokenizer in another format to `tokenizer.json`; empty without such a tokenizer."""
    other_format = next((name for name in OTHER_FORMATS if (folder / name).is_file()), None)
    if other_format is None:
        return ""
    return (
        f"has {other_format} but no {TOKENIZER_FILE}: convert it once with transformers "
        f"(AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained(FOLDER), which needs the package "
        "sentencepiece or tiktoken) and name FOLDER in data.tokenizer.path"
    )


def read_tokenizer(file: Path) -> dict[str, Any]:
    """Read a `tokenizer.json` with the tokens that the other files of its folder add. Raises UserError."""
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
        added = list(document.get("added_tokens") or ())
        entries = list_entries(document)
        if not entries:
            raise ValueError("no entries")  # noqa: TRY301 - one sentence for all that is wrong with it
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"data.tokenizer.path {file}: not a {TOKENIZER_FILE} of the `tokenizers` library: export it in that format"
        ) from error
    ids = {text: number for number, text in entries.items()}
    indices = {token["content"]: index for index, token in enumerate(added)}
    from_settings = _read_settings_tokens(file)
    extra = [token for token in _read_extra_special(file) if token["content"] not in ids]
    for token in [*from_settings, *extra]:
        text = token["content"]
        if text in indices:
            added[indices[text]] = added[indices[text]] | token
        else:
            number = ids.setdefault(text, max(ids.values(), default=-1) + 1)
            added.append({"id": number} | token)
    return dict(document, added_tokens=added) if from_settings or extra else dict(document)


def _read_settings_tokens(file: Path) -> list[dict[str, Any]]:
    """Return the tokens that `tokenizer_config.json` or, in older folders, `added_tokens.json` adds, by their ids."""
    config = read_json(file.with_name(CONFIG_FILE))
    listed = config.get("added_tokens_decoder")
    if isinstance(listed, dict) and listed:
        tokens = {
            int(number): token
            for number, token in listed.items()
            if str(number).isdecimal() and isinstance(token, dict) and token.get("content")
        }
    else:
        special = {text for _, text in list_special_names(file)}
        tokens = {
            number: {"content": text, "normalized": text not in special, "special": text in special}
            for text, number in read_json(file.with_name(_ADDED_FILE)).items()
            if isinstance(number, int)
        }
    return [
        {"content": token["content"]} | {flag: bool(token.get(flag, False)) for flag in _TOKEN_FLAGS}
        for _, token in sorted(tokens.items())
    ]


def _read_extra_special(file: Path) -> list[dict[str, Any]]:
    """Return the additional special tokens of the settings, which `transformers` adds too."""
    config, names = read_json(file.with_name(CONFIG_FILE)), read_json(file.with_name(_MAP_FILE))
    texts: dict[str, None] = {}
    for key in ("additional_special_tokens", "extra_special_tokens"):
        listed = config.get(key, names.get(key))
        for token in listed.values() if isinstance(listed, dict) else listed if isinstance(listed, list) else ():
            if (text := read_token_text(token)) is not None:
                texts[text] = None
    return [{"content": text} | {flag: flag == "special" for flag in _TOKEN_FLAGS} for text in texts]


def list_entries(document: Mapping[str, Any]) -> dict[int, str]:
    """Return the entries of the contents of a `tokenizer.json` by id."""
    vocabulary = document["model"].get("vocab") or {}
    ids = vocabulary if isinstance(vocabulary, dict) else {piece[0]: number for number, piece in enumerate(vocabulary)}
    entries = {int(number): str(text) for text, number in ids.items()}
    return entries | {int(token["id"]): str(token["content"]) for token in document.get("added_tokens") or ()}


def read_vocabulary(file: bytes) -> dict[int, str]:
    """Return the entries of a `tokenizer.json` by id."""
    return list_entries(json.loads(file))


def count_entries(file: Path) -> int:
    """Count the entries of a tokenizer from its JSON. Raises UserError for an unusable file."""
    return max(list_entries(read_tokenizer(file))) + 1


def hash_tokenizer(file: Path) -> str:
    """Return a digest of the contents of a tokenizer, independent of the layout of the file. Raises UserError."""
    return hashlib.sha256(json.dumps(read_tokenizer(file), sort_keys=True).encode()).hexdigest()


def load_tokenizer(file: Path, *, continuing: bool = False) -> Tokenizer:
    """Load a tokenizer; with `continuing` it adds no space before a text. Raises UserError."""
    from tokenizers import Tokenizer  # noqa: PLC0415 - not needed when the tokens are cached

    document = read_tokenizer(file)
    if continuing:
        document |= {part: _drop_prefix(document.get(part)) for part in ("normalizer", "pre_tokenizer")}
    try:
        tokenizer = Tokenizer.from_str(json.dumps(document))
    except Exception as error:  # the library raises bare Exceptions
        raise UserError(f"data.tokenizer.path {file}: cannot be read ({error}): replace the file") from error
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()  # some files have a truncation limit that was meant for another purpose
    tokenizer.no_padding()
    return tokenizer


def _drop_prefix(part: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return a normalizer or pre-tokenizer without the space that it adds before a text."""
    if part is None or part["type"] == "Prepend":
        return None
    match part["type"]:
        case "Sequence":
            name = "normalizers" if "normalizers" in part else "pretokenizers"
            return part | {name: [cleaned for token in part[name] if (cleaned := _drop_prefix(token)) is not None]}
        case "Metaspace":
            rest = {name: value for name, value in part.items() if name != "add_prefix_space"}
            return rest | {"prepend_scheme": "never"}
        case "ByteLevel":
            return part | {"add_prefix_space": False}
    return part


def write_tokenizer(file: Path) -> dict[str, str]:
    """Return the files, by name, with everything of a tokenizer on which tokens depend."""
    text = file.read_text(encoding="utf-8")
    document = read_tokenizer(file)
    files = {TOKENIZER_FILE: text if document == json.loads(text) else json.dumps(document, ensure_ascii=False)}
    if (name := find_end_token(file)) not in END_NAMES:
        files[CONFIG_FILE] = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": name})
    return files


# ---- the other files of the folder ----------------------------------------------------------------------------------


def list_special_names(tokenizer: Path) -> tuple[tuple[str, str], ...]:
    """Return the special tokens that the files beside a `tokenizer.json` name, as (`bos_token`, text)."""
    config, names = read_json(tokenizer.with_name(CONFIG_FILE)), read_json(tokenizer.with_name(_MAP_FILE))
    by_name = {}
    for name in _NAMES:
        if (text := read_token_text(config.get(name, names.get(name)))) is not None:
            by_name[name] = text
    return tuple(sorted(by_name.items()))


def read_token_text(token: Any) -> str | None:
    """Return the text of a token, which is written as text or as an object; None if there is none."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) and text else None


def read_json(file: Path) -> dict[str, Any]:
    """Return the fields of a file of a tokenizer's folder; none without the file. Raises UserError."""
    if not file.is_file():
        return {}
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"data.tokenizer.path {file}: cannot be read ({error}): replace the file") from error
    return document if isinstance(document, dict) else {}


# ---- the end of a document ------------------------------------------------------------------------------------------


def find_known_end_token(vocabulary: Container[str]) -> str | None:
    """Return a vocabulary's well-known end-of-document token; None if it has none."""
    return next((name for name in END_NAMES if name in vocabulary), None)


def find_end_token(file: Path) -> str:
    """Return the end-of-document token: a well-known one, else the folder's EOS token. Raises UserError."""
    entries = set(list_entries(read_tokenizer(file)).values())
    eos = dict(list_special_names(file)).get("eos_token")
    name = find_known_end_token(entries) or (eos if eos in entries else None)
    if name is None:
        raise UserError(
            f"data.tokenizer.path {file}: no end-of-document token ({', '.join(END_NAMES)}, or eos_token of the "
            f"{CONFIG_FILE} beside it): add one to the vocabulary"
        )
    return name


def find_end_of_document(file: Path) -> int:
    """Return the id of the token that ends a document. Raises UserError."""
    name = find_end_token(file)
    return next(number for number, text in list_entries(read_tokenizer(file)).items() if text == name)


def end_facts(file: Path) -> dict[str, str]:
    """Return the facts besides `tokenizer.json` on which documents depend: an end token that only its folder names."""
    name = find_end_token(file)
    return {} if name in END_NAMES else {"end": name}

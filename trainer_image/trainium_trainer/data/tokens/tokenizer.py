"""Read a tokenizer's folder, its special tokens and the end and the BOS prefix of its documents.

A folder has `tokenizer.json` and the files with special tokens, added tokens and chat template that `transformers`
reads.

Guarantees:
- Tokens that only `tokenizer_config.json` or `added_tokens.json` adds get the ids that `transformers` gives them.
- A special token within a text is encoded as text, so that the end-of-document token occurs nowhere else.
- Special tokens of `tokenizer_config.json` must be entries of the tokenizer; otherwise the folder is refused.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainium_contract.trainer.addresses import is_address
from trainium_contract.trainer.data import BosToken, TokenizerConfig
from trainium_trainer.exits import UnreadableError, UserError
from trainium_trainer.storage import open_storage
from trainium_trainer.storage.posix import PosixStorage
from trainium_trainer.storage.protocol import Retry, read_small

if TYPE_CHECKING:
    from collections.abc import Container, Mapping, Sequence

    from tokenizers import Tokenizer


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
_PROCESSOR_TEMPLATE_FILE = "chat_template.json"
OTHER_FORMATS = ("tokenizer.model", "spiece.model", "tiktoken.model", "tekken.json", "vocab.json")
"""The files of a tokenizer that transformers converts."""
_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")
_END_NAMES = (END_OF_DOCUMENT, "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
_TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


# ---- the folder -----------------------------------------------------------------------------------------------------


def find_tokenizer_file(config: TokenizerConfig) -> Path:
    """Return the `tokenizer.json` that the configuration names. Raises UserError."""
    assert config.path is not None
    path = _copy_from_store(config.path) if is_address(config.path) else Path(config.path).expanduser()
    file = path / TOKENIZER_FILE if path.is_dir() else path
    if file.is_file():
        return file
    if path.is_dir() and (way_out := explain_conversion(path)):
        raise UserError(f"data.tokenizer.path {config.path}: {way_out}")
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
    wanted = (TOKENIZER_FILE, CONFIG_FILE, _ADDED_FILE, _MAP_FILE, *TEMPLATE_FILES)
    contents = {
        name: data
        for name in wanted
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
        entries = _list_entries(document)
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
    config = _read_json(file.with_name(CONFIG_FILE))
    listed = config.get("added_tokens_decoder")
    if isinstance(listed, dict) and listed:
        tokens = {
            int(number): token
            for number, token in listed.items()
            if str(number).isdecimal() and isinstance(token, dict) and token.get("content")
        }
    else:
        special = {text for _, text in _list_special_names(file)}
        tokens = {
            number: {"content": text, "normalized": text not in special, "special": text in special}
            for text, number in _read_json(file.with_name(_ADDED_FILE)).items()
            if isinstance(number, int)
        }
    return [
        {"content": token["content"]} | {flag: bool(token.get(flag, False)) for flag in _TOKEN_FLAGS}
        for _, token in sorted(tokens.items())
    ]


def _read_extra_special(file: Path) -> list[dict[str, Any]]:
    """Return the additional special tokens of the settings, which `transformers` adds too."""
    config, names = _read_json(file.with_name(CONFIG_FILE)), _read_json(file.with_name(_MAP_FILE))
    texts: dict[str, None] = {}
    for key in ("additional_special_tokens", "extra_special_tokens"):
        listed = config.get(key, names.get(key))
        for token in listed.values() if isinstance(listed, dict) else listed if isinstance(listed, list) else ():
            if (text := read_token_text(token)) is not None:
                texts[text] = None
    return [{"content": text} | {flag: flag == "special" for flag in _TOKEN_FLAGS} for text in texts]


def _list_entries(document: Mapping[str, Any]) -> dict[int, str]:
    vocabulary = document["model"].get("vocab") or {}
    ids = vocabulary if isinstance(vocabulary, dict) else {piece[0]: number for number, piece in enumerate(vocabulary)}
    entries = {int(number): str(text) for text, number in ids.items()}
    return entries | {int(token["id"]): str(token["content"]) for token in document.get("added_tokens") or ()}


def read_vocabulary(file: bytes) -> dict[int, str]:
    """Return the entries of a `tokenizer.json` by id."""
    return _list_entries(json.loads(file))


def count_entries(file: Path) -> int:
    """Count the entries of a tokenizer from its JSON. Raises UserError for an unusable file."""
    return max(_list_entries(read_tokenizer(file))) + 1


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
    if (name := find_end_token(file)) not in _END_NAMES:
        files[CONFIG_FILE] = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": name})
    return files


# ---- the end of a document ------------------------------------------------------------------------------------------


def find_known_end_token(vocabulary: Container[str]) -> str | None:
    """Return a vocabulary's well-known end-of-document token; None if it has none."""
    return next((name for name in _END_NAMES if name in vocabulary), None)


def find_end_token(file: Path) -> str:
    """Return the end-of-document token: a well-known one, else the folder's EOS token. Raises UserError."""
    entries = set(_list_entries(read_tokenizer(file)).values())
    eos = dict(_list_special_names(file)).get("eos_token")
    name = find_known_end_token(entries) or (eos if eos in entries else None)
    if name is None:
        raise UserError(
            f"data.tokenizer.path {file}: no end-of-document token ({', '.join(_END_NAMES)}, or eos_token of the "
            f"{CONFIG_FILE} beside it): add one to the vocabulary"
        )
    return name


def find_end_of_document(file: Path) -> int:
    """Return the id of the token that ends a document. Raises UserError."""
    name = find_end_token(file)
    return next(number for number, text in _list_entries(read_tokenizer(file)).items() if text == name)


def end_facts(file: Path) -> dict[str, str]:
    """Return the facts besides `tokenizer.json` on which documents depend: an end token that only its folder names."""
    name = find_end_token(file)
    return {} if name in _END_NAMES else {"end": name}


# ---- special tokens and the chat template ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ChatTemplates:
    """The chat templates of a tokenizer that `transformers` chooses by itself."""

    default: str | None = None
    tool_use: str | None = None
    """The template for conversations with tools, if it is another."""

    def choose_template(self, tools: object) -> str | None:
        """Return the template for a conversation with these tools."""
        return self.default if tools is None or self.tool_use is None else self.tool_use

    def replace_in(self, files: dict[str, bytes]) -> None:
        """Make these the templates of a tokenizer's files, which are given by name."""
        for name in (TEMPLATE_FILE, TOOL_TEMPLATE_FILE, _PROCESSOR_TEMPLATE_FILE):
            files.pop(name, None)
        config = json.loads(files.get(CONFIG_FILE, b"{}"))
        config.pop("chat_template", None)
        named = {"default": self.default, "tool_use": self.tool_use}
        if self.tool_use is not None:
            config["chat_template"] = [{"name": name, "template": text} for name, text in named.items() if text]
        elif self.default is not None:
            files[TEMPLATE_FILE] = self.default.encode()
        files[CONFIG_FILE] = (json.dumps(config, indent=2) + "\n").encode()


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """The special tokens by name, as `bos_token`, and the chat templates."""

    tokens: tuple[tuple[str, str], ...]
    chat_templates: ChatTemplates = ChatTemplates()

    def find_token(self, name: str) -> str | None:
        """Return the token's text."""
        return dict(self.tokens).get(name)

    @property
    def ends(self) -> frozenset[str]:
        """The tokens with a name, and those that end documents by convention."""
        return frozenset((*dict(self.tokens).values(), *_END_NAMES))


def read_special_tokens(tokenizer: Path) -> SpecialTokens:
    """Read the special tokens and templates of a `tokenizer.json`. Raises UserError for files that do not match it."""
    names = _list_special_names(tokenizer)
    _check_special(tokenizer, dict(names))
    files = {name: file.read_bytes() for name in TEMPLATE_FILES if (file := tokenizer.parent / name).is_file()}
    return SpecialTokens(names, read_chat_templates(files, _read_json(tokenizer.with_name(CONFIG_FILE))))


def read_chat_templates(files: Mapping[str, bytes], config: Mapping[str, Any]) -> ChatTemplates:
    """Return the templates of separate files, given by name, or of `tokenizer_config.json`."""
    default, tool_use = (files[name].decode() if name in files else None for name in TEMPLATE_FILES)
    if default is not None or tool_use is not None:
        return ChatTemplates(default, tool_use)
    named = config.get("chat_template")
    if isinstance(named, list):
        named = {entry.get("name"): entry.get("template") for entry in named if isinstance(entry, dict)}
    named = named if isinstance(named, dict) else {"default": named}
    return ChatTemplates(
        *(text if isinstance(text := named.get(name), str) else None for name in ("default", "tool_use"))
    )


def _list_special_names(tokenizer: Path) -> tuple[tuple[str, str], ...]:
    config, names = _read_json(tokenizer.with_name(CONFIG_FILE)), _read_json(tokenizer.with_name(_MAP_FILE))
    by_name = {}
    for name in _NAMES:
        if (text := read_token_text(config.get(name, names.get(name)))) is not None:
            by_name[name] = text
    return tuple(sorted(by_name.items()))


def read_token_text(token: Any) -> str | None:
    """Return the text of a token, which is written as text or as an object; None if there is none."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) and text else None


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"data.tokenizer.path {file}: cannot be read ({error}): replace the file") from error
    return document if isinstance(document, dict) else {}


def _check_special(tokenizer: Path, tokens: dict[str, str]) -> None:
    entries = set(_list_entries(read_tokenizer(tokenizer)).values()) if tokens else set()
    for name in ("bos_token", "eos_token", "pad_token"):
        if (text := tokens.get(name)) is not None and text not in entries:
            raise UserError(
                f"data.tokenizer.path {tokenizer}: has no entry for {name} {text!r} of the {CONFIG_FILE} beside it: "
                "the two do not belong together, copy both from one model"
            )


_PROBE = "a"


@dataclass(frozen=True, slots=True)
class BosPrefix:
    """The tokens before a text."""

    rule: BosToken = BosToken.AUTO
    tokens: tuple[int, ...] = ()
    """The ids before a text, which `Never` removes; empty if the tokenizer has no BOS token."""

    def prepend_to(self, ids: Sequence[int], *, from_chat_template: bool = False) -> tuple[list[int], int]:
        """Return the tokens of a text with its BOS prefix, and the length of the prefix.

        `from_chat_template`: a chat template wrote the text, and with `Auto` the template decides.
        """
        tokens, size = list(ids), len(self.tokens)
        has_prefix = size > 0 and tuple(tokens[:size]) == self.tokens
        if self.rule is BosToken.NEVER:
            return (tokens[size:] if has_prefix else tokens), 0
        if has_prefix or (self.rule is BosToken.AUTO and from_chat_template):
            return tokens, size if has_prefix else 0
        return [*self.tokens, *tokens], size

    def list_settings(self) -> list[object]:
        """Return the facts on which samples depend; none for `Auto`."""
        return [] if self.rule is BosToken.AUTO else [self.rule, *self.tokens]


NO_BOS_PREFIX = BosPrefix()
"""Running text with `Auto`: documents get no BOS token."""


def find_bos_prefix(tokenizer: Tokenizer, file: Path, special: SpecialTokens, rule: BosToken) -> BosPrefix:
    """Return the BOS prefix of examples. Raises UserError for a tokenizer that lacks the BOS token."""
    leading = _find_leading_tokens(tokenizer)
    if rule is BosToken.AUTO:
        return BosPrefix(rule, leading)
    name = special.find_token("bos_token")
    number = tokenizer.token_to_id(name) if name is not None else None
    tokens = leading if number is None or number in leading else (int(number),)
    if rule is BosToken.ALWAYS and not tokens:
        raise UserError(
            f"data.bos is Always, but the tokenizer {file} has no BOS token: set data.bos to Auto or Never, or name "
            "bos_token in the tokenizer_config.json beside it"
        )
    return BosPrefix(rule, tokens)


def find_document_bos_prefix(rule: BosToken, file: Path) -> BosPrefix:
    """Return the BOS prefix of documents. Raises UserError for a tokenizer that cannot have one."""
    if rule is BosToken.AUTO:
        return NO_BOS_PREFIX
    tokenizer = load_tokenizer(file)
    tokenizer.encode_special_tokens = False
    bos_prefix = find_bos_prefix(tokenizer, file, read_special_tokens(file), rule)
    if rule is BosToken.ALWAYS and find_end_of_document(file) in bos_prefix.tokens:
        raise UserError(
            f"data.bos is Always, but the BOS token of the tokenizer {file} also ends documents, so that one is "
            "before every document but the first already: set data.bos to Auto"
        )
    return bos_prefix


def _find_leading_tokens(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the tokens that the tokenizer adds before a text."""
    plain = tokenizer.encode(_PROBE, add_special_tokens=False).ids
    ids = tokenizer.encode(_PROBE, add_special_tokens=True).ids
    for start in range(len(ids) - len(plain) + 1):
        if ids[start : start + len(plain)] == plain:
            return tuple(ids[:start])
    return ()

"""Read a tokenizer's folder, or train a byte-level BPE on the data.

A folder has `tokenizer.json` and, beside it, the special tokens, added tokens and chat template that `transformers`
reads with it.

Guarantees:
- The same text gives the same tokenizer.
- Tokens that only `tokenizer_config.json` or `added_tokens.json` adds get the ids that `transformers` gives them.
- A trained tokenizer never has more entries than configured and encodes every byte, so no text has unknown tokens.
- A special token in a text is text, so that the token that ends a document occurs nowhere else.
- Special tokens that `tokenizer_config.json` names are entries of the tokenizer; otherwise nothing is read with them.
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
from trainium_trainer.storage.opening import open_storage
from trainium_trainer.storage.posix import PosixStorage
from trainium_trainer.storage.protocol import Retry, read_small

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

    from tokenizers import Tokenizer


END_OF_DOCUMENT = "<|endoftext|>"
TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
_ADDED_FILE = "added_tokens.json"
_MAP_FILE = "special_tokens_map.json"
_TEMPLATE_FILE = "chat_template.jinja"
_OTHER_FORMATS = ("tokenizer.model", "spiece.model", "tiktoken.model", "vocab.json")
_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")
_END_NAMES = (END_OF_DOCUMENT, "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
_TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_TRAINING_CHARACTERS = 64 * 1024 * 1024


# ---- the folder -----------------------------------------------------------------------------------------------------


def tokenizer_file(config: TokenizerConfig) -> Path:
    """Return the `tokenizer.json` that the configuration names. Raises UserError."""
    assert config.path is not None
    path = _copied(config.path) if is_address(config.path) else Path(config.path).expanduser()
    file = path / TOKENIZER_FILE if path.is_dir() else path
    if file.is_file():
        return file
    if path.is_dir() and (way_out := explain_conversion(path)):
        raise UserError(f"data.tokenizer.path {config.path}: {way_out}")
    raise UnreadableError(
        f"data.tokenizer.path {config.path}: there is no {TOKENIZER_FILE}: correct the path or leave it out"
    )


@functools.cache
def _copied(address: str) -> Path:
    """Copy a tokenizer's files from an object store to this machine; return the folder. Raises UserError, StorageError.

    The folder is named by the contents, so that processes which copy at the same time write the same files.
    """
    folder = address.removesuffix(f"/{TOKENIZER_FILE}")
    storage, retry = open_storage(folder), Retry()
    wanted = (TOKENIZER_FILE, CONFIG_FILE, _ADDED_FILE, _MAP_FILE, _TEMPLATE_FILE)
    found = {
        name: data
        for name in wanted
        if (data := retry.run(lambda name=name: read_small(storage, name), folder)) is not None  # type: ignore[misc]
    }
    digest = hashlib.sha256(repr(sorted(found.items())).encode()).hexdigest()[:32]
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111 - Path.home() may raise
    target = PosixStorage(Path(base) / "trainium" / f"tokenizer-{digest}")
    for name, data in found.items():
        retry.run(lambda name=name, data=data: target.write(name, data), target.location)  # type: ignore[misc]
    return Path(target.location)


def explain_conversion(folder: Path) -> str:
    """Return how a folder with a tokenizer in another format gets a `tokenizer.json`; empty where it has none."""
    found = next((name for name in _OTHER_FORMATS if (folder / name).is_file()), None)
    if found is None:
        return ""
    return (
        f"has {found} but no {TOKENIZER_FILE}: convert it once with transformers "
        f"(AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained(FOLDER), which needs the package "
        "sentencepiece or tiktoken) and name FOLDER in data.tokenizer.path"
    )


def read_tokenizer(file: Path) -> dict[str, Any]:
    """Return the document of a `tokenizer.json`, with the tokens that the files beside it add. Raises UserError."""
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
        added = list(document.get("added_tokens") or ())
        entries = _entries(document)
        if not entries:
            raise ValueError("no entries")  # noqa: TRY301 - one sentence for all that is wrong with it
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"data.tokenizer.path {file}: not a {TOKENIZER_FILE} of the `tokenizers` library: export it in that format"
        ) from error
    known = {text: number for number, text in entries.items()}
    places = {token["content"]: place for place, token in enumerate(added)}
    beside = _added_beside(file)
    extra = [token for token in _extra_special(file) if token["content"] not in known]
    for token in [*beside, *extra]:
        text = token["content"]
        if text in places:
            added[places[text]] = added[places[text]] | token
        else:
            number = known.setdefault(text, max(known.values(), default=-1) + 1)
            added.append({"id": number} | token)
    return dict(document, added_tokens=added) if beside or extra else dict(document)


def _added_beside(file: Path) -> list[dict[str, Any]]:
    """Return the tokens that `tokenizer_config.json` or, in older folders, `added_tokens.json` adds, by their ids."""
    config = _read_json(file.with_name(CONFIG_FILE))
    listed = config.get("added_tokens_decoder")
    if isinstance(listed, dict) and listed:
        found = {
            int(number): token
            for number, token in listed.items()
            if str(number).isdecimal() and isinstance(token, dict) and token.get("content")
        }
    else:
        special = {text for _, text in _special_names(file)}
        found = {
            number: {"content": text, "normalized": text not in special, "special": text in special}
            for text, number in _read_json(file.with_name(_ADDED_FILE)).items()
            if isinstance(number, int)
        }
    return [
        {"content": token["content"]} | {flag: bool(token.get(flag, False)) for flag in _TOKEN_FLAGS}
        for _, token in sorted(found.items())
    ]


def _extra_special(file: Path) -> list[dict[str, Any]]:
    """Return the special tokens without a name of their kind that the settings list; `transformers` adds them too."""
    config, names = _read_json(file.with_name(CONFIG_FILE)), _read_json(file.with_name(_MAP_FILE))
    found: dict[str, None] = {}
    for key in ("additional_special_tokens", "extra_special_tokens"):
        listed = config.get(key, names.get(key))
        for one in listed.values() if isinstance(listed, dict) else listed if isinstance(listed, list) else ():
            text = one.get("content") if isinstance(one, dict) else one
            if isinstance(text, str) and text:
                found[text] = None
    return [{"content": text} | {flag: flag == "special" for flag in _TOKEN_FLAGS} for text in found]


def _entries(document: Mapping[str, Any]) -> dict[int, str]:
    vocabulary = document["model"].get("vocab") or {}
    ids = vocabulary if isinstance(vocabulary, dict) else {piece[0]: number for number, piece in enumerate(vocabulary)}
    found = {int(number): str(text) for text, number in ids.items()}
    return found | {int(token["id"]): str(token["content"]) for token in document.get("added_tokens") or ()}


def vocabulary_in(file: bytes) -> dict[int, str]:
    """Return the entries of a `tokenizer.json` by their numbers."""
    return _entries(json.loads(file))


def count_entries(file: Path) -> int:
    """Return the number of entries of a tokenizer, from JSON alone. Raises UserError for an unusable file."""
    return max(_entries(read_tokenizer(file))) + 1


def digest_of(file: Path) -> str:
    """Return the digest of a tokenizer: of its contents, whatever the layout of the file. Raises UserError."""
    return hashlib.sha256(json.dumps(read_tokenizer(file), sort_keys=True).encode()).hexdigest()


def load_tokenizer(file: Path, *, continuing: bool = False) -> Tokenizer:
    """Load a tokenizer; one that is `continuing` puts no blank before a text. Raises UserError."""
    from tokenizers import Tokenizer  # noqa: PLC0415 - not needed when the tokens are cached

    document = read_tokenizer(file)
    if continuing:
        document |= {part: _without_prefix(document.get(part)) for part in ("normalizer", "pre_tokenizer")}
    try:
        tokenizer = Tokenizer.from_str(json.dumps(document))
    except Exception as error:  # the library raises bare Exceptions
        raise UserError(f"data.tokenizer.path {file}: cannot be read ({error}): replace the file") from error
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()  # some files carry a limit that was meant for another purpose
    tokenizer.no_padding()
    return tokenizer


def _without_prefix(part: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return a normalizer or pre-tokenizer without the blank that it puts before a text."""
    if part is None or part["type"] == "Prepend":
        return None
    match part["type"]:
        case "Sequence":
            name = "normalizers" if "normalizers" in part else "pretokenizers"
            return part | {name: [kept for one in part[name] if (kept := _without_prefix(one)) is not None]}
        case "Metaspace":
            rest = {name: value for name, value in part.items() if name != "add_prefix_space"}
            return rest | {"prepend_scheme": "never"}
        case "ByteLevel":
            return part | {"add_prefix_space": False}
    return part


def write_tokenizer(file: Path) -> dict[str, str]:
    """Return the files, by name, that hold all of a tokenizer that tokens depend on."""
    text = file.read_text(encoding="utf-8")
    document = read_tokenizer(file)
    files = {TOKENIZER_FILE: text if document == json.loads(text) else json.dumps(document, ensure_ascii=False)}
    if (name := find_end_token(file)) not in _END_NAMES:
        files[CONFIG_FILE] = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": name})
    return files


# ---- the end of a document ------------------------------------------------------------------------------------------


def known_end(vocabulary: Container[str]) -> str | None:
    """Return the usual token of a vocabulary that ends a document; None when it has none."""
    return next((name for name in _END_NAMES if name in vocabulary), None)


def find_end_token(file: Path) -> str:
    """Return the token that ends a document: a usual one, else the folder's EOS token. Raises UserError."""
    known = set(_entries(read_tokenizer(file)).values())
    eos = dict(_special_names(file)).get("eos_token")
    name = known_end(known) or (eos if eos in known else None)
    if name is None:
        raise UserError(
            f"data.tokenizer.path {file}: no end-of-document token ({', '.join(_END_NAMES)}, or eos_token of the "
            f"{CONFIG_FILE} beside it): add one to the vocabulary"
        )
    return name


def find_end_of_document(file: Path) -> int:
    """Return the id of the token that ends a document. Raises UserError."""
    name = find_end_token(file)
    return next(number for number, text in _entries(read_tokenizer(file)).items() if text == name)


def end_facts(file: Path) -> dict[str, str]:
    """Return what documents depend on beside the tokenizer's own file: an end token that only its folder names."""
    name = find_end_token(file)
    return {} if name in _END_NAMES else {"end": name}


# ---- special tokens and the chat template ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Special:
    """Special tokens by name, as `bos_token`, and the chat template."""

    tokens: tuple[tuple[str, str], ...]
    chat_template: str | None

    def token(self, name: str) -> str | None:
        """Return the token's text."""
        return dict(self.tokens).get(name)


def read_special_tokens(tokenizer: Path) -> Special:
    """Read special tokens and template beside a `tokenizer.json`. Raises UserError for files that do not fit it."""
    found = _special_names(tokenizer)
    _check_special(tokenizer, dict(found))
    template = tokenizer.with_name(_TEMPLATE_FILE)
    config = _read_json(tokenizer.with_name(CONFIG_FILE))
    return Special(found, template_of(template.read_bytes() if template.is_file() else None, config))


def template_of(file: bytes | None, config: Mapping[str, Any]) -> str | None:
    """Return the chat template: that of a separate file, or that of `tokenizer_config.json`."""
    if file is not None:
        return file.decode()
    given = config.get("chat_template")
    if isinstance(given, list):  # several, by name
        named = {one.get("name"): one.get("template") for one in given if isinstance(one, dict)}
        given = named.get("default")
    return given if isinstance(given, str) else None


def _special_names(tokenizer: Path) -> tuple[tuple[str, str], ...]:
    config, names = _read_json(tokenizer.with_name(CONFIG_FILE)), _read_json(tokenizer.with_name(_MAP_FILE))
    found = {}
    for name in _NAMES:
        value = config.get(name, names.get(name))
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str) and text:
            found[name] = text
    return tuple(sorted(found.items()))


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"data.tokenizer.path {file}: cannot be read ({error}): replace the file") from error
    return document if isinstance(document, dict) else {}


def _check_special(tokenizer: Path, tokens: dict[str, str]) -> None:
    known = set(_entries(read_tokenizer(tokenizer)).values()) if tokens else set()
    for name in ("bos_token", "eos_token", "pad_token"):
        if (text := tokens.get(name)) is not None and text not in known:
            raise UserError(
                f"data.tokenizer.path {tokenizer}: has no entry for {name} {text!r} of the {CONFIG_FILE} beside it: "
                "the two do not belong together, copy both from one model"
            )


def difference_from_transformers(file: Path, text: str) -> str:
    """Return where `transformers` gives a text other tokens, as a sentence; empty where it gives the same, or none."""
    if not file.with_name(CONFIG_FILE).is_file():
        return ""
    from transformers import AutoTokenizer  # noqa: PLC0415 - seconds, only for a person who looks

    ours = load_tokenizer(file)
    ours.encode_special_tokens = False
    try:
        theirs = AutoTokenizer.from_pretrained(str(file.parent))(text, add_special_tokens=False)["input_ids"]
    except Exception as error:  # noqa: BLE001 - whatever the library meets in the folder
        return f"transformers cannot load {file.parent} ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
    ids = ours.encode(text, add_special_tokens=False).ids
    if ids == theirs:
        return ""
    place = next((at for at, (one, other) in enumerate(zip(ids, theirs, strict=False)) if one != other), None)
    place = min(len(ids), len(theirs)) if place is None else place
    return (
        f"transformers' AutoTokenizer gives this text {len(theirs)} tokens, {TOKENIZER_FILE} gives it {len(ids)}; they "
        f"differ from token {place} on: {theirs[place : place + 3]} there, {ids[place : place + 3]} here"
    )


# ---- training -------------------------------------------------------------------------------------------------------


def train_tokenizer(texts: Iterable[Iterator[str]], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE of at most `vocab_size` entries on the first 64 million characters.

    Of several streams of text each gives an equal part.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: PLC0415 - few runs train one

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


_PROBE = "a"


@dataclass(frozen=True, slots=True)
class BosPrefix:
    """Tokens before a text."""

    rule: BosToken = BosToken.AUTO
    tokens: tuple[int, ...] = ()
    """Ids that a text begins with, or that are taken away with `Never`; none where the tokenizer has no BOS token."""

    def prepend_to(self, ids: Sequence[int], *, framed: bool = False) -> tuple[list[int], int]:
        """Return the tokens of a text with their beginning, and how long that is.

        `framed`: a chat template wrote the text, and with `Auto` the template decides.
        """
        given, size = list(ids), len(self.tokens)
        there = size > 0 and tuple(given[:size]) == self.tokens
        if self.rule is BosToken.NEVER:
            return (given[size:] if there else given), 0
        if there or (self.rule is BosToken.AUTO and framed):
            return given, size if there else 0
        return [*self.tokens, *given], size

    def facts(self) -> list[object]:
        """Return the facts that samples depend on; none for `Auto`."""
        return [] if self.rule is BosToken.AUTO else [self.rule, *self.tokens]


AS_IT_IS = BosPrefix()
"""Running text with `Auto`: nothing is put before a document."""


def find_beginning(tokenizer: Tokenizer, file: Path, special: Special, rule: BosToken) -> BosPrefix:
    """Return the beginning of examples. Raises UserError for a tokenizer that lacks the BOS token."""
    own = _put_before(tokenizer)
    if rule is BosToken.AUTO:
        return BosPrefix(rule, own)
    name = special.token("bos_token")
    number = tokenizer.token_to_id(name) if name is not None else None
    tokens = own if number is None or number in own else (int(number),)
    if rule is BosToken.ALWAYS and not tokens:
        raise UserError(
            f"data.bos is Always, but the tokenizer {file} has no BOS token: set data.bos to Auto or Never, or name "
            "bos_token in the tokenizer_config.json beside it"
        )
    return BosPrefix(rule, tokens)


def find_beginning_of_documents(rule: BosToken, file: Path) -> BosPrefix:
    """Return the beginning of documents. Raises UserError for a tokenizer that cannot have one."""
    if rule is BosToken.AUTO:
        return AS_IT_IS
    tokenizer = load_tokenizer(file)
    tokenizer.encode_special_tokens = False
    beginning = find_beginning(tokenizer, file, read_special_tokens(file), rule)
    if rule is BosToken.ALWAYS and find_end_of_document(file) in beginning.tokens:
        raise UserError(
            f"data.bos is Always, but the BOS token of the tokenizer {file} also ends documents, so that one is "
            "before every document but the first already: set data.bos to Auto"
        )
    return beginning


def _put_before(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the tokens that the tokenizer itself puts before a text."""
    plain = tokenizer.encode(_PROBE, add_special_tokens=False).ids
    whole = tokenizer.encode(_PROBE, add_special_tokens=True).ids
    for place in range(len(whole) - len(plain) + 1):
        if whole[place : place + len(plain)] == plain:
            return tuple(whole[:place])
    return ()

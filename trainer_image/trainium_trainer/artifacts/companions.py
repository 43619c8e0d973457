"""The small files of an artifact: configuration, generation settings, tokenizer.

They come from the base where there is one, so that its authors' settings remain; the tokenizer is the one that
the run was trained with, and its BOS, EOS and PAD replace those of the base. Where its chat
template ends a turn with a separate token, an answer ends there too. Invariant: nothing here reads weights.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from trainium_trainer.data.examples.chat import after_answer
from trainium_trainer.data.tokens.tokenizer import (
    TOKENIZER_FILE,
    count_entries,
    find_end_token,
    known_end,
    load_tokenizer,
    template_of,
    vocabulary_in,
    write_tokenizer,
)
from trainium_trainer.exits import UserError
from trainium_trainer.models.huggingface import CONFIG_NAME, to_config

if TYPE_CHECKING:
    from pathlib import Path

    from trainium_contract.models.shape import ModelShape
    from trainium_trainer.weights.source import WeightsSource

GENERATION_NAME = "generation_config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
_SPECIAL_NAMES = "special_tokens_map.json"
_TEMPLATE = "chat_template.jinja"
_TOKENIZER_COMPANIONS = (
    TOKENIZER_CONFIG,
    _SPECIAL_NAMES,
    "added_tokens.json",
    "chat_template.json",
    _TEMPLATE,
)
TOKENIZER_NAMES = (TOKENIZER_FILE, *_TOKENIZER_COMPANIONS)
"""A tokenizer as fast programs read it."""
_OTHER_FORMS = ("tokenizer.model", "vocab.json", "merges.txt")
"""The same tokenizer as older programs read it."""
_NAMED = ("bos_token", "eos_token", "pad_token")
_NUMBERS = tuple(f"{name}_id" for name in _NAMED)
_EOS = "eos_token_id"


def model_files(shape: ModelShape, dtype: str, base: WeightsSource | None, tokenizer: Path | None) -> dict[str, bytes]:
    """Return configuration, generation settings and tokenizer of a model; `dtype` is torch's name of the weights' type.

    `base` is the folder that the run began with, `tokenizer` the `tokenizer.json` that it was trained with.
    Raises UserError, StorageError.
    """
    files = tokenizer_files(base, tokenizer, shape.max_positions)
    sizes = base.sizes() if base is not None else {}
    theirs: dict[str, Any] = {}
    if base is not None and CONFIG_NAME in sizes:
        theirs = json.loads(base.read(CONFIG_NAME))
        for name in ("_name_or_path", "dtype", "transformers_version"):
            theirs.pop(name, None)
    generation = json.loads(base.read(GENERATION_NAME)) if base is not None and GENERATION_NAME in sizes else {}
    ids = _token_ids(files)
    ends = {_EOS: ids[_EOS]} if ids.get(_EOS) not in (None, *_ends_in(theirs)) else {}  # the base may have several
    named = {name: number for name, number in ids.items() if name != _EOS} | ends
    config = theirs | to_config(shape) | named | {"torch_dtype": dtype}
    if base is None:  # transformers takes a number that is not given for that of Llama 1
        config = dict.fromkeys(_NUMBERS) | config
    files[CONFIG_NAME] = _json(config)
    found = {name: config[name] for name in _NUMBERS if config.get(name) is not None} | generation | named
    stops = _stops(files, base, [*_ends_in(generation), *_ends_in(theirs)], ids, tokenizer)
    if stops := list(dict.fromkeys([*stops, *_ends_of_turns(files)])):
        found[_EOS] = stops if len(stops) > 1 else stops[0]
    if found:
        files[GENERATION_NAME] = _json(found)
    return files


def _stops(
    files: dict[str, bytes], base: WeightsSource | None, theirs: list[int], ids: dict[str, int], tokenizer: Path | None
) -> list[int]:
    """Return the tokens that end an answer: those of the base with the same meaning here, and those of this run."""
    if tokenizer is None:
        return list(dict.fromkeys([*theirs, *([ids[_EOS]] if _EOS in ids else [])]))
    ours = vocabulary_in(files[TOKENIZER_FILE])
    before = None
    if base is not None and TOKENIZER_FILE in base.sizes():
        before = vocabulary_in(base.read(TOKENIZER_FILE))
    kept = [number for number in theirs if number in ours and (before is None or before.get(number) == ours[number])]
    if before is None:
        special = {token["id"] for token in json.loads(files[TOKENIZER_FILE]).get("added_tokens") or ()}
        kept = [number for number in kept if number in special]
    # Format Text learns what ends a document, the others the tokenizer's EOS.
    learned = [ids[_EOS]] if _EOS in ids else []
    end = known_end(set(ours.values()))
    learned += [number for number, text in ours.items() if text == end]
    return list(dict.fromkeys([*kept, *learned]))


def _ends_of_turns(files: dict[str, bytes]) -> list[int]:
    """Return the token with which the chat template ends an answer, if it is one that stands for nothing else."""
    if TOKENIZER_FILE not in files:
        return []
    named = json.loads(files.get(_SPECIAL_NAMES, b"{}")) | json.loads(files.get(TOKENIZER_CONFIG, b"{}"))
    if (template := template_of(files.get(_TEMPLATE), named)) is None:
        return []
    tokens = {name: text for name in _NAMED if (text := _text(named.get(name))) is not None}
    after = after_answer(template, tokens)
    added = json.loads(files[TOKENIZER_FILE]).get("added_tokens") or ()
    ends = [(token["content"], int(token["id"])) for token in added if token.get("special")]
    longest = max((end for end in ends if after.startswith(end[0])), key=lambda end: len(end[0]), default=None)
    return [] if longest is None else [longest[1]]


def _ends_in(document: dict[str, Any]) -> list[int]:
    """Return the tokens that end a text, by a configuration."""
    given = document.get(_EOS)
    return [number for number in (given if isinstance(given, list) else [given]) if isinstance(number, int)]


def tokenizer_files(base: WeightsSource | None, tokenizer: Path | None, max_positions: int) -> dict[str, bytes]:
    """Return the tokenizer of the run, so that `AutoTokenizer` finds it; nothing where there is none."""
    files: dict[str, bytes] = {}
    if tokenizer is not None:
        files[TOKENIZER_FILE] = tokenizer.read_bytes()
        for name in _TOKENIZER_COMPANIONS:
            if (tokenizer.parent / name).is_file():
                files[name] = (tokenizer.parent / name).read_bytes()
    if base is not None:
        sizes = base.sizes()
        same = not files or (
            TOKENIZER_FILE in sizes and json.loads(files[TOKENIZER_FILE]) == json.loads(base.read(TOKENIZER_FILE))
        )
        if same or TOKENIZER_CONFIG not in files:
            wanted = (*TOKENIZER_NAMES, *(_OTHER_FORMS if same else ()))
            files = {name: base.read(name) for name in wanted if name in sizes} | files
    if tokenizer is not None and TOKENIZER_CONFIG not in files:
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": find_end_token(tokenizer),
            "model_max_length": max_positions,
        }
        files[TOKENIZER_CONFIG] = _json(settings)
    if tokenizer is not None:  # with the tokens that only the files beside it add
        files[TOKENIZER_FILE] = write_tokenizer(tokenizer)[TOKENIZER_FILE].encode()
    return files


def check_tokenizer(tokenizer: Path, vocabulary: int) -> None:
    """Raise UserError unless the tokenizer has at most `vocabulary` entries and an end-of-document token."""
    load_tokenizer(tokenizer)
    find_end_token(tokenizer)
    if (entries := count_entries(tokenizer)) > vocabulary:
        raise UserError(
            f"{tokenizer}: has {entries} entries, but the model has {vocabulary}: name the tokenizer "
            "that the model was trained with"
        )


def _token_ids(files: dict[str, bytes]) -> dict[str, int]:
    """Numbers of the special tokens that the tokenizer's settings name, as `eos_token_id`."""
    if TOKENIZER_FILE not in files:
        return {}
    named = json.loads(files.get(_SPECIAL_NAMES, b"{}")) | json.loads(files.get(TOKENIZER_CONFIG, b"{}"))
    ids = {text: number for number, text in vocabulary_in(files[TOKENIZER_FILE]).items()}
    texts = {name: _text(named.get(name)) for name in _NAMED}
    return {f"{name}_id": int(ids[text]) for name, text in texts.items() if text is not None and text in ids}


def _text(token: Any) -> str | None:
    """Return the text of a token, which is written as text or as an object."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _json(document: dict[str, Any]) -> bytes:
    return (json.dumps(document, indent=2) + "\n").encode()

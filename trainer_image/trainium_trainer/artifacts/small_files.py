"""The small files of an artifact: configuration, generation settings, tokenizer.

They come from the base if there is one, so that its authors' settings remain; the tokenizer is the run's, and its BOS,
EOS and PAD replace those of the base. If its chat template ends a turn with a separate token, that token ends an answer
too.

Guarantees:
- No weights are read.
"""

from __future__ import annotations

import json
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from trainium_trainer.data.examples.chat import find_text_after_answer
from trainium_trainer.data.tokens.special_tokens import ChatTemplates, read_chat_templates
from trainium_trainer.data.tokens.tokenizer import (
    TEMPLATE_FILES,
    TOKENIZER_FILE,
    TOOL_TEMPLATE_FILE,
    count_entries,
    find_end_token,
    find_known_end_token,
    load_tokenizer,
    read_token_text,
    read_vocabulary,
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
_TOKENIZER_COMPANIONS = (
    TOKENIZER_CONFIG,
    _SPECIAL_NAMES,
    "added_tokens.json",
    "chat_template.json",
    *TEMPLATE_FILES,
)
TOKENIZER_NAMES = (TOKENIZER_FILE, *_TOKENIZER_COMPANIONS)
"""The files of a fast tokenizer."""
_OTHER_FORMS = ("tokenizer.model", "vocab.json", "merges.txt")
"""The files of the same tokenizer for older programs."""
_NAMED = ("bos_token", "eos_token", "pad_token")
_NUMBERS = tuple(f"{name}_id" for name in _NAMED)
_EOS = "eos_token_id"


def create_model_files(
    shape: ModelShape,
    dtype: str,
    base: WeightsSource | None,
    tokenizer: Path | None,
    chat_template: str | None = None,
) -> dict[str, bytes]:
    """Return configuration, generation settings and tokenizer of a model; `dtype` is torch's name of the weights' type.

    `base` is the folder of the initial model; `tokenizer` and `chat_template` as for `create_tokenizer_files`. Raises
    UserError, StorageError.
    """
    files = create_tokenizer_files(base, tokenizer, shape.longest_sequence, chat_template)
    sizes = base.list_sizes() if base is not None else {}
    base_config: dict[str, Any] = {}
    if base is not None and CONFIG_NAME in sizes:
        base_config = json.loads(base.read(CONFIG_NAME))
        for name in ("_name_or_path", "dtype", "transformers_version"):
            base_config.pop(name, None)
    generation = json.loads(base.read(GENERATION_NAME)) if base is not None and GENERATION_NAME in sizes else {}
    ids = _find_token_ids(files)
    ends = (
        {_EOS: ids[_EOS]} if ids.get(_EOS) not in (None, *_find_eos_tokens(base_config)) else {}
    )  # the base may have several
    token_ids = {name: number for name, number in ids.items() if name != _EOS} | ends
    config = base_config | to_config(shape) | token_ids | {"torch_dtype": dtype}
    if base is None:  # transformers replaces a missing number by Llama 1's
        config = dict.fromkeys(_NUMBERS) | config
    files[CONFIG_NAME] = _encode_json(config)
    generation_config = (
        {name: config[name] for name in _NUMBERS if config.get(name) is not None} | generation | token_ids
    )
    stops = _stop_tokens(files, base, [*_find_eos_tokens(generation), *_find_eos_tokens(base_config)], ids, tokenizer)
    if stops := list(dict.fromkeys([*stops, *_find_turn_end_tokens(files)])):
        generation_config[_EOS] = stops if len(stops) > 1 else stops[0]
    if generation_config:
        files[GENERATION_NAME] = _encode_json(generation_config)
    return files


def _stop_tokens(
    files: dict[str, bytes], base: WeightsSource | None, listed: list[int], ids: dict[str, int], tokenizer: Path | None
) -> list[int]:
    """Return the tokens that end an answer: those of the base that mean the same here, and those of this run."""
    if tokenizer is None:
        return list(dict.fromkeys([*listed, *([ids[_EOS]] if _EOS in ids else [])]))
    vocabulary = read_vocabulary(files[TOKENIZER_FILE])
    before = None
    if base is not None and TOKENIZER_FILE in base.list_sizes():
        before = read_vocabulary(base.read(TOKENIZER_FILE))
    valid = [
        number
        for number in listed
        if number in vocabulary and (before is None or before.get(number) == vocabulary[number])
    ]
    if before is None:
        special = {token["id"] for token in json.loads(files[TOKENIZER_FILE]).get("added_tokens") or ()}
        valid = [number for number in valid if number in special]
    # Format Text learns the end-of-document token, the others the tokenizer's EOS.
    learned = [ids[_EOS]] if _EOS in ids else []
    end = find_known_end_token(set(vocabulary.values()))
    learned += [number for number, text in vocabulary.items() if text == end]
    return list(dict.fromkeys([*valid, *learned]))


def _find_turn_end_tokens(files: dict[str, bytes]) -> list[int]:
    """Return the token with which the chat template ends an answer, if it has no other meaning."""
    if TOKENIZER_FILE not in files:
        return []
    settings = _read_tokenizer_settings(files)
    if (template := read_chat_templates(files, settings).default) is None:
        return []
    tokens = {name: text for name in _NAMED if (text := read_token_text(settings.get(name))) is not None}
    after = find_text_after_answer(template, tokens)
    added = json.loads(files[TOKENIZER_FILE]).get("added_tokens") or ()
    ends = [(token["content"], int(token["id"])) for token in added if token.get("special")]
    longest = max((end for end in ends if after.startswith(end[0])), key=lambda end: len(end[0]), default=None)
    return [] if longest is None else [longest[1]]


def _find_eos_tokens(document: dict[str, Any]) -> list[int]:
    """Return the tokens that end a text in a configuration."""
    eos = document.get(_EOS)
    return [number for number in (eos if isinstance(eos, list) else [eos]) if isinstance(number, int)]


def create_tokenizer_files(
    base: WeightsSource | None, tokenizer: Path | None, max_positions: int, chat_template: str | None = None
) -> dict[str, bytes]:
    """Return the files of the run's tokenizer for `AutoTokenizer`; empty without a tokenizer.

    `tokenizer` is the run's `tokenizer.json`, `chat_template` the template of its data if that is not the tokenizer's.
    """
    files: dict[str, bytes] = {}
    if tokenizer is not None:
        files[TOKENIZER_FILE] = tokenizer.read_bytes()
        for name in _TOKENIZER_COMPANIONS:
            if (tokenizer.parent / name).is_file():
                files[name] = (tokenizer.parent / name).read_bytes()
    templates = ChatTemplates(chat_template) if chat_template is not None else _find_chat_templates(files)
    if base is not None:
        sizes = base.list_sizes()
        same = not files or (
            TOKENIZER_FILE in sizes and json.loads(files[TOKENIZER_FILE]) == json.loads(base.read(TOKENIZER_FILE))
        )
        if same or TOKENIZER_CONFIG not in files:
            other_forms = [name for name in _OTHER_FORMS if same and name in sizes]
            files = {name: base.read(name) for name in (*list_tokenizer_files(base), *other_forms)} | files
    if tokenizer is not None and TOKENIZER_CONFIG not in files:
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": find_end_token(tokenizer),
            "model_max_length": max_positions,
        }
        files[TOKENIZER_CONFIG] = _encode_json(settings)
    if tokenizer is not None:  # with the tokens that only the other files of its folder add
        files[TOKENIZER_FILE] = write_tokenizer(tokenizer)[TOKENIZER_FILE].encode()
    if templates == ChatTemplates():
        templates = _find_chat_templates(files)
    if TOKENIZER_FILE in files and templates != ChatTemplates():  # of several places `transformers` reads only one
        templates.replace_in(files)
    return files


def list_tokenizer_files(source: WeightsSource) -> list[str]:
    """Return the names of the files of a fast tokenizer in a folder of weights."""
    folder = PurePosixPath(TOOL_TEMPLATE_FILE).parent
    present = {*source.list_sizes(), *(str(folder / name) for name in source.list_sizes(str(folder)))}
    return [name for name in TOKENIZER_NAMES if name in present]


def _find_chat_templates(files: dict[str, bytes]) -> ChatTemplates:
    return read_chat_templates(files, json.loads(files.get(TOKENIZER_CONFIG, b"{}")))


def check_tokenizer(tokenizer: Path, vocabulary: int) -> None:
    """Raise UserError unless the tokenizer has at most `vocabulary` entries and an end-of-document token."""
    load_tokenizer(tokenizer)
    find_end_token(tokenizer)
    if (entries := count_entries(tokenizer)) > vocabulary:
        raise UserError(
            f"{tokenizer}: has {entries} entries, but the model has {vocabulary}: name the tokenizer "
            "that the model was trained with"
        )


def _find_token_ids(files: dict[str, bytes]) -> dict[str, int]:
    """Return the ids of the special tokens in the tokenizer's settings, as `eos_token_id`."""
    if TOKENIZER_FILE not in files:
        return {}
    settings = _read_tokenizer_settings(files)
    ids = {text: number for number, text in read_vocabulary(files[TOKENIZER_FILE]).items()}
    texts = {name: read_token_text(settings.get(name)) for name in _NAMED}
    return {f"{name}_id": int(ids[text]) for name, text in texts.items() if text is not None and text in ids}


def _read_tokenizer_settings(files: dict[str, bytes]) -> dict[str, Any]:
    """Return the special tokens and the other settings of a tokenizer."""
    settings: dict[str, Any] = json.loads(files.get(_SPECIAL_NAMES, b"{}"))
    settings |= json.loads(files.get(TOKENIZER_CONFIG, b"{}"))
    return settings


def _encode_json(document: dict[str, Any]) -> bytes:
    return (json.dumps(document, indent=2) + "\n").encode()

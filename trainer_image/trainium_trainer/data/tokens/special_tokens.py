"""What a tokenizer's folder says beside `tokenizer.json`: special tokens and the chat template.

Invariant: names that `tokenizer_config.json` gives must be entries of `tokenizer.json`: else the two do not belong
together, and nothing is read with them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainium_trainer.exits import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_CONFIG_FILE = "tokenizer_config.json"
_MAP_FILE = "special_tokens_map.json"
_TEMPLATE_FILE = "chat_template.jinja"
_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class Special:
    """Special tokens by name, as `bos_token`, and the chat template."""

    tokens: tuple[tuple[str, str], ...]
    chat_template: str | None

    def token(self, name: str) -> str | None:
        """The token's text."""
        return dict(self.tokens).get(name)


def special_of(tokenizer: Path) -> Special:
    """What stands beside a `tokenizer.json`. Raises UserError for files that cannot be read or do not fit it."""
    config, names = _read(tokenizer.with_name(_CONFIG_FILE)), _read(tokenizer.with_name(_MAP_FILE))
    found = {name: text for name in _NAMES if (text := _text_of(config.get(name, names.get(name)))) is not None}
    _check(tokenizer, found)
    template = tokenizer.with_name(_TEMPLATE_FILE)
    return Special(
        tuple(sorted(found.items())), template_of(template.read_bytes() if template.is_file() else None, config)
    )


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"data.tokenizer.path {file}: cannot be read ({error}): replace the file") from error
    return document if isinstance(document, dict) else {}


def _text_of(value: Any) -> str | None:
    """A token is written as text or as an object with its content."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) and text else None


def _check(tokenizer: Path, tokens: dict[str, str]) -> None:
    if not tokens:
        return
    document = json.loads(tokenizer.read_text(encoding="utf-8"))
    vocabulary = document["model"]["vocab"]
    known = set(vocabulary if isinstance(vocabulary, dict) else (piece[0] for piece in vocabulary))
    known |= {token["content"] for token in document.get("added_tokens") or ()}
    for name in ("bos_token", "eos_token", "pad_token"):
        if (text := tokens.get(name)) is not None and text not in known:
            raise UserError(
                f"data.tokenizer.path {tokenizer}: has no entry for {name} {text!r} of the {_CONFIG_FILE} beside it: "
                "the two do not belong together, copy both from one model"
            )


def template_of(file: bytes | None, config: Mapping[str, Any]) -> str | None:
    """The chat template: that of a file of its own, or that of `tokenizer_config.json`."""
    if file is not None:
        return file.decode()
    given = config.get("chat_template")
    if isinstance(given, list):  # several, by name
        named = {one.get("name"): one.get("template") for one in given if isinstance(one, dict)}
        given = named.get("default")
    return given if isinstance(given, str) else None

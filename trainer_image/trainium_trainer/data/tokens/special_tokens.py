"""Read the special tokens and the chat templates of a tokenizer's folder, and find the BOS prefix of its texts.

Guarantees:
- Special tokens of `tokenizer_config.json` must be entries of the tokenizer; otherwise the folder is refused.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainium_contract.trainer.data import BosToken
from trainium_trainer.data.tokens.tokenizer import (
    CONFIG_FILE,
    END_NAMES,
    PROCESSOR_TEMPLATE_FILE,
    TEMPLATE_FILE,
    TEMPLATE_FILES,
    TOOL_TEMPLATE_FILE,
    find_end_of_document,
    list_entries,
    list_special_names,
    load_tokenizer,
    read_json,
    read_tokenizer,
)
from trainium_trainer.exits import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from tokenizers import Tokenizer


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
        for name in (TEMPLATE_FILE, TOOL_TEMPLATE_FILE, PROCESSOR_TEMPLATE_FILE):
            files.pop(name, None)
        config = json.loads(files.get(CONFIG_FILE, b"{}"))
        config.pop("chat_template", None)
        by_name = {"default": self.default, "tool_use": self.tool_use}
        if self.tool_use is not None:
            config["chat_template"] = [{"name": name, "template": text} for name, text in by_name.items() if text]
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
        return frozenset((*dict(self.tokens).values(), *END_NAMES))


def read_special_tokens(tokenizer: Path) -> SpecialTokens:
    """Read the special tokens and templates of a `tokenizer.json`. Raises UserError for files that do not match it."""
    names = list_special_names(tokenizer)
    _check_special(tokenizer, dict(names))
    files = {name: file.read_bytes() for name in TEMPLATE_FILES if (file := tokenizer.parent / name).is_file()}
    return SpecialTokens(names, read_chat_templates(files, read_json(tokenizer.with_name(CONFIG_FILE))))


def read_chat_templates(files: Mapping[str, bytes], config: Mapping[str, Any]) -> ChatTemplates:
    """Return the templates of separate files, given by name, or of `tokenizer_config.json`."""
    default, tool_use = (files[name].decode() if name in files else None for name in TEMPLATE_FILES)
    if default is not None or tool_use is not None:
        return ChatTemplates(default, tool_use)
    by_name = config.get("chat_template")
    if isinstance(by_name, list):
        by_name = {entry.get("name"): entry.get("template") for entry in by_name if isinstance(entry, dict)}
    by_name = by_name if isinstance(by_name, dict) else {"default": by_name}
    return ChatTemplates(
        *(text if isinstance(text := by_name.get(name), str) else None for name in ("default", "tool_use"))
    )


def _check_special(tokenizer: Path, tokens: dict[str, str]) -> None:
    entries = set(list_entries(read_tokenizer(tokenizer)).values()) if tokens else set()
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

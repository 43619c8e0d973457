"""How a text begins: with the tokenizer's BOS token or without it, `data.bos`.

Invariants: no text begins with the token twice, whoever put it there (template, source, tokenizer); documents, examples
and the prompts of an evaluation get their beginning here and nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainium_contract.trainer.data import BosToken
from trainium_trainer.data.tokens.tokenizer import end_of_document_of, load_tokenizer, special_of
from trainium_trainer.exits import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tokenizers import Tokenizer

    from trainium_trainer.data.tokens.tokenizer import Special

_PROBE = "a"


@dataclass(frozen=True, slots=True)
class BosPrefix:
    """What stands before a text."""

    rule: BosToken = BosToken.AUTO
    tokens: tuple[int, ...] = ()
    """Ids that a text begins with, or that are taken away with `Never`; none where the tokenizer has no BOS token."""

    def begun(self, ids: Sequence[int], *, framed: bool = False) -> tuple[list[int], int]:
        """The tokens of a text with their beginning, and how long that is.

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
        """What samples depend on; nothing for `Auto`, which all data of earlier versions have."""
        return [] if self.rule is BosToken.AUTO else [self.rule, *self.tokens]


AS_IT_IS = BosPrefix()
"""Running text with `Auto`: nothing is put before a document."""


def beginning_of(tokenizer: Tokenizer, file: Path, special: Special, rule: BosToken) -> BosPrefix:
    """How an example begins. Raises UserError for a tokenizer without a BOS token that is to have one."""
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


def beginning_of_documents(rule: BosToken, file: Path) -> BosPrefix:
    """How a document of running text begins. Raises UserError for a tokenizer that cannot do it."""
    if rule is BosToken.AUTO:
        return AS_IT_IS
    tokenizer = load_tokenizer(file)
    tokenizer.encode_special_tokens = False
    beginning = beginning_of(tokenizer, file, special_of(file), rule)
    if rule is BosToken.ALWAYS and end_of_document_of(file) in beginning.tokens:
        raise UserError(
            f"data.bos is Always, but the BOS token of the tokenizer {file} also ends documents, so that one stands "
            "before every document but the first already: set data.bos to Auto"
        )
    return beginning


def _put_before(tokenizer: Tokenizer) -> tuple[int, ...]:
    """What the tokenizer itself puts before a text."""
    plain = tokenizer.encode(_PROBE, add_special_tokens=False).ids
    whole = tokenizer.encode(_PROBE, add_special_tokens=True).ids
    for place in range(len(whole) - len(plain) + 1):
        if whole[place : place + len(plain)] == plain:
            return tuple(whole[:place])
    return ()

"""Turn the text of an example into tokens, and mark those that are learned.

Guarantees:
- The tokens before the last answer are those that the prompt has when it is encoded alone, to be answered.
- Every token that holds a character of an answer is learned, as in the assistant mask of `transformers`.
- A text begins as `data.bos` demands.
- An answer that no chat template ends, ends with the tokenizer's EOS token, which is learned.
- Examples that are longer than a sequence are dropped or cut, and counted. What is left fits and has something to
  learn. Cut on the left, the last answer is whole and follows at least one token of its prompt.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from trainium_contract.trainer.examples import LossOn, TooLong
from trainium_trainer.data.tokens.tokenizer import (
    Special,
    count_entries,
    find_beginning,
    find_end_of_document,
    load_tokenizer,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray
    from tokenizers import Tokenizer

    from trainium_contract.trainer.data import BosToken
    from trainium_trainer.data.examples.templates import Example, Guard


@dataclass(frozen=True, slots=True)
class Encoded:
    """An example as tokens."""

    ids: NDArray[np.int64]
    trained: NDArray[np.bool_]
    """Whether each token is to be learned; the first one never is, since nothing comes before it."""
    answer: int
    """Place at which the last answer begins."""
    frame: int = 0
    """Tokens at the beginning that stay whatever is cut: the beginning of a text."""


def fit_together(examples: Sequence[Encoded], most: int, rule: TooLong) -> list[Encoded] | None:
    """Return the examples of one record in at most `most` tokens each; None when they are dropped.

    The answers of a pair keep one prompt, and differ.
    """
    over = max(len(example.ids) for example in examples) - most
    fitted = [fit_length(example, most, rule, over) for example in examples]
    kept = [example for example in fitted if example is not None]
    if len(kept) < len(examples) or (len(kept) == 2 and np.array_equal(kept[0].ids, kept[1].ids)):
        return None
    return kept


def fit_length(example: Encoded, most: int, rule: TooLong, over: int | None = None) -> Encoded | None:
    """Return the example in at most `most` tokens; None when it is dropped.

    `over`: tokens that a cut on the left removes, where another example with the same prompt has more of them.
    """
    over = len(example.ids) - most if over is None else over
    if over <= 0 or (len(example.ids) <= most and rule is not TooLong.CUT_LEFT):
        return example
    if rule is TooLong.DROP:
        return None
    if rule is TooLong.CUT_RIGHT:
        kept = replace(
            example, ids=example.ids[:most], trained=example.trained[:most], answer=min(example.answer, most)
        )
        return kept if kept.trained[1:].any() else None
    begin = example.frame + over
    if begin >= example.answer:  # not one token of the prompt would be left
        return None
    frame = slice(0, example.frame)
    return replace(
        example,
        ids=np.concatenate([example.ids[frame], example.ids[begin:]]),
        trained=np.concatenate([example.trained[frame], example.trained[begin:]]),
        answer=example.answer - over,
    )


Places: TypeAlias = "NDArray[np.int64]"


class TextEncoder:
    """A tokenizer for examples: special tokens in a text are such, unless the guard marks them."""

    def __init__(self, file: Path, special: Special, bos: BosToken) -> None:
        """Load a `tokenizer.json`. Raises UserError."""
        self.vocabulary = count_entries(file)
        self._file = file
        self._tokenizer = load_tokenizer(file)
        self._tokenizer.encode_special_tokens = False
        added = self._tokenizer.get_added_tokens_decoder().items()
        self.special_ids = frozenset(number for number, token in added if token.special)
        self.specials = tuple(sorted(token.content for _, token in added if token.special))
        eos = special.token("eos_token")
        end = self._tokenizer.token_to_id(eos) if eos is not None else None
        self.end: int = end if end is not None else find_end_of_document(file)
        self.padding = find_padding(self._tokenizer, special, self.end)
        self._beginning = find_beginning(self._tokenizer, file, special, bos)

    def encode(self, examples: Sequence[Example], guard: Guard, loss: LossOn) -> list[Encoded]:
        """Encode examples."""
        pairs = [number for number, example in enumerate(examples) if not example.framed]
        prompts = self._ids([examples[number].prompt for number in pairs], guard)
        wholes = self._ids([examples[number].text for number in pairs], guard)
        found: dict[int, Encoded] = {}
        for number, prompt, whole in zip(pairs, prompts, wholes, strict=True):
            found[number] = self._pair(examples[number], prompt, whole, guard)
        for number, example in enumerate(examples):
            if example.framed:
                found[number] = self._conversation(example, guard)
        results = [found[number] for number in range(len(examples))]
        if loss is LossOn.ALL:
            for result in results:
                result.trained[:] = True
        return results

    def prompt_ids(self, prompt: str, guard: Guard, *, framed: bool) -> list[int]:
        """Return the tokens of a prompt that is to be answered."""
        (ids,) = self._ids([prompt], guard)
        return self._beginning.prepend_to(ids, framed=framed)[0]

    def end_of(self, answer: str) -> int:
        """Return the end of an answer that a chat template wrote: before the special token that ends the turn."""
        ending = next((name for name in self.specials if answer.endswith(name)), "")
        return len(answer) - len(ending)

    def _pair(self, example: Example, prompt: list[int], whole: list[int], guard: Guard) -> Encoded:
        if whole[: len(prompt)] != prompt:  # a token reaches over the border, or depends on what follows it
            whole = prompt + self._with_places(example.answer, guard, continuing=True)[0].tolist()
        ids, frame = self._beginning.prepend_to(whole)
        answer = max(0, len(prompt) + len(ids) - len(whole))
        if not ids or ids[-1] != self.end:
            ids = [*ids, self.end]
        trained = np.arange(len(ids)) >= answer
        return Encoded(np.array(ids, np.int64), trained, answer, frame)

    def _conversation(self, example: Example, guard: Guard) -> Encoded:
        written, starts, ends = self._with_places(example.text, guard)
        prompt, *places = self._with_places(example.prompt, guard)
        if not np.array_equal(written[: len(prompt)], prompt):  # as for a pair
            border = len(example.prompt)
            rest, *more = self._with_places(example.text[border:], guard, continuing=True)
            written = np.concatenate([prompt, rest])
            starts, ends = (np.concatenate([a, b + border]) for a, b in zip(places, more, strict=True))
        ids_with_beginning, frame = self._beginning.prepend_to(written.tolist(), framed=True)
        ids, by = np.array(ids_with_beginning, np.int64), len(ids_with_beginning) - len(written)
        starts, ends = _moved(starts, by), _moved(ends, by)
        trained = np.zeros(len(ids), bool)
        for start, end in example.answers:
            trained |= (starts < end) & (ends > start) & (ends > starts)
        return Encoded(ids, trained, max(0, len(prompt) + by), frame)

    def _ids(self, texts: Sequence[str], guard: Guard) -> list[list[int]]:
        if not any(map(guard.marked, texts)):
            return [one.ids for one in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]
        return [self._with_places(text, guard)[0].tolist() for text in texts]

    @cached_property
    def _continuation(self) -> Tokenizer:
        return load_tokenizer(self._file, continuing=True)

    def _with_places(self, text: str, guard: Guard, *, continuing: bool = False) -> tuple[Places, Places, Places]:
        """Return tokens, and where each begins and ends in the text, which may be `continuing` another."""
        ids: list[int] = []
        places: list[tuple[int, int]] = []
        at = 0
        for piece, plain in guard.pieces(text):
            tokenizer = self._continuation if continuing or at else self._tokenizer
            tokenizer.encode_special_tokens = plain
            encoding = tokenizer.encode(piece, add_special_tokens=False)
            tokenizer.encode_special_tokens = False
            ids += encoding.ids
            # A mark is one character of the text, whatever it represents.
            places += [(at, at + 1)] * len(encoding.ids) if plain else [(at + a, at + b) for a, b in encoding.offsets]
            at += 1 if plain else len(piece)
        table = np.array(places, np.int64).reshape(-1, 2)
        return np.array(ids, np.int64), table[:, 0], table[:, 1]


def find_padding(tokenizer: Tokenizer, special: Special, end: int) -> int:
    """Return the token that fills up a sequence: the tokenizer's, else the one that ends a text."""
    name = special.token("pad_token")
    number = tokenizer.token_to_id(name) if name is not None else None
    return end if number is None else int(number)


def _moved(places: Places, by: int) -> Places:
    """Return the places of the tokens after `by` were added before them, which are not in the text, or removed."""
    return np.concatenate([np.full(by, -1, np.int64), places]) if by >= 0 else places[-by:]

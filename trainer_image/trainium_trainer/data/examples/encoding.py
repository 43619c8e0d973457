"""Turn records into examples of tokens, in a worker process, and mark the tokens that are learned.

Guarantees:
- The result is a pure function of the block of records and the recipe.
- The tokens before the last answer are those of the prompt encoded alone, as at inference.
- Every token that holds a character of an answer is learned, as in the assistant mask of `transformers`.
- The beginning of a text follows `data.bos`.
- An answer without an end from a chat template ends with the tokenizer's EOS token, which is learned.
- Examples longer than a sequence are dropped or cut, and counted. The remaining ones fit and have learned tokens. After
  a cut on the left, the last answer is whole and follows at least one token of its prompt.
- A block is read again from its beginning if the store fails during a read.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from trainium_contract.trainer.examples import LossOn, TooLong
from trainium_trainer.data.examples.templates import BadRecordError, Example, RecordFilter, without_nulls
from trainium_trainer.data.sources.documents import DocumentSource, FileBlock, Record, SkippedRecord
from trainium_trainer.data.sources.files import read_with_retries
from trainium_trainer.data.tokens.encoding import ExampleColumns, RecordCounts, TokenBlock, token_type
from trainium_trainer.data.tokens.tokenizer import (
    SpecialTokens,
    count_entries,
    find_beginning,
    find_end_of_document,
    load_tokenizer,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray
    from tokenizers import Tokenizer

    from trainium_contract.trainer.data import BosToken
    from trainium_trainer.data.examples.recipe import Recipe
    from trainium_trainer.data.examples.templates import SpecialTokenGuard

_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class EncodedExample:
    """An example as tokens."""

    ids: NDArray[np.int64]
    loss_mask: NDArray[np.bool_]
    """Whether each token is learned; the first one never is, because no token precedes it."""
    answer: int
    """The index of the first token of the last answer."""
    prefix: int = 0
    """The number of initial tokens that a cut keeps: the beginning of a text."""


def fit_together(examples: Sequence[EncodedExample], max_tokens: int, rule: TooLong) -> list[EncodedExample] | None:
    """Cut the examples of one record to at most `max_tokens` tokens each; return None to drop them.

    The answers of a pair keep one prompt and remain different.
    """
    over = max(len(example.ids) for example in examples) - max_tokens
    fitted = [fit_length(example, max_tokens, rule, over) for example in examples]
    fitting = [example for example in fitted if example is not None]
    if len(fitting) < len(examples) or (len(fitting) == 2 and np.array_equal(fitting[0].ids, fitting[1].ids)):
        return None
    return fitting


def fit_length(
    example: EncodedExample, max_tokens: int, rule: TooLong, over: int | None = None
) -> EncodedExample | None:
    """Cut an example to at most `max_tokens` tokens; return None to drop it.

    `over` is the number of tokens that a cut on the left removes, where a longer example has the same prompt.
    """
    over = len(example.ids) - max_tokens if over is None else over
    if over <= 0 or (len(example.ids) <= max_tokens and rule is not TooLong.CUT_LEFT):
        return example
    if rule is TooLong.DROP:
        return None
    if rule is TooLong.CUT_RIGHT:
        truncated = replace(
            example,
            ids=example.ids[:max_tokens],
            loss_mask=example.loss_mask[:max_tokens],
            answer=min(example.answer, max_tokens),
        )
        return truncated if truncated.loss_mask[1:].any() else None
    begin = example.prefix + over
    if begin >= example.answer:  # no token of the prompt would remain
        return None
    prefix = slice(0, example.prefix)
    return replace(
        example,
        ids=np.concatenate([example.ids[prefix], example.ids[begin:]]),
        loss_mask=np.concatenate([example.loss_mask[prefix], example.loss_mask[begin:]]),
        answer=example.answer - over,
    )


Spans: TypeAlias = "NDArray[np.int64]"


class TextEncoder:
    """A tokenizer for examples: special tokens in a text are recognized unless the guard marks them."""

    def __init__(self, file: Path, special: SpecialTokens, bos: BosToken) -> None:
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
        pad = special.token("pad_token")
        padding = self._tokenizer.token_to_id(pad) if pad is not None else None
        self.padding: int = self.end if padding is None else padding
        self._beginning = find_beginning(self._tokenizer, file, special, bos)

    def encode(self, examples: Sequence[Example], guard: SpecialTokenGuard, loss: LossOn) -> list[EncodedExample]:
        """Encode examples."""
        pairs = [number for number, example in enumerate(examples) if not example.from_chat_template]
        prompts = self._ids([examples[number].prompt for number in pairs], guard)
        integers = self._ids([examples[number].text for number in pairs], guard)
        encoded: dict[int, EncodedExample] = {}
        for number, prompt, whole in zip(pairs, prompts, integers, strict=True):
            encoded[number] = self._pair(examples[number], prompt, whole, guard)
        for number, example in enumerate(examples):
            if example.from_chat_template:
                encoded[number] = self._conversation(example, guard)
        results = [encoded[number] for number in range(len(examples))]
        if loss is LossOn.ALL:
            for result in results:
                result.loss_mask[:] = True
        return results

    def prompt_ids(self, prompt: str, guard: SpecialTokenGuard, *, from_chat_template: bool) -> list[int]:
        """Return the tokens of a prompt for inference."""
        (ids,) = self._ids([prompt], guard)
        return self._beginning.prepend_to(ids, from_chat_template=from_chat_template)[0]

    def find_end(self, answer: str) -> int:
        """Return the end of an answer that a chat template wrote, before the special token that ends the turn."""
        ending = next((name for name in self.specials if answer.endswith(name)), "")
        return len(answer) - len(ending)

    def _pair(self, example: Example, prompt: list[int], whole: list[int], guard: SpecialTokenGuard) -> EncodedExample:
        if whole[: len(prompt)] != prompt:  # a token crosses the border, or depends on the text after it
            whole = prompt + self._encode_with_spans(example.answer, guard, continuing=True)[0].tolist()
        ids, prefix = self._beginning.prepend_to(whole)
        answer_start = max(0, len(prompt) + len(ids) - len(whole))
        if not ids or ids[-1] != self.end:
            ids = [*ids, self.end]
        loss_mask = np.arange(len(ids)) >= answer_start
        return EncodedExample(np.array(ids, np.int64), loss_mask, answer_start, prefix)

    def _conversation(self, example: Example, guard: SpecialTokenGuard) -> EncodedExample:
        written, starts, ends = self._encode_with_spans(example.text, guard)
        prompt, *places = self._encode_with_spans(example.prompt, guard)
        if not np.array_equal(written[: len(prompt)], prompt):  # as for a pair
            border = len(example.prompt)
            rest, *more = self._encode_with_spans(example.text[border:], guard, continuing=True)
            written = np.concatenate([prompt, rest])
            starts, ends = (np.concatenate([a, b + border]) for a, b in zip(places, more, strict=True))
        ids_with_beginning, prefix = self._beginning.prepend_to(written.tolist(), from_chat_template=True)
        ids, by = np.array(ids_with_beginning, np.int64), len(ids_with_beginning) - len(written)
        starts, ends = _shift_spans(starts, by), _shift_spans(ends, by)
        loss_mask = np.zeros(len(ids), bool)
        for start, end in example.answers:
            loss_mask |= (starts < end) & (ends > start) & (ends > starts)
        return EncodedExample(ids, loss_mask, max(0, len(prompt) + by), prefix)

    def _ids(self, texts: Sequence[str], guard: SpecialTokenGuard) -> list[list[int]]:
        if not any(map(guard.has_escapes, texts)):
            return [one.ids for one in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]
        return [self._encode_with_spans(text, guard)[0].tolist() for text in texts]

    @cached_property
    def _continuation(self) -> Tokenizer:
        return load_tokenizer(self._file, continuing=True)

    def _encode_with_spans(
        self, text: str, guard: SpecialTokenGuard, *, continuing: bool = False
    ) -> tuple[Spans, Spans, Spans]:
        """Return tokens with their start and end in the text, which may be `continuing` another."""
        ids: list[int] = []
        places: list[tuple[int, int]] = []
        at = 0
        for piece, plain in guard.pieces(text):
            tokenizer = self._continuation if continuing or at else self._tokenizer
            tokenizer.encode_special_tokens = plain
            encoding = tokenizer.encode(piece, add_special_tokens=False)
            tokenizer.encode_special_tokens = False
            ids += encoding.ids
            # A mark is one character of the text, no matter what it represents.
            places += [(at, at + 1)] * len(encoding.ids) if plain else [(at + a, at + b) for a, b in encoding.offsets]
            at += 1 if plain else len(piece)
        table = np.array(places, np.int64).reshape(-1, 2)
        return np.array(ids, np.int64), table[:, 0], table[:, 1]


def _shift_spans(places: Spans, by: int) -> Spans:
    """Shift the positions of tokens after `by` tokens outside the text were added before them, or removed."""
    return np.concatenate([np.full(by, -1, np.int64), places]) if by >= 0 else places[-by:]


@dataclass(frozen=True, slots=True)
class KeptExample:
    """A kept example, with the hash of its record."""

    example: Example
    encoded: EncodedExample
    record: int


class ExampleEncoder:
    """Builds and encodes the examples of one source."""

    def __init__(self, recipe: Recipe) -> None:
        """Load tokenizer, templates and function. Raises UserError."""
        assert recipe.tokenizer is not None
        self._recipe = recipe
        self.texts = TextEncoder(Path(recipe.tokenizer), recipe.special, recipe.bos)
        self.record_format = recipe.record_format(self.texts.specials)

    def encode(
        self,
        items: Iterable[Record | SkippedRecord],
        counts: RecordCounts,
        skipped: list[SkippedRecord],
        original_lengths: list[int],
    ) -> Iterator[KeptExample]:
        """Yield the examples that are kept, and count the others in the other arguments. Raises UserError."""
        config = self._recipe.config
        for batch in _batches(self._examples(items, counts, skipped)):
            encoded = self.texts.encode([example for example, _ in batch], self.record_format.guard, config.loss)
            for start in range(0, len(batch), self.record_format.width):
                group = encoded[start : start + self.record_format.width]
                lengths = [len(one.ids) for one in group]
                original_lengths += lengths
                fitting = fit_together(group, self._recipe.max_tokens, config.too_long)
                if fitting is None:
                    counts.dropped += 1
                    counts.shortest_dropped = min(counts.shortest_dropped or max(lengths), max(lengths))
                    continue
                counts.cut += any(len(one.ids) < length for one, length in zip(fitting, lengths, strict=True))
                for (example, record), one in zip(batch[start:], fitting, strict=False):
                    yield KeptExample(example, one, record)

    def block(self, items: Iterable[Record | SkippedRecord]) -> TokenBlock:
        """Encode a block, and return its examples as arrays."""
        counts, skipped, original_lengths = RecordCounts(), list[SkippedRecord](), list[int]()
        encoded = list(self.encode(items, counts, skipped, original_lengths))
        dtype = token_type(self.texts.vocabulary)
        rows, dropped = [one.encoded for one in encoded], [0] * (len(original_lengths) - len(encoded))
        return TokenBlock(
            tokens=np.concatenate([row.ids for row in rows]).astype(dtype) if rows else np.empty(0, dtype),
            lengths=np.array([len(row.ids) for row in rows] + dropped, np.int64),
            documents=np.array([one.record for one in encoded] + dropped, np.uint64),
            skipped=tuple(skipped),
            examples=ExampleColumns(
                loss_mask=np.concatenate([row.loss_mask for row in rows]) if rows else np.empty(0, np.bool_),
                answers=np.array([row.answer for row in rows] + dropped, np.int64),
                original_lengths=np.array(original_lengths, np.int64),
            ),
            counts=counts,
        )

    def _examples(
        self, items: Iterable[Record | SkippedRecord], counts: RecordCounts, skipped: list[SkippedRecord]
    ) -> Iterator[tuple[Example, int]]:
        chosen = RecordFilter(self._recipe.config.where)
        counts.found = chosen.found
        listed = list(items)
        known = dict.fromkeys(name for item in listed if isinstance(item, Record) for name in item.fields)
        for item in listed:
            if isinstance(item, SkippedRecord):
                skipped.append(item)
                counts.unreadable += 1
                continue
            counts.records += 1
            for name in self.record_format.unused(item.fields):
                if item.fields.get(name, ...) is not None and name not in self._recipe.config.where:
                    counts.unused[name] = counts.unused.get(name, 0) + 1
            if not chosen(known | item.fields if item.fields else {}):
                counts.filtered += 1
                continue
            try:
                examples = self._build_examples(item, known)
            except BadRecordError as error:
                skipped.append(item.skipped(str(error)))
                continue
            counts.left_out += not examples
            yield from ((example, hash_record(item.fields)) for example in examples)

    def _build_examples(self, record: Record, known: dict[str, None]) -> tuple[Example, ...]:
        """Build the examples of a record; fields of other records are null, as in a table. Raises BadRecordError."""
        if record.fields and len(record.fields) < len(known):
            try:
                return self.record_format.examples(replace(record, fields=known | record.fields))
            except BadRecordError:
                pass  # the next call names the missing field
        return self.record_format.examples(record)


def hash_record(fields: Mapping[str, Any]) -> int:
    """Return a 64-bit hash of a record that ignores the order of fields and treats null fields as missing."""
    text = json.dumps(without_nulls(fields), sort_keys=True, default=str)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _batches(examples: Iterator[tuple[Example, int]]) -> Iterator[list[tuple[Example, int]]]:
    batch: list[tuple[Example, int]] = []
    for one in examples:
        batch.append(one)
        if len(batch) == _AT_ONCE:
            yield batch
            batch = []
    if batch:
        yield batch


# ---- functions that a worker process calls by reference -------------------------------------------------------------

_worker: dict[str, Any] = {}


def initialize_worker(recipe: Recipe) -> tuple[int, int]:
    """Prepare this process; return the size of the vocabulary and the padding token."""
    _worker["encoder"] = ExampleEncoder(recipe)
    _worker["source"] = recipe.spec.source
    return _worker["encoder"].texts.vocabulary, _worker["encoder"].texts.padding


def encode_block(_: int, block: FileBlock) -> list[TokenBlock]:
    """Return the examples of a block of the installed source."""
    source: DocumentSource = _worker["source"]
    encoder: ExampleEncoder = _worker["encoder"]
    return [read_with_retries(source.file_name_of(block), lambda: encoder.block(source.records(block)))]

"""Turn records into examples of tokens, in a worker process, and mark the tokens that are learned.

Guarantees:
- The result is a pure function of the block of records and the recipe.
- The tokens before the last answer are those of the prompt encoded alone, as at inference.
- Every token that holds a character of an answer is learned, as in the assistant mask of `transformers`.
- The BOS prefix of a text follows `data.bos`.
- An answer without an end from a chat template ends with the tokenizer's EOS token, which is learned.
- Examples longer than a sequence are dropped or cut, and counted. The remaining ones fit and have learned tokens. After
  a cut on the left, the last answer is whole and follows at least one token of its prompt.
- A block is read again from its beginning if the store fails during a read.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from trainium_contract.trainer.examples import LossOn, TooLong
from trainium_trainer.data.examples.conversation import count_common
from trainium_trainer.data.examples.record_filter import RecordFilter
from trainium_trainer.data.examples.record_format import BadRecordError, Example, GuardedText, Range, drop_nulls
from trainium_trainer.data.sources.documents import DocumentSource, FileBlock, Record, SkippedRecord
from trainium_trainer.data.sources.files import read_with_retries
from trainium_trainer.data.tokens.encoding import ExampleColumns, RecordCounts, TokenBlock, choose_token_type
from trainium_trainer.data.tokens.special_tokens import SpecialTokens, find_bos_prefix
from trainium_trainer.data.tokens.tokenizer import count_entries, find_end_of_document, load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray
    from tokenizers import Tokenizer

    from trainium_contract.trainer.data import BosToken
    from trainium_trainer.data.examples.recipe import Recipe

_BATCH_EXAMPLES = 256


@dataclass(frozen=True, slots=True)
class EncodedExample:
    """An example as tokens."""

    ids: NDArray[np.int64]
    loss_mask: NDArray[np.bool_]
    """Whether each token is learned; the first one never is, because no token precedes it."""
    answer: int
    """The index of the first token of the last answer."""
    prefix: int = 0
    """The number of initial tokens that a cut keeps: the BOS prefix."""


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
        eos = special.find_token("eos_token")
        end = self._tokenizer.token_to_id(eos) if eos is not None else None
        self.end: int = end if end is not None else find_end_of_document(file)
        pad = special.find_token("pad_token")
        padding = self._tokenizer.token_to_id(pad) if pad is not None else None
        self.padding: int = self.end if padding is None else padding
        self._bos_prefix = find_bos_prefix(self._tokenizer, file, special, bos)

    def encode(self, examples: Sequence[Example], loss: LossOn) -> list[EncodedExample]:
        """Encode examples."""
        plain = [example for example in examples if not example.from_chat_template]
        prompt_ids = iter(self._encode_texts([example.prompt for example in plain]))
        text_ids = iter(self._encode_texts([example.guarded for example in plain]))
        encoded = [
            self._encode_conversation(example)
            if example.from_chat_template
            else self._encode_pair(example, next(prompt_ids), next(text_ids))
            for example in examples
        ]
        if loss is LossOn.ALL:
            for example in encoded:
                example.loss_mask[:] = True
        return encoded

    def encode_prompt(self, prompt: GuardedText, *, from_chat_template: bool) -> list[int]:
        """Return the tokens of a prompt for inference."""
        (ids,) = self._encode_texts([prompt])
        return self._bos_prefix.prepend_to(ids, from_chat_template=from_chat_template)[0]

    def find_end(self, answer: str) -> int:
        """Return the end of an answer that a chat template wrote, before the special token that ends the turn."""
        turn = answer.rstrip()
        ending = next((name for name in self.specials if turn.endswith(name)), None)
        return len(answer) if ending is None else len(turn) - len(ending)

    def _encode_pair(self, example: Example, prompt_ids: list[int], text_ids: list[int]) -> EncodedExample:
        """Return the tokens of a prompt and its answer; `text_ids` are those of both encoded together."""
        if example.encoded_whole:
            prompt_ids = prompt_ids[: count_common(prompt_ids, text_ids)]
        elif text_ids[: len(prompt_ids)] != prompt_ids:  # a token crosses the border, or depends on the text after it
            answer = example.guarded.slice_text(*example.answers[-1])
            text_ids = prompt_ids + self._encode_with_spans(answer, continuing=True)[0].tolist()
        ids, prefix = self._bos_prefix.prepend_to(text_ids)
        answer_start = max(0, len(prompt_ids) + len(ids) - len(text_ids))
        if not ids or ids[-1] != self.end:
            ids = [*ids, self.end]
        loss_mask = np.arange(len(ids)) >= answer_start
        return EncodedExample(np.array(ids, np.int64), loss_mask, answer_start, prefix)

    def _encode_conversation(self, example: Example) -> EncodedExample:
        """Return the tokens of a text from a chat template; those of all of its answers are learned."""
        text_ids, starts, ends = self._encode_with_spans(example.guarded)
        prompt_ids, *prompt_spans = self._encode_with_spans(example.prompt)
        if example.encoded_whole:
            prompt_ids = prompt_ids[: count_common(prompt_ids.tolist(), text_ids.tolist())]
        elif not np.array_equal(text_ids[: len(prompt_ids)], prompt_ids):  # as for a pair
            border = len(example.prompt.text)
            rest_ids, *rest_spans = self._encode_with_spans(example.guarded.slice_text(border), continuing=True)
            text_ids = np.concatenate([prompt_ids, rest_ids])
            starts, ends = (
                np.concatenate([before, after + border]) for before, after in zip(prompt_spans, rest_spans, strict=True)
            )
        prefixed_ids, prefix = self._bos_prefix.prepend_to(text_ids.tolist(), from_chat_template=True)
        ids, shift = np.array(prefixed_ids, np.int64), len(prefixed_ids) - len(text_ids)
        starts, ends = _shift_spans(starts, shift), _shift_spans(ends, shift)
        loss_mask = np.zeros(len(ids), bool)
        for start, end in example.answers:
            loss_mask |= (starts < end) & (ends > start) & (ends > starts)
        answer_start = max(0, len(prompt_ids) + shift)
        if example.encoded_whole:
            loss_mask[answer_start:] = True
        return EncodedExample(ids, loss_mask, answer_start, prefix)

    def _encode_texts(self, texts: Sequence[GuardedText]) -> list[list[int]]:
        if not any(text.plain for text in texts):
            encodings = self._tokenizer.encode_batch_fast([text.text for text in texts], add_special_tokens=False)
            return [encoding.ids for encoding in encodings]
        return [self._encode_with_spans(text)[0].tolist() for text in texts]

    @cached_property
    def _continuation(self) -> Tokenizer:
        return load_tokenizer(self._file, continuing=True)

    def _encode_with_spans(self, text: GuardedText, *, continuing: bool = False) -> tuple[Spans, Spans, Spans]:
        """Return tokens with their start and end in the text, which may be `continuing` another."""
        ids: list[int] = []
        spans: list[Range] = []
        for position, piece, is_plain in text.iterate_pieces():
            tokenizer = self._continuation if continuing or position else self._tokenizer
            tokenizer.encode_special_tokens = is_plain
            encoding = tokenizer.encode(piece, add_special_tokens=False)
            tokenizer.encode_special_tokens = False
            ids += encoding.ids
            spans += [(position + start, position + end) for start, end in encoding.offsets]
        table = np.array(spans, np.int64).reshape(-1, 2)
        return np.array(ids, np.int64), table[:, 0], table[:, 1]


def _shift_spans(positions: Spans, shift: int) -> Spans:
    """Shift the positions of tokens after `shift` tokens outside the text were added before them, or removed."""
    return np.concatenate([np.full(shift, -1, np.int64), positions]) if shift >= 0 else positions[-shift:]


@dataclass(frozen=True, slots=True)
class KeptExample:
    """A kept example, with the hash of its record."""

    example: Example
    encoded: EncodedExample
    record_hash: int


@dataclass(slots=True)
class EncodedBlock:
    """The examples of a block of records, and what became of the other records and examples."""

    kept: list[KeptExample] = field(default_factory=list)
    counts: RecordCounts = field(default_factory=RecordCounts)
    skipped: list[SkippedRecord] = field(default_factory=list)
    original_lengths: list[int] = field(default_factory=list)
    """The tokens of every example before it was cut or dropped."""

    def to_token_block(self, dtype: np.dtype[Any]) -> TokenBlock:
        """Return the examples as arrays, with an empty row for each dropped example."""
        rows, dropped = [kept.encoded for kept in self.kept], [0] * (len(self.original_lengths) - len(self.kept))
        return TokenBlock(
            tokens=np.concatenate([row.ids for row in rows]).astype(dtype) if rows else np.empty(0, dtype),
            lengths=np.array([len(row.ids) for row in rows] + dropped, np.int64),
            documents=np.array([kept.record_hash for kept in self.kept] + dropped, np.uint64),
            skipped=tuple(self.skipped),
            examples=ExampleColumns(
                loss_mask=np.concatenate([row.loss_mask for row in rows]) if rows else np.empty(0, np.bool_),
                answers=np.array([row.answer for row in rows] + dropped, np.int64),
                original_lengths=np.array(self.original_lengths, np.int64),
            ),
            counts=self.counts,
        )


class ExampleEncoder:
    """Builds and encodes the examples of one source."""

    def __init__(self, recipe: Recipe) -> None:
        """Load tokenizer, templates and function. Raises UserError."""
        assert recipe.tokenizer is not None
        self._recipe = recipe
        self.texts = TextEncoder(Path(recipe.tokenizer), recipe.special, recipe.bos)
        self.record_format = recipe.record_format(self.texts.specials)
        self.vocabulary, self.end = self.texts.vocabulary, self.texts.padding

    def encode_block(self, source: DocumentSource, block: FileBlock) -> list[TokenBlock]:
        """Return the tokens of a block of records. Raises UserError or StorageError."""
        name = source.find_file_name(block)
        encoded = read_with_retries(name, lambda: self.encode(source.iterate_records(block)))
        return [encoded.to_token_block(choose_token_type(self.vocabulary))]

    def encode(self, items: Iterable[Record | SkippedRecord]) -> EncodedBlock:
        """Encode the examples of a block of records. Raises UserError."""
        config, width, block = self._recipe.config, self.record_format.width, EncodedBlock()
        for batch in _group_into_batches(self._iterate_examples(list(items), block)):
            encoded = self.texts.encode([example for example, _ in batch], config.loss)
            for start in range(0, len(batch), width):
                group = _align_answers(encoded[start : start + width])
                lengths = [len(example.ids) for example in group]
                block.original_lengths += lengths
                fitting = fit_together(group, self._recipe.max_tokens, config.too_long)
                if fitting is None:
                    block.counts.dropped += 1
                    shortest = block.counts.shortest_dropped or max(lengths)
                    block.counts.shortest_dropped = min(shortest, max(lengths))
                    continue
                block.counts.cut += any(
                    len(example.ids) < length for example, length in zip(fitting, lengths, strict=True)
                )
                for (example, record_hash), fitted in zip(batch[start:], fitting, strict=False):
                    block.kept.append(KeptExample(example, fitted, record_hash))
        return block

    def _iterate_examples(
        self, items: list[Record | SkippedRecord], block: EncodedBlock
    ) -> Iterator[tuple[Example, int]]:
        """Yield each example with the hash of its record; count the other records in `block`."""
        counts, matches = block.counts, RecordFilter(self._recipe.config.where)
        counts.found = matches.seen_values
        all_fields = dict.fromkeys(name for item in items if isinstance(item, Record) for name in item.fields)
        for item in items:
            if isinstance(item, SkippedRecord):
                block.skipped.append(item)
                counts.unreadable += 1
                continue
            counts.records += 1
            for name in self.record_format.find_unused_fields(item.fields):
                if item.fields.get(name, ...) is not None and name not in self._recipe.config.where:
                    counts.unused[name] = counts.unused.get(name, 0) + 1
            if not matches(all_fields | item.fields if item.fields else {}):
                counts.filtered += 1
                continue
            try:
                examples = self._build_examples(item, all_fields)
            except BadRecordError as error:
                block.skipped.append(item.skip(str(error)))
                continue
            counts.left_out += not examples
            for name in {name for example in examples for name in example.unused}:
                counts.unused[name] = counts.unused.get(name, 0) + 1
            yield from ((example, hash_record(item.fields)) for example in examples)

    def _build_examples(self, record: Record, all_fields: dict[str, None]) -> tuple[Example, ...]:
        """Build the examples of a record; fields of other records are null, as in a table. Raises BadRecordError."""
        if record.fields and len(record.fields) < len(all_fields):
            try:
                return self.record_format.build_examples(replace(record, fields=all_fields | record.fields))
            except BadRecordError:
                pass  # the next call names the missing field
        return self.record_format.build_examples(record)


def _align_answers(examples: list[EncodedExample]) -> list[EncodedExample]:
    """Let the answers of a pair begin with the same token, as in trl."""
    start = min(example.answer for example in examples)
    for example in examples:
        example.loss_mask[start : example.answer] = True
    return [replace(example, answer=start) for example in examples]


def hash_record(fields: Mapping[str, Any]) -> int:
    """Return a 64-bit hash of a record that ignores the order of fields and treats null fields as missing."""
    text = json.dumps(drop_nulls(fields), sort_keys=True, default=str)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _group_into_batches(examples: Iterator[tuple[Example, int]]) -> Iterator[list[tuple[Example, int]]]:
    batch: list[tuple[Example, int]] = []
    for example in examples:
        batch.append(example)
        if len(batch) == _BATCH_EXAMPLES:
            yield batch
            batch = []
    if batch:
        yield batch

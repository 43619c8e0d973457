"""Return the examples that are held back, as text for an evaluation.

Guarantees:
- The examples are always the same, in the order of their records, and never used in training.
- A prompt has the same tokens as in training.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainium_contract.trainer.examples import DataFormat, LossOn
from trainium_trainer.data.cache import run_with_cache
from trainium_trainer.data.examples.dataset import ExampleSource, find_tokenizer, open_validation_sources
from trainium_trainer.data.examples.encoding import ExampleEncoder, KeptExample
from trainium_trainer.data.examples.recipe import build_recipe
from trainium_trainer.data.examples.record_format import BadRecordError, GuardedText, build_pair
from trainium_trainer.data.examples.store import BLOCK_BYTES
from trainium_trainer.data.sources.resolve import list_sources
from trainium_trainer.exits import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from trainium_contract.trainer.data import DataConfig
    from trainium_trainer.data.examples.encoding import TextEncoder


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutExample:
    """A prompt and its expected answer, not trained on."""

    prompt: str
    """The prompt with the text that a template adds."""
    prompt_ids: tuple[int, ...]
    """The tokens of the prompt as in training, including the BOS prefix; cut where the example was cut."""
    answer: str = ""
    """The answer of the record, without its end token."""
    answer_ids: tuple[int, ...] = ()
    """The tokens of the answer as in training, including its end token."""
    label: int | None = None
    """The index of the correct label; None without labels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutExamples:
    """Prompts for a model with the expected answers, in a fixed order."""

    examples: tuple[HeldOutExample, ...]
    labels: tuple[str, ...] = ()
    """The names of all classes; empty unless the format is Classification."""
    label_ids: tuple[tuple[int, ...], ...] = ()
    """The tokens of the labels as answers, without the end token."""
    end_tokens: tuple[int, ...] = ()
    """The tokens that end an answer: the end of a turn in a chat, else the tokenizer's EOS."""
    has_answers: bool = True
    """Whether answers are generated; not for running text, which has none."""

    @property
    def largest_token(self) -> int:
        """The largest id in any prompt or answer."""
        return max(max(example.prompt_ids + example.answer_ids) for example in self.examples)


def read_held_out(config: DataConfig, max_examples: int | None = None) -> HeldOutExamples:
    """Return at most `max_examples` of the examples that data.validation holds back, source by source, in order.

    For every format but Text. Raises UserError for unusable data, and StorageError.
    """
    sources = run_with_cache(
        config, lambda cache: open_validation_sources(config, find_tokenizer(config, cache), cache)
    )
    encoders = [ExampleEncoder(source.recipe) for source in sources]
    held_back = itertools.chain.from_iterable(
        _read_source_examples(source, encoder) for source, encoder in zip(sources, encoders, strict=True)
    )
    labels = config.examples.classification.labels if config.format is DataFormat.CLASSIFICATION else ()
    examples = tuple(itertools.islice(held_back, max_examples))
    texts = encoders[0].texts
    ends = {example.answer_ids[-1] for example in examples} & texts.special_ids
    return HeldOutExamples(
        examples=examples,
        labels=tuple(labels),
        label_ids=_encode_labels(encoders[0], examples, labels),
        end_tokens=tuple(ends) if len(ends) == 1 else (texts.end,),
    )


def _encode_labels(
    encoder: ExampleEncoder, examples: Sequence[HeldOutExample], labels: Sequence[str]
) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of each label after a prompt."""
    if not labels or not examples:
        return ()
    first = examples[0]
    assert first.label is not None
    space = first.answer.removesuffix(labels[first.label])
    pairs = [build_pair(GuardedText(first.prompt), GuardedText(f"{space}{label}")) for label in labels]
    encoded = encoder.texts.encode(pairs, LossOn.ANSWER)
    return tuple(tuple(example.ids[example.answer : -1].tolist()) for example in encoded)


def build_prompts(config: DataConfig, prompts: Sequence[dict[str, Any] | str]) -> list[tuple[str, tuple[int, ...]]]:
    """Return text and tokens of several prompts, with the tokens as in training. Raises UserError.

    A prompt is built from a record without an answer, or from a text if the format needs only one field. For every
    format but Text.
    """
    tokenizer = run_with_cache(config, lambda cache: find_tokenizer(config, cache))
    encoder = ExampleEncoder(build_recipe(config, list_sources(config)[0], tokenizer))
    return [_encode_prompt(encoder, prompt) for prompt in prompts]


def _encode_prompt(encoder: ExampleEncoder, prompt: dict[str, Any] | str) -> tuple[str, tuple[int, ...]]:
    fields = encoder.record_format.record_of_prompt(prompt) if isinstance(prompt, str) else prompt
    try:
        text, from_chat_template = encoder.record_format.render_prompt(fields)
    except BadRecordError as error:
        raise UserError(f"the prompt: {error}") from error
    return text.text, tuple(encoder.texts.encode_prompt(text, from_chat_template=from_chat_template))


def _read_source_examples(source: ExampleSource, encoder: ExampleEncoder) -> Iterator[HeldOutExample]:
    """Yield the held-back examples of a source by reading its records again."""
    documents = source.recipe.spec.source
    examples = itertools.chain.from_iterable(
        encoder.encode(documents.read_records(block)).kept for block in documents.divide_into_blocks(BLOCK_BYTES)
    )
    # The expected answer of a pair is the preferred one.
    for kept, is_held_back in itertools.islice(
        zip(examples, source.held_back, strict=False), 0, None, encoder.record_format.width
    ):
        if is_held_back and kept.encoded.answer < len(kept.encoded.ids):
            yield _build_example(kept, encoder.texts, source.recipe.config.classification.labels)


def _build_example(kept: KeptExample, texts: TextEncoder, labels: Sequence[str]) -> HeldOutExample:
    example = kept.example
    answer = example.answer
    if example.from_chat_template:  # ends as a turn does
        answer = answer[: texts.find_end(answer)]
    ids, begin = kept.encoded.ids, kept.encoded.answer
    end = int(kept.encoded.loss_mask.nonzero()[0][-1]) + 1
    special = [position for position in range(begin, end) if int(ids[position]) in texts.special_ids]
    if example.from_chat_template and special:  # what the template writes after the end of a turn is no answer
        end = special[-1] + 1
    return HeldOutExample(
        prompt=example.prompt.text,
        prompt_ids=tuple(ids[:begin].tolist()),
        answer=answer,
        answer_ids=tuple(ids[begin:end].tolist()),
        label=None if example.label is None else labels.index(example.label),
    )

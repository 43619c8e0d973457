"""Return the examples that are held back, as text for an evaluation.

Guarantees:
- Always the same examples, in the order of their records, and never one that is trained on.
- A prompt has the tokens that it has in training.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainium_contract.trainer.examples import DataFormat, LossOn
from trainium_trainer.data.examples.blocks import ExampleEncoder, Made
from trainium_trainer.data.examples.opening import ExampleSource, find_tokenizer, open_validation_sources
from trainium_trainer.data.examples.recipe import build_recipe
from trainium_trainer.data.examples.store import BLOCK_BYTES
from trainium_trainer.data.examples.templates import BadRecordError, Guard, build_pair
from trainium_trainer.data.prepared.cache import list_sources, with_cache
from trainium_trainer.data.tokens.encoding import Counts
from trainium_trainer.exits import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from trainium_contract.trainer.data import DataConfig
    from trainium_trainer.data.examples.encode import TextEncoder


@dataclass(frozen=True, slots=True)
class HeldOutExample:
    """One example that is not trained on."""

    prompt_text: str
    """With whatever a template writes around it."""
    prompt_ids: tuple[int, ...]
    """Its tokens as in training, the beginning of a text among them; cut where the example was."""
    answer_text: str
    """The answer of the record, without the token that ends it."""
    answer_ids: tuple[int, ...]
    """Its tokens as in training, the one that ends it among them."""
    label: str | None
    """Name of the class."""


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Questions for a model, and the expected answers."""

    examples: tuple[HeldOutExample, ...]
    labels: tuple[str, ...]
    """Names of all classes; none where the format is not Classification."""
    label_ids: tuple[tuple[int, ...], ...]
    """The tokens of those words as answers, without the one that ends them."""
    end: int
    """The token that ends an answer: that of a turn in a chat, else the tokenizer's EOS."""


def read_held_out(config: DataConfig, most: int | None = None) -> HeldOut:
    """Return at most `most` of the examples that data.validation holds back, source by source in their order.

    Raises UserError for data.format Text, for data without data.validation, and for unusable data; StorageError.
    """
    _refuse_text(config)
    if config.validation is None:
        raise UserError("data.validation is not given, so no example is held back: give it a fraction or a source")
    sources = with_cache(config, lambda cache: open_validation_sources(config, find_tokenizer(config, cache), cache))
    encoders = [ExampleEncoder(source.recipe) for source in sources]
    found = itertools.chain.from_iterable(
        _of_source(source, encoder) for source, encoder in zip(sources, encoders, strict=True)
    )
    labels = config.examples.classification.labels if config.format is DataFormat.CLASSIFICATION else ()
    examples = tuple(itertools.islice(found, most))
    texts = encoders[0].texts
    ends = {one.answer_ids[-1] for one in examples if one.answer_ids[-1] in texts.special_ids} if examples else set()
    end = ends.pop() if len(ends) == 1 else texts.end
    return HeldOut(examples, labels, _label_ids(encoders[0], examples, labels), end)


def _label_ids(
    encoder: ExampleEncoder, examples: Sequence[HeldOutExample], labels: Sequence[str]
) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of each label after a prompt."""
    if not labels or not examples:
        return ()
    first = examples[0]
    assert first.label is not None
    space = first.answer_text.removesuffix(first.label)
    made = [build_pair(first.prompt_text, f"{space}{label}") for label in labels]
    encoded = encoder.texts.encode(made, encoder.maker.guard, LossOn.ANSWER)
    return tuple(tuple(one.ids[one.answer : -1].tolist()) for one in encoded)


def build_prompts(config: DataConfig, given: Sequence[dict[str, Any] | str]) -> list[tuple[str, tuple[int, ...]]]:
    """Return text and tokens of several prompts, the tokens as in training. Raises UserError.

    Each is for a record without an answer, or for a text where the format asks for one field only.
    """
    _refuse_text(config)
    tokenizer = with_cache(config, lambda cache: find_tokenizer(config, cache))
    encoder = ExampleEncoder(build_recipe(config, list_sources(config)[0][0], tokenizer))
    return [_prompt(encoder, one) for one in given]


def _prompt(encoder: ExampleEncoder, given: dict[str, Any] | str) -> tuple[str, tuple[int, ...]]:
    fields = encoder.maker.prompt_of_text(given) if isinstance(given, str) else given
    try:
        text, framed = encoder.maker.prompt(fields)
    except BadRecordError as error:
        raise UserError(f"the prompt: {error}") from error
    guard = encoder.maker.guard
    return guard.show(text), tuple(encoder.texts.prompt_ids(text, guard, framed=framed))


def _refuse_text(config: DataConfig) -> None:
    if config.format is DataFormat.TEXT:
        raise UserError("data.format is Text, which has no prompts and answers: set another data.format")


def _of_source(source: ExampleSource, encoder: ExampleEncoder) -> Iterator[HeldOutExample]:
    """Yield the examples of a source that are held back: its records are read again, and counted as when stored."""
    guard = encoder.maker.guard
    opened = source.recipe.spec.source
    made = itertools.chain.from_iterable(
        encoder.encode(opened.all_records(block), Counts(), [], []) for block in opened.blocks(BLOCK_BYTES)
    )
    # Of a pair the preferred answer is expected.
    for one, held in itertools.islice(zip(made, source.held, strict=False), 0, None, encoder.maker.width):
        if held and one.encoded.answer < len(one.encoded.ids):
            yield _shown(one, guard, encoder.texts)


def _shown(one: Made, guard: Guard, texts: TextEncoder) -> HeldOutExample:
    example = one.example
    answer_text = example.answer
    if example.framed:  # ends as a turn does
        answer_text = answer_text[: texts.end_of(answer_text)]
    ids, answer = one.encoded.ids, one.encoded.answer
    end = int(one.encoded.trained.nonzero()[0][-1]) + 1  # what a chat template writes after the answer is not learned
    return HeldOutExample(
        prompt_text=guard.show(example.prompt),
        prompt_ids=tuple(ids[:answer].tolist()),
        answer_text=guard.show(answer_text),
        answer_ids=tuple(ids[answer:end].tolist()),
        label=example.label,
    )

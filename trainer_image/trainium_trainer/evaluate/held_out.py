"""Read what `data.validation` holds back, as prompts with expected answers for an evaluation.

Guarantees:
- Token ids equal those of the same record in training.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_contract.trainer.examples import DataFormat
from trainium_trainer.data.dataset import open_data
from trainium_trainer.data.examples.held_out import HeldOutExample, HeldOutExamples, read_held_out
from trainium_trainer.exits import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainium_contract.trainer.data import DataConfig


def read_held_out_examples(config: DataConfig, samples: int) -> HeldOutExamples:
    """Return at most `samples` of the examples that `data.validation` holds back, always the same ones.

    Samples of running text have `sequenceLength` tokens and no answer. Raises UserError, also if there are none, and
    StorageError.
    """
    if config.validation is None:
        raise UserError("data.validation is not given, so no examples are held back: give it a fraction or a source")
    if config.format is DataFormat.TEXT:
        return _read_running_text(config, samples)
    held_out = read_held_out(config, samples)
    if not held_out.examples:
        raise UserError(
            "data.validation: of the examples that are held back none has an answer within data.sequenceLength: raise "
            "that, or data.validation.fraction"
        )
    return held_out


def _read_running_text(config: DataConfig, samples: int) -> HeldOutExamples:
    assert config.validation is not None
    validation = config.validation.model_copy(update={"samples": samples})
    data = open_data(config.model_copy(update={"validation": validation}), 1)
    assert data.validation is not None
    rules = data.validation.rules
    rows = [sample.list_rows(rules)[0] for sample in data.validation.read_rank_samples(0, 1) if sample is not None]
    texts = [[*row.inputs.tolist(), int(row.targets[-1])] for row in rows]
    pieces = [
        piece for text in texts for piece in _divide_into_documents(text, rules.end_of_document) if len(piece) > 1
    ]
    if not pieces:
        raise UserError("data.validation: holds back no text: raise data.validation.fraction")
    return HeldOutExamples(
        examples=tuple(
            HeldOutExample(prompt="", prompt_ids=tuple(piece[:1]), answer_ids=tuple(piece[1:])) for piece in pieces
        ),
        has_answers=False,
    )


def _divide_into_documents(tokens: list[int], end: int | None) -> Iterator[list[int]]:
    """Yield the parts of a sample whose tokens attend to each other."""
    start = 0
    for position, token in enumerate(tokens, start=1):
        if token == end:
            yield tokens[start:position]
            start = position
    yield tokens[start:]

"""Questions out of a run's data: the examples that it holds back, and prompts by its template.

Invariant: token ids are those that the same record has in training.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_contract.trainer.examples import DataFormat
from trainium_trainer.data.examples.held_out import held_out, prompts_of
from trainium_trainer.data.opening import open_data, text_prompt_ids
from trainium_trainer.evaluate.exam import Exam, Question
from trainium_trainer.evaluate.prompts import plain_text
from trainium_trainer.exits import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from trainium_contract.trainer.data import DataConfig
    from trainium_trainer.evaluate.prompts import Asked


def exam_of(config: DataConfig, samples: int) -> Exam:
    """At most `samples` of the examples that `data.validation` holds back, always the same ones.

    Of running text they are samples of `sequenceLength` tokens, and nothing is to be answered. Raises UserError, also
    when there are none, and StorageError.
    """
    if config.validation is None:
        raise UserError("data.validation is not given, so no examples are held back: give it a fraction or a source")
    if config.format is DataFormat.TEXT:
        return _running_text(config, samples)
    held = held_out(config, samples)
    if not held.examples:
        raise UserError(
            "data.validation: of the examples that are held back none has an answer within data.sequenceLength: raise "
            "that, or data.validation.fraction"
        )
    return Exam(
        questions=tuple(
            Question(
                prompt=each.prompt_text,
                prompt_ids=each.prompt_ids,
                answer=each.answer_text,
                answer_ids=each.answer_ids,
                label=None if each.label is None else held.labels.index(each.label),
            )
            for each in held.examples
        ),
        labels=held.labels,
        label_ids=held.label_ids,
        ends=(held.end,),
    )


def asked_as_in_training(config: DataConfig, asked: Sequence[Asked]) -> list[Question]:
    """Prompts made by the template of the training, with the token ids that they have there. Raises UserError."""
    if config.format is DataFormat.TEXT:
        texts = [plain_text(each) for each in asked]
        known = zip(texts, text_prompt_ids(config, texts), strict=True)
        return [Question(prompt=text, prompt_ids=ids, answer="", answer_ids=()) for text, ids in known]
    made = prompts_of(config, asked)
    return [Question(prompt=text, prompt_ids=ids, answer="", answer_ids=()) for text, ids in made]


def _running_text(config: DataConfig, samples: int) -> Exam:
    assert config.validation is not None
    held = config.validation.model_copy(update={"samples": samples})
    data = open_data(config.model_copy(update={"validation": held}), 1)
    assert data.validation is not None
    rules = data.validation.rules
    rows = [sample.row(rules) for sample in data.validation.share(0, 1) if sample is not None]
    texts = [[*row.inputs.tolist(), int(row.targets[-1])] for row in rows]
    pieces = [piece for text in texts for piece in _documents(text, rules.end_of_document) if len(piece) > 1]
    if not pieces:
        raise UserError("data.validation: holds back no text: raise data.validation.fraction")
    return Exam(
        questions=tuple(
            Question(prompt="", prompt_ids=tuple(piece[:1]), answer="", answer_ids=tuple(piece[1:])) for piece in pieces
        ),
        generates=False,
    )


def _documents(tokens: list[int], end: int | None) -> Iterator[list[int]]:
    """The stretches of a sample that see each other: nothing foretells how the next document begins."""
    start = 0
    for place, token in enumerate(tokens, start=1):
        if token == end:
            yield tokens[start:place]
            start = place
    yield tokens[start:]

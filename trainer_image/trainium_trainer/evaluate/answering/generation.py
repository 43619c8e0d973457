"""Answers to prompts, in batches, by `transformers`.

Invariants: an answer depends on its prompt, the settings and its own seed, not on the prompts beside it (apart from
rounding); answers come in the order of the prompts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from trainium_trainer.evaluate.answering.batching import batches, draw_seeds
from trainium_trainer.evaluate.answering.draws import processors
from trainium_trainer.evaluate.answering.endings import Ending, Endings, cut
from trainium_trainer.exits import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from trainium_contract.trainer.evaluate import GenerationConfig
    from trainium_trainer.evaluate.answering.folder import Candidate
    from trainium_trainer.evaluate.answering.loading import LoadedModel


@dataclass(frozen=True, slots=True)
class GeneratedAnswer:
    """What a model answers."""

    text: str
    tokens: int
    """Tokens of the answer, without the one that ended it."""
    ending: Ending


def generate(
    model: LoadedModel,
    prompts: Sequence[Sequence[int]],
    config: GenerationConfig,
    *,
    seeds: Sequence[int] | None = None,
    ends: Sequence[int] = (),
    beat: Callable[[], None] = lambda: None,
) -> list[GeneratedAnswer]:
    """Answers to prompts of token ids; `seeds` are those of the draws, one a prompt.

    An answer ends at a token that the folder names as an end, or that is one of `ends`. `beat` is called at each token.

    Raises UserError for a prompt that the model cannot take.
    """
    check_prompts(model.folder, prompts)
    own = draw_seeds(prompts, config.seed) if seeds is None else list(seeds)
    answers: dict[int, GeneratedAnswer] = {}
    endings = sorted({*model.folder.endings, *ends})
    for batch in batches([len(prompt) for prompt in prompts], config.batch_size):
        found = _answers(model, [prompts[n] for n in batch], [own[n] for n in batch], config, endings, beat)
        answers |= zip(batch, found, strict=True)
    return [answers[number] for number in range(len(prompts))]


def check_prompts(folder: Candidate, prompts: Sequence[Sequence[int]]) -> None:
    """Refuse what the model cannot take: no token, more tokens than positions, ids beyond the vocabulary."""
    for number, prompt in enumerate(prompts, start=1):
        if not prompt:
            raise UserError(f"prompt {number} has no tokens: write a text")
        if folder.positions is not None and len(prompt) >= folder.positions:
            raise UserError(
                f"prompt {number} has {len(prompt)} tokens, but {folder.path} has {folder.positions} positions, of "
                "which an answer needs one: shorten the prompt"
            )
        if max(prompt) >= folder.vocabulary:
            raise UserError(
                f"prompt {number} has the token {max(prompt)}, but {folder.path} has {folder.vocabulary} rows: the "
                "tokenizer is not that of the model"
            )


def left_padded(rows: Sequence[Sequence[int]], device: torch.device, fill: int = 0) -> tuple[Tensor, Tensor]:
    """Rows of ids that end together: int64 ids [rows, width], and a mask of that size that is 0 on padding."""
    width = max(map(len, rows))
    ids = torch.tensor([[fill] * (width - len(row)) + list(row) for row in rows], device=device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)
    return ids, mask


@torch.no_grad()
def _answers(
    model: LoadedModel,
    prompts: list[Sequence[int]],
    seeds: list[int],
    config: GenerationConfig,
    ends: list[int],
    beat: Callable[[], None],
) -> list[GeneratedAnswer]:
    from transformers import GenerationConfig as LibraryConfig  # noqa: PLC0415 - seconds
    from transformers import StoppingCriteriaList  # noqa: PLC0415

    folder = model.folder
    ids, mask = left_padded(prompts, model.device)
    room = [config.max_new_tokens if folder.positions is None else folder.positions - len(row) for row in prompts]
    limits = [min(config.max_new_tokens, each) for each in room]
    stop = config.stop or ()
    endings = Endings(folder.decode, width=ids.shape[1], limits=limits, stop=stop, beat=beat)
    out = model.network.generate(
        ids,
        attention_mask=mask,
        generation_config=LibraryConfig(  # type: ignore[no-untyped-call]
            do_sample=False,
            max_new_tokens=max(limits),
            eos_token_id=ends or None,
            pad_token_id=ends[0] if ends else 0,
        ),
        logits_processor=processors(config, seeds),
        stopping_criteria=StoppingCriteriaList([endings]),
    )
    rows = out[:, ids.shape[1] :].tolist()
    return [_answer(folder, row[:length], stop, ends) for row, length in zip(rows, endings.lengths, strict=True)]


def _answer(folder: Candidate, ids: list[int], stop: Sequence[str], endings: list[int]) -> GeneratedAnswer:
    """An answer out of what was generated, which goes on with padding after its end."""
    places = [place for place, token in enumerate(ids) if token in endings]
    ids = ids[: places[0]] if places else ids
    text = folder.decode(ids)
    short = cut(text, stop)
    if short is not None:
        return GeneratedAnswer(short, len(ids), Ending.STOP)
    return GeneratedAnswer(text, len(ids), Ending.END_OF_TEXT if places else Ending.LENGTH)

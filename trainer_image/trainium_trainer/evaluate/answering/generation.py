"""Generate answers to prompts in batches with `transformers`.

Guarantees:
- An answer depends on its prompt, the settings and its seed, not on the other prompts of its batch (apart from
  rounding).
- Answers are in the order of the prompts.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import BoolTensor, FloatTensor, LongTensor, Tensor
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from trainium_trainer.exits import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trainium_contract.trainer.evaluate import GenerationConfig
    from trainium_trainer.evaluate.answering.folder import ModelFiles
    from trainium_trainer.evaluate.answering.loading import LoadedModel


@dataclass(frozen=True, slots=True)
class GeneratedAnswer:
    """An answer of a model."""

    text: str
    tokens: int
    """The tokens of the answer, without the end token."""
    finish_reason: FinishReason


def generate(
    model: LoadedModel,
    prompts: Sequence[Sequence[int]],
    config: GenerationConfig,
    *,
    seeds: Sequence[int] | None = None,
    ends: Sequence[int] = (),
    heartbeat: Callable[[], None] = lambda: None,
) -> list[GeneratedAnswer]:
    """Generate answers to prompts of token ids; `seeds` are the seeds of sampling, one per prompt.

    An answer ends at an end token of the folder or one of `ends`. `heartbeat` is called at each token. Raises UserError
    for a prompt that the model does not support.
    """
    check_prompts(model.folder, prompts)
    prompt_seeds = draw_seeds(prompts, config.seed) if seeds is None else list(seeds)
    answers: dict[int, GeneratedAnswer] = {}
    end_tokens = sorted({*model.folder.end_tokens, *ends})
    for batch in group_by_length([len(prompt) for prompt in prompts], config.batch_size):
        batch_prompts, batch_seeds = [prompts[n] for n in batch], [prompt_seeds[n] for n in batch]
        batch_answers = _generate_batch(model, batch_prompts, batch_seeds, config, end_tokens, heartbeat)
        answers |= zip(batch, batch_answers, strict=True)
    return [answers[number] for number in range(len(prompts))]


def check_prompts(folder: ModelFiles, prompts: Sequence[Sequence[int]]) -> None:
    """Raise UserError for a prompt without tokens, with more tokens than positions, or with unknown ids."""
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


def pad_left(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return left-padded int64 ids [rows, width], and a mask of that size that is 0 on padding."""
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + list(row) for row in rows], device=device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)
    return ids, mask


@torch.no_grad()
def _generate_batch(
    model: LoadedModel,
    prompts: list[Sequence[int]],
    seeds: list[int],
    config: GenerationConfig,
    ends: list[int],
    heartbeat: Callable[[], None],
) -> list[GeneratedAnswer]:
    from transformers import GenerationConfig as LibraryConfig  # noqa: PLC0415 - seconds
    from transformers import StoppingCriteriaList  # noqa: PLC0415

    folder = model.folder
    ids, mask = pad_left(prompts, model.device)
    capacity = [config.max_new_tokens if folder.positions is None else folder.positions - len(row) for row in prompts]
    limits = [min(config.max_new_tokens, limit) for limit in capacity]
    stop = config.stop or ()
    stopping = AnswerStopping(folder.decode, width=ids.shape[1], limits=limits, stop=stop, heartbeat=heartbeat)
    out = model.network.generate(
        ids,
        attention_mask=mask,
        generation_config=LibraryConfig(  # type: ignore[no-untyped-call]
            do_sample=False,
            max_new_tokens=max(limits),
            eos_token_id=ends or None,
            pad_token_id=ends[0] if ends else 0,
        ),
        logits_processor=build_logits_processors(config, seeds),
        stopping_criteria=StoppingCriteriaList([stopping]),
    )
    rows = out[:, ids.shape[1] :].tolist()
    return [_build_answer(folder, row[:length], stop, ends) for row, length in zip(rows, stopping.lengths, strict=True)]


def _build_answer(folder: ModelFiles, ids: list[int], stop: Sequence[str], end_tokens: list[int]) -> GeneratedAnswer:
    """Return the answer in generated tokens, which may have padding after its end."""
    ends = [position for position, token in enumerate(ids) if token in end_tokens]
    ids = ids[: ends[0]] if ends else ids
    text = folder.decode(ids)
    short = truncate_at_stop(text, stop)
    if short is not None:
        return GeneratedAnswer(short, len(ids), FinishReason.STOP)
    return GeneratedAnswer(text, len(ids), FinishReason.END_OF_TEXT if ends else FinishReason.LENGTH)


def group_by_length(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Return indices of the examples in batches of at most `size`, grouped by length, the longest first.

    The longest come first so that a lack of memory shows immediately.
    """
    order = sorted(range(len(lengths)), key=lambda number: (-lengths[number], number))
    return [order[start : start + size] for start in range(0, len(order), size)]


def draw_seeds(prompts: Sequence[Sequence[int]], seed: int) -> list[int]:
    """Return a seed for each prompt, from `seed`, the prompt's ids and the number of equal prompts before it."""
    before: Counter[bytes] = Counter()
    seeds = []
    for ids in prompts:
        content = ",".join(map(str, ids)).encode()
        digest = hashlib.sha256(f"{seed}/{before[content]}/".encode() + content).digest()
        before[content] += 1
        seeds.append(int.from_bytes(digest[:8]) >> 1)  # the range of a generator's seed
    return seeds


class GumbelNoise(LogitsProcessor):
    """Adds noise to each row, from a separate generator per row."""

    def __init__(self, seeds: Sequence[int]) -> None:
        self._generators = [torch.Generator().manual_seed(seed) for seed in seeds]

    def __call__(self, input_ids: LongTensor, scores: FloatTensor) -> FloatTensor:  # noqa: ARG002 - the library's
        """Add noise to [rows, vocabulary] logits."""
        noise = torch.stack(
            [-torch.empty(scores.shape[1]).exponential_(generator=generator).log() for generator in self._generators]
        )
        return scores + noise.to(scores.device)  # type: ignore[return-value]


def build_logits_processors(config: GenerationConfig, seeds: Sequence[int]) -> LogitsProcessorList:
    """Return the logits processors for sampling; none at temperature 0."""
    processors = LogitsProcessorList()
    if config.temperature == 0:
        return processors
    if config.temperature != 1:
        processors.append(TemperatureLogitsWarper(config.temperature))
    if config.top_k:
        processors.append(TopKLogitsWarper(config.top_k))
    if config.top_p < 1:
        processors.append(TopPLogitsWarper(config.top_p))
    processors.append(GumbelNoise(seeds))
    return processors


_BYTES_OF_A_CHARACTER = 4


class FinishReason(StrEnum):
    """The reason for the end of an answer."""

    END_OF_TEXT = "EndOfText"
    STOP = "Stop"
    LENGTH = "Length"


def truncate_at_stop(text: str, stop: Sequence[str]) -> str | None:
    """Return the text before the first stop text; None if there is none."""
    starts = [start for start in map(text.find, stop) if start >= 0]
    return text[: min(starts)] if starts else None


class AnswerStopping(StoppingCriteria):
    """Ends a row at its limit or when its newest tokens complete a stop text; sends a heartbeat with each token."""

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        *,
        width: int,
        limits: Sequence[int],
        stop: Sequence[str],
        heartbeat: Callable[[], None],
    ) -> None:
        """Create the criterion; `width` is the length of padded prompts, `limits` the maximum new tokens per row."""
        self._decode = decode
        self._width = width
        self._limits = limits
        self._stop = stop
        # A token has at least one byte, so a stop text that was just completed begins within these tokens.
        self._tail = max((_BYTES_OF_A_CHARACTER * len(text) for text in stop), default=0) + _BYTES_OF_A_CHARACTER
        self._heartbeat = heartbeat
        self.lengths = list(limits)
        """The new tokens of each row until its end; padding follows."""

    def __call__(self, input_ids: LongTensor, scores: FloatTensor, **_: Any) -> BoolTensor:  # noqa: ARG002
        """Return which rows of [rows, width + new] ids have ended."""
        self._heartbeat()
        new = input_ids.shape[1] - self._width
        tails = input_ids[:, max(self._width, input_ids.shape[1] - self._tail) :].tolist() if self._stop else None
        done = []
        for row, limit in enumerate(self._limits):
            stops = tails is not None and truncate_at_stop(self._decode(tails[row]), self._stop) is not None
            if stops or new >= limit:
                self.lengths[row] = min(self.lengths[row], new)
            done.append(new >= self.lengths[row])
        return cast("BoolTensor", torch.tensor(done, device=input_ids.device))

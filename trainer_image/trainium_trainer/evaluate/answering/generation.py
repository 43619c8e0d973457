"""Answers to prompts, in batches, by `transformers`.

Invariants: an answer depends on its prompt, the settings and its own seed, not on the prompts beside it (apart from
rounding); answers come in the order of the prompts.
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
    from trainium_trainer.evaluate.answering.folder import Candidate
    from trainium_trainer.evaluate.answering.loading import LoadedModel


@dataclass(frozen=True, slots=True)
class GeneratedAnswer:
    """An answer of a model."""

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


def left_padded(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows of ids that end together: int64 ids [rows, width], and a mask of that size that is 0 on padding."""
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + list(row) for row in rows], device=device)
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
    capacity = [config.max_new_tokens if folder.positions is None else folder.positions - len(row) for row in prompts]
    limits = [min(config.max_new_tokens, each) for each in capacity]
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
    """Return an answer out of what was generated, which goes on with padding after its end."""
    places = [place for place, token in enumerate(ids) if token in endings]
    ids = ids[: places[0]] if places else ids
    text = folder.decode(ids)
    short = cut(text, stop)
    if short is not None:
        return GeneratedAnswer(short, len(ids), Ending.STOP)
    return GeneratedAnswer(text, len(ids), Ending.END_OF_TEXT if places else Ending.LENGTH)


def batches(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Numbers of the examples in batches of at most `size`, similar lengths together, the longest first.

    The longest come first so that memory which does not do is found at once.
    """
    order = sorted(range(len(lengths)), key=lambda number: (-lengths[number], number))
    return [order[start : start + size] for start in range(0, len(order), size)]


def share(batches: Sequence[list[int]], place: int, places: int) -> list[list[int]]:
    """Return the batches that one of `places` readers takes: whole ones, so that no figure depends on how many read."""
    return list(batches[place::places])


def draw_seeds(prompts: Sequence[Sequence[int]], seed: int) -> list[int]:
    """Return a seed for each prompt, from `seed`, the prompt's ids and the number of equal prompts before it."""
    before: Counter[bytes] = Counter()
    seeds = []
    for ids in prompts:
        content = ",".join(map(str, ids)).encode()
        digest = hashlib.sha256(f"{seed}/{before[content]}/".encode() + content).digest()
        before[content] += 1
        seeds.append(int.from_bytes(digest[:8]) >> 1)  # what a generator takes as its seed
    return seeds


class GumbelNoise(LogitsProcessor):
    """Adds noise to each row from a separate generator."""

    def __init__(self, seeds: Sequence[int]) -> None:
        self._generators = [torch.Generator().manual_seed(seed) for seed in seeds]

    def __call__(self, input_ids: LongTensor, scores: FloatTensor) -> FloatTensor:  # noqa: ARG002 - the library's
        """[rows, vocabulary] logits to the same, with noise."""
        noise = torch.stack(
            [-torch.empty(scores.shape[1]).exponential_(generator=each).log() for each in self._generators]
        )
        return scores + noise.to(scores.device)  # type: ignore[return-value]


def processors(config: GenerationConfig, seeds: Sequence[int]) -> LogitsProcessorList:
    """Return the logits processors for sampling; none at temperature 0."""
    found = LogitsProcessorList()
    if config.temperature == 0:
        return found
    if config.temperature != 1:
        found.append(TemperatureLogitsWarper(config.temperature))
    if config.top_k:
        found.append(TopKLogitsWarper(config.top_k))
    if config.top_p < 1:
        found.append(TopPLogitsWarper(config.top_p))
    found.append(GumbelNoise(seeds))
    return found


_BYTES_OF_A_CHARACTER = 4


class Ending(StrEnum):
    """Reason for which an answer ended."""

    END_OF_TEXT = "EndOfText"
    STOP = "Stop"
    LENGTH = "Length"


def cut(text: str, stop: Sequence[str]) -> str | None:
    """Return the text before the first stop text in it; None when there is none."""
    places = [place for place in map(text.find, stop) if place >= 0]
    return text[: min(places)] if places else None


class Endings(StoppingCriteria):
    """Ends a row at its own limit or when its newest tokens complete a stop text; a sign of life with each token."""

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        *,
        width: int,
        limits: Sequence[int],
        stop: Sequence[str],
        beat: Callable[[], None],
    ) -> None:
        """`width` is the length of the padded prompts, `limits` are most new tokens of each row."""
        self._decode = decode
        self._width = width
        self._limits = limits
        self._stop = stop
        # No token is shorter than a byte, so a stop text that has just been completed begins within these.
        self._tail = max((_BYTES_OF_A_CHARACTER * len(text) for text in stop), default=0) + _BYTES_OF_A_CHARACTER
        self._beat = beat
        self.lengths = list(limits)
        """New tokens of each row until it ended here; what follows is padding."""

    def __call__(self, input_ids: LongTensor, scores: FloatTensor, **_: Any) -> BoolTensor:  # noqa: ARG002
        """[rows, width + new] ids to [rows]: which rows are at their end."""
        self._beat()
        new = input_ids.shape[1] - self._width
        tails = input_ids[:, max(self._width, input_ids.shape[1] - self._tail) :].tolist() if self._stop else None
        done = []
        for row, limit in enumerate(self._limits):
            stops = tails is not None and cut(self._decode(tails[row]), self._stop) is not None
            if stops or new >= limit:
                self.lengths[row] = min(self.lengths[row], new)
            done.append(new >= self.lengths[row])
        return cast("BoolTensor", torch.tensor(done, device=input_ids.device))


Pair = tuple["Sequence[int]", "Sequence[int]"]
"""Token ids of a prompt and of what follows it."""


@dataclass(frozen=True, slots=True)
class Likelihood:
    """The likelihood of one answer."""

    log: float
    """Sum of the natural logarithms of its tokens' probabilities."""
    tokens: int


def likelihoods(
    model: LoadedModel, pairs: Sequence[Pair], *, batch_size: int, beat: Callable[[], None] = lambda: None
) -> list[Likelihood]:
    """Return the likelihood of each answer after its prompt; after an empty prompt the first token is not counted."""
    rows = [
        (list(prompt), list(answer)) if prompt else (list(answer[:1]), list(answer[1:])) for prompt, answer in pairs
    ]
    found = {number: Likelihood(0.0, 0) for number in range(len(rows))}
    counted = [number for number in found if rows[number][1]]
    lengths = [len(rows[number][0]) + len(rows[number][1]) for number in counted]
    for batch in batches(lengths, batch_size):
        beat()
        numbers = [counted[place] for place in batch]
        found |= zip(numbers, _of_batch(model, [rows[number] for number in numbers]), strict=True)
    return [found[number] for number in range(len(rows))]


@torch.no_grad()
def _of_batch(model: LoadedModel, rows: list[tuple[list[int], list[int]]]) -> list[Likelihood]:
    ids, mask = left_padded([prompt + answer for prompt, answer in rows], model.device)
    longest = max(len(answer) for _, answer in rows)
    logits = model.network(
        input_ids=ids,
        attention_mask=mask,
        position_ids=(mask.cumsum(-1) - 1).clamp(min=0),
        logits_to_keep=longest + 1,  # nothing is needed of the long prompts before
        use_cache=False,
    ).logits
    found = []
    for row, (_, answer) in zip(logits, rows, strict=True):  # row by row: float32 of a large vocabulary is much
        truth = torch.tensor(answer, device=model.device)
        each = row[-len(answer) - 1 : -1].float().log_softmax(-1).gather(-1, truth[:, None])
        found.append(Likelihood(float(each.cpu().double().sum()), len(answer)))
    return found

"""Answers: against plain greedy search, alone and in batches, drawn, cut at stop texts and limits."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch

from trainium_contract.trainer.evaluate import GenerationConfig
from trainium_trainer.evaluate.answering.folder import open_candidate
from trainium_trainer.evaluate.answering.generation import Ending, draw_seeds, generate
from trainium_trainer.evaluate.answering.loading import ComputeDevice, LoadedModel, load
from trainium_trainer.exits import UserError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


TEXTS = ("gradient loss", "a step", "warm tensor state of the mesh", "no", "shard rank node batch token")


@pytest.fixture(scope="module")
def model(model_folder: Path) -> LoadedModel:
    return load(open_candidate(model_folder), device=ComputeDevice.CPU)


def prompts_of(model: LoadedModel) -> list[list[int]]:
    return [model.folder.encode(text) for text in TEXTS]


def test_without_temperature_each_answer_is_the_likeliest_token_after_token(model: LoadedModel) -> None:
    prompts = prompts_of(model)
    answers = generate(model, prompts, GenerationConfig(max_new_tokens=9, batch_size=3))
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = list(prompt)
        with torch.no_grad():
            for _ in range(9):
                ids.append(int(model.network(torch.tensor([ids])).logits[0, -1].argmax()))
                if ids[-1] in model.folder.endings:
                    ids.pop()
                    break
        assert answer.text == model.folder.decode(ids[len(prompt) :])
        assert answer.tokens == len(ids) - len(prompt)


def test_a_drawn_answer_is_the_same_in_any_batch_and_another_with_another_seed(model: LoadedModel) -> None:
    prompts = prompts_of(model)
    config = GenerationConfig(max_new_tokens=12, temperature=0.9, top_p=0.95, top_k=40, seed=3, batch_size=1)
    alone = generate(model, prompts, config)
    assert generate(model, prompts, config.model_copy(update={"batch_size": 5})) == alone
    seeds = draw_seeds(prompts, 3)
    assert generate(model, prompts[2:4], config, seeds=seeds[2:4]) == alone[2:4]
    assert generate(model, prompts, config.model_copy(update={"seed": 4})) != alone


def test_equal_prompts_are_drawn_apart(model: LoadedModel) -> None:
    prompt = model.folder.encode("gradient")
    first, second = generate(model, [prompt, prompt], GenerationConfig(max_new_tokens=12, temperature=1.0))
    assert first.text != second.text


def test_draws_follow_the_probabilities(model: LoadedModel) -> None:
    prompt = model.folder.encode("loss")
    with torch.no_grad():
        expected = (model.network(torch.tensor([prompt])).logits[0, -1] / 0.5).softmax(-1)
    config = GenerationConfig(max_new_tokens=1, temperature=0.5, batch_size=1000)
    answers = generate(model, [prompt] * 1000, config)
    likeliest = int(expected.argmax())
    share = sum(answer.text == model.folder.decode([likeliest]) for answer in answers) / 1000
    assert abs(share - float(expected[likeliest])) < 0.05  # 3 standard deviations at most, and the seeds are fixed


def test_only_one_token_can_be_drawn_with_top_k_of_one(model: LoadedModel) -> None:
    prompts = prompts_of(model)
    drawn = generate(model, prompts, GenerationConfig(max_new_tokens=6, temperature=2.0, top_k=1))
    assert drawn == generate(model, prompts, GenerationConfig(max_new_tokens=6))


def test_an_answer_ends_before_its_stop_text(model: LoadedModel) -> None:
    prompts = prompts_of(model)
    whole = generate(model, prompts, GenerationConfig(max_new_tokens=20))
    text = whole[0].text
    stop = text[6:9]
    (short, *others) = generate(model, prompts, GenerationConfig(max_new_tokens=20, stop=(stop,)))
    assert short.text == text[: text.index(stop)]
    assert short.ending is Ending.STOP
    assert short.tokens < whole[0].tokens
    for answer, longer in zip(others, whole[1:], strict=True):
        assert answer.text == longer.text.split(stop)[0]


def test_an_answer_ends_at_the_model_s_last_position(model: LoadedModel) -> None:
    short, long = model.folder.encode("a"), model.folder.encode("a") * 60
    first, second = generate(model, [short, long], GenerationConfig(max_new_tokens=10))
    assert len(long) == 60
    assert (second.tokens, second.ending) == (4, Ending.LENGTH)
    assert (first.tokens, first.ending) == (10, Ending.LENGTH)


def test_an_answer_ends_at_the_end_of_text(write_model: Callable[..., Path], tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    plain = load(open_candidate(folder), device=ComputeDevice.CPU)
    prompt = plain.folder.encode("gradient loss")
    with torch.no_grad():
        first = int(plain.network(torch.tensor([prompt])).logits[0, -1].argmax())
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [first], "do_sample": True}))
    model = load(open_candidate(folder), device=ComputeDevice.CPU)
    (answer,) = generate(model, [prompt], GenerationConfig())
    assert (answer.text, answer.tokens, answer.ending) == ("", 0, Ending.END_OF_TEXT)


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([], ["prompt 2", "no tokens"]),
        ([5] * 64, ["prompt 2", "64 tokens", "64 positions", "shorten"]),
        ([5, 4000], ["prompt 2", "4000", "tokenizer"]),
    ],
    ids=["empty", "too long", "beyond the vocabulary"],
)
def test_a_prompt_that_the_model_cannot_take_is_refused(
    model: LoadedModel, prompt: list[int], words: list[str]
) -> None:
    with pytest.raises(UserError) as caught:
        generate(model, [[5], prompt], GenerationConfig())
    assert all(word in str(caught.value) for word in words)

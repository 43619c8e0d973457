"""Generate answers: greedy search, sampling, stop texts and limits; compare likelihoods with transformers' loss."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from trainium_contract.accelerators import Device
from trainium_contract.trainer.evaluate import GenerationConfig
from trainium_trainer.evaluate.answering.folder import open_model_files
from trainium_trainer.evaluate.answering.generation import FinishReason, draw_seeds, generate
from trainium_trainer.evaluate.answering.likelihood import compute_likelihoods
from trainium_trainer.evaluate.answering.loading import LoadedModel, load
from trainium_trainer.exits import UserError

TEXTS = ("gradient loss", "a step", "warm tensor state of the mesh", "no", "shard rank node batch token")


@pytest.fixture(scope="module")
def model(model_folder: Path) -> LoadedModel:
    return load(open_model_files(model_folder), device=Device.CPU)


def encode_texts(model: LoadedModel) -> list[list[int]]:
    return [model.folder.encode(text) for text in TEXTS]


def test_without_temperature_each_token_is_the_likeliest(model: LoadedModel) -> None:
    prompts = encode_texts(model)
    answers = generate(model, prompts, GenerationConfig(max_new_tokens=9, batch_size=3))
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = list(prompt)
        with torch.no_grad():
            for _ in range(9):
                ids.append(int(model.network(torch.tensor([ids])).logits[0, -1].argmax()))
                if ids[-1] in model.folder.end_tokens:
                    ids.pop()
                    break
        assert answer.text == model.folder.decode(ids[len(prompt) :])
        assert answer.tokens == len(ids) - len(prompt)


def test_a_drawn_answer_is_the_same_in_any_batch_and_another_with_another_seed(model: LoadedModel) -> None:
    prompts = encode_texts(model)
    config = GenerationConfig(max_new_tokens=12, temperature=0.9, top_p=0.95, top_k=40, seed=3, batch_size=1)
    expected = generate(model, prompts, config)
    assert generate(model, prompts, config.model_copy(update={"batch_size": 5})) == expected
    seeds = draw_seeds(prompts, 3)
    assert generate(model, prompts[2:4], config, seeds=seeds[2:4]) == expected[2:4]
    assert generate(model, prompts, config.model_copy(update={"seed": 4})) != expected


def test_equal_prompts_are_sampled_independently(model: LoadedModel) -> None:
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
    assert abs(share - float(expected[likeliest])) < 0.05  # 3 standard deviations; the seeds are fixed


def test_only_one_token_can_be_drawn_with_top_k_of_one(model: LoadedModel) -> None:
    prompts = encode_texts(model)
    drawn = generate(model, prompts, GenerationConfig(max_new_tokens=6, temperature=2.0, top_k=1))
    assert drawn == generate(model, prompts, GenerationConfig(max_new_tokens=6))


def test_an_answer_ends_before_its_stop_text(model: LoadedModel) -> None:
    prompts = encode_texts(model)
    unlimited = generate(model, prompts, GenerationConfig(max_new_tokens=20))
    text = unlimited[0].text
    stop = text[6:9]
    (short, *others) = generate(model, prompts, GenerationConfig(max_new_tokens=20, stop=(stop,)))
    assert short.text == text[: text.index(stop)]
    assert short.finish_reason is FinishReason.STOP
    assert short.tokens < unlimited[0].tokens
    for answer, longer in zip(others, unlimited[1:], strict=True):
        assert answer.text == longer.text.split(stop)[0]


def test_an_answer_ends_at_the_last_position_of_the_model(model: LoadedModel) -> None:
    short, long = model.folder.encode("a"), model.folder.encode("a") * 60
    first, second = generate(model, [short, long], GenerationConfig(max_new_tokens=10))
    assert len(long) == 60
    assert (second.tokens, second.finish_reason) == (4, FinishReason.LENGTH)
    assert (first.tokens, first.finish_reason) == (10, FinishReason.LENGTH)


def test_an_answer_ends_at_the_end_of_text(write_model: Callable[..., Path], tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    plain = load(open_model_files(folder), device=Device.CPU)
    prompt = plain.folder.encode("gradient loss")
    with torch.no_grad():
        first = int(plain.network(torch.tensor([prompt])).logits[0, -1].argmax())
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [first], "do_sample": True}))
    model = load(open_model_files(folder), device=Device.CPU)
    (answer,) = generate(model, [prompt], GenerationConfig())
    assert (answer.text, answer.tokens, answer.finish_reason) == ("", 0, FinishReason.END_OF_TEXT)


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([], ["prompt 2", "no tokens"]),
        ([5] * 64, ["prompt 2", "64 tokens", "64 positions", "shorten"]),
        ([5, 4000], ["prompt 2", "4000", "tokenizer"]),
    ],
    ids=["empty", "too long", "beyond the vocabulary"],
)
def test_an_invalid_prompt_is_refused(model: LoadedModel, prompt: list[int], words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        generate(model, [[5], prompt], GenerationConfig())
    assert all(word in str(caught.value) for word in words)


PAIRS = [([5, 6, 7], [8, 9]), ([4], [12, 3, 5, 7, 9, 11]), ([9] * 12, [2]), ([], [6, 7, 8]), ([3, 4], []), ([], [7])]


@pytest.mark.parametrize("batch_size", [1, 2, 6])
def test_the_likelihood_of_an_answer_is_the_loss_of_transformers(model: LoadedModel, batch_size: int) -> None:
    likelihoods = compute_likelihoods(model, PAIRS, batch_size=batch_size)
    for (prompt, answer), likelihood in zip(PAIRS, likelihoods, strict=True):
        ids = torch.tensor([prompt + answer])
        first = max(1, len(prompt))
        assert likelihood.tokens == max(0, ids.shape[1] - first)
        if not likelihood.tokens:
            assert likelihood.log_likelihood == 0
            continue
        labels = ids.clone()
        labels[0, :first] = -100
        with torch.no_grad():
            loss = model.network(ids, labels=labels).loss
        assert likelihood.log_likelihood == pytest.approx(-float(loss) * likelihood.tokens, rel=1e-5)

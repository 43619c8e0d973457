"""Encode pairs of answers in the columns of trl, with one prompt for both, and refuse unusable records."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from tests.testing.trainer.example_files import CHAT as LLAMA3
from tests.testing.trainer.example_files import (
    CHATML,
    CLOSED,
    EOS,
    decode,
    encode,
    make_config,
    open_encoded,
    write_records,
    write_tokenizer,
)
from trainium_contract.trainer.data import ValidationConfig
from trainium_trainer.configuration.config import parse
from trainium_trainer.data.examples.dataset import ExampleDataset
from trainium_trainer.data.examples.held_out import build_prompts, read_held_out
from trainium_trainer.data.loader import build_micro_batch, trim_padding
from trainium_trainer.exits import UserError

ASK = {"role": "user", "content": "name a shard"}
GOOD, BAD = ({"role": "assistant", "content": text} for text in ("a tensor", "the node"))
TEXT = {"prompt": "name a shard:", "chosen": " a tensor", "rejected": " the node"}
THINKING = CHATML.replace("assistant\n' }}{% endif %}", "assistant\n<think>' }}{% endif %}")
OPENED = CLOSED.replace("<think></think>", "<think>\n\n</think>\n\n")
CHAT = {"prompt": [ASK], "chosen": [GOOD], "rejected": [BAD]}


def encode_pairs(tmp_path: Path, rows: list[dict[str, Any]], **settings: Any) -> ExampleDataset:
    return encode(tmp_path, rows, format="Preference", max_bad_lines=0, **settings)


def render_turn(role: str, text: str) -> str:
    return f"<|head|>{role}<|tail|>\n\n{text}<|eot|>"


@pytest.mark.parametrize(
    "row",
    [
        TEXT,
        {"chosen": "name a shard: a tensor", "rejected": "name a shard: the node"},
        {name: value for name, value in TEXT.items() if name != "prompt"}
        | {"prompt": "name a shard:", "score_chosen": 8.0},
    ],
    ids=["prompt", "common start", "more columns"],
)
def test_texts_are_a_prompt_and_two_answers_with_an_end(tmp_path: Path, row: dict[str, Any]) -> None:
    assert decode(encode_pairs(tmp_path, [row])) == [
        (f"<|begin|>name a shard: a tensor{EOS}", f" a tensor{EOS}"),
        (f"<|begin|>name a shard: the node{EOS}", f" the node{EOS}"),
    ]


@pytest.mark.parametrize(
    "row",
    [
        CHAT,
        {"chosen": [ASK, GOOD], "rejected": [ASK, BAD]},
        {"prompt": "name a shard", "chosen": [ASK, GOOD], "rejected": [ASK, BAD], "prompt_id": "1"},
        {name: json.dumps(value) for name, value in CHAT.items()},
    ],
    ids=["prompt", "common start", "UltraFeedback", "as JSON"],
)
def test_messages_are_put_together_by_the_chat_template(tmp_path: Path, row: dict[str, Any]) -> None:
    before = f"<|begin|>{render_turn('user', 'name a shard')}<|head|>assistant<|tail|>\n\n"
    assert decode(encode_pairs(tmp_path, [row])) == [
        (f"{before}a tensor<|eot|>", "a tensor<|eot|>"),
        (f"{before}the node<|eot|>", "the node<|eot|>"),
    ]


def test_only_the_last_answers_of_a_conversation_are_compared(tmp_path: Path) -> None:
    earlier = [{"role": "user", "content": "step?"}, {"role": "assistant", "content": "step"}, ASK]
    examples = decode(encode_pairs(tmp_path, [{"chosen": [*earlier, GOOD], "rejected": [*earlier, BAD]}]))
    assert [learned for _, learned in examples] == ["a tensor<|eot|>", "the node<|eot|>"]


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        (TEXT | {"rejected": " a tensor"}, "the two answers are equal, so neither is preferred"),
        (CHAT | {"rejected": [GOOD]}, "the two answers are equal, so neither is preferred"),
        (TEXT | {"rejected": "  "}, "the answer is empty"),
        (CHAT | {"chosen": [GOOD | {"content": ""}]}, "the answer is empty"),
        ({"prompt": "a", "chosen": "b"}, "has no field 'rejected', which data.examples.preference names .*'prompt'"),
        (TEXT | {"chosen": 7}, "the field 'chosen' is neither a text nor a list of messages"),
        (CHAT | {"chosen": "a tensor"}, "one answer is a text and the other a list of messages"),
        ({"chosen": "tensor", "rejected": "node"}, "has no field 'prompt'.* and the answers begin differently"),
        (
            {"chosen": [GOOD], "rejected": [BAD]},
            "the two answers begin with different messages, and there is no prompt",
        ),
        (TEXT | {"prompt": [ASK]}, "the prompt is no text but the answers are"),
    ],
)
def test_an_invalid_pair_is_named_by_its_line(tmp_path: Path, row: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=f"d.jsonl line 2: .*{sentence}"):
        encode_pairs(tmp_path, [TEXT, row])


def test_a_chat_template_that_changes_the_prompt_by_the_answer_is_refused(tmp_path: Path) -> None:
    template = (
        "{{ messages[-1]['content'] | length }}{% for message in messages %}{% if message['role'] == 'assistant' %}"
        "{% generation %}{{ message['content'] }}{% endgeneration %}{% else %}{{ message['content'] }}{% endif %}"
        "{% endfor %}"
    )
    write_tokenizer(tmp_path / "tokenizer", chat=template)
    longer = CHAT | {"chosen": [GOOD | {"content": "a tensor of the mesh"}]}
    with pytest.raises(UserError, match="the chat template changes what comes before an answer"):
        encode_pairs(tmp_path, [longer])


def test_messages_without_a_chat_template_name_where_to_give_one(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer", chat=None)
    with pytest.raises(UserError, match=r"there is no chat template: give data\.examples\.chat\.template"):
        encode_pairs(tmp_path, [CHAT])


def test_other_columns_can_be_named(tmp_path: Path) -> None:
    row = {"question": "name a shard:", "best": " a tensor", "worst": " the node"}
    field_names = {"promptField": "question", "chosenField": "best", "rejectedField": "worst"}
    data = encode_pairs(tmp_path, [row | {"score": 1}], examples={"preference": field_names})
    assert [learned for _, learned in decode(data)] == [f" a tensor{EOS}", f" the node{EOS}"]
    assert data.report.counts.unused == {"score": 1}


@pytest.mark.parametrize("rule", ["Drop", "CutLeft", "CutRight"])
def test_a_pair_that_is_too_long_is_dropped_or_cut_as_one(tmp_path: Path, rule: str) -> None:
    words = " ".join(["gradient loss step batch"] * 5)
    row = {"prompt": f"{words}:", "chosen": f" node {words}", "rejected": " mesh"}
    lengths = {len(ids) for ids in example_ids(encode_pairs(tmp_path, [row, TEXT], sequence_length=200))[:2]}
    length = max(lengths) - 5
    data = encode_pairs(tmp_path, [row, TEXT], sequence_length=length - 1, examples={"tooLong": rule})
    assert data.report.examples == (1 if rule == "Drop" else 2)
    assert (data.report.counts.dropped, data.report.counts.cut) == ((1, 0) if rule == "Drop" else (0, 1))
    if rule == "Drop":
        return
    chosen, rejected = example_ids(data)[:2]
    assert len(chosen) == length
    prompt = int(data.sources[0].stored.answers[0])
    assert prompt == int(data.sources[0].stored.answers[1])
    assert np.array_equal(chosen[:prompt], rejected[:prompt]), "both answers follow one prompt"


def test_a_pair_whose_difference_is_cut_away_is_dropped(tmp_path: Path) -> None:
    words = " ".join(["gradient loss step batch"] * 5)
    row = {"prompt": "say:", "chosen": f" {words} tensor", "rejected": f" {words} node"}
    data = encode_pairs(tmp_path, [row, TEXT], sequence_length=12, examples={"tooLong": "CutRight"})
    assert (data.report.examples, data.report.counts.dropped) == (1, 1)


def example_ids(data: ExampleDataset) -> list[np.ndarray[Any, Any]]:
    stored = data.sources[0].stored
    return [stored.read_example(number)[0] for number in range(len(stored))]


@pytest.mark.parametrize("split", ["DocumentHash", "Tail"])
def test_a_pair_is_held_back_as_a_whole_and_its_preferred_answer_is_expected(tmp_path: Path, split: str) -> None:
    rows = [TEXT | {"prompt": f"name shard {number}:"} for number in range(30)]
    held_back = {"fraction": 0.25, "split": split, "samples": 30}
    data = encode_pairs(tmp_path, rows, validation=held_back)
    (source,) = data.sources
    assert (source.held_back.reshape(-1, 2)[:, 0] == source.held_back.reshape(-1, 2)[:, 1]).all()
    number = int(source.held_back.sum()) // 2
    assert data.report.held_back == number
    assert data.validation.num_samples == number
    assert data.training.num_samples == 30 - number
    held_out = read_held_out(make_config(tmp_path, tmp_path / "d.jsonl", format="Preference", validation=held_back))
    assert len(held_out.examples) == number
    assert {example.answer for example in held_out.examples} == {" a tensor"}


def test_both_answers_lie_in_adjacent_rows_of_one_micro_batch(tmp_path: Path) -> None:
    data = encode_pairs(tmp_path, [TEXT, TEXT | {"chosen": " a tensor of the mesh"}], sequence_length=40)
    rules = data.training.rules
    batch = build_micro_batch([data.training.sample(0, 1), None, data.training.sample(0, 0)], rules, first=5)
    assert batch.inputs.shape == (6, 40)
    assert (batch.divisor, batch.pairs.count) == (2, 2)
    assert batch.sample_positions.tolist() == list(range(10, 16)), "each row has its own dropout"
    assert not (batch.labels[2:4] != -100).any(), "a padding pair has no labels"
    first = example_ids(data)[2]
    assert batch.inputs[0, : len(first) - 1].tolist() == first[:-1].tolist()
    assert batch.valid_tokens == int((batch.labels != -100).sum())


def test_a_micro_batch_is_as_long_as_its_longest_row_in_whole_blocks_of_columns(tmp_path: Path) -> None:
    data = encode_pairs(tmp_path, [TEXT, TEXT | {"chosen": " a tensor of the mesh"}], sequence_length=40)
    longest = max(len(ids) for ids in example_ids(data)) - 1
    batch = build_micro_batch([data.training.sample(0, 1), data.training.sample(0, 0)], data.training.rules)
    trimmed = trim_padding(batch, 4)
    assert trimmed.inputs.shape == trimmed.labels.shape == (4, -(-longest // 4) * 4)
    assert trimmed.inputs.tolist() == batch.inputs[:, : trimmed.inputs.shape[1]].tolist()
    assert int((trimmed.labels != -100).sum()) == batch.valid_tokens, "all labels are kept"
    assert trim_padding(batch, 64) is batch, "never longer than the sequence"
    assert trim_padding(build_micro_batch([None], data.training.rules), 4).inputs.shape == (2, 4)


@pytest.mark.parametrize("loss", ["Answer", "All"])
def test_answers_are_marked_also_when_the_prompt_is_learned(tmp_path: Path, loss: str) -> None:
    data = encode_pairs(tmp_path, [TEXT], examples={"loss": loss}, sequence_length=40)
    batch = build_micro_batch([data.training.sample(0, 0)], data.training.rules)
    in_answer = (batch.labels[0] != -100).numpy() & (np.arange(40) >= int(batch.pairs.answers[0]))
    (_, learned), _ = decode(encode_pairs(tmp_path, [TEXT]))
    assert learned == f" a tensor{EOS}"
    answer = int(data.sources[0].stored.answers[0])
    assert batch.labels[0][in_answer].tolist() == example_ids(data)[0][answer:].tolist()
    assert int((batch.labels[0] != -100).sum()) == (len(example_ids(data)[0]) - 1 if loss == "All" else in_answer.sum())


@pytest.mark.parametrize(
    ("question", "text"),
    [
        ({"prompt": "name a shard:"}, "name a shard:"),
        ({"prompt": [ASK]}, f"<|begin|>{render_turn('user', 'name a shard')}<|head|>assistant<|tail|>\n\n"),
        (CHAT, f"<|begin|>{render_turn('user', 'name a shard')}<|head|>assistant<|tail|>\n\n"),
        (
            {"chosen": [ASK, GOOD], "rejected": [ASK, BAD]},
            f"<|begin|>{render_turn('user', 'name a shard')}<|head|>assistant<|tail|>\n\n",
        ),
        ("name a shard", f"<|begin|>{render_turn('user', 'name a shard')}<|head|>assistant<|tail|>\n\n"),
    ],
)
def test_a_custom_prompt_is_built_as_in_training(tmp_path: Path, question: Any, text: str) -> None:
    encode_pairs(tmp_path, [TEXT])
    settings = make_config(tmp_path, tmp_path / "d.jsonl", format="Preference")
    ((prompt, _),) = build_prompts(settings, [question])
    assert prompt == text


def trl_ids(
    reference: PreTrainedTokenizerFast, prompt: list[dict[str, str]], answer: list[dict[str, str]]
) -> tuple[list[int], int]:
    """Return the tokens of a chat pair's answer after its prompt, and where the answer begins, as trl makes them."""
    options: dict[str, Any] = {"return_dict": True}
    before = reference.apply_chat_template(prompt, add_generation_prompt=True, **options)["input_ids"]
    ids = list(reference.apply_chat_template([*prompt, *answer], **options)["input_ids"])
    start = next((at for at, (one, other) in enumerate(zip(before, ids, strict=False)) if one != other), len(before))
    return ids, start


@pytest.mark.parametrize(
    "template",
    [CHATML, LLAMA3, THINKING, CLOSED, OPENED],
    ids=["ChatML", "Llama 3", "opens the reasoning", "closes it", "with a line break"],
)
def test_pairs_of_messages_have_the_tokens_and_the_answers_of_trl(tmp_path: Path, template: str) -> None:
    file = write_tokenizer(tmp_path / "tokenizer", chat=template)
    reference = PreTrainedTokenizerFast.from_pretrained(file.parent)
    turns = [ASK, GOOD, {"role": "user", "content": "and a rank"}, BAD]
    rows: list[dict[str, Any]] = [
        CHAT,
        {"prompt": turns[:3], "chosen": [GOOD], "rejected": [BAD | {"content": "a node "}]},
        {"chosen": turns, "rejected": [*turns[:3], GOOD]},
        {"chosen": turns, "rejected": [ASK, BAD, turns[2], GOOD]},
        {"prompt": [ASK], "chosen": [GOOD | {"content": "<think>\na net</think>a tensor"}], "rejected": [BAD]},
    ]
    source = write_records(tmp_path / "d.jsonl", rows)
    data = {
        "source": str(source),
        "format": "Preference",
        "tokenizer": {"path": str(file.parent)},
        "sequenceLength": 128,
        "cacheDirectory": str(tmp_path / "cache"),
    }
    config = parse({"data": data, "tuning": {"objective": {"reference": "/reference"}}}, (), "run.yaml")
    stored = open_encoded(config.data).sources[0].stored
    prompts = [row.get("prompt", turns[: 1 if row["rejected"][1:2] == [BAD] else 3]) for row in rows]
    for number, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
        answers = [row[name] if "prompt" in row else row[name][len(prompt) :] for name in ("chosen", "rejected")]
        expected = [trl_ids(reference, prompt, answer) for answer in answers]
        start = min(start for _, start in expected)
        for place, (ids, _) in enumerate(expected):
            ours, loss_mask = stored.read_example(2 * number + place)
            assert ours.tolist() == ids
            assert loss_mask.tolist() == [False] * start + [True] * (len(ids) - start)
    held_out = read_held_out(config.data.model_copy(update={"validation": ValidationConfig(source=str(source))}))
    for example in held_out.examples[:2]:
        assert example.answer.removeprefix("\n").removeprefix("</think>").strip() == "a tensor", (
            "without the end of a turn"
        )


def test_a_token_across_the_border_belongs_to_both_answers_as_in_trl(tmp_path: Path) -> None:
    reference = PreTrainedTokenizerFast.from_pretrained(write_tokenizer(tmp_path / "tokenizer").parent)
    row = {"prompt": "name a sha", "chosen": "rd token", "rejected": " node"}
    data = encode_pairs(tmp_path, [row])
    prompt = reference(row["prompt"])["input_ids"]
    expected = [[*reference(row["prompt"] + row[name])["input_ids"], reference.eos_token_id] for name in list(row)[1:]]
    start = min(next(at for at, token in enumerate(prompt) if ids[at] != token) for ids in expected[:1])
    assert start < len(prompt), "a token of the first answer crosses the border"
    assert expected[1][: len(prompt)] == prompt
    for number, ids in enumerate(expected):
        ours, loss_mask = data.sources[0].stored.read_example(number)
        assert ours.tolist() == ids
        assert loss_mask.tolist() == [False] * start + [True] * (len(ids) - start)

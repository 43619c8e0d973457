"""Cache encoded examples, hold examples back, and count epochs."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.testing.suite.timeouts import until
from tests.testing.trainer.example_files import (
    CHAT,
    decode,
    encode,
    make_config,
    make_records,
    open_encoded,
    write_records,
    write_tokenizer,
)
from trainium_contract.trainer.data import DataConfig
from trainium_trainer.data.batches.order import EpochOrder
from trainium_trainer.data.dataset import open_data
from trainium_trainer.data.examples.held_out import build_prompts, read_held_out
from trainium_trainer.data.examples.store import ExampleInputs, StoredExamples
from trainium_trainer.data.tokens.tokenizer import load_tokenizer
from trainium_trainer.exits import UserError


@pytest.fixture
def settings(tmp_path: Path) -> DataConfig:
    write_tokenizer(tmp_path / "tokenizer")
    source = write_records(tmp_path / "d.jsonl", make_records(120))
    return make_config(tmp_path, source, sequence_length=96, validation={"fraction": 0.2})


def with_fields(settings: DataConfig, **fields: Any) -> DataConfig:
    return settings.model_validate({**settings.model_dump(), **fields})


def test_examples_are_encoded_once_and_read_from_the_cache_afterwards(tmp_path: Path, settings: DataConfig) -> None:
    first = open_encoded(settings)
    (folder,) = (tmp_path / "cache").glob("examples-*[0-9a-f]")
    stamps = {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}
    reopened = open_encoded(settings)
    assert {file.name: file.stat().st_mtime_ns for file in folder.iterdir()} == stamps
    assert reopened.identity == first.identity
    assert set(stamps) == {"manifest.json", "index.arrow", "tokens-00000.arrow"}


@pytest.mark.parametrize(
    "change",
    [
        {"examples": {"loss": "All"}},
        {"examples": {"packing": True}},
        {"examples": {"tooLong": "CutRight"}, "sequence_length": 40},
        {"examples": {"template": {"prompt": "{instruction}: "}}},
        {"examples": {"where": {"category": "open_qa"}}},
        {"validation": {"fraction": 0.3}},
        {"validation": {"fraction": 0.2, "split": "Tail"}},
    ],
)
def test_the_data_identity_changes_with_each_setting_that_changes_samples(
    settings: DataConfig, change: dict[str, Any]
) -> None:
    other = with_fields(settings, **change)
    assert open_encoded(other).identity != open_encoded(settings).identity


def test_a_changed_function_is_not_read_from_the_cache(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    answers = []
    for word in ("yes", "no"):
        file.write_text(f"def f(record):\n    return {{'prompt': 'a', 'completion': '{word}'}}\n")
        data = encode(tmp_path, make_records(5), format="Function", examples={"function": f"{file}:f"})
        answers.append(decode(data)[0][1].removesuffix("<|end|>"))
    assert answers == ["yes", "no"]


def test_the_folder_is_the_same_for_any_number_of_processes(
    tmp_path: Path, settings: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_one = open_encoded(settings)
    monkeypatch.setattr(ExampleInputs, "block_bytes", 1500)
    for name, workers in (("two", 2), ("three", 3)):
        by_several = open_encoded(with_fields(settings, cache_directory=str(tmp_path / name), workers=workers))
        assert by_several.identity == by_one.identity
        lengths = by_one.sources[0].stored.original_lengths
        assert (by_several.sources[0].stored.original_lengths == lengths).all()


_SLOW = """
import sys, time
def f(record):
    time.sleep(0.02)
    return {"prompt": record["instruction"], "completion": record["response"]}
"""


def test_a_killed_build_continues_to_the_result_of_an_uninterrupted_one(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer")
    source = write_records(tmp_path / "d.jsonl", make_records(150))
    (tmp_path / "slow.py").write_text(_SLOW)
    config = make_config(tmp_path, source, format="Function", examples={"function": f"{tmp_path}/slow.py:f"}, workers=2)
    code = (
        "import sys; from trainium_contract.trainer.data import DataConfig\n"
        "from trainium_trainer.data.examples.store import ExampleInputs\n"
        "ExampleInputs.block_bytes, ExampleInputs.shard_tokens = 1000, 1\n"
        "from trainium_trainer.data.dataset import open_data\n"
        "open_data(DataConfig.model_validate_json(sys.argv[1]), 8)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, config.model_dump_json(by_alias=True)])
    partial = (tmp_path / "cache").glob
    progress_files = until(
        lambda: [*partial("examples-*.partial/tokens-*.json")], "some examples are encoded", pause=0.01
    )
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    progress = json.loads(progress_files[0].read_text())
    assert 0 < progress["blocks"] < 15
    assert not list((tmp_path / "cache").glob("examples-*[0-9a-f]"))
    with (progress_files[0].parent / f"tokens-{progress['blocks']:05d}.tmp").open("ab") as stream:
        stream.write(b"half an example")  # as if the process died during a write
    subprocess.run([sys.executable, "-c", code, config.model_dump_json(by_alias=True)], check=True)
    uninterrupted = with_fields(config, workers=1, cache_directory=str(tmp_path / "other"))
    subprocess.run([sys.executable, "-c", code, uninterrupted.model_dump_json(by_alias=True)], check=True)
    assert open_data(config, 8).identity == open_data(uninterrupted, 8).identity


def test_a_damaged_folder_is_refused_before_anything_is_read_of_it(tmp_path: Path, settings: DataConfig) -> None:
    open_encoded(settings)
    (folder,) = (tmp_path / "cache").glob("examples-*[0-9a-f]")
    os.truncate(folder / "tokens-00000.arrow", 10)
    with pytest.raises(UserError, match=r"tokens-00000.arrow: has 10 bytes, not \d+: copy it again.* remove"):
        StoredExamples(folder)


def test_held_out_examples_are_never_trained_on_also_after_records_are_added(
    tmp_path: Path, settings: DataConfig
) -> None:
    data = open_encoded(settings)
    (source,) = data.sources
    assert data.report.held_back == source.held_back.sum() == data.validation.num_samples
    assert 10 < data.report.held_back < 40
    trained = {tuple(sample.examples[0][0].tolist()) for sample in data.training.read_at(0, data.training.num_samples)}
    held_back = {
        tuple(sample.examples[0][0].tolist())
        for sample in data.validation.read_rank_samples(0, 1)
        if sample is not None
    }
    assert not trained & held_back
    assert len(trained) + len(held_back) == 120
    write_records(tmp_path / "d.jsonl", [*make_records(40, seed=7), *make_records(120)])
    extended = open_encoded(settings)
    assert extended.sources[0].held_back[40:].tolist() == source.held_back.tolist()


def test_the_end_of_each_source_or_a_separate_source_may_be_held_back(tmp_path: Path, settings: DataConfig) -> None:
    tail = open_encoded(with_fields(settings, validation={"fraction": 0.1, "split": "Tail"}))
    assert tail.sources[0].held_back.tolist() == [False] * 108 + [True] * 12
    folder = tmp_path / "other"
    folder.mkdir()
    (folder / "template.json").write_text(json.dumps({"prompt": "no {instruction}", "completion": "{response}"}))
    validation_source = write_records(folder / "v.jsonl", make_records(9, seed=5))
    config = with_fields(settings, validation={"source": str(validation_source)})
    data = open_encoded(config)
    assert data.validation.num_samples == 9
    assert data.report.held_back == 0
    held_out = read_held_out(config)
    assert [example.answer for example in held_out.examples] == [row["response"] for row in make_records(9, seed=5)]
    assert held_out.examples[0].prompt.startswith("### Instruction"), "prompts have the template of the training data"


@pytest.mark.parametrize("validation", [{"fraction": 0.2}, {"fraction": 0.15, "split": "Tail"}])
def test_held_out_examples_are_those_that_are_held_back_with_their_tokens(
    settings: DataConfig, validation: dict[str, Any]
) -> None:
    config = with_fields(settings, validation=validation)
    data = open_encoded(config)
    (source,) = data.sources
    held_out = read_held_out(config)
    numbers = source.held_back.nonzero()[0].tolist()
    assert len(held_out.examples) == len(numbers)
    for example, number in zip(held_out.examples, numbers, strict=True):
        ids, loss_mask = source.stored.read_example(number)
        assert list(example.prompt_ids) == ids[~loss_mask].tolist()
        assert example.prompt.startswith("### Instruction\nsay ")
        assert example.answer == decode(data)[number][1].removesuffix("<|end|>")
        assert example.label is None
    assert read_held_out(config, 3).examples == held_out.examples[:3]
    assert held_out.labels == ()
    assert held_out.end_tokens == (load_tokenizer(data.tokenizer).token_to_id("<|end|>"),)


def test_held_out_classes_have_the_label_as_their_answer(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer")
    rows = [{"question": f"q{number}", "sentence": "s", "label": number % 2} for number in range(40)]
    source = write_records(tmp_path / "d.jsonl", rows)
    held_out = read_held_out(make_config(tmp_path, source, format="Classification", validation={"fraction": 0.3}))
    assert held_out.labels == ("entailment", "not_entailment")
    assert {example.label for example in held_out.examples} == {0, 1}
    assert all(example.answer == f" {held_out.labels[example.label or 0]}" for example in held_out.examples)


def test_held_out_answers_of_a_chat_are_the_messages_and_end_with_the_token_of_the_turn(tmp_path: Path) -> None:
    file = write_tokenizer(tmp_path / "tokenizer")
    conversations = [
        {
            "messages": [
                {"role": "user", "content": f"say {number}"},
                {"role": "assistant", "content": f"{number} <|eot|>!"},
            ]
        }
        for number in range(10)
    ]
    source = write_records(tmp_path / "d.jsonl", conversations)
    held_out = read_held_out(
        make_config(tmp_path, source, format="Chat", validation={"fraction": 0.3, "split": "Tail"})
    )
    assert [example.answer for example in held_out.examples] == ["7 <|eot|>!", "8 <|eot|>!", "9 <|eot|>!"]
    assert held_out.examples[0].prompt.endswith("say 7<|eot|><|head|>assistant<|tail|>\n\n")
    turn = load_tokenizer(file).token_to_id("<|eot|>")
    assert held_out.end_tokens == (turn,)
    assert all(example.answer_ids.count(turn) == 1 for example in held_out.examples)
    assert all(example.answer_ids[-1] == turn for example in held_out.examples)


def build_prompt(config: DataConfig, question: dict[str, Any] | str) -> str:
    return build_prompts(config, [question])[0][0]


def test_a_custom_prompt_is_built_as_in_training(tmp_path: Path, settings: DataConfig) -> None:
    built_in = "### Instruction\nsay rank\n\n### Answer\n"
    assert build_prompt(settings, "say rank") == build_prompt(settings, {"instruction": "say rank"}) == built_in
    row = read_held_out(settings, 1).examples[0]
    instruction = row.prompt.split("\n")[1]
    context = row.prompt.split("### Context\n")[1].split("\n")[0] if "### Context" in row.prompt else ""
    assert build_prompts(settings, [{"instruction": instruction, "context": context}])[0][1] == row.prompt_ids
    with pytest.raises(UserError, match="the prompt: has no field 'instruction'"):
        build_prompt(settings, {"context": "a"})
    chat = make_config(tmp_path, tmp_path / "d.jsonl", format="Chat")
    assert build_prompt(chat, "hello") == ("<|begin|><|head|>user<|tail|>\n\nhello<|eot|><|head|>assistant<|tail|>\n\n")
    assert build_prompts(chat, ["hello"])[0][1].count(0) == 1, CHAT
    classification = make_config(tmp_path, tmp_path / "d.jsonl", format="Classification")
    with pytest.raises(UserError, match="needs the fields question, sentence: give a JSON object with them"):
        build_prompt(classification, "hello")


@pytest.mark.parametrize("packing", [False, True])
def test_an_epoch_has_each_example_exactly_once_at_every_size(settings: DataConfig, packing: bool) -> None:
    config = with_fields(settings, examples={"packing": packing})
    data = open_encoded(config, epochs=2)
    length = data.training.epoch_samples
    assert length % 8 == 0
    assert isinstance(data.training._epochs, EpochOrder)
    for epoch in range(2):
        numbers = data.training.list_numbers(epoch * length, length)
        members = [member for number in numbers for member in data.training.sources[0].list_members(number)]
        assert sorted(members) == (~data.sources[0].held_back).nonzero()[0].tolist()


def test_several_sources_have_their_shares_and_their_own_templates(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer")
    sources = []
    for number, weight in enumerate((3, 1)):
        folder = tmp_path / f"s{number}"
        folder.mkdir()
        (folder / "template.json").write_text(
            json.dumps({"prompt": f"{number}: {{instruction}} ", "completion": "{response}"})
        )
        write_records(folder / "d.jsonl", make_records(20, seed=number))
        sources.append({"source": str(folder), "weight": weight})
    data = open_encoded(make_config(tmp_path, "unused", sources=sources))
    drawn = data.training.list_numbers(0, 400)
    assert sum(number < 20 for number in drawn) == pytest.approx(300, abs=2)
    assert decode(data, 1)[0][0].startswith("<|begin|>1: say")
    assert data.report.counts.records == 40


def test_open_data_reports_counts_and_has_the_same_identity(settings: DataConfig) -> None:
    data = open_data(settings, 8, epochs=1)
    assert data.report.format_line() == (
        f"120 examples of 120 records, {data.report.held_back} held back, "
        f"{120 - data.report.held_back} sequences with {data.report.occupancy:.1%} of their positions used"
    )
    assert data.epoch_samples == -(-data.training.num_samples // 8) * 8
    assert data.identity == open_encoded(settings, epochs=5).identity
    assert sum(count for _, _, count in data.report.build_histogram()) == 120

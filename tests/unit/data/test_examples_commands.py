"""Run the commands that show and prepare examples."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.testing.trainer.example_files import make_records, write_records, write_tokenizer
from tests.testing.trainer.fork_server import run_python
from trainium_trainer.cli import run


def write_run_file(tmp_path: Path, **data: Any) -> Path:
    write_tokenizer(tmp_path / "tokenizer")
    fields = {
        "source": str(write_records(tmp_path / "d.jsonl", make_records(120))),
        "format": "Instruction",
        "sequenceLength": 96,
        "cacheDirectory": str(tmp_path / "cache"),
        "tokenizer": {"path": str(tmp_path / "tokenizer")},
        "workers": 1,
    }
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump({"batch": {"globalSize": 8}, "data": fields | data}))
    return file


def test_show_data_prints_text_and_counts_without_colours_outside_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    validation = {"fraction": 0.1}
    file = write_run_file(tmp_path, examples={"tooLong": "CutLeft"}, sequenceLength=40, validation=validation)
    assert run(["show-data", "--config", str(file), "--samples", "2", "--set", "epochs=3"]) == 0
    output = capsys.readouterr().out
    assert "\x1b" not in output
    assert output.count("── sample ") == 2
    assert re.search(r"### Answer\n⟦[\w ]+<\|end\|>⟧", output)
    for line in ("records     120", "dropped     0 longer than 40 tokens", "cut   ", "positions   ", "held back   "):
        assert line in output
    assert re.search(r"one epoch   1[3-5] steps", output)
    bars = re.findall(r"^ *\d+ - +\d+ █* (\d+)$", output, re.MULTILINE)
    assert sum(map(int, bars)) == 120


def test_show_data_colours_what_is_learned_on_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    file = write_run_file(tmp_path)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert run(["show-data", "--config", str(file), "--samples", "1"]) == 0
    output = capsys.readouterr().out
    assert re.search(r"### Answer\n\x1b\[1;32m[\w ]+<\|end\|>\x1b\[0m", output)
    assert "⟦" not in output


def test_show_data_shows_packed_examples_one_by_one_and_the_padding_of_an_epoch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_run_file(tmp_path, examples={"packing": True, "where": {"category": "open_qa"}}, sequenceLength=500)
    command = ["show-data", "--config", str(file), "--set", "epochs=1"]
    assert run([*command, "--samples", "1"]) == 0
    output = capsys.readouterr().out
    counts = re.search(r"sample 0: (\d+) examples, (\d+) of 500 positions used", output)
    assert int(counts[1]) > 5
    assert output.count("which does not see the one before") == int(counts[1]) - 1
    assert output.count("<|begin|>") == int(counts[1])
    assert "filtered    60 by data.examples.where" in output
    assert ", packed" in output
    assert run([*command, "--samples", "1", "--first", "7"]) == 0
    assert "sample 7: padding of the last batch of an epoch; not trained" in capsys.readouterr().out


@pytest.mark.parametrize("tokenization", ["Ahead", "Online"])
def test_show_data_shows_running_text_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tokenization: str
) -> None:
    file = write_run_file(tmp_path, format="Text", textField="response", sequenceLength=16, tokenization=tokenization)
    command = ["show-data", "--config", str(file), "--samples", "2", "--set", "data.tokenizer={vocabSize: 300}"]
    assert run(command) == 0
    output = capsys.readouterr().out
    assert output.count("16 of 16 positions used" if tokenization == "Ahead" else "of 16 positions used") == 2
    assert "⟦" in output
    assert ("tokenized ahead" if tokenization == "Ahead" else "tokenized while training") in output


def test_prepare_data_prepares_all_data_before_the_run(tmp_path: Path) -> None:
    file = write_run_file(tmp_path, examples={"packing": True})
    command = ["-m", "trainium_trainer", "prepare-data", "--config", str(file)]
    first = run_python(*command)
    assert re.fullmatch(
        rf"{tmp_path}/cache: 120 examples of 120 records, \d+ sequences with 9\d\.\d% of their positions used, "
        r"[\d,]+ tokens/s\n",
        first.stdout,
    )
    assert "120 examples, " in first.stderr, "the end of the progress bar"
    again = run_python(*command)
    assert again.stdout.endswith("positions used, all of it was there\n")
    code = "import sys; from trainium_trainer.cli import run; run(sys.argv[1:]); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code, *command[2:]], check=True, capture_output=True)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--output", "x"], "prepare-data: needs --config FILE, or --source and --output"),
        (["--config", "run.yaml", "--source", "x"], "--config names what is prepared and where"),
    ],
)
def test_prepare_data_is_refused_outside_its_two_forms(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["prepare-data", *arguments]) == 64
    assert sentence in capsys.readouterr().err


def test_prepare_data_is_refused_without_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_run_file(tmp_path, format="Text", textField="response", sequenceLength=16, tokenization="Online")
    assert run(["prepare-data", "--config", str(file), "--set", "data.tokenizer={vocabSize: 300}"]) == 64
    assert "tokenized while training, so nothing is prepared: set it to Ahead" in capsys.readouterr().err


def test_show_data_shows_both_answers_of_a_pair(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"prompt": "name a shard:", "chosen": " a tensor", "rejected": f" node {number}"} for number in range(8)]
    source = str(write_records(tmp_path / "pairs.jsonl", rows))
    file = write_run_file(tmp_path, source=source, format="Preference")
    command = [
        "show-data",
        "--config",
        str(file),
        "--samples",
        "1",
        "--set",
        "tuning.objective={reference: /reference}",
    ]
    assert run(command) == 0
    output = capsys.readouterr().out
    assert re.search(r"sample 0: 2 answers, \d+ of 192 positions used", output)
    assert "name a shard:⟦ a tensor<|end|>⟧\n── the answer that is not preferred ──" in output
    assert re.search(r"name a shard:⟦ node \d<\|end\|>⟧", output)
    assert "examples    8 to train on" in output

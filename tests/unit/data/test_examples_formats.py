"""Convert records of each format to prompts and answers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from tests.testing.trainer.data_files import write_arrow, write_csv
from tests.testing.trainer.example_files import (
    BOS,
    END_OF_TEXT,
    EOS,
    decode,
    encode,
    make_config,
    make_records,
    open_encoded,
    write_records,
    write_tokenizer,
)


def test_the_built_in_template_leaves_an_empty_context_out(tmp_path: Path) -> None:
    rows = [
        {"instruction": "add", "context": "1 and 2", "response": "3"},
        {"instruction": "greet", "context": " ", "response": "hello"},
        {"instruction": "part", "response": "bye"},
    ]
    assert decode(encode(tmp_path, rows)) == [
        (f"{BOS}### Instruction\nadd\n\n### Context\n1 and 2\n\n### Answer\n3{EOS}", f"3{EOS}"),
        (f"{BOS}### Instruction\ngreet\n\n### Answer\nhello{EOS}", f"hello{EOS}"),
        (f"{BOS}### Instruction\npart\n\n### Answer\nbye{EOS}", f"bye{EOS}"),
    ]


def test_a_custom_template_fills_in_fields_and_escaped_braces(tmp_path: Path) -> None:
    row = {"q": "{how}?", "a": 7, "tags": ["x", "é"], "none": None}
    template = {"prompt": "{{json}} {q} {tags}{none}\n", "completion": "is {a}"}
    (example,) = decode(encode(tmp_path, [row], examples={"template": template}))
    assert example == (f'{BOS}{{json}} {{how}}? ["x", "é"]\nis 7{EOS}', f"is 7{EOS}")


def test_template_json_beside_the_data_is_the_template_unless_the_configuration_has_one(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer")
    folder = tmp_path / "jumpstart"
    folder.mkdir()
    (folder / "template.json").write_text(json.dumps({"prompt": "Q: {question}\nA:", "completion": " {answer}"}))
    write_records(folder / "train.jsonl", [{"question": "why", "answer": "so"}])
    for source in (folder, folder / "*.jsonl", folder / "train.jsonl"):
        assert decode(open_encoded(make_config(tmp_path, source))) == [(f"{BOS}Q: why\nA: so{EOS}", f" so{EOS}")]
    override = {"template": {"completion": "!{answer}"}}
    assert decode(open_encoded(make_config(tmp_path, folder, examples=override))) == [
        (f"{BOS}Q: why\nA:!so{EOS}", f"!so{EOS}")
    ]


def test_a_class_is_answered_by_its_label(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"question": "who?", "sentence": "she.", "label": 0},
        {"question": "who?", "sentence": "it.", "label": "not_entailment"},
        {"question": "who?", "sentence": "he.", "label": "1"},
    ]
    examples = decode(encode(tmp_path, rows, format="Classification"))
    assert examples[0] == (f"{BOS}question: who?\nsentence: she.\nlabel: entailment{EOS}", f" entailment{EOS}")
    assert [answer for _, answer in examples[1:]] == [f" not_entailment{EOS}"] * 2
    custom = {"classification": {"textFields": ["sentence"], "labels": ["no", "yes"], "prompt": "Is it? {sentence}\n"}}
    examples = decode(encode(tmp_path, rows, format="Classification", examples=custom, max_bad_lines=1))
    assert examples == [(f"{BOS}Is it? she.\nno{EOS}", f"no{EOS}"), (f"{BOS}Is it? he.\nyes{EOS}", f"yes{EOS}")]


def test_a_function_turns_a_record_into_an_example_messages_or_nothing(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("MARK = '!'\n")
    code = tmp_path / "mine.py"
    code.write_text(
        "from beside import MARK\n"
        "def examples(record):\n"
        "    if record['id'] == 0:\n"
        "        return None\n"
        "    if record['id'] == 1:\n"
        "        return {'messages': [{'role': 'user', 'content': 'a'}, {'role': 'assistant', 'content': 'b'}]}\n"
        "    return {'prompt': 'p' + MARK, 'completion': 'c'}\n"
    )
    rows = [{"id": number} for number in range(3)]
    data = encode(tmp_path, rows, format="Function", examples={"function": f"{code}:examples"})
    assert decode(data) == [
        (f"{BOS}<|head|>user<|tail|>\n\na<|eot|><|head|>assistant<|tail|>\n\nb<|eot|>", "b<|eot|>"),
        (f"{BOS}p!c{EOS}", f"c{EOS}"),
    ]
    assert data.report.counts.left_out == 1


FORMATS: dict[str, Callable[[Path, list[dict[str, Any]]], Any]] = {
    "d.json": lambda path, rows: path.write_text(json.dumps(rows, indent=1)),
    "d.csv": write_csv,
    "d.parquet": lambda path, rows: parquet.write_table(pa.Table.from_pylist(rows), path, row_group_size=9),
    "d.arrow": lambda path, rows: write_arrow(path, pa.Table.from_pylist(rows), rows=7),
}


@pytest.mark.parametrize("name", FORMATS)
def test_the_same_records_make_the_same_samples_from_every_kind_of_file(tmp_path: Path, name: str) -> None:
    rows = make_records(40)
    lines = encode(tmp_path, rows, validation={"fraction": 0.3})
    FORMATS[name](tmp_path / name, rows)
    other = open_encoded(make_config(tmp_path, tmp_path / name, validation={"fraction": 0.3}))
    assert decode(other) == decode(lines)
    assert (other.sources[0].held_back == lines.sources[0].held_back).all(), "the hash is that of the record"
    assert other.identity == lines.identity


def test_records_that_do_not_match_the_filter_are_left_out(tmp_path: Path) -> None:
    source = write_records(tmp_path / "d.jsonl", make_records(30))
    data = open_encoded(
        make_config(tmp_path, source, examples={"where": {"category": "information_extraction"}}, sequence_length=128)
    )
    assert (data.report.counts.records, data.report.counts.filtered, data.report.examples) == (30, 15, 15)
    assert all("number" in text and int(text.split("number ")[1].split()[0]) % 2 for text, _ in decode(data))


def test_without_a_tokenizer_one_is_trained_on_the_examples(tmp_path: Path) -> None:
    source = write_records(tmp_path / "d.jsonl", make_records(30))
    data = open_encoded(make_config(tmp_path, source))
    assert decode(data)[1][0].endswith(END_OF_TEXT)
    assert data.tokenizer == open_encoded(make_config(tmp_path, source, seed=1)).tokenizer

"""Read sources of every format in order, and refuse bad data."""

import gzip
import os
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from tests.testing.trainer.data_files import (
    END,
    FORMATS,
    TEXTS,
    data_config,
    decode_all,
    json_lines,
    open_text,
    write_parquet,
    write_text,
)
from trainium_contract.exit_codes import ExitCode
from trainium_trainer.data.batches.samples import Samples
from trainium_trainer.data.sources.documents import SkippedRecord, TextPiece
from trainium_trainer.data.sources.files import find_files
from trainium_trainer.data.sources.resolve import open_source
from trainium_trainer.exits import UserError


def read_items(source: Path, block_bytes: int) -> tuple[list[TextPiece], list[SkippedRecord]]:
    opened = open_source(str(source), "text")
    items = [item for block in opened.divide_into_blocks(block_bytes) for item in opened.read(block)]
    pieces = [item for item in items if isinstance(item, TextPiece)]
    return pieces, [item for item in items if isinstance(item, SkippedRecord)]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("block_bytes", [40, 300, 10**9])
def test_every_format_gives_its_documents_in_order_however_it_is_divided(
    tmp_path: Path, name: str, block_bytes: int
) -> None:
    FORMATS[name](tmp_path / name)
    pieces, skipped = read_items(tmp_path / name, block_bytes)
    assert [piece.text for piece in pieces] == TEXTS
    assert skipped == []


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
@pytest.mark.parametrize("block_bytes", [1, 7, 64, 10**9])
def test_a_text_file_is_one_document_however_it_is_divided(tmp_path: Path, ending: str, block_bytes: int) -> None:
    text = "\n".join(["first", "", "naïve 日本語 🙂", "x" * 100, "last"] * 3)
    (tmp_path / "d.txt").write_bytes(b"\xef\xbb\xbf" + text.replace("\n", ending).encode())
    pieces, skipped = read_items(tmp_path / "d.txt", block_bytes)
    assert skipped == []
    assert "".join(piece.text for piece in pieces) == text
    assert [piece.ends_document for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert {piece.document for piece in pieces} == {"d.txt"}


def test_the_tokens_are_the_documents_with_their_ends(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_bytes(json_lines(["", *TEXTS, "that says <|endoftext|> itself"]))
    data = open_text(data_config(tmp_path, tmp_path / "d.jsonl"))
    expected = [*TEXTS, "that says <|endoftext|> itself"]
    assert decode_all(data) == "".join(text + END for text in expected)
    sequence = data.training.sources[0].sequence
    assert (sequence.read(0, sequence.tokens) == 0).sum() == len(expected), (
        "the marker within a text does not end a document"
    )


def test_a_folder_is_read_in_the_order_of_its_names(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "inner").mkdir(parents=True)
    (folder / "b.txt").write_text("second " * 30)
    (folder / "a.txt").write_text("first " * 30)
    (folder / "inner" / "c.txt").write_text("third " * 30)
    for note in ("readme.md", "state.json", ".hidden.txt", "_SUCCESS.txt"):
        (folder / note).write_text("not data")
    texts = [word * 30 + END for word in ("first ", "second ", "third ")]
    assert decode_all(open_text(data_config(tmp_path, folder))) == "".join(texts)
    assert decode_all(open_text(data_config(tmp_path, folder / "[ab].txt"))) == texts[0] + texts[1]
    assert decode_all(open_text(data_config(tmp_path, folder / "**" / "c*.txt"))) == texts[2]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.txt", None, "there is no such file or folder"),
        ("no*.txt", None, "file matches: correct the pattern"),
        ("empty.txt", b"", "holds no text"),
        ("short.txt", b"too short", "tokens to train on, fewer than one sequence of 16"),
        ("latin.txt", b"caf\xe9 " * 50, "latin.txt line 1: not UTF-8 text at byte 3 of it"),
        ("table.tsv", b"a\tb\n", "files end in .txt, .jsonl, .json, .csv, .arrow, .parquet"),
        ("d.csv", b"a,b\n1,2\n", "no column 'text' (columns: a, b): set data.textField"),
        ("d.csv", b"text,b\n1\n", "line 2: has 1 values, the header 2 names"),
        ("d.csv", b"text\n\xe9\n", "line 2: not UTF-8 text"),
        ("d.csv", b"text,text\n1,2\n", "two columns are called 'text'"),
        ("d.csv", b'text\n"open\n', "line 2: not comma-separated values"),
        ("d.json", b"[{}, oops]\n", "line 1: not one JSON array"),
        ("d.json", b'[{"body": 1}]\n', "item 1: no text under 'text' (keys: body)"),
        ("d.jsonl", b"{oops\n", "line 1: not JSON"),
        ("d.jsonl", b'{"body": "fine"}\n', "line 1: no text under 'text' (keys: body): set data.textField"),
        ("d.jsonl", b"[1]\n", "line 1: no text under 'text'"),
        ("d.jsonl", b'{"text": "\\ud800"}\n', "line 1: holds half a surrogate pair"),
        ("d.jsonl.gz", b"not gzip", "cannot be decompressed"),
        ("d.jsonl.gz", gzip.compress(json_lines())[:-40], "cannot be decompressed"),
        ("d.parquet", b"not parquet", "not a Parquet file"),
        ("d.arrow", b"not arrow at all", "not an Arrow file"),
    ],
)
def test_unusable_data_is_refused_in_a_sentence(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError) as refusal:
        open_text(data_config(tmp_path, path))
    assert message in str(refusal.value)
    assert name in str(refusal.value)
    assert refusal.value.code is ExitCode.USER_ERROR


@pytest.mark.parametrize("name", ["d.parquet", "d.arrow"])
def test_a_truncated_table_and_an_unknown_column_are_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    FORMATS[name](path)
    with pytest.raises(UserError, match=r"no column 'body' \(columns: .*text\): set data.textField"):
        open_text(data_config(tmp_path, path, text_field="body"))
    os.truncate(path, path.stat().st_size * 2 // 3)
    with pytest.raises(UserError, match=r"not an? (Parquet|Arrow) file, or not all of one .*: copy it again"):
        open_text(data_config(tmp_path, path))


def test_a_column_that_is_no_text_is_refused(tmp_path: Path) -> None:
    write_parquet(tmp_path / "d.parquet")
    with pytest.raises(UserError, match="the column 'id' holds int64, neither text nor lists of token ids"):
        open_text(data_config(tmp_path, tmp_path / "d.parquet", text_field="id"))


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="the folder holds no"):
        open_text(data_config(tmp_path, tmp_path / "empty"))


def test_bad_lines_are_skipped_and_counted_up_to_the_limit(tmp_path: Path) -> None:
    lines = json_lines().splitlines(keepends=True)
    lines[3:3] = [b"{oops\n"]
    lines[20:20] = [b'{"text": "caf\xe9"}\n', b"\n"]
    path = tmp_path / "d.jsonl"
    path.write_bytes(b"".join(lines))
    data = open_text(data_config(tmp_path, path, max_bad_lines=2))
    assert decode_all(data) == "".join(text + END for text in TEXTS)
    with pytest.raises(UserError, match=r"d.jsonl line 4: not JSON .* \(more such lines than data.maxBadLines 1 "):
        open_text(data_config(tmp_path, path, max_bad_lines=1))
    path.write_bytes(b"".join(lines[1:]))
    with pytest.raises(UserError, match=r"d.jsonl line 20: not UTF-8 text at byte 13 of it \(more such lines"):
        open_text(data_config(tmp_path, path, max_bad_lines=1))


def test_a_bad_line_has_its_number_however_the_file_is_divided(tmp_path: Path) -> None:
    lines = json_lines().splitlines(keepends=True)
    lines[33] = b"{oops\n"
    (tmp_path / "d.jsonl").write_bytes(b"".join(lines))
    _, (skipped,) = read_items(tmp_path / "d.jsonl", 100)
    assert skipped.format_message().startswith(f"{tmp_path}/d.jsonl line 34: not JSON")


def test_rows_that_are_not_utf_8_are_skipped_one_by_one(tmp_path: Path) -> None:
    texts = pa.array([b"fine " * 20, b"caf\xe9", b"good " * 20], pa.binary()).view(pa.string())
    parquet.write_table(pa.table({"text": texts}), tmp_path / "d.parquet")
    pieces, (skipped,) = read_items(tmp_path / "d.parquet", 10**6)
    assert [piece.text[:4] for piece in pieces] == ["fine", "good"]
    assert skipped.format_message().endswith("d.parquet row 2: not UTF-8 text at byte 3 of it")


def test_the_end_of_a_single_document_can_be_held_back_but_not_its_hash(tmp_path: Path) -> None:
    path = tmp_path / "one.txt"
    path.write_text("a document much longer than a sequence, and the only one " * 40)
    data = open_text(data_config(tmp_path, path, validation={"fraction": 0.25, "split": "Tail"}))
    assert isinstance(data.training, Samples)
    held_back = sum(len(sample.tokens) - 1 for sample in data.validation.read_rank_samples(0, 1) if sample is not None)
    kept = data.training.sources[0].sequence.tokens
    assert held_back + 1 == pytest.approx((kept + held_back + 1) / 4, abs=1)
    with pytest.raises(UserError, match=r"no document to hold back: .* set data.validation.split to Tail"):
        open_text(data_config(tmp_path, path, validation={"fraction": 0.0001}))
    with pytest.raises(UserError, match="holds 0 tokens to train on, fewer than one sequence of 16"):
        open_text(data_config(tmp_path, path, validation={"fraction": 0.9999}))


def test_token_ids_may_be_given_and_must_be_in_the_vocabulary(tmp_path: Path) -> None:
    write_text(tmp_path / "d.txt")
    tokenizer = open_text(data_config(tmp_path, tmp_path / "d.txt")).tokenizer
    settings = {"tokenizer": {"path": str(tokenizer)}, "text_field": "ids"}
    parquet.write_table(pa.table({"ids": [[7] * 30, [], [8, 9, 0]]}), tmp_path / "d.parquet")
    data = open_text(data_config(tmp_path, tmp_path / "d.parquet", **settings))
    sequence = data.training.sources[0].sequence
    assert sequence.read(0, sequence.tokens).tolist() == [7] * 30 + [0, 8, 9, 0]
    parquet.write_table(pa.table({"ids": [[7] * 30, [300]]}), tmp_path / "e.parquet")
    with pytest.raises(UserError, match=r"e.parquet: holds token id 300, but the tokenizer has 300 entries"):
        open_text(data_config(tmp_path, tmp_path / "e.parquet", **settings))


def test_the_python_documentation_is_read_in_a_fixed_order() -> None:
    source = open_source("python-docs", "text")
    (block,) = source.divide_into_blocks(1)

    def head() -> list[str]:
        items = source.read(block)
        return [item.text for item in (next(items) for _ in range(30)) if isinstance(item, TextPiece)]

    first = head()
    assert first == head()
    assert any("assert" in text for text in first)
    assert sum(len(text) for text in first) > 20_000


LAYOUTS: dict[str, list[str]] = {
    "names": ["train.jsonl", "validation.jsonl", "test.jsonl"],
    "shards": [
        "data/train-00000-of-00002.parquet",
        "data/train-00001-of-00002.parquet",
        "data/dev-00000-of-00001.parquet",
    ],
    "folders": ["training/a.jsonl", "training/test.jsonl", "eval set/a.jsonl"],
    "parts of names": ["my_train_1.jsonl", "my.valid.jsonl", "constraint.jsonl"],
    "none": ["a.jsonl", "contest.jsonl", "trainer.jsonl"],
    "only others": ["dev.jsonl", "test.jsonl"],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_of_a_folder_with_splits_the_training_split_is_read_as_by_datasets(
    tmp_path: Path, layout: str, caplog: pytest.LogCaptureFixture
) -> None:
    from datasets import load_dataset_builder

    for name in LAYOUTS[layout]:
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text('{"text": "a"}\n')
    splits = load_dataset_builder(str(tmp_path)).config.data_files
    expected = set(splits["train"] if "train" in splits else map(str, tmp_path.rglob("*.jsonl")))
    files = find_files(str(tmp_path))
    assert {file.path for file in files} == expected
    left_out = set(LAYOUTS[layout]) - {file.relative for file in files}
    assert all(name in caplog.text for name in left_out)
    assert bool(left_out) == ("has splits, of which the training split is read" in caplog.text)
    assert len(find_files(f"{tmp_path}/**")) == len(LAYOUTS[layout]), "a pattern names all"

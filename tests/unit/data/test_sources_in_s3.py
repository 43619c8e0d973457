"""Read data in S3, with the real client and an S3 gateway on loopback."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.testing.trainer.data_files import END, FORMATS, TEXTS, data_config, decode_all, json_lines, open_text
from tests.testing.trainer.s3_gateway import Fault, S3Gateway, run_gateway
from trainium_contract.exit_codes import ExitCode
from trainium_contract.trainer.data import TokenizerConfig
from trainium_trainer import exits
from trainium_trainer.data.examples.held_out import read_held_out
from trainium_trainer.data.prepared.s3_copy import find_vocabulary_size
from trainium_trainer.data.sources import files
from trainium_trainer.data.sources.documents import TextPiece
from trainium_trainer.data.sources.resolve import open_source
from trainium_trainer.data.tokens.tokenizer import find_tokenizer_file
from trainium_trainer.exits import StorageError, UserError


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Gateway]:
    monkeypatch.setattr(files, "_PAUSES_SECONDS", (0.01,) * 5)
    (tmp_path / "s3").mkdir()
    with run_gateway(tmp_path / "s3", monkeypatch) as gateway:
        files.open_s3.cache_clear()
        yield gateway
        files.open_s3.cache_clear()


def put(server: S3Gateway, tmp_path: Path, *names: str) -> None:
    for name in names:
        FORMATS[name](tmp_path / name)
        server.put("bucket", f"data/{name}", (tmp_path / name).read_bytes())


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_read_from_s3(server: S3Gateway, tmp_path: Path, name: str) -> None:
    put(server, tmp_path, name)
    opened = open_source(f"s3://bucket/data/{name}", "text")
    blocks = opened.divide_into_blocks(300)
    assert opened.find_file_name(blocks[0]) == f"s3://bucket/data/{name}"
    pieces = [piece for block in blocks for piece in opened.read(block)]
    assert [piece.text for piece in pieces if isinstance(piece, TextPiece)] == TEXTS


def test_a_prefix_and_a_pattern_name_objects_in_the_order_of_their_names(server: S3Gateway) -> None:
    for name in ("b.jsonl", "a.jsonl", "inner/c.jsonl", "inner/readme.md", "_SUCCESS", "d.txt"):
        server.put("bucket", f"data/{name}", json_lines([f"this is {name}"]))

    def names(source: str) -> list[str]:
        return [file.path.removeprefix("bucket/data/") for file in files.find_files(source)]

    assert names("s3://bucket/data/") == ["a.jsonl", "b.jsonl", "d.txt", "inner/c.jsonl"]
    assert names("s3://bucket/data/*.jsonl") == ["a.jsonl", "b.jsonl"]
    assert names("s3://bucket/data/**.jsonl") == ["a.jsonl", "b.jsonl", "inner/c.jsonl"]
    for source in ("s3://bucket/none", "s3://bucket/data/*.parquet", "s3://bucket/data/inner/readme.md"):
        with pytest.raises(UserError):
            names(source)
    with pytest.raises(UserError, match="names no bucket"):
        names("s3://*/data")
    for number in range(1001):
        server.put("bucket", f"many/{number:04}.txt", b"text")
    assert len(names("s3://bucket/many/")) == 1001, "a page of a listing has a thousand"


@pytest.mark.parametrize("source", ["s3://bucket/tuning/", "s3://bucket/tuning/d.jsonl", "s3://bucket/tuning/*.jsonl"])
def test_examples_and_the_template_beside_them_are_read_from_s3(server: S3Gateway, tmp_path: Path, source: str) -> None:
    rows = [{"question": f"what is {number}", "answer": f"it is {number}"} for number in range(30)]
    server.put("bucket", "tuning/d.jsonl", "".join(json.dumps(row) + "\n" for row in rows).encode())
    server.put("bucket", "tuning/template.json", b'{"prompt": "Q: {question}\\nA:", "completion": " {answer}"}')
    validation = {"fraction": 0.2, "split": "Tail"}
    config = data_config(tmp_path, source, format="Instruction", sequence_length=64, validation=validation)
    assert open_text(config).report.examples == 30
    assert [(example.prompt, example.answer) for example in read_held_out(config).examples] == [
        (f"Q: what is {number}\nA:", f" it is {number}") for number in range(24, 30)
    ]


@pytest.mark.parametrize("file", ["", "/tokenizer.json"])
def test_a_tokenizer_is_read_from_s3_with_the_files_beside_it(
    server: S3Gateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    FORMATS["d.jsonl"](tmp_path / "d.jsonl")
    original = open_text(data_config(tmp_path, tmp_path / "d.jsonl")).tokenizer
    server.put("bucket", "models/one/tokenizer.json", original.read_bytes())
    server.put("bucket", "models/one/tokenizer_config.json", b'{"eos_token": "<|endoftext|>"}')
    copy = find_tokenizer_file(TokenizerConfig(path=f"s3://bucket/models/one{file}"))
    assert copy.read_bytes() == original.read_bytes()
    assert (copy.parent / "tokenizer_config.json").exists()
    with pytest.raises(UserError, match=r"data.tokenizer.path s3://bucket/none: there is no tokenizer.json"):
        find_tokenizer_file(TokenizerConfig(path="s3://bucket/none"))


def test_a_changed_object_is_tokenised_again(server: S3Gateway, tmp_path: Path) -> None:
    FORMATS["d.jsonl"](tmp_path / "d.jsonl")
    server.put("bucket", "data/d.jsonl", (tmp_path / "d.jsonl").read_bytes(), modified=1e9)
    first = open_text(data_config(tmp_path, "s3://bucket/data")).identity
    reads = len(server.requests)
    assert open_text(data_config(tmp_path, "s3://bucket/data")).identity == first
    assert not [request for request in server.requests[reads:] if request.method == "GET" and request.key]
    server.put("bucket", "data/d.jsonl", json_lines([*TEXTS, "one more"]))
    assert open_text(data_config(tmp_path, "s3://bucket/data")).identity != first


def test_a_request_to_a_failing_store_is_retried(server: S3Gateway, tmp_path: Path) -> None:
    put(server, tmp_path, "d.jsonl")
    server.inject_fault(Fault(status=503, code="SlowDown", times=7))
    server.inject_fault(Fault(cut=100, method="GET", fits=lambda request: request.key != "", times=2))
    assert decode_all(open_text(data_config(tmp_path, "s3://bucket/data"))) == "".join(text + END for text in TEXTS)


def test_a_store_that_keeps_failing_ends_the_run_with_the_storage_exit_code(
    server: S3Gateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(server, tmp_path, "d.jsonl")
    monkeypatch.setattr(files, "_PAUSES_SECONDS", (0.01,))
    server.inject_fault(Fault(status=500, times=10**6))
    with pytest.raises(
        StorageError, match=r"s3://bucket/data: cannot be read after 2 tries .*: look at the storage"
    ) as error:
        open_text(data_config(tmp_path, "s3://bucket/data"))
    assert exits.find_exit_code(error.value) == ExitCode.STORAGE_UNAVAILABLE


def test_errors_of_the_user_are_reported_without_retries(
    server: S3Gateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(server, tmp_path, "d.jsonl")
    with pytest.raises(UserError, match=r"s3://nowhere/data: .*correct"):
        open_text(data_config(tmp_path, "s3://nowhere/data"))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "of somebody else")
    files.open_s3.cache_clear()
    with pytest.raises(UserError, match=r"cannot be read .*: correct or replace it"):
        open_text(data_config(tmp_path, "s3://bucket/data"))


def test_prepared_data_in_s3_are_copied_into_the_cache_once(server: S3Gateway, tmp_path: Path) -> None:
    FORMATS["d.jsonl"](tmp_path / "d.jsonl")
    local = open_text(data_config(tmp_path, tmp_path / "d.jsonl"))
    (prepared,) = (tmp_path / "cache").glob("tokens-*[0-9a-f]")
    for file in prepared.iterdir():
        server.put("bucket", f"made/{file.name}", file.read_bytes())
    settings: Any = data_config(
        tmp_path, "s3://bucket/made/", cache_directory=str(tmp_path / "elsewhere"), tokenizer={}
    )
    assert find_vocabulary_size(settings) == 300
    server.inject_fault(Fault(status=500, method="GET", fits=lambda request: request.key.endswith(".arrow"), times=2))
    copied = open_text(settings)
    assert copied.identity == local.identity
    assert decode_all(copied) == decode_all(local)
    before = [request.key for request in server.requests].count("made/tokens-00000.arrow")
    open_text(settings)
    assert [request.key for request in server.requests].count("made/tokens-00000.arrow") == before


def test_reading_local_data_does_not_touch_s3(tmp_path: Path) -> None:
    FORMATS["d.jsonl"](tmp_path / "d.jsonl")
    script = (
        "import sys\nfrom trainium_contract.trainer.data import DataConfig\n"
        "from trainium_trainer.data.dataset import open_data\n"
        "open_data(DataConfig.model_validate_json(sys.argv[1]), 8)\n"
        "sys.exit('pyarrow._s3fs' in sys.modules or 'torch' in sys.modules)\n"
    )
    document = data_config(tmp_path, tmp_path / "d.jsonl").model_dump_json(by_alias=True)
    assert subprocess.run([sys.executable, "-c", script, document], check=False).returncode == 0

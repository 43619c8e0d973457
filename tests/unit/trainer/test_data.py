"""From text to samples: sources, errors, cache, and the global sample position."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from trainium_contract.trainer import DataConfig
from trainium_trainer.data.documents import open_source
from trainium_trainer.data.loader import Loader, Permutation, samples_at
from trainium_trainer.data.packing import TokenFile, open_tokens
from trainium_trainer.data.tokenizer import load_tokenizer
from trainium_trainer.exits import UserError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TEXTS = [f"document number {number} says hello to the world of tokens" for number in range(40)]


def config(tmp_path: Path, source: Path, **more: Any) -> DataConfig:
    fields = {"sequence_length": 16, "cache_directory": str(tmp_path / "cache"), "tokenizer": {"vocab_size": 300}}
    return DataConfig.model_validate({**fields, "source": str(source), **more})


def write_text(path: Path) -> None:
    path.write_text("\n".join(TEXTS))


def write_jsonl(path: Path) -> None:
    path.write_text("".join(json.dumps({"id": 1, "text": text}) + "\n" for text in TEXTS))


def write_parquet(path: Path) -> None:
    parquet.write_table(pa.table({"id": list(range(40)), "text": TEXTS}), path)


def write_arrow_file(path: Path) -> None:
    table = pa.table({"text": TEXTS})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)


def write_arrow_stream(path: Path) -> None:
    table = pa.table({"text": TEXTS})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)


def decoded(tokens: TokenFile, tmp_path: Path) -> str:
    (file,) = (tmp_path / "cache").glob("*/tokenizer.json")
    return load_tokenizer(file).decode(tokens.tokens.tolist(), skip_special_tokens=False)


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("d.jsonl", write_jsonl),
        ("d.parquet", write_parquet),
        ("d.arrow", write_arrow_file),
        ("e.arrow", write_arrow_stream),
    ],
)
def test_every_format_gives_the_documents_in_order_with_their_ends(
    tmp_path: Path, name: str, write: Callable[[Path], None]
) -> None:
    write(tmp_path / name)
    tokens = open_tokens(config(tmp_path, tmp_path / name))
    assert decoded(tokens, tmp_path) == "".join(text + "<|endoftext|>" for text in TEXTS)


def test_a_text_file_is_one_document(tmp_path: Path) -> None:
    write_text(tmp_path / "d.txt")
    tokens = open_tokens(config(tmp_path, tmp_path / "d.txt"))
    assert decoded(tokens, tmp_path) == "\n".join(TEXTS) + "<|endoftext|>"


def test_a_folder_is_read_in_the_order_of_its_names(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "b.txt").write_text("second " * 30)
    (folder / "a.txt").write_text("first " * 30)
    (folder / "readme.md").write_text("not data")
    tokens = open_tokens(config(tmp_path, folder))
    assert decoded(tokens, tmp_path) == "first " * 30 + "<|endoftext|>" + "second " * 30 + "<|endoftext|>"


def test_text_of_any_script_survives(tmp_path: Path) -> None:
    text = "naïve 日本語 🙂 \t end " * 20
    (tmp_path / "d.txt").write_text(text)
    assert decoded(open_tokens(config(tmp_path, tmp_path / "d.txt")), tmp_path) == text + "<|endoftext|>"


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("none.txt", None, "there is no such file or folder"),
        ("empty.txt", b"", "holds no text"),
        ("short.txt", b"too short", "fewer than one sequence of 16"),
        ("latin.txt", b"caf\xe9 " * 50, "not UTF-8 text at byte 3"),
        ("table.csv", b"a,b\n", "files end in .txt, .jsonl, .arrow, .parquet"),
        ("d.jsonl", b'{"text": "fine"}\n{oops\n', "line 2: not JSON"),
        ("d.jsonl", b'{"body": "fine"}\n', "line 1: no text under 'text' (keys: body): set data.textField"),
        ("d.jsonl", b"[1]\n", "line 1: no text under 'text'"),
        ("d.parquet", b"not parquet", "not a Parquet file"),
        ("d.arrow", b"not arrow at all", "not an Arrow file"),
    ],
)
def test_unusable_data_is_refused_in_a_sentence(
    tmp_path: Path, name: str, content: bytes | None, sentence: str
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError) as refusal:
        open_tokens(config(tmp_path, path))
    assert sentence in str(refusal.value)
    assert name in str(refusal.value)


@pytest.mark.parametrize("write", [write_parquet, write_arrow_file])
def test_an_unknown_column_is_refused_with_the_known_ones(tmp_path: Path, write: Callable[[Path], None]) -> None:
    path = tmp_path / ("d.parquet" if write is write_parquet else "d.arrow")
    write(path)
    with pytest.raises(UserError, match=r"no column 'body' \(columns: .*text\): set data.textField"):
        open_tokens(config(tmp_path, path, text_field="body"))


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "nothing").mkdir()
    with pytest.raises(UserError, match="the folder holds no"):
        open_tokens(config(tmp_path, tmp_path / "nothing"))


def test_a_tokenizer_may_be_brought_and_must_be_one(tmp_path: Path) -> None:
    write_text(tmp_path / "d.txt")
    open_tokens(config(tmp_path, tmp_path / "d.txt"))
    (file,) = (tmp_path / "cache").glob("*/tokenizer.json")
    from trainium_contract.trainer import TokenizerConfig
    from trainium_trainer.data.tokenizer import vocabulary_of

    size = load_tokenizer(file).get_vocab_size()
    assert vocabulary_of(TokenizerConfig(path=str(file))) == size
    assert vocabulary_of(TokenizerConfig(vocab_size=512)) == 512
    with pytest.raises(UserError, match="there is no tokenizer"):
        vocabulary_of(TokenizerConfig(path=str(tmp_path / "gone")))
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(UserError, match="not a tokenizer"):
        vocabulary_of(TokenizerConfig(path=str(tmp_path / "broken.json")))
    own = open_tokens(config(tmp_path, tmp_path / "d.txt", tokenizer={"path": str(file)}))
    assert own.identity == open_tokens(config(tmp_path, tmp_path / "d.txt")).identity


def test_changed_text_is_tokenised_anew_and_unchanged_text_is_not(tmp_path: Path) -> None:
    path = tmp_path / "d.txt"
    write_text(path)
    first = open_tokens(config(tmp_path, path)).identity
    (meta,) = (tmp_path / "cache").glob("*/meta.json")
    stamp = meta.stat().st_mtime_ns
    assert open_tokens(config(tmp_path, path)).identity == first
    assert meta.stat().st_mtime_ns == stamp
    path.write_text("\n".join(reversed(TEXTS)))
    assert open_tokens(config(tmp_path, path)).identity != first


def test_a_cache_folder_that_can_never_be_written_is_the_users_to_change(tmp_path: Path) -> None:
    write_text(tmp_path / "d.txt")
    (tmp_path / "cache").write_text("a file where a folder should be")
    with pytest.raises(UserError, match=r"cannot be used .*: free space there or set data.cacheDirectory"):
        open_tokens(config(tmp_path, tmp_path / "d.txt"))


def test_a_standby_prepares_the_data_and_keeps_quiet_about_what_is_wrong_with_it(tmp_path: Path) -> None:
    from trainium_trainer.warm import _prepare_data

    write_text(tmp_path / "d.txt")
    _prepare_data(config(tmp_path, tmp_path / "d.txt"))
    assert len(list((tmp_path / "cache").glob("*/meta.json"))) == 1
    _prepare_data(config(tmp_path, tmp_path / "none.txt"))


def test_two_processes_that_start_at_once_build_the_cache_once(tmp_path: Path) -> None:
    path = tmp_path / "d.txt"
    path.write_text("\n".join(TEXTS * 200))
    script = (
        "import sys\nfrom trainium_contract.trainer import DataConfig\nfrom trainium_trainer.data import packing\n"
        "build = packing._build\n"
        "packing._build = lambda *arguments: (print('built'), build(*arguments))\n"
        "print(packing.open_tokens(DataConfig.model_validate_json(sys.argv[1])).identity)\n"
    )
    document = config(tmp_path, path).model_dump_json(by_alias=True)
    processes = [
        subprocess.Popen([sys.executable, "-c", script, document], stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    lines = [line for process in processes for line in process.communicate()[0].split()]
    assert lines.count("built") == 1
    assert len(set(lines) - {"built"}) == 1


def test_the_python_documentation_is_real_text_in_a_fixed_order() -> None:
    pieces = open_source("python-docs", "text").pieces()
    head = [next(pieces).text for _ in range(30)]
    again = open_source("python-docs", "text").pieces()
    assert head == [next(again).text for _ in range(30)]
    assert any("assert" in text for text in head)
    assert sum(len(text) for text in head) > 20_000


@given(st.integers(1, 3000), st.integers(0, 5), st.integers(0, 5))
@settings(max_examples=40, deadline=None)
def test_an_epoch_is_a_permutation(size: int, seed: int, epoch: int) -> None:
    order = Permutation(size, seed, epoch)
    assert sorted(order[index] for index in range(size)) == list(range(size))


def test_epochs_and_seeds_differ() -> None:
    orders = {tuple(samples_at(start, 50, num_samples=50, seed=seed)) for start in (0, 50) for seed in (0, 1)}
    assert len(orders) == 4


def token_file(samples: int, length: int = 8) -> TokenFile:
    return TokenFile(np.arange(samples * length + 1, dtype=np.uint16), length, "0" * 64)


@given(
    samples=st.integers(1, 60),
    plan=st.lists(st.tuples(st.sampled_from([1, 2, 3, 4, 6, 12]), st.integers(1, 4)), min_size=1, max_size=4),
)
@settings(max_examples=30, deadline=None)
def test_every_sample_is_seen_once_per_epoch_whatever_the_sizes(samples: int, plan: list[tuple[int, int]]) -> None:
    """`plan` is a list of (data-parallel size, steps at that size): the run stops and goes on at the next size."""
    tokens = token_file(samples)
    seen = []
    position = 0
    for dp_size, steps in plan:
        loaders = [
            Loader(tokens, seed=3, global_size=12, micro_size=1, dp_rank=rank, dp_size=dp_size)
            for rank in range(dp_size)
        ]
        for _ in range(steps):
            for loader in loaders:
                seen += loader.batch_at(position).samples
            position += 12
        for loader in loaders:
            loader.close()
    assert seen == samples_at(0, position, num_samples=samples, seed=3)
    for start in range(0, len(seen) - samples + 1, samples):
        assert sorted(seen[start : start + samples]) == list(range(samples))


def test_labels_are_the_next_tokens_and_the_rest_of_the_last_sample_is_kept() -> None:
    tokens = TokenFile(np.arange(21, dtype=np.uint16), 8, "0" * 64)
    assert tokens.num_samples == 3
    loader = Loader(tokens, seed=0, global_size=3, micro_size=3, dp_rank=0, dp_size=1)
    (batch,) = loader.batch_at(0).micro_batches
    loader.close()
    assert batch.valid_tokens == 20
    valid = batch.labels != -100
    assert int(valid.sum()) == 20
    assert (batch.labels[valid] == batch.inputs[valid] + 1).all()
    assert sorted(batch.labels[valid].tolist()) == list(range(1, 21))

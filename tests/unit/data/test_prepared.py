"""Prepare data once, rebuild it after changes, continue after a kill, and never read partial data."""

import json
import os
import pathlib
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tests.testing.trainer.data_files import (
    END,
    TEXTS,
    data_config,
    decode_all,
    json_lines,
    open_text,
    read_prepared,
    write_text,
)
from trainium_contract.exit_codes import ExitCode
from trainium_contract.trainer.config import TrainingConfig
from trainium_trainer import cli
from trainium_trainer.data.prepared.build import BuildProgress, build
from trainium_trainer.data.prepared.reader import DocumentSelection, PreparedData, divide_file_checks
from trainium_trainer.data.prepared.s3_copy import find_vocabulary_size
from trainium_trainer.data.prepared.text_sources import TextInputs
from trainium_trainer.data.sources.files import DataFile
from trainium_trainer.data.sources.resolve import SourceSpec
from trainium_trainer.data.tokens.encoding import select_held_back
from trainium_trainer.data.tokens.tokenizer import load_tokenizer
from trainium_trainer.data.workers.pool import WorkerError, Workers
from trainium_trainer.exits import UserError


def write_documents(path: Path, count: int = 400) -> list[str]:
    texts = [f"text {number}: " + "word " * (number % 50) for number in range(count)]
    path.write_bytes(json_lines(texts))
    return texts


def build_inputs(path: Path, tokenizer: Path) -> TextInputs:
    return TextInputs((SourceSpec(str(path), "text"),), tokenizer, 0)


@pytest.fixture
def prepared_folder(tmp_path: Path, tokenizer: Path) -> Path:
    """Prepare 400 documents of `d.jsonl`."""
    write_documents(tmp_path / "d.jsonl")
    build(tmp_path / "prepared", build_inputs(tmp_path / "d.jsonl", tokenizer), "k", workers=1)
    return tmp_path / "prepared"


# ---- the cache ------------------------------------------------------------------------------------------------------


def test_changed_text_is_tokenised_again_and_unchanged_text_is_not(tmp_path: Path) -> None:
    path = tmp_path / "d.txt"
    write_text(path)
    first = open_text(data_config(tmp_path, path)).identity
    stamp = (read_prepared(tmp_path / "cache").folder / "manifest.json").stat().st_mtime_ns
    assert open_text(data_config(tmp_path, path)).identity == first
    assert (read_prepared(tmp_path / "cache").folder / "manifest.json").stat().st_mtime_ns == stamp
    path.write_text("\n".join(reversed(TEXTS)))
    assert open_text(data_config(tmp_path, path)).identity != first


def test_a_tokenizer_file_may_be_given_and_must_be_valid(tmp_path: Path, tokenizer: Path) -> None:
    write_text(tmp_path / "d.txt")

    def with_tokenizer(path: Path) -> Any:
        return data_config(tmp_path, tmp_path / "d.txt", tokenizer={"path": str(path)})

    assert find_vocabulary_size(with_tokenizer(tokenizer)) == load_tokenizer(tokenizer).get_vocab_size()
    assert find_vocabulary_size(data_config(tmp_path, "x", tokenizer={"vocab_size": 512})) == 512
    with pytest.raises(UserError, match="there is no tokenizer"):
        find_vocabulary_size(with_tokenizer(tmp_path / "missing"))
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(UserError, match="not a tokenizer"):
        find_vocabulary_size(with_tokenizer(tmp_path / "broken.json"))
    data = open_text(with_tokenizer(tokenizer))
    assert data.identity == open_text(data_config(tmp_path, tmp_path / "d.txt")).identity
    document = json.loads(tokenizer.read_text())
    document["added_tokens"][0]["content"] = "<nothing>"
    document["model"]["vocab"]["<nothing>"] = document["model"]["vocab"].pop(END)
    (tmp_path / "endless.json").write_text(json.dumps(document))
    with pytest.raises(UserError, match="no end-of-document token"):
        open_text(with_tokenizer(tmp_path / "endless.json"))


def test_a_cache_folder_that_can_never_be_written_is_an_error_of_the_user(tmp_path: Path) -> None:
    write_text(tmp_path / "d.txt")
    (tmp_path / "cache").write_text("a file where a folder should be")
    with pytest.raises(UserError, match=r"cannot be used \(.*\): set data.cacheDirectory to a folder"):
        open_text(data_config(tmp_path, tmp_path / "d.txt"))


@pytest.mark.usefixtures("clean_start")  # the test forks this process, and its child cannot use its fork server
def test_a_standby_prepares_the_data_without_reporting_errors(tmp_path: Path) -> None:
    from trainium_agent.linux.kernel import list_thread_names
    from trainium_trainer.warm import _prepare_data

    write_text(tmp_path / "d.txt")
    threads = list_thread_names()  # some libraries end their threads around a fork
    _prepare_data(TrainingConfig(data=data_config(tmp_path, tmp_path / "d.txt")))
    assert len(list_thread_names()) <= len(threads), "a process with threads must not be forked"
    assert read_prepared(tmp_path / "cache").tokens
    _prepare_data(TrainingConfig(data=data_config(tmp_path, tmp_path / "none.txt")))


def test_data_are_written_and_read_without_pandas(tmp_path: Path) -> None:
    """Arrow's conversions import pandas where it is installed."""
    write_text(tmp_path / "d.txt")
    program = """
import sys
from trainium_contract.trainer.data import DataConfig
from trainium_trainer.data.dataset import open_data
data = open_data(DataConfig.model_validate_json(sys.argv[1]), 8)
assert data.training.sources[0].sequence.read(0, 300).size == 300
print("pyarrow" in sys.modules, "pandas" in sys.modules)
"""
    completed = subprocess.run(
        [sys.executable, "-c", program, data_config(tmp_path, tmp_path / "d.txt").model_dump_json()],
        capture_output=True,
        text=True,
        check=True,
    )
    assert completed.stdout == "True False\n"


def test_two_processes_that_start_at_once_build_the_cache_once(tmp_path: Path) -> None:
    path = tmp_path / "d.txt"
    path.write_text("\n".join(TEXTS * 200))
    script = (
        "import sys\nfrom trainium_contract.trainer.data import DataConfig\n"
        "from trainium_trainer.data.prepared import build; from trainium_trainer.data import dataset\n"
        "original = build.PartialFolder.build\n"
        "build.PartialFolder.build = lambda *arguments: (print('built'), original(*arguments))[1]\n"
        "print(dataset.open_data(DataConfig.model_validate_json(sys.argv[1]), 8).identity)\n"
    )
    document = data_config(tmp_path, path).model_dump_json(by_alias=True)
    processes = [
        subprocess.Popen([sys.executable, "-c", script, document], stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    lines = [line for process in processes for line in process.communicate()[0].split()]
    assert lines.count("built") == 1
    assert len(set(lines) - {"built"}) == 1


# ---- prepared folders -----------------------------------------------------------------------------------------------


def test_prepared_data_are_the_same_for_any_number_of_processes_and_shards(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = write_documents(tmp_path / "d.jsonl")
    monkeypatch.setattr(TextInputs, "block_bytes", 3000)
    monkeypatch.setattr("trainium_trainer.data.prepared.shard_writer._BATCH_TOKENS", 700)
    manifests = []
    for workers, shard_tokens in ((1, 10**9), (3, 2000)):
        folder = tmp_path / f"by-{workers}"
        monkeypatch.setattr(TextInputs, "shard_tokens", shard_tokens)
        manifests.append(build(folder, build_inputs(tmp_path / "d.jsonl", tokenizer), "k", workers=workers))
    single, divided = (PreparedData(tmp_path / f"by-{workers}") for workers in (1, 3))
    assert single.tokens == divided.tokens
    assert len(manifests[1].shards) > 3
    assert len(divided.batch_tokens) > len(manifests[1].shards)
    expected = single.read(0, single.tokens)
    assert (expected == divided.read(0, divided.tokens)).all()
    assert load_tokenizer(tokenizer).decode(list(expected), skip_special_tokens=False) == "".join(
        text + END for text in texts
    )
    assert manifests[0].documents == len(texts)
    for start, stop in ((0, 1), (650, 2100), (1999, 2001), (single.tokens - 5, single.tokens), (7, 7)):
        assert (divided.read(start, stop) == expected[start:stop]).all()


def test_a_killed_build_is_continued_with_the_same_result(tmp_path: Path, tokenizer: Path) -> None:
    write_documents(tmp_path / "d.jsonl")
    script = (
        "import os, signal, sys\nfrom pathlib import Path\n"
        "from trainium_trainer.data.prepared import build\n"
        "from trainium_trainer.data.prepared.text_sources import TextInputs\n"
        "from trainium_trainer.data.sources.resolve import SourceSpec\n"
        "TextInputs.block_bytes, TextInputs.shard_tokens, count = 3000, 800, 0\n"
        "def stop(progress):\n    global count\n    count += 1\n"
        "    if count == int(sys.argv[4]): os.kill(os.getpid(), signal.SIGKILL)\n"
        "specs, tokenizer = (SourceSpec(sys.argv[1], 'text'),), Path(sys.argv[2])\n"
        "build.build(Path(sys.argv[3]), TextInputs(specs, tokenizer, 0), 'k', workers=2, progress=stop)\n"
    )

    def run(folder: str, kill_at: int) -> int:
        arguments = [str(tmp_path / "d.jsonl"), str(tokenizer), str(tmp_path / folder), str(kill_at)]
        return subprocess.run([sys.executable, "-c", script, *arguments], check=False).returncode

    assert run("whole", 0) == 0
    assert run("killed", 6) == -9
    assert not (tmp_path / "killed").exists()
    finished = [file.name for file in (tmp_path / "killed.partial").glob("tokens-*.arrow")]
    assert finished
    stamps = {name: (tmp_path / "killed.partial" / name).stat().st_mtime_ns for name in finished}
    assert run("killed", 0) == 0
    assert {name: (tmp_path / "killed" / name).stat().st_mtime_ns for name in finished} == stamps
    assert (tmp_path / "killed" / "manifest.json").read_text() == (tmp_path / "whole" / "manifest.json").read_text()
    assert {file.name for file in (tmp_path / "killed").iterdir()} == {
        file.name for file in (tmp_path / "whole").iterdir()
    }


def test_a_partial_build_of_other_data_is_not_continued(tmp_path: Path, tokenizer: Path) -> None:
    write_documents(tmp_path / "d.jsonl")
    partial = tmp_path / "prepared.partial"
    partial.mkdir()
    (partial / "plan.json").write_text('"another"')
    (partial / "tokens-00000.json").write_text("{}")
    manifest = build(tmp_path / "prepared", build_inputs(tmp_path / "d.jsonl", tokenizer), "k", workers=1)
    assert manifest.documents == 400


def test_incomplete_or_foreign_prepared_data_are_refused(
    tmp_path: Path, tokenizer: Path, prepared_folder: Path
) -> None:

    def assert_refused(pattern: str) -> None:
        with pytest.raises(UserError, match=pattern):
            open_text(data_config(tmp_path, prepared_folder, tokenizer={}))

    shard = prepared_folder / "tokens-00000.arrow"
    content = shard.read_bytes()
    shard.write_bytes(content[:-100])
    assert_refused(r"tokens-00000.arrow: has \d+ bytes, not \d+: copy it again")
    shard.unlink()
    assert_refused(r"tokens-00000.arrow: is missing")
    shard.write_bytes(b"x" * len(content))
    with pytest.raises(UserError, match="not an Arrow file"):
        open_text(data_config(tmp_path, prepared_folder, tokenizer={})).training.read_at(0, 1)
    shard.write_bytes(content)
    index = (prepared_folder / "index.arrow").read_bytes()
    (prepared_folder / "index.arrow").write_bytes(index[:-20])
    assert_refused(r"index.arrow: cannot be read")
    (prepared_folder / "index.arrow").write_bytes(index)
    manifest = (prepared_folder / "manifest.json").read_text()
    (prepared_folder / "manifest.json").write_text(manifest.replace('"format": 3', '"format": 9'))
    assert_refused("was prepared in format 9, this version reads 3")
    (prepared_folder / "manifest.json").write_text(manifest[:-50])
    assert_refused("manifest.json is not that of prepared data")
    (prepared_folder / "manifest.json").write_text(manifest)
    with pytest.raises(UserError, match="holds other prepared data"):
        build(prepared_folder, build_inputs(tmp_path / "d.jsonl", tokenizer), "other", workers=1)


def test_the_processes_of_a_node_divide_the_checks_of_files(
    prepared_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = json.loads((prepared_folder / "manifest.json").read_text())
    (shard,) = manifest["shards"]
    for number in range(1, 7):
        os.link(prepared_folder / shard["file"], prepared_folder / f"copy-{number}.arrow")
    copies = [shard | {"file": f"copy-{number}.arrow", "tokens": 0} for number in range(1, 7)]
    (prepared_folder / "manifest.json").write_text(json.dumps(manifest | {"shards": [shard, *copies]}))
    inspected: list[str] = []
    check = PreparedData._check
    monkeypatch.setattr(
        PreparedData, "_check", lambda self, shard: (inspected.append(shard.file), check(self, shard))[1]
    )
    for number in range(4):
        before = len(inspected)
        with divide_file_checks(number, 4):
            PreparedData(prepared_folder)
        assert len(inspected) - before <= 2
    assert sorted(inspected) == sorted([shard["file"], *(copy["file"] for copy in copies)])
    (prepared_folder / "copy-5.arrow").unlink()
    for number in (0, 2, 3):
        with divide_file_checks(number, 4):
            PreparedData(prepared_folder)
    with divide_file_checks(1, 4), pytest.raises(UserError, match=r"copy-5.arrow: is missing"):
        PreparedData(prepared_folder)


def test_a_file_that_no_process_inspected_is_inspected_when_it_is_opened(prepared_folder: Path) -> None:
    with divide_file_checks(1, 2):
        prepared = PreparedData(prepared_folder)
    os.truncate(prepared_folder / "tokens-00000.arrow", 100)
    with pytest.raises(UserError, match=r"tokens-00000.arrow: has 100 bytes, not"):
        prepared.read(0, 1)


def test_a_damaged_token_is_refused(tmp_path: Path, prepared_folder: Path) -> None:
    prepared = PreparedData(prepared_folder)
    with pa.memory_map(str(prepared_folder / "tokens-00000.arrow"), "r+") as stream:
        content = stream.read()
        offset = content.index(prepared.read(100, 140).tobytes())
        stream.seek(offset)
        stream.write(np.array([40_000], np.uint16).tobytes())
    with pytest.raises(UserError, match="holds token id 40000, but the vocabulary has 300 entries"):
        open_text(data_config(tmp_path, prepared_folder, tokenizer={})).training.read_at(0, 2000)


def run_concurrently(monkeypatch: pytest.MonkeyPatch, action: Callable[[], object]) -> list[object]:
    """Return two results of an action; the second call runs before the first one renames its draft."""
    first, second, drafted, done = [], [], threading.Event(), threading.Event()
    replace = pathlib.Path.replace

    def replace_late(draft: Path, target: Path) -> Path:
        if threading.current_thread() is slower:
            drafted.set()
            done.wait(10)
        return replace(draft, target)

    def run(results: list[object]) -> None:
        try:
            results.append(action())
        except OSError as error:
            results.append(error)

    monkeypatch.setattr(pathlib.Path, "replace", replace_late)
    slower = threading.Thread(target=run, args=(first,))
    slower.start()
    assert drafted.wait(10)
    run(second)
    done.set()
    slower.join()
    return [*first, *second]


def test_two_ranks_can_count_held_back_documents_at_once(
    tmp_path: Path, prepared_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = PreparedData(prepared_folder)
    # Ranks are forks of one process, so their objects have the same addresses.
    monkeypatch.setattr("trainium_trainer.data.prepared.reader.id", lambda _: 1, raising=False)
    cache = tmp_path / "shared"
    cache.mkdir()
    results = run_concurrently(
        monkeypatch, lambda: DocumentSelection(prepared, 0.2, validation=True, cache_folder=cache).tokens
    )
    assert results[0] == results[1] == DocumentSelection(prepared, 0.2, validation=True, cache_folder=cache).tokens
    assert [file.suffix for file in cache.iterdir()] == [".npy"], "no draft is left"


def test_two_pods_can_compute_the_digest_of_a_file_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_documents(tmp_path / "d.jsonl")
    cache = tmp_path / "shared"
    cache.mkdir()
    file = DataFile(str(tmp_path / "d.jsonl"), (tmp_path / "d.jsonl").stat().st_size, "stamp", "d.jsonl")
    results = run_concurrently(monkeypatch, lambda: file.digest(cache))
    assert results[0] == results[1] == file.digest(None)
    assert len(list(cache.iterdir())) == 1


def test_documents_are_held_back_by_their_hash_alone(tmp_path: Path, tokenizer: Path, prepared_folder: Path) -> None:
    texts = write_documents(tmp_path / "d.jsonl")
    prepared = PreparedData(prepared_folder)
    loaded_tokenizer = load_tokenizer(tokenizer)

    def documents(tokens: Any) -> list[str]:
        return loaded_tokenizer.decode(list(tokens.read(0, tokens.tokens)), skip_special_tokens=False).split(END)[:-1]

    kept, held_back = (
        documents(DocumentSelection(prepared, 0.2, validation=validation, cache_folder=tmp_path))
        for validation in (False, True)
    )
    assert 40 < len(held_back) < 120
    assert sorted(kept + held_back) == sorted(texts)
    assert kept == [text for text in texts if text in set(kept)], "in the order of the data"
    (tmp_path / "e.jsonl").write_bytes(json_lines(["more", *reversed(texts)]))
    build(tmp_path / "more", build_inputs(tmp_path / "e.jsonl", tokenizer), "k", workers=1)
    extended = DocumentSelection(PreparedData(tmp_path / "more"), 0.2, validation=True, cache_folder=tmp_path)
    assert set(documents(extended)) - {"more"} == set(held_back)
    cached = DocumentSelection(prepared, 0.2, validation=True, cache_folder=tmp_path)
    assert documents(cached) == held_back
    for start, stop in ((0, 3), (50, 500), (cached.tokens - 9, cached.tokens)):
        assert (cached.read(start, stop) == cached.read(0, cached.tokens)[start:stop]).all()


def test_pieces_of_one_document_are_held_back_together(tmp_path: Path, tokenizer: Path) -> None:
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(f"{name} says\n" * 180_000)
    build(tmp_path / "prepared", build_inputs(tmp_path / "*.txt", tokenizer), "k", workers=1)
    prepared = PreparedData(tmp_path / "prepared")
    hashes = [prepared.batch(number)[2] for number in range(len(prepared.batch_tokens))]
    assert sum(len(part) for part in hashes) == 6
    assert len(np.unique(np.concatenate(hashes))) == 3
    mask = select_held_back(np.array([0, 2**63 - 1, 2**63, 2**64 - 1], np.uint64), 0.5)
    assert mask.tolist() == [True, True, False, False]


# ---- processes ------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("clean_start")
def test_a_worker_that_dies_is_an_error() -> None:
    with Workers(2) as workers, pytest.raises(WorkerError, match=r"was killed by SIGKILL .*memory is short"):
        list(workers.map(os.kill, [(0, 0), (0, 0), (os.getpid(), 0), (0, 9), (0, 0)]))


@pytest.mark.usefixtures("clean_start")
def test_an_error_in_a_worker_comes_with_its_traceback() -> None:
    with Workers(1) as workers:
        with pytest.raises(WorkerError, match=r"(?s)Traceback.*ZeroDivisionError"):
            workers.call(divmod, 1, 0)
        assert workers.call(divmod, 7, 2) == (3, 1), "the worker continues"


@pytest.mark.usefixtures("clean_start")
def test_results_come_in_the_order_of_the_calls() -> None:
    with Workers(3) as workers:
        calls = [(number, 7) for number in range(50)]
        assert list(workers.map(divmod, calls)) == [divmod(*call) for call in calls]


# ---- the command ----------------------------------------------------------------------------------------------------


def test_the_command_prepares_data_with_their_tokenizer(
    tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = write_documents(tmp_path / "d.jsonl")
    with (tmp_path / "d.jsonl").open("ab") as stream:
        stream.write(b"{oops\n")
    out = tmp_path / "prepared"
    command = ["prepare-data", "--source", str(tmp_path / "d.jsonl"), "--tokenizer", str(tokenizer)]
    assert cli.run([*command, "--output", str(out), "--workers", "1"]) == 0
    output = capsys.readouterr().out
    assert f"{out}: 400 documents, " in output
    assert "tokens/s, 1 lines skipped, the first: " in output
    assert "d.jsonl line 401: not JSON" in output
    settings = data_config(tmp_path, out, tokenizer={})
    data = open_text(settings)
    assert decode_all(data) == "".join(text + END for text in texts)
    assert find_vocabulary_size(settings) == 300
    assert cli.run([*command, "--output", str(out)]) == 0, "the data exist already"
    assert cli.run([*command, "--output", str(tmp_path)]) == ExitCode.USER_ERROR
    assert "is there already and is not prepared data" in capsys.readouterr().err
    assert cli.run([*command, "--output", str(tmp_path / "x"), "--max-bad-lines", "0"]) == ExitCode.USER_ERROR
    assert not (tmp_path / "x").exists()
    assert cli.run([*command, "--output", str(tmp_path / "x"), "--workers", "0"]) == ExitCode.USER_ERROR
    assert "workers is 0" in capsys.readouterr().err


def test_a_tokenizer_that_differs_from_the_prepared_datas_is_refused(
    tmp_path: Path, tokenizer: Path, prepared_folder: Path
) -> None:
    document = json.loads(tokenizer.read_text())
    document["added_tokens"][0]["special"] = False
    (tmp_path / "other.json").write_text(json.dumps(document))
    (tmp_path / "same.json").write_text(json.dumps(json.loads(tokenizer.read_text()), indent=3))
    with pytest.raises(UserError, match=r"was prepared with another tokenizer than .*other.json"):
        open_text(data_config(tmp_path, prepared_folder, tokenizer={"path": str(tmp_path / "other.json")}))
    open_text(data_config(tmp_path, prepared_folder, tokenizer={"path": str(tmp_path / "same.json")}))


def test_the_progress_of_a_build_reaches_its_end(tmp_path: Path, tokenizer: Path) -> None:
    write_documents(tmp_path / "d.jsonl")
    reports: list[BuildProgress] = []
    build(tmp_path / "prepared", build_inputs(tmp_path / "d.jsonl", tokenizer), "k", workers=1, progress=reports.append)
    assert reports[-1].bytes == reports[-1].total_bytes
    assert reports[-1].documents == 400


def test_several_sources_are_mixed_by_their_weights_and_share_a_tokenizer(tmp_path: Path, tokenizer: Path) -> None:
    write_documents(tmp_path / "a.jsonl")
    build(tmp_path / "prepared", build_inputs(tmp_path / "a.jsonl", tokenizer), "k", workers=1)
    (tmp_path / "b.jsonl").write_bytes(json_lines(["b " * 400] * 3).replace(b'"text"', b'"body"'))
    sources = [
        {"source": str(tmp_path / "prepared"), "weight": 3},
        {"source": str(tmp_path / "b.jsonl"), "textField": "body"},
    ]
    settings = data_config(tmp_path, "unused", sources=sources, tokenizer={})
    assert find_vocabulary_size(settings) == 300
    data = open_text(settings)
    assert data.tokenizer == tmp_path / "prepared" / "tokenizer.json"
    numbers = data.training.list_numbers(0, 1000)
    assert sum(number < data.training.sizes[0] for number in numbers) == pytest.approx(750, abs=2)
    assert len(data.training.read_at(0, 8)[-1].tokens) == 17
    assert open_text(settings).identity == data.identity
    other = data_config(tmp_path, "unused", sources=[sources[0] | {"weight": 2}, sources[1]], tokenizer={})
    assert open_text(other).identity != data.identity

"""Fetch a model from a hub on loopback, through the library of the hub."""

import json
import logging
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.testing.trainer.base_models import save_base
from tests.testing.trainer.hub_server import COMMIT, HubServer, run_hub
from trainium_trainer import cli
from trainium_trainer.weights.base import BaseWeights

TOKEN = "hf_token_that_must_never_be_shown"
OTHER_FILES = {
    "tokenizer.json": b"{}",
    "tokenizer_config.json": b"{}",
    "pytorch_model.bin": b"pickle",
    "original/consolidated.safetensors": b"other",
    "consolidated.safetensors": b"other",
    "README.md": b"about",
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with run_hub(monkeypatch) as server:
        yield server


@pytest.fixture
def files(tmp_path: Path) -> dict[str, bytes]:
    save_base(tmp_path / "original", largest="20KB")
    return {path.name: path.read_bytes() for path in (tmp_path / "original").iterdir()}


def fetch(output: Path, name: str = "owner/tiny", *options: str) -> int:
    return cli.run(["fetch-model", name, "--output", str(output), *options])


def test_only_files_that_training_needs_are_fetched(
    tmp_path: Path, hub: HubServer, files: dict[str, bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    hub.add("owner/tiny", files | OTHER_FILES)
    assert fetch(tmp_path / "out") == 0
    fetched = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir() if path.is_file()}
    assert fetched == files | {name: OTHER_FILES[name] for name in ("tokenizer.json", "tokenizer_config.json")}
    original = BaseWeights.open(str(tmp_path / "original"))
    assert BaseWeights.open(str(tmp_path / "out")).digest == original.digest
    output = capsys.readouterr().out
    assert output.startswith(f"fetched owner/tiny to {tmp_path / 'out'}: {len(fetched)} files, ")
    assert COMMIT in output
    before = len(hub.downloaded_files())
    assert fetch(tmp_path / "out") == 0
    assert len(hub.downloaded_files()) == before


@pytest.mark.parametrize(
    ("file", "sentence"),
    [
        ("tekken.json", "; the folder has tekken.json but no tokenizer.json: convert it once with transformers"),
        ("tokenizer.model", "; the folder has tokenizer.model but no tokenizer.json: convert it once"),
        ("README.md", "; the folder has no tokenizer.json: name another folder with one in data.tokenizer.path\n"),
    ],
)
def test_a_model_without_a_tokenizer_is_fetched_with_a_word(
    tmp_path: Path,
    hub: HubServer,
    files: dict[str, bytes],
    capsys: pytest.CaptureFixture[str],
    file: str,
    sentence: str,
) -> None:
    hub.add("owner/tiny", files | {file: b"{}"})
    assert fetch(tmp_path / "out") == 0
    assert sentence in capsys.readouterr().out
    assert (tmp_path / "out" / file).exists() == (file != "README.md")


def test_an_interrupted_download_is_continued(
    tmp_path: Path, hub: HubServer, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)  # only complete chunks are kept
    name = min(name for name in files if name.endswith(".safetensors"))
    hub.add("owner/tiny", files)
    hub.truncate_next_download(name, after=5_000)
    assert fetch(tmp_path / "out") == 0
    ranges = [item.range for item in hub.requests if item.method == "GET" and item.path.endswith(name)]
    assert ranges == [None, "bytes=5000-"]
    assert (tmp_path / "out" / name).read_bytes() == files[name]


def test_a_repeated_fetch_downloads_only_the_missing_files(
    tmp_path: Path, hub: HubServer, files: dict[str, bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    name = max(name for name in files if name.endswith(".safetensors"))
    hub.add("owner/tiny", files)
    hub.refused.add(name)
    assert fetch(tmp_path / "out") == 64
    assert "the hub refused the token: set HF_TOKEN to one that may read it" in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "out" / name).exists()
    before = {path.name for path in (tmp_path / "out").iterdir() if path.is_file()}
    partial = tmp_path / "out/.cache/huggingface/download/a.b.incomplete"  # of a killed process
    partial.write_bytes(b"part")
    hub.refused.clear()
    hub.requests.clear()
    assert fetch(tmp_path / "out") == 0
    assert set(hub.downloaded_files()) == files.keys() - before
    assert not partial.exists()


def test_a_gated_model_needs_the_token_of_the_environment(
    tmp_path: Path,
    hub: HubServer,
    files: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    hub.add("owner/tiny", files, token=TOKEN)
    # The login of the machine must not be used.
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "token").write_text(TOKEN)
    gated = "fetch-model owner/tiny: the model is gated: accept its terms on its page of the hub, and set HF_TOKEN"
    assert fetch(tmp_path / "out") == 64
    assert capsys.readouterr().err.splitlines()[-1].startswith(gated)
    assert {request.token for request in hub.requests} == {None}
    monkeypatch.setenv("HF_TOKEN", "hf_of_somebody_else")
    assert fetch(tmp_path / "out") == 64
    assert capsys.readouterr().err.splitlines()[-1].startswith(gated)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert fetch(tmp_path / "out") == 0
    output = capsys.readouterr()
    assert TOKEN not in output.out + output.err + caplog.text
    for path in (tmp_path / "out").rglob("*"):
        assert not path.is_file() or TOKEN.encode() not in path.read_bytes()


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("owner/none", [], "there is no such model, or it may not be read: correct the name"),
        ("owner/tiny", ["--revision", "v9"], "has no revision v9: correct --revision or leave it out"),
        ("a name/with/slashes", [], "is not the name of a model: write owner/name"),
    ],
)
def test_an_unknown_or_invalid_model_name_is_refused_in_one_sentence(
    tmp_path: Path,
    hub: HubServer,
    files: dict[str, bytes],
    capsys: pytest.CaptureFixture[str],
    name: str,
    options: list[str],
    sentence: str,
) -> None:
    hub.add("owner/tiny", files)
    assert fetch(tmp_path / "out", name, *options) == 64
    assert f"fetch-model {name}: {sentence}" in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"model.safetensors.index.json": None, "*": None, "pytorch_model.bin": b"x"},
            "has neither model.safetensors nor model.safetensors.index.json, only pytorch_model.bin: use",
        ),
        ({"config.json": None}, "has no config.json"),
        (
            {"config.json": b'{"architectures": ["PhiForCausalLM"]}'},
            "describes PhiForCausalLM, but the built-in trainer has only",
        ),
    ],
    ids=["pickles", "no configuration", "other architecture"],
)
def test_models_that_cannot_be_trained_are_refused_before_their_weights_are_fetched(
    tmp_path: Path,
    hub: HubServer,
    files: dict[str, bytes],
    capsys: pytest.CaptureFixture[str],
    change: dict[str, bytes | None],
    sentence: str,
) -> None:
    kept = {name: data for name, data in files.items() if "*" not in change or not name.endswith(".safetensors")}
    hub.add("owner/tiny", {name: data for name, data in (kept | change).items() if data is not None})
    assert fetch(tmp_path / "out") == 64
    assert f"fetch-model owner/tiny: {sentence}" in capsys.readouterr().err.replace(
        "config.json: describes", "describes"
    )
    assert not any(name.endswith(".safetensors") for name in hub.downloaded_files())


def test_a_failing_or_unreachable_hub_is_reported_in_one_sentence(
    tmp_path: Path, hub: HubServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.status = 500
    assert fetch(tmp_path / "out") == 81
    assert "fetch-model owner/tiny: the hub answered 500" in capsys.readouterr().err.splitlines()[-1]
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{closed.getsockname()[1]}")
        assert fetch(tmp_path / "out") == 81
    assert "the hub cannot be reached: look at the network" in capsys.readouterr().err.splitlines()[-1]


def test_an_index_without_its_files_is_refused_before_downloads(
    tmp_path: Path, hub: HubServer, files: dict[str, bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    index = json.loads(files["model.safetensors.index.json"])
    missing = max(index["weight_map"].values())
    hub.add("owner/tiny", {name: data for name, data in files.items() if name != missing})
    assert fetch(tmp_path / "out") == 64
    assert f"index.json names {missing}, not in the repository" in capsys.readouterr().err.splitlines()[-1]
    assert not any(name.endswith(".safetensors") for name in hub.downloaded_files())


@pytest.mark.parametrize(
    "pattern",
    [
        "model_{}-of-2.safetensors",
        "weights-{}.safetensors",
        "pytorch_model-{}.safetensors",
        "shards/part-{}.safetensors",
    ],
)
def test_the_index_decides_which_files_are_weights(
    tmp_path: Path, hub: HubServer, files: dict[str, bytes], pattern: str
) -> None:
    index = json.loads(files["model.safetensors.index.json"])
    names = {file: pattern.format(number) for number, file in enumerate(sorted(set(index["weight_map"].values())))}
    index["weight_map"] = {tensor: names[file] for tensor, file in index["weight_map"].items()}
    renamed = {names.get(name, name): data for name, data in files.items()}
    renamed["model.safetensors.index.json"] = json.dumps(index).encode()
    hub.add("owner/tiny", renamed | {"model-of-something-else.safetensors": b"other"})
    assert fetch(tmp_path / "out") == 0
    assert BaseWeights.open(str(tmp_path / "out")).digest == BaseWeights.open(str(tmp_path / "original")).digest
    assert set(hub.downloaded_files()) == {name.rpartition("/")[2] for name in renamed}


def test_an_index_that_names_files_outside_of_its_folder_is_refused(
    tmp_path: Path, hub: HubServer, files: dict[str, bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    index = json.loads(files["model.safetensors.index.json"])
    for outside in ("../secret.safetensors", "/etc/secret.safetensors"):
        index["weight_map"]["lm_head.weight"] = outside
        hub.add("owner/tiny", files | {"model.safetensors.index.json": json.dumps(index).encode()})
        assert fetch(tmp_path / f"out{len(outside)}") == 64
        assert f"names {outside}, which is outside of the folder" in capsys.readouterr().err.splitlines()[-1]

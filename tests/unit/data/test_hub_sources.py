"""Read data sets of a hub on loopback through `datasets` and `huggingface_hub`.

Both libraries read HF_ENDPOINT when they are imported, so each run is a process that has imported neither.
"""

import io
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pyarrow as pa
import pytest
import yaml
from pyarrow import parquet

from tests.testing.trainer.fork_server import run_python
from tests.testing.trainer.hub_server import PARQUET, HubServer

TOKEN = "hf_token_that_must_never_be_shown"
README = b"""---
configs:
- config_name: qnli
  data_files:
  - {split: train, path: qnli/train-*}
  - {split: validation, path: qnli/validation-*}
- config_name: cola
  data_files: [{split: train, path: cola/train-*}]
---
"""
TABS = b'---\nconfigs: [{config_name: default, data_files: a.csv, sep: "\\t"}]\n---\n'
READ_SOURCES = """
import json, sys
from trainium_trainer.data.sources.hub import pin_revision
from trainium_trainer.data.sources.resolve import open_source
from trainium_trainer.exits import TrainerError
results = {}
for location in sys.argv[1:]:
    try:
        source = open_source(pin_revision(location), "text")
        blocks = source.divide_into_blocks(1 << 20)
        texts = [document.text for block in blocks for document in source.read_documents(block)]
        results[location] = [source.compute_identity(None), texts, [file.name for file in source.files]]
    except TrainerError as error:
        results[location] = [type(error).__name__, str(error)]
print(json.dumps(results))
"""


def parquet_bytes(texts: list[str]) -> bytes:
    stream = io.BytesIO()
    parquet.write_table(pa.table({"text": texts}), stream, row_group_size=40)
    return stream.getvalue()


def jsonl_bytes(texts: list[str]) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def glue_files() -> dict[str, bytes]:
    return {
        "README.md": README,
        "qnli/train-00000-of-00002.parquet": parquet_bytes([f"train {number}" for number in range(60)]),
        "qnli/train-00001-of-00002.parquet": parquet_bytes([f"train {number}" for number in range(60, 100)]),
        "qnli/validation-00000-of-00001.parquet": parquet_bytes([f"validation {number}" for number in range(40)]),
        "cola/train-00000-of-00001.parquet": parquet_bytes(["cola"]),
    }


SPACES = b"""---
configs:
- config_name: de+en (small)
  data_dir: my data
---
"""
SPLITS = {
    "train": ["train-0.jsonl", "train-1.parquet", "train 2.jsonl"],
    "test": ["test.jsonl"],
}


def split_files() -> dict[str, bytes]:
    """Return a data set of 150 rows of train in three files, and 7 of test."""
    lines = jsonl_bytes([f"row {number}" for number in range(30)]).replace(b"\n", b"\n\n", 3)
    rows = [f"row {number}" for number in range(30, 130)]
    more = jsonl_bytes([f"row {number}" for number in range(130, 150)])
    contents = [lines, parquet_bytes(rows), more, jsonl_bytes([f"test {number}" for number in range(7)])]
    paths = [path for split in SPLITS.values() for path in split]
    configs = [{"split": split, "path": files} for split, files in SPLITS.items()]
    readme = f"---\nconfigs: {json.dumps([{'config_name': 'default', 'data_files': configs}])}\n---\n"
    return {"README.md": readme.encode(), **dict(zip(paths, contents, strict=True))}


LINES = {"README.md": b"about", "data.jsonl": jsonl_bytes(["a", "b"])}


@pytest.fixture(scope="module")
def hub() -> Iterator[HubServer]:
    with HubServer() as server:
        server.add("datasets/nyu-mll/glue", glue_files())
        server.add("datasets/owner/renamed", glue_files())
        server.add("datasets/owner/lines", LINES)
        server.add("datasets/owner/splits", split_files())
        server.add("datasets/owner/spaces", {"README.md": SPACES, "my data/a b.jsonl": jsonl_bytes(["a", "b"])})
        server.add(
            "datasets/owner/folders",
            {"my data/a b.jsonl": jsonl_bytes(["a", "b"]), "other/a.jsonl": jsonl_bytes(["c"])},
        )
        server.add("datasets/owner/script", {"script.py": b"code", "data.jsonl": jsonl_bytes(["a"])})
        server.add("datasets/owner/tabs", {"README.md": TABS, "a.csv": b"text\tother\nx\ty\n"})
        server.add("datasets/owner/pictures", {"README.md": b"about", "a.tar": b"x"})
        server.add("datasets/owner/empty", {"README.md": b"about"})
        server.add("datasets/owner/gated", {"README.md": b"about", "data.jsonl": jsonl_bytes(["secret"])}, token=TOKEN)
        server.add(
            "datasets/owner/converted",
            {
                "arxiv/partial-train/0000.parquet": parquet_bytes(["arxiv"]),
                "c4/partial-train/0000.parquet": parquet_bytes(["c4"]),
            },
        )
        yield server


def run_process(home: Path, hub: HubServer, *argv: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    hub_variables = {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    return run_python(*argv, env=inherited | hub_variables | environment)


def read_sources(home: Path, hub: HubServer, *locations: str, **environment: str) -> dict[str, Any]:
    completed = run_process(
        home, hub, "-c", READ_SOURCES, *(f"hf://datasets/{location}" for location in locations), **environment
    )
    assert completed.returncode == 0, completed.stderr
    results: dict[str, Any] = json.loads(completed.stdout.splitlines()[-1])
    return {location.removeprefix("hf://datasets/"): result for location, result in results.items()}


REFUSED = {
    "owner/splits?split=train[:50": "data.hub.split train[:50: Unrecognized instruction format: train[:50: write",
    "owner/splits?split=train[:50%]+valid": "has no split 'valid' (splits: train, test): correct data.hub.split",
    "nyu-mll/glue?name=qnli&split=trian": (
        "data.hub nyu-mll/glue: has no split 'trian' (splits: train, validation): correct data.hub.split"
    ),
    "nyu-mll/glue?name=mnli": "BuilderConfig 'mnli' not found. Available: ['qnli', 'cola']: correct data.hub.name",
    "nyu-mll/glue": "Please pick one among the available configs: ['qnli', 'cola']",
    "nyu-mll/glue@v9?name=qnli": "data.hub nyu-mll/glue: has no revision v9: correct data.hub.revision",
    "owner/absent": "data.hub owner/absent: there is no such data set, or it may not be read: correct the name, or set",
    "owner/gated": "data.hub owner/gated: the data set is gated: accept its terms on its page of the hub, and set HF_T",
    "owner/script": "data.hub owner/script: is loaded by a script, which is not run: set data.hub.revision to refs/con",
    "owner/tabs": "data.hub owner/tabs: its files need special settings to be read (sep), which are not known here",
    "owner/pictures": "a.tar: files end in .txt, .jsonl",
    "owner/empty": "doesn't contain any data files: correct data.hub.name or data.hub.directory",
    "a b": "is no data set on the hub: write hf://datasets/owner/name",
}


@pytest.fixture(scope="module")
def refused_sources(hub: HubServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return read_sources(tmp_path_factory.mktemp("home"), hub, *REFUSED)


@pytest.mark.parametrize("location", REFUSED)
def test_data_sets_that_cannot_be_read_are_refused_with_the_field(
    refused_sources: dict[str, Any], location: str
) -> None:
    kind, sentence = refused_sources[location]
    assert kind in ("UserError", "UnreadableError")
    assert REFUSED[location] in sentence


EXPRESSIONS = (
    "train[:50%]",
    "train[10:20]",
    "train[-5:]",
    "train[125:]+test",
    "test + train[:1%]",
    "train[:10%]+train[-3%:]",
    "train[33%:34%](pct1_dropremainder)",
    "train[140:1000]",
    "train+test",
)


def test_expressions_of_splits_give_the_rows_of_datasets(hub: HubServer, tmp_path: Path) -> None:
    from datasets import Dataset, ReadInstruction

    rows = {"train": [f"row {number}" for number in range(150)], "test": [f"test {number}" for number in range(7)]}
    tables = {split: Dataset.from_dict({"text": texts}) for split, texts in rows.items()}
    locations = {spec: f"owner/splits?{urlencode({'split': spec})}" for spec in EXPRESSIONS}
    results = read_sources(tmp_path, hub, *locations.values(), "owner/splits?split=train+test")
    for spec, location in locations.items():
        parts = ReadInstruction.from_spec(spec).to_absolute({split: len(texts) for split, texts in rows.items()})
        expected = [text for part in parts for text in tables[part.splitname]["text"][part.from_ : part.to]]
        assert results[location][1] == expected, spec
    assert results["owner/splits?split=train+test"][1] == [*rows["train"], *rows["test"]], "as people write it"
    identities = [result[0] for result in results.values()]
    assert len(set(identities)) == len(identities) - 1, "only the last two have the same rows"


def test_names_may_have_spaces_and_signs(hub: HubServer, tmp_path: Path) -> None:
    name = f"owner/spaces?{urlencode({'name': 'de+en (small)'})}"
    directory = f"owner/folders?{urlencode({'directory': 'my data'})}"
    results = read_sources(tmp_path, hub, name, directory)
    assert [result[1] for result in results.values()] == [["a", "b"], ["a", "b"]], results


def test_a_split_is_read_in_the_order_of_its_files_and_identified_by_their_digests(
    hub: HubServer, tmp_path: Path
) -> None:
    names = ("nyu-mll/glue?name=qnli", "owner/renamed?name=qnli", "nyu-mll/glue?name=qnli&split=validation")
    results = read_sources(
        tmp_path, hub, *names, "owner/lines", f"owner/converted@{PARQUET.replace('/', '%2F')}?directory=arxiv"
    )
    train, renamed, validation, plain, converted = results.values()
    assert train[1] == [f"train {number}" for number in range(100)]
    assert validation[1] == [f"validation {number}" for number in range(40)]
    assert (plain[1], converted[1]) == (["a", "b"], ["arxiv"])
    assert train[0] == renamed[0], "the name is not in the identity"
    assert len({result[0] for result in results.values()}) == 4
    commit = train[2][0].partition("@")[2].partition("/")[0]
    assert len(commit) == 40


def test_a_commit_is_resolved_once_and_a_branch_at_each_start(hub: HubServer, tmp_path: Path) -> None:
    first = hub.add("datasets/owner/moving", {"README.md": b"one", "data.jsonl": jsonl_bytes(["old"])})
    pinned = f"owner/moving@{first}"
    (before,) = read_sources(tmp_path, hub, "owner/moving").values()
    hub.add("datasets/owner/moving", {"README.md": b"another text", "data.jsonl": jsonl_bytes(["old"])})
    hub.requests.clear()
    assert read_sources(tmp_path, hub, pinned)[pinned] == before
    assert not any(request.path.startswith("/api/datasets/") for request in hub.requests), "the commit is cached"
    assert read_sources(tmp_path, hub, "owner/moving")["owner/moving"][0] == before[0], (
        "the same files of another commit"
    )
    hub.add("datasets/owner/moving", {"data.jsonl": jsonl_bytes(["new"])})
    moved, old = read_sources(tmp_path, hub, "owner/moving", pinned).values()
    assert (moved[1], old[1]) == (["new"], ["old"])
    assert moved[0] != old[0]


def test_known_files_are_read_when_the_cache_becomes_unwritable(hub: HubServer, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    (refusal,) = read_sources(tmp_path / "file" / "home", hub, "owner/lines").values()
    assert refusal[0] == "StorageError"
    assert "cannot be written (Not a directory): set HF_HOME to a folder that can" in refusal[1]
    home, pinned = tmp_path / "home", f"owner/lines@{hub.add('datasets/owner/lines', LINES)}"
    before = read_sources(home, hub, pinned)
    (file_list,) = (home / "trainium").glob("files-*.json")
    file_list.write_text("{")  # truncated
    assert read_sources(home, hub, pinned) == before
    file_list.with_suffix(".lock").unlink(missing_ok=True)
    file_list.with_suffix(".lock").mkdir()
    hub.requests.clear()
    assert read_sources(home, hub, pinned) == before
    assert not any(request.path.startswith("/api/datasets/") for request in hub.requests)


def test_a_token_opens_a_gated_data_set_and_is_never_shown(hub: HubServer, tmp_path: Path) -> None:
    hub.requests.clear()
    results = read_sources(tmp_path, hub, "owner/gated", HF_TOKEN=TOKEN)
    assert results["owner/gated"][1] == ["secret"]
    assert {request.token for request in hub.requests if request.path.startswith("/datasets/")} == {f"Bearer {TOKEN}"}
    assert TOKEN not in "".join(file.read_text(errors="replace") for file in tmp_path.rglob("*") if file.is_file())
    completed = run_process(tmp_path, hub, "-c", READ_SOURCES, "hf://datasets/owner/gated", HF_TOKEN="hf_another")
    assert "the data set is gated" in completed.stdout
    assert "hf_another" not in completed.stdout + completed.stderr


SAMPLES = """
import json, sys
from trainium_contract.trainer.data import DataConfig
from trainium_trainer.data.batches.samples import Share
from trainium_trainer.data.dataset import open_data
from trainium_trainer.data.loader import open_loader

def rows(data, ranks, start):
    inputs = {}
    for rank in range(ranks):
        loader = open_loader(data, Share(global_size=4, micro_size=1, dp_rank=rank, dp_size=ranks))
        for step in range(start, 4):
            batches = loader.read_batch(step * 4).micro_batches
            inputs |= {int(row.sample_positions[0]): row.inputs[0].tolist() for row in batches}
        loader.close()
    return [inputs[number] for number in sorted(inputs)]

if __name__ == "__main__":
    for number, document in enumerate(json.loads(sys.argv[1])):
        data = open_data(DataConfig.model_validate(document), 4)
        whole = rows(data, 1, 0)
        assert number or rows(data, 2, 2) == whole[8:], "two ranks from step 2 on"
        validation_samples = data.validation and data.validation.num_samples
        print(json.dumps([type(data.training).__name__, whole, validation_samples]))
"""


@pytest.mark.parametrize("tokenization", ["Ahead", pytest.param("Online", marks=pytest.mark.long)])
def test_a_mixture_gives_the_samples_of_the_same_files_at_each_size_and_place(
    hub: HubServer, tmp_path: Path, tokenization: str
) -> None:
    for name, content in glue_files().items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    train = {"hub": {"dataset": "nyu-mll/glue", "name": "qnli"}, "weight": 3}
    validation = {"hub": {"dataset": "nyu-mll/glue", "name": "qnli", "split": "validation"}}
    files = {"source": f"{tmp_path}/qnli/train-*", "weight": 3}, {"source": f"{tmp_path}/qnli/validation-*"}
    settings = {
        "sequenceLength": 16,
        "tokenizer": {"vocabSize": 300},
        "cacheDirectory": str(tmp_path / "cache"),
        "tokenization": tokenization,
        "workers": 1,
    }
    (tmp_path / "samples.py").write_text(SAMPLES)
    documents = json.dumps([settings | {"sources": [train, validation]}, settings | {"sources": files}])
    completed = run_process(tmp_path / "home", hub, str(tmp_path / "samples.py"), documents)
    assert completed.returncode == 0, completed.stderr
    streamed, local = map(json.loads, completed.stdout.splitlines()[-2:])
    assert streamed[0] == {"Ahead": "Samples", "Online": "Streams"}[tokenization]
    assert len(streamed[1]) == 16
    assert streamed == local


def test_show_data_uses_another_split_for_validation(hub: HubServer, tmp_path: Path) -> None:
    document = {
        "data": {
            "hub": {"dataset": "nyu-mll/glue", "name": "qnli"},
            "validation": {"hubSplit": "validation"},
            "format": "Instruction",
            "examples": {"template": {"prompt": "say", "completion": " {text}"}},
            "sequenceLength": 32,
            "tokenizer": {"vocabSize": 300},
            "cacheDirectory": str(tmp_path / "cache"),
        }
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(document))
    command = ("-m", "trainium_trainer", "show-data", "--config", str(tmp_path / "run.yaml"), "--samples", "1")
    completed = run_process(tmp_path / "home", hub, *command)
    assert completed.returncode == 0, completed.stderr
    assert "records     100\n" in completed.stdout
    assert "validation  40 samples\n" in completed.stdout


def test_a_failure_of_the_hub_is_a_storage_error(hub: HubServer, tmp_path: Path) -> None:
    location = "nyu-mll/glue?name=cola"
    hub.status = 500
    try:
        assert read_sources(tmp_path, hub, location)[location][0] == "StorageError"
    finally:
        hub.status = None
    assert read_sources(tmp_path, hub, location)[location][1] == ["cola"]

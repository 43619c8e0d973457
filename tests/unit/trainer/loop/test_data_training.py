"""Train on text and examples in real runs: the same numbers in every layout and after restarts."""

import itertools
import json
import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.testing.trainer.example_files import make_records, write_records
from tests.testing.trainer.hub_server import HubServer
from tests.testing.trainer.layouts import PP, SHARDED, SP, TP, TWO_PASSES
from tests.unit.trainer.conftest import Job, Launcher

pytestmark = pytest.mark.timeout(300)  # real processes; the first test also waits for the imports


def write_documents(folder: Path, *extra_lines: str) -> list[str]:
    """Write many short documents and the extra lines; return the overrides of a run that holds some back."""
    texts = [f"number {number} is {'even' if number % 2 else 'odd'} " * 3 for number in range(200)]
    lines = [json.dumps({"text": text}) for text in texts]
    (folder / "d.jsonl").write_text("\n".join([*lines, *extra_lines]))
    cache = f"data.cacheDirectory={folder / 'cache'}"  # other tests inspect the shared cache
    return [f"data.source={folder / 'd.jsonl'}", cache, "data.workers=1", "data.validation.fraction=0.1"]


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the overrides of a run on documents; their tokens are cached for all tests."""
    return write_documents(tmp_path_factory.mktemp("documents"))


def test_a_run_that_tokenises_online_resumes_at_another_size_with_the_same_samples(
    launch: Launcher, documents: list[str]
) -> None:
    online = [*documents, "data.tokenization=Online", "steps=12"]
    reference = launch(1, "whole", online).finish()
    first = launch(2, "run", [*online, "checkpoint.durable.everySteps=1000"]).request_exit(1, step=3)
    assert len(first.metrics()) < 12
    assert list((first.folder / "data").glob("blocks-*-[01].idx"))
    launch(1, "run", online).finish().assert_same_curve(reference)


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with HubServer() as server:
        yield server


def split_files(word: str) -> dict[str, bytes]:
    texts = [f"{word} {number} is {'even' if number % 2 else 'odd'} " * 3 for number in range(120)]
    lines = [json.dumps({"text": text, "instruction": text[:20], "response": text[20:60]}) for text in texts]
    return {"train.jsonl": "\n".join(lines[20:]).encode(), "validation.jsonl": "\n".join(lines[:20]).encode()}


HUB = {"dataset": "owner/moving"}
FROM_HUB = {
    "sources": {"sources": [{"hub": HUB, "weight": 3}, {"source": "hf://datasets/owner/moving?split=validation"}]},
    "streamed": {"hub": HUB, "validation": {"hubSplit": "validation", "everySteps": 12}, "tokenization": "Online"},
    "examples": {"hub": HUB, "validation": {"hubSplit": "validation", "everySteps": 12}, "format": "Instruction"},
}


@pytest.mark.parametrize(
    "form", ["streamed", *(pytest.param(form, marks=pytest.mark.long) for form in ("sources", "examples"))]
)
def test_a_restart_reads_the_commit_of_the_first_start(
    launch: Launcher, hub: HubServer, tmp_path: Path, form: str
) -> None:
    hub.add("datasets/owner/moving", split_files("number"))
    document = {"sequenceLength": 96, "tokenizer": {"vocabSize": 340}, "cacheDirectory": str(tmp_path / "cache")}
    settings = [f"data={json.dumps(document | {'workers': 1} | FROM_HUB[form])}", "steps=12"]

    def start(ranks: int, name: str, home: str) -> Job:
        return launch(ranks, name, settings, HF_ENDPOINT=hub.url, HF_HOME=str(tmp_path / home))

    reference = start(1, "whole", "home").finish()
    start(2, "run", "home").request_exit(1, step=3)
    hub.add("datasets/owner/moving", split_files("word"))
    hub.status, hub.failing = 500, "api/" if form == "streamed" else ""
    hub.requests.clear()
    start(1, "run", "another-home").finish().assert_same_curve(reference)
    assert not any(request.path.startswith("/api/datasets/") for request in hub.requests)
    assert bool(hub.requests) == (form == "streamed"), "everything else is cached"


def test_all_ranks_of_the_first_start_read_one_commit_while_the_branch_moves(
    launch: Launcher, hub: HubServer, tmp_path: Path
) -> None:
    hub.add("datasets/owner/moving", split_files("number"))
    hub.moving = "datasets/owner/moving"
    document = {"sequenceLength": 96, "tokenizer": {"vocabSize": 340}, "cacheDirectory": str(tmp_path / "cache")}
    settings = [f"data={json.dumps(document | {'workers': 1, 'hub': HUB})}"]
    launch(2, "run", settings, HF_ENDPOINT=hub.url, HF_HOME=str(tmp_path / "home")).finish()
    assert sum(request.path.endswith("/revision/main") for request in hub.requests) == 1
    record = json.loads((tmp_path / "run" / "DATA-REVISIONS").read_text())
    assert record["commits"] == {"owner/moving@main": next(iter(hub.repositories["datasets/owner/moving"].commits))}


def test_a_tokenising_process_that_is_killed_ends_the_run_with_its_reason(
    launch: Launcher, documents: list[str]
) -> None:
    job = launch(1, "run", [*documents, "data.tokenization=Online", "steps=100000"])
    job.wait_for_step(3)
    (worker,) = children(job.pids[0])
    os.kill(worker, signal.SIGKILL)
    assert job.wait() == [1], job.log()
    assert "a tokenizing process was killed by SIGKILL" in job.log()


def children(pid: int) -> list[int]:
    import psutil

    return [child.pid for child in psutil.Process(pid).children()]


@pytest.mark.parametrize(
    ("ranks", "overrides", "tokenizing"),
    [
        pytest.param(4, [TP], [1, 0, 1, 0], id="tensor", marks=pytest.mark.long),
        pytest.param(2, [PP], [1, 0], id="pipeline"),
    ],
)
def test_ranks_that_train_on_the_same_samples_tokenise_them_once(
    launch: Launcher, documents: list[str], ranks: int, overrides: list[str], tokenizing: list[int]
) -> None:
    online = [*documents, "data.tokenization=Online"]
    reference = launch(1, "whole", online).finish()
    launch(ranks, "divided", [*online, *overrides]).finish().assert_same_curve(reference)
    job = launch(ranks, "endless", [*online, *overrides, "steps=100000"])
    job.wait_for_step(3)
    assert [len(children(pid)) for pid in job.pids] == tokenizing
    job.request_exit(-1)


def test_an_error_of_the_tokenising_rank_ends_all_ranks_with_its_samples(launch: Launcher, tmp_path: Path) -> None:
    documents = write_documents(tmp_path, *["{oops\n"] * 40)
    job = launch(2, "run", [*documents, "data.tokenization=Online", "data.maxBadLines=0", TP, "steps=100000"])
    assert job.wait() == [64, 64], job.log()
    for rank in range(2):
        assert "not JSON" in job.log(rank).splitlines()[-1]


@pytest.mark.parametrize(("attempt", "code"), [("0", 64), ("1", 81)])
def test_missing_data_are_a_storage_error_after_a_restart_alone(
    launch: Launcher, tmp_path: Path, attempt: str, code: int
) -> None:
    job = launch(1, "run", [f"data.source={tmp_path}/missing.txt"], TRAINIUM_ATTEMPT=attempt)
    assert job.wait() == [code], job.log()
    assert "missing.txt: there is no such file or folder" in job.log().splitlines()[-1]


def test_bad_lines_end_a_run_with_64_and_their_place(launch: Launcher, tmp_path: Path) -> None:
    job = launch(1, "run", [*write_documents(tmp_path, "{oops\n"), "data.maxBadLines=0"])
    assert job.wait() == [64]
    assert f"{tmp_path / 'd.jsonl'} line 201: not JSON" in job.log().splitlines()[-1]


def test_a_rank_that_is_killed_leaves_no_tokenising_process(launch: Launcher, documents: list[str]) -> None:
    import psutil

    job = launch(1, "run", [*documents, "data.tokenization=Online", "steps=100000"])
    job.wait_for_step(2)
    (worker,) = children(job.pids[0])
    process = psutil.Process(worker)
    os.kill(job.pids[0], signal.SIGKILL)
    job.wait()
    process.wait(timeout=20)


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the overrides of a run on 60 examples of allowed lengths."""
    folder = tmp_path_factory.mktemp("examples")
    source = write_records(folder / "d.jsonl", make_records(60))
    return [
        f"data.source={source}",
        f"data.cacheDirectory={folder / 'cache'}",
        "data.format=Instruction",
        "data.sequenceLength=128",
        "data.tokenizer.vocabSize=340",
        "data.workers=1",
    ]


@pytest.mark.parametrize("packing", ["true", pytest.param("false", marks=pytest.mark.long)])
def test_examples_give_the_same_numbers_in_every_layout(launch: Launcher, examples: list[str], packing: str) -> None:
    settings = [*examples, f"data.examples.packing={packing}", "data.validation.fraction=0.2"]
    settings += ["data.validation.everySteps=3", "data.validation.samples=7"]
    reference = launch(1, "one", settings).finish()
    assert [line["step"] for line in reference.metrics() if "validationLoss" in line] == [3, 6]
    layouts = {
        "data": (2, []),
        "tensor": (2, [TP, SP, TWO_PASSES]),
        "pipeline": (2, [PP]),
        "sharded": (2, [SHARDED, "recompute=Selective"]),
    }
    for name, (ranks, overrides) in layouts.items():
        launch(ranks, name, [*settings, *overrides]).finish().assert_same_curve(reference)


def test_packed_examples_have_the_losses_of_separate_examples(launch: Launcher, examples: list[str]) -> None:
    batch = "batch={globalSize: 60, microSize: 10}"
    one_step = [*examples, "monitor.recordSamples=true", "epochs=1", batch, "schedule.warmupSteps=0"]
    alone = launch(1, "alone", one_step).finish()
    packed = launch(2, "packed", [*one_step, "data.examples.packing=true"]).finish()
    assert packed.losses() == pytest.approx(alone.losses(), rel=1e-5)
    assert 10 < len(packed.samples()[1]) < 30


def test_each_example_is_used_once_per_epoch_also_after_a_resume_at_another_size(
    launch: Launcher, examples: list[str]
) -> None:
    settings = [*examples, "epochs=3", "monitor.recordSamples=true", "schedule.warmupSteps=0"]
    reference = launch(1, "whole", settings).finish()
    assert len(reference.losses()) == 24, "60 samples in batches of 8"
    launch(2, "run", [*settings, "checkpoint.durable.everySteps=1000"]).request_exit(1, step=3)
    second = launch(1, "run", settings).finish()
    second.assert_same_curve(reference)
    assert Counter(itertools.chain(*second.samples().values())) == dict.fromkeys(range(60), 3)

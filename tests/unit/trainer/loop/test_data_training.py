"""Data in real runs: masks, validation and online tokenisation are the same at every size and layout."""

from __future__ import annotations

import json
import os
import signal
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Job, Launcher

    Curve = list[tuple[float, float | None]]

pytestmark = pytest.mark.timeout(300)  # real processes; the first test also waits for the imports

PATIENCE = 120.0


@pytest.fixture
def documents(tmp_path: Path) -> list[str]:
    """Settings of a run on many short documents, some of which are held back."""
    texts = [f"number {number} is {'even' if number % 2 else 'odd'} " * 3 for number in range(200)]
    lines = [json.dumps({"text": text}) for text in texts]
    (tmp_path / "d.jsonl").write_text("\n".join(lines))
    cache = f"data.cacheDirectory={tmp_path / 'cache'}"  # other tests look into the one that they share
    return [f"data.source={tmp_path / 'd.jsonl'}", cache, "data.workers=1", "data.validation.fraction=0.1"]


def curve(job: Job, ranks: int) -> Curve:
    assert job.wait(PATIENCE) == [0] * ranks, job.log()
    return [(line["loss"], line.get("validationLoss")) for line in job.metrics()]


def assert_same(found: Curve, expected: Curve) -> None:
    assert [loss for loss, _ in found] == pytest.approx([loss for loss, _ in expected], rel=1e-5)
    assert [held is None for _, held in found] == [held is None for _, held in expected]
    assert [held for _, held in found if held] == pytest.approx([held for _, held in expected if held], rel=1e-5)


def test_masked_documents_and_validation_give_the_same_numbers_in_every_layout(
    launch: Launcher, documents: list[str]
) -> None:
    masked = [*documents, "data.maskDocuments=true", "data.validation.everySteps=4", "data.validation.samples=13"]
    reference = curve(launch(1, "one", masked), 1)
    assert [step for step, (_, loss) in enumerate(reference, start=1) if loss is not None] == [4, 6]
    layouts = {
        "tensor": (2, ["parallelism.tensor=2", "parallelism.sequence=true"]),
        "pipeline": (2, ["parallelism.pipeline=2"]),
        "sharded": (2, ["dataParallel=FullySharded", "recompute=Selective"]),
    }
    for name, (ranks, overrides) in layouts.items():
        assert_same(curve(launch(ranks, name, [*masked, *overrides]), ranks), reference)


def test_a_run_that_tokenises_online_goes_on_at_another_size_as_if_nothing_had_happened(
    launch: Launcher, documents: list[str]
) -> None:
    online = [*documents, "data.tokenization=Online", "steps=12"]
    whole = curve(launch(1, "whole", online), 1)
    first = launch(2, "run", [*online, "checkpoint.durable.everySteps=1000"])
    first.wait_for_step(3, PATIENCE)
    os.kill(first.pids[1], signal.SIGTERM)
    assert first.wait(PATIENCE) == [75, 75], first.log()
    assert len(first.metrics()) < 12
    assert list((first.folder / "data").glob("blocks-*-[01].idx"))
    second = launch(1, "run", online)
    assert_same(curve(second, 1), whole)


def test_a_tokenising_process_that_is_killed_ends_the_run_with_its_reason(
    launch: Launcher, documents: list[str]
) -> None:
    job = launch(1, "run", [*documents, "data.tokenization=Online", "steps=100000"])
    job.wait_for_step(3, PATIENCE)
    (worker,) = children(job.pids[0])
    os.kill(worker, signal.SIGKILL)
    assert job.wait(PATIENCE) == [1], job.log()
    assert "a tokenising process was killed by SIGKILL" in job.log()


def children(pid: int) -> list[int]:
    import psutil

    return [child.pid for child in psutil.Process(pid).children()]


@pytest.mark.parametrize(
    ("ranks", "overrides", "makers"),
    [
        pytest.param(4, ["parallelism.tensor=2"], [1, 0, 1, 0], id="tensor", marks=pytest.mark.long),
        pytest.param(2, ["parallelism.pipeline=2"], [1, 0], id="pipeline"),
    ],
)
def test_ranks_that_train_on_the_same_samples_tokenise_them_once(
    launch: Launcher, documents: list[str], ranks: int, overrides: list[str], makers: list[int]
) -> None:
    online = [*documents, "data.tokenization=Online"]
    whole = curve(launch(1, "whole", online), 1)
    assert_same(curve(launch(ranks, "divided", [*online, *overrides]), ranks), whole)
    job = launch(ranks, "endless", [*online, *overrides, "steps=100000"])
    job.wait_for_step(3, PATIENCE)
    assert [len(children(pid)) for pid in job.pids] == makers
    os.kill(job.pids[-1], signal.SIGTERM)
    assert job.wait(PATIENCE) == [75] * ranks, job.log()


def test_an_error_of_the_rank_that_tokenises_ends_all_that_train_on_its_samples(
    launch: Launcher, tmp_path: Path, documents: list[str]
) -> None:
    with (tmp_path / "d.jsonl").open("a") as stream:
        stream.write("\n{oops\n" * 40)
    bad = [*documents, "data.tokenization=Online", "data.maxBadLines=0", "parallelism.tensor=2", "steps=100000"]
    job = launch(2, "run", bad)
    assert job.wait(PATIENCE) == [64, 64], job.log()
    for rank in range(2):
        assert "not JSON" in job.log(rank).splitlines()[-1]


def test_bad_lines_end_a_run_with_64_and_their_place(launch: Launcher, tmp_path: Path, documents: list[str]) -> None:
    with (tmp_path / "d.jsonl").open("a") as stream:
        stream.write("\n{oops\n")
    job = launch(1, "run", [*documents, "data.maxBadLines=0"])
    assert job.wait(PATIENCE) == [64]
    assert f"{tmp_path / 'd.jsonl'} line 201: not JSON" in job.log().splitlines()[-1]


def test_a_rank_that_is_killed_leaves_no_tokenising_process(launch: Launcher, documents: list[str]) -> None:
    import psutil

    job = launch(1, "run", [*documents, "data.tokenization=Online", "steps=100000"])
    job.wait_for_step(2, PATIENCE)
    (worker,) = children(job.pids[0])
    process = psutil.Process(worker)
    os.kill(job.pids[0], signal.SIGKILL)
    job.wait(PATIENCE)
    process.wait(timeout=20)

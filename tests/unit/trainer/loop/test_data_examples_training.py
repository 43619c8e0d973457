"""Examples in real runs: the same numbers in every layout, packed or not, and each example once an epoch."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from tests.testing.trainer.example_files import records, write_records

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Job, Launcher

    Curve = list[tuple[float, float | None]]

pytestmark = pytest.mark.timeout(300)  # real processes; the first test also waits for the imports

PATIENCE = 120.0


@pytest.fixture
def examples(tmp_path: Path) -> list[str]:
    """Settings of a run on 60 examples, none of which is too long."""
    source = write_records(tmp_path / "d.jsonl", records(60))
    return [
        f"data.source={source}",
        f"data.cacheDirectory={tmp_path / 'cache'}",
        "data.format=Instruction",
        "data.sequenceLength=128",
        "data.tokenizer.vocabSize=340",
        "data.workers=1",
    ]


def curve(job: Job, ranks: int) -> Curve:
    assert job.wait(PATIENCE) == [0] * ranks, job.log()
    return [(line["loss"], line.get("validationLoss")) for line in job.metrics()]


def assert_same(found: Curve, expected: Curve) -> None:
    assert [loss for loss, _ in found] == pytest.approx([loss for loss, _ in expected], rel=1e-5)
    assert [held for _, held in found if held] == pytest.approx([held for _, held in expected if held], rel=1e-5)


@pytest.mark.parametrize("packing", ["true", pytest.param("false", marks=pytest.mark.long)])
def test_examples_give_the_same_numbers_in_every_layout(launch: Launcher, examples: list[str], packing: str) -> None:
    given = [*examples, f"data.examples.packing={packing}", "data.validation.fraction=0.2"]
    given += ["data.validation.everySteps=3", "data.validation.samples=7"]
    reference = curve(launch(1, "one", given), 1)
    assert [step for step, (_, loss) in enumerate(reference, start=1) if loss is not None] == [3, 6]
    layouts = {
        "data": (2, []),
        "tensor": (2, ["parallelism.tensor=2", "parallelism.sequence=true"]),
        "pipeline": (2, ["parallelism.pipeline=2"]),
        "sharded": (2, ["dataParallel=FullySharded", "recompute=Selective"]),
    }
    for name, (ranks, overrides) in layouts.items():
        assert_same(curve(launch(ranks, name, [*given, *overrides]), ranks), reference)


def test_packed_examples_do_not_see_each_other_so_their_loss_is_that_of_each_alone(
    launch: Launcher, examples: list[str]
) -> None:
    whole = [
        *examples,
        "monitor.recordSamples=true",
        "epochs=1",
        "batch.globalSize=60",
        "batch.microSize=10",
        "schedule.warmupSteps=0",
    ]
    ((alone, _),) = curve(launch(1, "alone", whole), 1)
    job = launch(2, "packed", [*whole, "data.examples.packing=true"])
    ((packed, _),) = curve(job, 2)
    assert packed == pytest.approx(alone, rel=1e-5)
    assert 10 < len(recorded(job)) < 30


def recorded(job: Job) -> list[int]:
    """The samples of all steps that are in the history."""
    last = job.metrics()[-1]["step"]
    steps: dict[int, list[int]] = {}
    for file in sorted(job.folder.glob("samples-*.jsonl")):
        for line in file.read_text().splitlines():
            row = json.loads(line)
            steps.setdefault(row["step"], []).extend(row["samples"])
    return [sample for step, samples in sorted(steps.items()) if step <= last for sample in samples]


def test_each_example_is_seen_once_an_epoch_also_when_the_run_goes_on_at_another_size(
    launch: Launcher, examples: list[str]
) -> None:
    given = [*examples, "epochs=3", "monitor.recordSamples=true", "schedule.warmupSteps=0"]
    whole = curve(launch(1, "whole", given), 1)
    assert len(whole) == 24, "60 samples in batches of 8"
    first = launch(2, "run", [*given, "checkpoint.durable.everySteps=1000"])
    first.wait_for_step(3, PATIENCE)
    os.kill(first.pids[1], signal.SIGTERM)
    assert first.wait(PATIENCE) == [75, 75], first.log()
    second = launch(1, "run", given)
    assert_same(curve(second, 1), whole)
    assert Counter(recorded(second)) == dict.fromkeys(range(60), 3)

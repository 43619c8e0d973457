"""Sizes at which the global batch does not come out even, with real gloo processes: the same history at each."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from trainium_trainer.backends.pipeline import check_torch
from trainium_trainer.exits import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from conftest import Job

    Launcher = Callable[..., Job]
    Metrics = list[dict[str, Any]]

pytestmark = pytest.mark.timeout(150)  # real processes; the first test also waits for the imports

try:
    check_torch()
except UserError:
    able = False
else:
    able = True
needs_new_torch = pytest.mark.skipif(not able, reason="this torch has no pipeline schedules that can be used")

TP = "parallelism.tensor=2"
PP = "parallelism.pipeline=2"
SP = "parallelism.sequence=true"
SHARDED = "dataParallel=FullySharded"
ZERO = "dataParallel=ShardedOptimizer"
ONE = "batch.microSize=1"
DURABLE = "checkpoint.durable.everySteps=2"
VALIDATION = "data.validation={fraction: 0.2, split: Tail, everySteps: 4, samples: 5}"
KEYS = ("step", "loss", "gradNorm", "learningRate", "tokens", "samples", "validationLoss")


def run(launch: Launcher, ranks: int, name: str, overrides: Sequence[str] = ()) -> Job:
    job = launch(ranks, name, [VALIDATION, "monitor.recordSamples=true", *overrides])
    assert job.wait(90) == [0] * ranks, "\n".join(job.log(rank) for rank in range(ranks))
    return job


def samples_of(job: Job) -> dict[int, list[int]]:
    """Step -> the samples that all ranks recorded for it."""
    seen: dict[int, list[int]] = {}
    for path in job.folder.glob("samples-*.jsonl"):
        for line in path.read_text().splitlines():
            record = json.loads(line)
            seen.setdefault(record["step"], []).extend(record["samples"])
    return {step: sorted(samples) for step, samples in seen.items()}


def assert_same_history(job: Job, reference: Job) -> None:
    assert samples_of(job) == samples_of(reference)
    metrics, expected = job.metrics(), reference.metrics()
    assert [line["tokens"] for line in metrics] == [line["tokens"] for line in expected], "masked rows are no tokens"
    for key in ("loss", "gradNorm", "validationLoss"):
        values = [line.get(key, 0.0) for line in metrics]
        assert values == pytest.approx(
            [line.get(key, 0.0) for line in expected], rel=1e-3 if key == "gradNorm" else 1e-5
        )


@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [
        pytest.param(3, [], id="dp3, a partly filled pass"),
        pytest.param(3, [ONE], id="dp3, an empty pass"),
        pytest.param(4, ["batch={globalSize: 8, microSize: 3}"], id="dp4, all passes partly filled"),
        pytest.param(5, ["batch={globalSize: 3, microSize: 1}"], id="dp5, two ranks without a sample"),
        pytest.param(3, [ONE, SHARDED], id="dp3, fully sharded"),
        pytest.param(3, [ONE, ZERO], id="dp3, sharded optimizer"),
        pytest.param(6, [ONE, TP, SP], id="dp3 tp2, sequence"),
        pytest.param(6, [ONE, TP, SHARDED], id="dp3 tp2, fully sharded"),
        pytest.param(6, [ONE, PP], id="dp3 pp2", marks=needs_new_torch),
        pytest.param(3, [ONE, "recompute=Full", "data.maskDocuments=true"], id="dp3, recompute, masked documents"),
    ],
)
def test_the_curve_and_the_samples_are_those_of_one_rank(launch: Launcher, ranks: int, overrides: list[str]) -> None:
    same = [text for text in overrides if text.startswith(("batch=", "data."))]
    assert_same_history(run(launch, ranks, "uneven", overrides), run(launch, 1, "one", same))


@pytest.mark.parametrize("overrides", [[ONE], [ONE, SHARDED]], ids=["replicated", "sharded"])
def test_two_runs_of_an_uneven_size_agree_bit_for_bit(launch: Launcher, overrides: list[str]) -> None:
    first, second = run(launch, 3, "first", overrides).metrics(), run(launch, 3, "second", overrides).metrics()
    assert [[line.get(key) for key in KEYS] for line in first] == [[line.get(key) for key in KEYS] for line in second]


@pytest.mark.parametrize("mode", ["dataParallel=Replicated", SHARDED, ZERO])
def test_a_run_goes_from_size_to_size_through_its_checkpoints(launch: Launcher, mode: str) -> None:
    """4 -> 3 -> 2 -> 4 ranks, two steps at each."""
    constant = "schedule={kind: Constant, warmupSteps: 0}"
    whole = run(launch, 1, "whole", [ONE, "steps=8", constant])
    for ranks, steps in ((4, 2), (3, 4), (2, 6), (4, 8)):
        job = run(launch, ranks, "resized", [ONE, mode, DURABLE, f"steps={steps}", constant])
        assert job.metrics()[-1]["step"] == steps
    assert samples_of(job) == samples_of(whole)
    losses = [line["loss"] for line in job.metrics()]
    assert losses == pytest.approx([line["loss"] for line in whole.metrics()], rel=1e-5)

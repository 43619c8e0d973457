"""Train at sizes that do not divide the global batch evenly: the same history on real gloo ranks."""

import shutil
from collections.abc import Sequence

import pytest

from tests.testing.trainer.layouts import PP, SHARDED, SP, TP, VALIDATION, ZERO, needs_pipelines
from tests.unit.trainer.conftest import Job, Launcher, ReferenceRuns

ONE = "batch.microSize=1"
DURABLE = "checkpoint.durable.everySteps=2"
KEYS = ("step", "loss", "gradNorm", "learningRate", "tokens", "samples", "validationLoss", "batch")
RECORDED = [VALIDATION, "monitor.recordSamples=true"]


def run(launch: Launcher, ranks: int, name: str, overrides: Sequence[str] = ()) -> Job:
    return launch(ranks, name, [*RECORDED, *overrides]).finish()


def read_history(job: Job) -> list[list[object]]:
    return [[line.get(key) for key in KEYS] for line in job.metrics()]


@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [
        pytest.param(3, [], id="dp3, a partly filled pass"),
        pytest.param(3, [ONE], id="dp3, an empty pass"),
        pytest.param(
            4,
            ["batch={globalSize: 8, microSize: 3}"],
            id="dp4, all passes partly filled",
            marks=pytest.mark.long,
        ),
        pytest.param(5, ["batch={globalSize: 3, microSize: 1}"], id="dp5, two ranks without a sample"),
        pytest.param(3, [ONE, SHARDED], id="dp3, fully sharded"),
        pytest.param(3, [ONE, ZERO], id="dp3, sharded optimizer"),
        pytest.param(6, [ONE, TP, SP], id="dp3 tp2, sequence", marks=pytest.mark.long),
        pytest.param(6, [ONE, TP, SHARDED], id="dp3 tp2, fully sharded", marks=pytest.mark.long),
        pytest.param(6, [ONE, PP], id="dp3 pp2", marks=[needs_pipelines, pytest.mark.long]),
        pytest.param(3, [ONE, "recompute=Full", "data.maskDocuments=true"], id="dp3, recompute, masked documents"),
    ],
)
def test_the_curve_and_the_samples_are_those_of_one_rank(
    launch: Launcher, reference_run: ReferenceRuns, ranks: int, overrides: list[str]
) -> None:
    kept = [text for text in overrides if text.startswith(("batch=", "data."))]
    job, reference = run(launch, ranks, "uneven", overrides), reference_run(1, [*RECORDED, *kept])
    assert job.samples() == reference.samples()
    job.assert_same_curve(reference)


@pytest.mark.parametrize(
    "overrides",
    [pytest.param([ONE], id="replicated"), pytest.param([ONE, SHARDED], id="sharded", marks=pytest.mark.long)],
)
def test_two_runs_of_an_uneven_size_are_bitwise_equal(
    launch: Launcher, reference_run: ReferenceRuns, overrides: list[str]
) -> None:
    reference = reference_run(3, [*RECORDED, *overrides])
    assert read_history(run(launch, 3, "second", overrides)) == read_history(reference)


@pytest.mark.parametrize(
    "mode", [SHARDED, *(pytest.param(mode, marks=pytest.mark.long) for mode in ("dataParallel=Replicated", ZERO))]
)
def test_a_run_resumes_from_size_to_size(launch: Launcher, reference_run: ReferenceRuns, mode: str) -> None:
    """4 -> 3 -> 2 -> 4 ranks, two steps at each."""
    constant = "schedule={kind: Constant, warmupSteps: 0}"
    reference = reference_run(1, [*RECORDED, ONE, "steps=8", constant])
    for ranks, steps in ((4, 2), (3, 4), (2, 6), (4, 8)):
        job = run(launch, ranks, "resized", [ONE, mode, DURABLE, f"steps={steps}", constant])
        assert job.metrics()[-1]["step"] == steps
    assert job.samples() == reference.samples()
    assert job.losses() == pytest.approx(reference.losses(), rel=1e-5)


# ---- a batch near the global one (batch.tolerance) ------------------------------------------------------------------

NEAR = "batch={globalSize: 8, microSize: 1, tolerance: 0.13}"
"""Steps have 9 samples on 3 ranks, and 8 on 1, 2, 4 and 5 ranks: on 5, 10 is beyond the tolerance."""
CONSTANT = "schedule={kind: Constant, warmupSteps: 0}"


def run_resized(launch: Launcher, name: str) -> Job:
    """Run on 4, 3 and 4 ranks; resume after steps 3 and 6."""
    for ranks, kept in ((4, 3), (3, 6), (4, None)):
        job = run(launch, ranks, name, [NEAR, "steps=10", "checkpoint.durable={everySteps: 3, keepLast: 9}"])
        for folder in job.folder.glob("step-*"):
            if kept is not None and int(folder.name.removeprefix("step-")) > kept:
                shutil.rmtree(folder)
    return job


@pytest.mark.long
def test_the_same_sizes_with_a_tolerance_give_the_same_curve_and_every_sample_once(launch: Launcher) -> None:
    first, second = run_resized(launch, "first"), run_resized(launch, "second")
    assert read_history(first) == read_history(second)
    assert [line["batch"] for line in first.metrics()] == [8, 8, 8, 9, 9, 9, 8, 8, 8, 5]
    assert [line["samples"] for line in first.metrics()] == [8, 16, 24, 33, 42, 51, 59, 67, 75, 80]
    recorded = first.samples()
    assert [len(recorded[step]) for step in range(1, 11)] == [8, 8, 8, 9, 9, 9, 8, 8, 8, 5]
    reference = run(launch, 1, "whole", [ONE, "steps=10"])
    samples = [sample for step in range(1, 11) for sample in recorded[step]]
    assert sorted(samples) == sorted(sample for step in reference.samples().values() for sample in step)
    assert first.metrics()[-1]["learningRate"] == reference.metrics()[-1]["learningRate"]
    assert first.metrics()[-1]["validationLoss"] == pytest.approx(reference.metrics()[-1]["validationLoss"], rel=0.05)


def test_a_tolerance_changes_no_bit_at_a_size_that_divides_the_batch(launch: Launcher) -> None:
    near, exact = run(launch, 4, "near", [NEAR]), run(launch, 4, "exact", [ONE])
    assert read_history(near) == read_history(exact)
    assert near.samples() == exact.samples()


@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [
        pytest.param(3, [], id="dp3"),
        pytest.param(3, [SHARDED], id="dp3, fully sharded"),
        pytest.param(6, [TP, SP], id="dp3 tp2, sequence", marks=pytest.mark.long),
        pytest.param(6, [PP], id="dp3 pp2", marks=needs_pipelines),
    ],
)
def test_a_near_batch_has_the_curve_of_one_rank_with_the_same_batch(
    launch: Launcher, reference_run: ReferenceRuns, ranks: int, overrides: list[str]
) -> None:
    """The last step has the remaining samples in the same number of passes."""
    near = run(launch, ranks, "near", [NEAR, CONSTANT, "steps=4", *overrides])
    reference = reference_run(1, [*RECORDED, "batch={globalSize: 9, microSize: 1}", CONSTANT, "steps=3"])
    assert [line["batch"] for line in near.metrics()] == [9, 9, 9, 5]
    assert near.losses()[:3] == pytest.approx(reference.losses(), rel=1e-5)
    assert {step: near.samples()[step] for step in (1, 2, 3)} == reference.samples()


def test_an_epoch_has_each_sample_once_where_steps_have_near_batches(launch: Launcher) -> None:
    near, exact = (
        run(launch, 3, name, [*batch, "epochs=1", "data.sequenceLength=16"])
        for name, batch in (("near", [NEAR]), ("exact", [ONE]))
    )
    recorded, expected = (sorted(sample for step in job.samples().values() for sample in step) for job in (near, exact))
    assert recorded == expected == sorted(set(recorded))
    assert near.metrics()[0]["batch"] == 9


def test_the_missing_record_of_a_failed_rank_has_the_batch_of_its_step(launch: Launcher) -> None:
    """The last step has 5 samples; the global batch is 8, and 9 at this size."""
    job = launch(3, "mended", [NEAR, CONSTANT, "steps=4", "monitor.recordSamples=true"], memory=True).finish()
    reference, recorded = job.metrics(), job.samples()
    for path in job.folder.glob("*.jsonl"):
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    job = launch(3, "mended", [NEAR, CONSTANT, "steps=4", "monitor.recordSamples=true"], memory=True).finish()
    assert "from memory" in job.log()
    assert [[line[key] for key in ("step", "samples", "batch", "loss")] for line in job.metrics()] == [
        [line[key] for key in ("step", "samples", "batch", "loss")] for line in reference
    ]
    assert job.samples() == recorded

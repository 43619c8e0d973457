"""Sizes at which the global batch does not come out even, with real gloo processes: the same history at each."""

import shutil
from collections.abc import Sequence

import pytest

from tests.testing.trainer.layouts import PP, SHARDED, SP, TP, VALIDATION, ZERO, needs_pipelines
from tests.unit.trainer.conftest import Job, Launcher, ReferenceRuns

ONE = "batch.microSize=1"
DURABLE = "checkpoint.durable.everySteps=2"
KEYS = ("step", "loss", "gradNorm", "learningRate", "tokens", "samples", "validationLoss")


RECORDED = [VALIDATION, "monitor.recordSamples=true"]


def run(launch: Launcher, ranks: int, name: str, overrides: Sequence[str] = ()) -> Job:
    return launch(ranks, name, [*RECORDED, *overrides]).finish()


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
    same = [text for text in overrides if text.startswith(("batch=", "data."))]
    job, one = run(launch, ranks, "uneven", overrides), reference_run(1, [*RECORDED, *same])
    assert job.samples() == one.samples()
    job.assert_same_curve(one)


@pytest.mark.parametrize(
    "overrides",
    [pytest.param([ONE], id="replicated"), pytest.param([ONE, SHARDED], id="sharded", marks=pytest.mark.long)],
)
def test_two_runs_of_an_uneven_size_agree_bit_for_bit(
    launch: Launcher, reference_run: ReferenceRuns, overrides: list[str]
) -> None:
    first, second = reference_run(3, [*RECORDED, *overrides]).metrics(), run(launch, 3, "second", overrides).metrics()
    assert [[line.get(key) for key in KEYS] for line in first] == [[line.get(key) for key in KEYS] for line in second]


@pytest.mark.parametrize(
    "mode", [SHARDED, *(pytest.param(mode, marks=pytest.mark.long) for mode in ("dataParallel=Replicated", ZERO))]
)
def test_checkpoints_carry_a_run_from_size_to_size(launch: Launcher, reference_run: ReferenceRuns, mode: str) -> None:
    """4 -> 3 -> 2 -> 4 ranks, two steps at each."""
    constant = "schedule={kind: Constant, warmupSteps: 0}"
    whole = reference_run(1, [*RECORDED, ONE, "steps=8", constant])
    for ranks, steps in ((4, 2), (3, 4), (2, 6), (4, 8)):
        job = run(launch, ranks, "resized", [ONE, mode, DURABLE, f"steps={steps}", constant])
        assert job.metrics()[-1]["step"] == steps
    assert job.samples() == whole.samples()
    assert job.losses() == pytest.approx(whole.losses(), rel=1e-5)


# --- a batch near the global one (batch.tolerance)

NEAR = "batch={globalSize: 8, microSize: 1, tolerance: 0.13}"
"""9 samples a step on 3 ranks; 8 on 1, 2 and 4; on 5 those 8 too, for 10 would be too far."""
CONSTANT = "schedule={kind: Constant, warmupSteps: 0}"


def resized(launch: Launcher, name: str) -> Job:
    """Run on 4, 3 and 4 ranks, resumed after steps 3 and 6 from the checkpoints that are left."""
    for ranks, kept in ((4, 3), (3, 6), (4, None)):
        job = run(launch, ranks, name, [NEAR, "steps=10", "checkpoint.durable={everySteps: 3, keepLast: 9}"])
        for folder in job.folder.glob("step-*"):
            if kept is not None and int(folder.name.removeprefix("step-")) > kept:
                shutil.rmtree(folder)
    return job


@pytest.mark.long
def test_with_a_tolerance_the_same_history_of_sizes_gives_the_same_curve_and_every_sample_once(
    launch: Launcher,
) -> None:
    first, second = resized(launch, "first"), resized(launch, "second")
    history = [[line.get(key) for key in (*KEYS, "batch")] for line in first.metrics()]
    assert history == [[line.get(key) for key in (*KEYS, "batch")] for line in second.metrics()]
    assert [line["batch"] for line in first.metrics()] == [8, 8, 8, 9, 9, 9, 8, 8, 8, 5]
    assert [line["samples"] for line in first.metrics()] == [8, 16, 24, 33, 42, 51, 59, 67, 75, 80]
    seen = first.samples()
    assert [len(seen[step]) for step in range(1, 11)] == [8, 8, 8, 9, 9, 9, 8, 8, 8, 5]
    whole = run(launch, 1, "whole", [ONE, "steps=10"])
    flat = [sample for step in range(1, 11) for sample in seen[step]]
    assert sorted(flat) == sorted(sample for samples in whole.samples().values() for sample in samples)
    assert first.metrics()[-1]["learningRate"] == whole.metrics()[-1]["learningRate"]
    assert first.metrics()[-1]["validationLoss"] == pytest.approx(whole.metrics()[-1]["validationLoss"], rel=0.05)


def test_a_tolerance_changes_no_bit_at_a_size_that_divides_the_batch(launch: Launcher) -> None:
    near, exact = run(launch, 4, "near", [NEAR]), run(launch, 4, "exact", [ONE])
    assert [[line.get(key) for key in KEYS] for line in near.metrics()] == [
        [line.get(key) for key in KEYS] for line in exact.metrics()
    ]
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
def test_a_near_batch_is_that_of_one_rank_with_as_many_samples(
    launch: Launcher, reference_run: ReferenceRuns, ranks: int, overrides: list[str]
) -> None:
    """The last step has what is left, in as many passes as the others."""
    near = run(launch, ranks, "near", [NEAR, CONSTANT, "steps=4", *overrides])
    one = reference_run(1, [*RECORDED, "batch={globalSize: 9, microSize: 1}", CONSTANT, "steps=3"])
    assert [line["batch"] for line in near.metrics()] == [9, 9, 9, 5]
    assert near.losses()[:3] == pytest.approx(one.losses(), rel=1e-5)
    assert {step: near.samples()[step] for step in (1, 2, 3)} == one.samples()


def test_an_epoch_has_each_sample_once_where_steps_have_near_batches(launch: Launcher) -> None:
    near, exact = (
        run(launch, 3, name, [*batch, "epochs=1", "data.sequenceLength=16"])
        for name, batch in (("near", [NEAR]), ("exact", [ONE]))
    )
    seen, expected = (sorted(sample for step in job.samples().values() for sample in step) for job in (near, exact))
    assert seen == expected == sorted(set(seen))
    assert near.metrics()[0]["batch"] == 9


def test_the_record_of_a_step_that_a_lost_rank_did_not_write_has_its_own_batch(launch: Launcher) -> None:
    """The last step took 5 samples where the global batch is 8, and the size makes it 9."""
    job = launch(3, "mended", [NEAR, CONSTANT, "steps=4", "monitor.recordSamples=true"], memory=True).finish()
    whole, seen = job.metrics(), job.samples()
    for path in job.folder.glob("*.jsonl"):
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    job = launch(3, "mended", [NEAR, CONSTANT, "steps=4", "monitor.recordSamples=true"], memory=True).finish()
    assert "from memory" in job.log()
    assert [[line[key] for key in ("step", "samples", "batch", "loss")] for line in job.metrics()] == [
        [line[key] for key in ("step", "samples", "batch", "loss")] for line in whole
    ]
    assert job.samples() == seen

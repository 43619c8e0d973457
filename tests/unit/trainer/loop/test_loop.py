"""Stop, resume and fail: exit codes, saved steps and reports of real runs."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.testing.suite.timeouts import until
from tests.unit.trainer.conftest import Job, Launcher, ReferenceRuns
from trainium_agent.linux.kernel import has_signal_handler
from trainium_contract.wire.nonfinite_origin import parse_nonfinite_rank
from trainium_trainer.checkpoint.root.ownership_check import LATE_SECONDS
from trainium_trainer.loop.stop import compute_max_wait
from trainium_worker.progress_record import ProgressPhase, alerts_path, read_progress
from trainium_worker.pulse import Activity, PulseReading, Waiting


def read_curve(job: Job) -> list[tuple[Any, ...]]:
    return [(line["step"], line["loss"], line["tokens"], line["samples"]) for line in job.metrics()]


def test_sigterm_on_one_rank_makes_all_ranks_leave_with_75_at_one_step(launch: Launcher) -> None:
    job = launch(2, "run", ["steps=100000"], memory=True).request_exit(1, step=3)
    step = job.metrics()[-1]["step"]
    assert all(f"saved step {step}" in job.log(rank) for rank in range(2))


def test_a_rank_whose_memory_ends_makes_all_ranks_save_durably_before_they_leave(launch: Launcher) -> None:
    overrides = ["steps=100000", "checkpoint.durable.everySteps=100000"]
    staying = launch(2, "staying", overrides, memory=True).request_exit(1, step=3)
    assert not list(staying.folder.glob("step-*/COMMITTED")), "memory survives, so no durable save is needed"

    leaving = launch(2, "leaving", overrides, memory=True)
    leaving.wait_for_step(3)
    os.kill(leaving.pids[1], signal.SIGUSR1)
    assert leaving.wait() == [75, 75], leaving.log()
    step = leaving.metrics()[-1]["step"]
    assert (leaving.folder / f"step-{step}" / "COMMITTED").exists()


def test_a_rank_that_receives_sigterm_does_not_wait_for_a_missing_peer(launch: Launcher) -> None:
    job = launch(2, "run", ["steps=100000"])
    os.kill(job.pids[1], signal.SIGSTOP)
    while not has_signal_handler(job.pids[0], signal.SIGTERM):
        time.sleep(0.01)
    time.sleep(0.3)  # by now it waits for its peer
    os.kill(job.pids[0], signal.SIGTERM)
    assert job.wait_for_rank(0) == 75, job.log()
    assert "nothing to save" in job.log()
    job.wait(0)


def test_a_rank_that_receives_sigterm_does_not_wait_for_a_stalled_peer(launch: Launcher) -> None:
    job = launch(2, "run", ["steps=100000"], memory=True)
    job.wait_for_step(3)
    os.kill(job.pids[1], signal.SIGSTOP)
    time.sleep(0.3)
    os.kill(job.pids[0], signal.SIGTERM)
    assert job.wait_for_rank(0) == 76, job.log()
    assert "does not come" in job.log()
    job.wait(0)


def test_the_timeout_of_peers_follows_the_steps_and_does_not_limit_work() -> None:
    reading = PulseReading(1, Activity.STEP, Waiting.YES, 2.0, ((1.0, 0.9), (30.0, 1.0)))
    assert compute_max_wait(reading) == 90.0
    assert compute_max_wait(replace(reading, steps=())) == 10.0
    assert compute_max_wait(replace(reading, waiting=Waiting.MAYBE)) == 90.0
    assert compute_max_wait(replace(reading, waiting=Waiting.NO)) == float("inf")


def test_a_rank_of_an_old_generation_neither_writes_snapshots_nor_commits(launch: Launcher) -> None:
    overrides = ["steps=100000", "checkpoint.durable.everySteps=3", "checkpoint.durable.keepLast=50"]
    stale = launch(1, "run", overrides, memory=True, TRAINIUM_GENERATION="1")
    stale.wait_for_step(7)
    os.kill(stale.pids[0], signal.SIGSTOP)  # its node hangs; a newer generation fences it out
    successor = launch(1, "run", overrides, memory=True, TRAINIUM_GENERATION="2")
    successor.wait_for_step(successor.metrics()[-1]["step"] + 20)

    os.kill(stale.pids[0], signal.SIGCONT)
    assert stale.wait_for_rank(0) == 76, stale.log()
    assert "generation" in stale.log(), "the log has the reason"

    before = successor.metrics()[-1]["step"]
    successor.wait_for_step(before + 10)
    starts = [line for line in successor.log().splitlines() if "start-up" in line]
    resumed = int(starts[1].split(" step ")[1].split()[0])
    assert resumed >= 6, "the line of step 7 may have been written before its snapshot"
    manifests = [json.loads(path.read_text()) for path in successor.folder.glob("step-*/*/manifest.json")]
    assert {manifest["generation"] for manifest in manifests if manifest["step"] > resumed} == {2}
    assert (successor.folder / "GENERATION").exists()
    successor.request_exit()


def test_a_stale_rank_records_nothing_when_its_collective_returns_late(launch: Launcher) -> None:
    job = launch(2, "run", ["steps=100000", "checkpoint.durable.everySteps=100000"], TRAINIUM_GENERATION="1")
    job.wait_for_step(3)
    os.kill(job.pids[1], signal.SIGSTOP)
    time.sleep(LATE_SECONDS + 1)
    recorded = job.metrics()[-1]["step"]
    (job.folder / "GENERATION").write_text("2\n")
    os.kill(job.pids[1], signal.SIGCONT)
    assert job.wait_for_rank(0) == 76, job.log()
    assert job.metrics()[-1]["step"] == recorded
    job.wait()


def test_a_second_job_in_the_folder_is_refused_and_the_first_continues(launch: Launcher) -> None:
    overrides = ["steps=100000", "checkpoint.durable.everySteps=3", "checkpoint.durable.keepLast=50"]

    def identity(name: str) -> dict[str, str]:
        return {"TRAINIUM_NAMESPACE": "team", "TRAINIUM_JOB": name, "TRAINIUM_RUN_ID": f"uid-of-{name}"}

    first = launch(1, "run", overrides, memory=True, **identity("one"))
    first.wait_for_step(7)
    second = launch(1, "run", overrides, TRAINIUM_MEMORY_DIR="", **identity("two"))
    assert second.wait() == [64], second.log()
    last = [line for line in second.log().splitlines() if "belongs to the job" in line][-1]
    assert "belongs to the job team/one" in last
    assert "checkpoint.storage.takeOver: team/one" in last
    last_step = first.metrics()[-1]["step"]

    def newest_commit() -> int:
        return max(int(path.parent.name.split("-")[1]) for path in first.folder.glob("step-*/COMMITTED"))

    until(lambda: newest_commit() > last_step, lambda: f"its commits are fenced out: {first.log()}")
    first.request_exit()
    steps = [line["step"] for line in first.metrics()]
    assert steps == list(range(1, len(steps) + 1))


RECORDED = ["steps=40", "monitor.recordSamples=true"]


def test_a_run_that_left_resumes_at_its_step_bitwise_equal(launch: Launcher, reference_run: ReferenceRuns) -> None:
    reference = reference_run(2, RECORDED)
    launch(2, "parts", RECORDED, memory=True, exit_step=3).wait_for_exit()
    restarted = launch(2, "parts", RECORDED, memory=True).finish()
    assert read_curve(restarted) == read_curve(reference)


def test_the_files_of_a_killed_and_resumed_run_have_one_history(launch: Launcher, reference_run: ReferenceRuns) -> None:
    reference = reference_run(2, RECORDED)
    job = launch(2, "parts", RECORDED, memory=True)
    job.wait_for_step(5)
    os.kill(job.pids[1], signal.SIGKILL)
    assert job.wait() == [76, -9], job.log()
    with (job.folder / "metrics.jsonl").open("a") as file:
        file.write('{"step":900,"loss":1}\n{"step":9')  # a step beyond the saved state, and a torn line
    restarted = launch(1, "parts", RECORDED, memory=True).finish()  # at another size
    assert [line["step"] for line in restarted.metrics()] == list(range(1, 41))
    for line, expected in zip(restarted.metrics(), reference.metrics(), strict=True):
        assert line["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert job.samples() == reference.samples()


def test_a_finished_run_finishes_again_without_a_step(launch: Launcher) -> None:
    first = launch(1, "run", ["steps=3"]).finish()
    before = read_curve(first)
    second = launch(1, "run", ["steps=3"]).finish()
    assert read_curve(second) == before


def test_a_loss_that_is_not_a_number_ends_all_ranks_with_65(launch: Launcher) -> None:
    job = launch(2, "run", ["model.ropeTheta=1e-300"])
    assert job.wait() == [65, 65]
    assert job.log().splitlines()[-1].startswith("step 1: loss is nan")


def test_all_ranks_attribute_a_loss_that_is_nan_to_the_rank_that_computed_it(launch: Launcher) -> None:
    job = launch(3, "run", ["batch.globalSize=12"], TEST_NAN_RANK="2", TEST_NAN_STEPS='{"loss": 3}')
    assert job.wait() == [65, 65, 65]
    for rank in range(3):
        last = job.log(rank).splitlines()[-1]
        assert last.startswith("step 3: loss is nan"), last
        assert parse_nonfinite_rank(last) == 2, last


BATCH = ["batch.globalSize=12"]
PIPELINE = ["parallelism.pipeline=2", "batch.globalSize=8", "batch.microSize=1"]
TENSOR = ["parallelism.tensor=2", "batch.globalSize=8", "batch.microSize=4"]


@pytest.mark.parametrize(
    ("overrides", "ranks", "nan_rank", "reported"),
    [
        (BATCH, 3, 2, "rank 2 alone"),
        ([*BATCH, "dataParallel=FullySharded"], 3, 2, "rank 2 alone"),
        pytest.param([*BATCH, "dataParallel=ShardedOptimizer"], 3, 2, "rank 2 alone", marks=pytest.mark.long),
        pytest.param([*BATCH, "precision=BFloat16Stochastic"], 3, 2, "rank 2 alone", marks=pytest.mark.long),
        # Ranks 0 and 1 have the first stage, ranks 2 and 3 the last one.
        (PIPELINE, 4, 1, "rank 1 alone"),
        (PIPELINE, 4, 3, "rank 3 alone"),
        pytest.param([*PIPELINE, "dataParallel=FullySharded"], 4, 3, "rank 3 alone", marks=pytest.mark.long),
        (TENSOR, 4, 3, "ranks 2, 3, finite on the other 2"),
    ],
)
def test_nan_is_attributed_to_the_rank_that_computed_it(
    launch: Launcher, overrides: list[str], ranks: int, nan_rank: int, reported: str
) -> None:
    nan = {"TEST_NAN_RANK": str(nan_rank), "TEST_NAN_STEPS": '{"forward": 2, "backward": 4}'}
    job = launch(ranks, "run", [*overrides, "nonFiniteTolerance=1", "steps=5"], **nan).finish()
    forward, backward = (line for line in job.log().splitlines() if line.endswith(": skipped"))
    assert "step 2: loss is nan" in forward
    assert "step 4: loss is " in backward
    for line in (forward, backward):
        assert f"(not finite on {reported})" in line
        assert parse_nonfinite_rank(line) == int(reported.split()[1].strip(","))


def test_tolerated_steps_are_skipped_and_reported(launch: Launcher, tmp_path: Path) -> None:
    progress = tmp_path / "r0"
    overrides = ["model.ropeTheta=1e-300", "nonFiniteTolerance=2"]
    job = launch(1, "run", overrides, TRAINIUM_PROGRESS_FILE=str(progress))
    assert job.wait() == [65]
    assert [line["loss"] for line in job.metrics()] == [None, None]
    alert = json.loads(alerts_path(progress).read_text())["StepSkipped"]
    assert alert["step"] == 2
    assert alert["message"] == "step 2: loss is nan, gradient norm is nan: skipped, 2 of at most 2 in a row"
    assert "step 3: loss is nan" in job.log().splitlines()[-1]
    assert read_progress(progress).phase is ProgressPhase.FAILED


@pytest.mark.parametrize("overrides", [[], ["dataParallel=FullySharded"]], ids=["replicated", "sharded"])
def test_a_gradient_that_is_not_finite_is_named(launch: Launcher, overrides: list[str]) -> None:
    # Embeddings so small that only the backward pass of the first normalization overflows.
    job = launch(1, "run", ["model.initialStd=1e-30", "model.normEps=1e-38", *overrides])
    assert job.wait() == [65]
    last = job.log().splitlines()[-1]
    assert re.match(r"step 1: loss is 5\.\d+, gradient norm is (nan|inf) \(gradients that are not finite: \d+", last)
    assert re.search(r"nearest to the loss that of model\.layers\.\d\.\S+\), 1 such in a row", last)


def test_a_rank_that_newer_checkpoints_refuse_records_their_generation(launch: Launcher, tmp_path: Path) -> None:
    file, run = tmp_path / "progress", {"TRAINIUM_RUN_ID": "run"}
    launch(1, "run", ["steps=2"], TRAINIUM_GENERATION="4", **run).finish()
    refused = launch(1, "run", ["steps=4"], TRAINIUM_PROGRESS_FILE=str(file), TRAINIUM_GENERATION="2", **run)
    assert refused.wait() == [76], refused.log()
    record = read_progress(file)
    assert (record.phase, record.newer_generation) == (ProgressPhase.FAILED, 4)


def test_progress_is_in_shared_memory_while_the_run_goes_on(launch: Launcher, tmp_path: Path) -> None:
    file = tmp_path / "progress" / "r0"
    job = launch(1, "run", ["steps=5"], TRAINIUM_PROGRESS_FILE=str(file), TRAINIUM_GENERATION="4").finish()
    record = read_progress(file)
    assert record.phase is ProgressPhase.FINISHED
    assert (record.generation, record.step, record.resume_step, record.samples) == (4, 5, 0, 40)
    assert record.figures["loss"] == job.losses()[-1]
    assert record.durable_step == 5


def test_an_alarm_about_the_loss_is_logged_and_left_for_the_agent(launch: Launcher, tmp_path: Path) -> None:
    file = tmp_path / "r0"
    launch(1, "run", ["steps=110", "schedule.kind=Constant", "batch.microSize=8"]).finish()
    higher = ["steps=220", "optimizer.learningRate=1", "batch.microSize=8"]
    job = launch(1, "run", higher, TRAINIUM_PROGRESS_FILE=str(file)).finish()
    (raised, *_) = [line["step"] for line in job.metrics() if line["alarm"]]
    alert = json.loads(alerts_path(file).read_text())["LossAlarm"]
    assert alert["step"] == raised
    assert f"WARNING {alert['message']}" in job.log()


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.long) for seed in (2, 3))])
def test_a_normal_run_with_a_tiny_batch_reports_no_alarm_and_no_spike(
    launch: Launcher, tmp_path: Path, seed: int
) -> None:
    file = tmp_path / "r0"
    overrides = [f"seed={seed}", "batch.globalSize=1", "batch.microSize=1", "steps=400"]
    job = launch(1, "run", overrides, TRAINIUM_PROGRESS_FILE=str(file)).finish()
    norms = [line["gradNorm"] for line in job.metrics()]
    assert max(norms) > 3 * min(norms), "the gradient norms vary"
    assert not any(line["alarm"] for line in job.metrics())
    assert not alerts_path(file).exists()


@pytest.mark.long
def test_ranks_that_read_different_text_refuse_to_train(launch: Launcher, tmp_path: Path, text_file: Path) -> None:
    launch(2, "same", ["steps=3"]).finish()
    # The cache of one rank has other tokens under the same name, as with another build of Python.
    (folder,) = (path.parent for path in (text_file.parent / "cache").glob("tokens-*/manifest.json"))
    other = shutil.copytree(folder, tmp_path / "other" / folder.name)
    manifest = json.loads((folder / "manifest.json").read_text())
    (other / "manifest.json").write_text(json.dumps(manifest | {"identity": "f" * 64}))
    job = launch(2, "differ", last_rank=[f"data.cacheDirectory={other.parent}"])
    assert all(job.wait())
    assert "the ranks do not read the same tokens" in job.log()


def test_another_tokenizer_than_the_checkpoints_is_refused_by_name(
    launch: Launcher, tmp_path: Path, text_file: Path
) -> None:
    saved = ["steps=3", "checkpoint.durable.everySteps=3"]
    launch(1, "run", saved).finish()
    file = next((text_file.parent / "cache").glob("tokenizer-*/tokenizer.json"))
    document = json.loads(file.read_text())
    document["added_tokens"][0]["special"] = False
    (tmp_path / "other.json").write_text(json.dumps(document))
    restarted = launch(1, "run", [*saved, f"data.tokenizer.path={tmp_path / 'other.json'}"])
    assert restarted.wait() == [64]
    assert re.search(r"tokenizer is \w{12}… there and \w{12}… here", restarted.log())


@pytest.mark.long
def test_a_run_starts_under_plain_torchrun(tmp_path: Path, launch: Launcher) -> None:
    launch(1, "unused", ["steps=3"]).wait()
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    command += ["--rdzv-endpoint", "localhost:0", "-m", "trainium_trainer", "train"]
    command += ["--config", str(tmp_path / "trainer.yaml"), "--set", f"checkpoint.path={tmp_path / 'torchrun'}"]
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
    completed = subprocess.run(command, capture_output=True, text=True, check=False, env=one_thread)
    assert completed.returncode == 0, completed.stderr
    assert len((tmp_path / "torchrun" / "metrics.jsonl").read_text().splitlines()) == 6


def test_the_start_reports_its_durations(launch: Launcher) -> None:
    job = launch(1, "run", ["steps=3"]).finish()
    line = next(line for line in job.log().splitlines() if "start-up:" in line)
    assert all(part in line for part in ("data ", "process group ", "model ", "state ", "together "))


def test_a_checkpoint_folder_that_cannot_be_written_is_a_storage_error(launch: Launcher, tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file where a folder should be")
    job = launch(1, "run", ["steps=3"])
    assert job.wait() == [81], job.log()
    assert "checkpoint" in job.log().splitlines()[-1]

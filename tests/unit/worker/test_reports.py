"""Report from a program to its agent, and stop all ranks after the same step."""

import ast
import json
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trainium_worker
from tests.testing.suite.timeouts import scaled
from trainium_contract.wire import worker_env
from trainium_worker.dcp import session
from trainium_worker.progress_record import (
    ProgressPhase,
    ProgressRecord,
    ProgressWriter,
    read_notice,
    read_progress,
    read_with_pulse,
    request_stop,
    stop_at,
)
from trainium_worker.pulse import Activity, Waiting

PACKAGE = Path(trainium_worker.__file__).parent


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "progress" / "g3-r0"
    monkeypatch.setenv("TRAINIUM_PROGRESS_FILE", str(path))
    monkeypatch.setenv("TRAINIUM_GENERATION", "3")
    monkeypatch.setenv("TRAINIUM_ATTEMPT", "2")
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setattr(trainium_worker, "_reporter", None)
    return path


def progress(path: Path) -> ProgressRecord:
    record = read_progress(path)
    assert record is not None
    return record


def activity(path: Path) -> tuple[Activity, Waiting]:
    reading = read_with_pulse(path)
    assert reading is not None
    assert reading.pulse is not None
    return reading.pulse.activity, reading.pulse.waiting


def test_steps_are_recorded_with_their_figures(record: Path) -> None:
    trainium_worker.step(8, loss=np.float32(2.5), tokens=np.int64(100), learning_rate=0.1, total_steps=20)
    newest = progress(record)
    assert (newest.pid, newest.generation, newest.attempt) == (os.getpid(), 3, 2)
    assert newest.phase is ProgressPhase.TRAINING
    assert (newest.resume_step, newest.step, newest.total_steps) == (7, 8, 20)
    assert (newest.figures, newest.tokens) == ({"loss": 2.5, "learning_rate": 0.1}, 100)
    assert newest.step_seconds == 0.0, "the start of the first step is unknown"
    time.sleep(0.01)
    trainium_worker.step(9, tokens=300, samples=4)
    newest = progress(record)
    assert (newest.step, newest.tokens, newest.figures["loss"]) == (9, 400, 2.5)
    assert newest.step_seconds >= 0.01
    assert newest.figures["tokens_per_second"] == pytest.approx(300 / newest.step_seconds)
    assert (newest.samples, newest.figures["samples_per_second"]) == (4, pytest.approx(4 / newest.step_seconds))
    assert activity(record) == (Activity.STEP, Waiting.MAYBE)
    trainium_worker.step(9, loss=1.25, reward_margin=0.5)
    repeated = progress(record)
    assert repeated.updated == newest.updated, "a second report of a step adds to it"
    assert {**newest.figures, "loss": 1.25, "reward_margin": 0.5} == repeated.figures
    with pytest.raises(ValueError, match="45 figures need"):
        trainium_worker.step(9, **{f"figure_{number}": 0.1 for number in range(40)})


def test_stages_have_their_activity(record: Path) -> None:
    expected = {"load": Activity.LOAD, "compile": Activity.COMPILE, "shuffle": Activity.INIT, "save": Activity.SAVE}
    for name, expected_activity in expected.items():
        trainium_worker.stage(name)
        assert activity(record)[0] is expected_activity
    trainium_worker.stage("evaluate", 0.25)
    newest = progress(record)
    assert (newest.stage, newest.stage_progress) == ("Evaluate", 0.25)
    assert newest.stage_since > 0
    trainium_worker.step(1)
    newest = progress(record)
    assert (newest.stage, newest.stage_progress, newest.stage_since) == ("Train", 0.0, 0.0)
    assert newest.step_seconds > 0, "the step starts with the newest stage"
    trainium_worker.stage("shuffle")
    assert activity(record)[0] is Activity.STEP, "after the first step, an unknown stage counts as a step"
    trainium_worker.stage("x" * 40)
    newest = progress(record)
    assert newest.stage == "X" + "x" * 31


def test_waiting_for_answers_is_part_of_the_step_and_has_the_limit_of_a_save(record: Path) -> None:
    trainium_worker.step(1)
    started = time.monotonic()
    time.sleep(0.02)
    trainium_worker.stage("generate")
    assert activity(record)[0] is Activity.SAVE
    assert progress(record).stage == "Generate"
    trainium_worker.step(2)
    assert activity(record)[0] is Activity.STEP
    assert 0.02 <= progress(record).step_seconds <= time.monotonic() - started + 0.01


def test_saved_steps_are_recorded_by_storage(record: Path) -> None:
    trainium_worker.saved(4, "/checkpoints/4")
    trainium_worker.saved(5, trainium_worker.MEMORY)
    newest = progress(record)
    assert (newest.durable_step, newest.memory_step) == (4, 5)


def test_decreasing_steps_are_reported(record: Path) -> None:
    trainium_worker.step(9)
    trainium_worker.step(4)
    newest = progress(record)
    assert newest.step == 4
    assert read_notice(record).startswith("rank 5 reported step 4 after step 9: report steps as a number that rises")


@pytest.mark.parametrize("wrong", ["7", 7.5, None])
def test_a_step_that_is_not_an_integer_is_an_error(record: Path, wrong: Any) -> None:
    with pytest.raises(TypeError):
        trainium_worker.step(wrong)
    assert not record.exists()


def test_calls_without_an_agent_do_nothing(record: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRAINIUM_PROGRESS_FILE")
    trainium_worker.step(1, loss=2.0, tokens=3)
    trainium_worker.stage("load")
    trainium_worker.saved(1, "/x")
    trainium_worker.notice("x")
    assert not trainium_worker.should_stop()
    assert not record.parent.exists()


def test_an_unwritable_record_is_reported_once(record: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record.parent.write_text("a file where a folder belongs")
    trainium_worker.step(1)
    trainium_worker.step(2)
    assert not trainium_worker.should_stop()
    errors = capsys.readouterr().err
    assert errors == f"trainium_worker: nothing is reported to the agent: {record}: File exists\n"


def test_rank_and_generation_are_read_at_each_access(record: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (trainium_worker.rank, trainium_worker.generation) == (5, 3)
    monkeypatch.setenv("RANK", "6")
    assert trainium_worker.rank == 6, "a standby is forked before it has a rank"
    with pytest.raises(AttributeError, match="no attribute 'ranks'"):
        _ = trainium_worker.ranks  # type: ignore[attr-defined]


def test_a_fork_writes_its_record(record: Path) -> None:
    trainium_worker.step(1)
    child = os.fork()
    if child == 0:
        trainium_worker.step(2)
        os._exit(1)
    os.waitpid(child, 0)
    newest = progress(record)
    assert (newest.pid, newest.step) == (child, 2)


def test_environment_variables_equal_those_of_the_contract() -> None:
    module = trainium_worker
    assert (module.ENV_PROGRESS_FILE, module.ENV_GENERATION, module.ENV_ATTEMPT) == (
        worker_env.ENV_PROGRESS_FILE, worker_env.ENV_GENERATION, worker_env.ENV_ATTEMPT,
    )  # fmt: skip
    assert module.ENV_WORLD_SIZE == worker_env.ENV_WORLD_SIZE
    assert (session.ENV_MEMORY_DIRECTORY, session.ENV_RUN_ID, session.DEFAULT_MEMORY_DIRECTORY) == (
        worker_env.ENV_MEMORY_DIRECTORY, worker_env.ENV_RUN_ID, worker_env.MEMORY_DIRECTORY,
    )  # fmt: skip


def test_the_package_is_python_3_9_and_its_reports_have_no_dependencies() -> None:
    for path in PACKAGE.rglob("*.py"):
        ast.parse(path.read_text(), feature_version=(3, 9))
    script = "import json, sys; import trainium_worker; print(json.dumps([*sys.modules]))"
    command = [sys.executable, "-S", "-c", script]
    environment = {"PYTHONPATH": str(PACKAGE.parent)}
    loaded = json.loads(subprocess.run(command, env=environment, check=True, capture_output=True).stdout)
    assert "trainium_worker" in loaded
    assert {name.partition(".")[0] for name in loaded} - {"trainium_worker", "__main__"} <= set(sys.stdlib_module_names)


# ---- stopping ------------------------------------------------------------------------------------------------------


class StoppingRanks:
    """Ranks that make each step together, as with collectives."""

    def __init__(self, folder: Path, count: int) -> None:
        self.paths = [folder / f"r{rank}" for rank in range(count)]
        self.programs = [trainium_worker._Reporter(ProgressWriter(path, generation=1)) for path in self.paths]
        self.stopped: list[int | None] = [None] * count
        self._barrier = threading.Barrier(count)

    def train(self, rank: int, seed: int) -> None:
        rng = random.Random(seed * 100 + rank)
        for number in range(1, 2000):
            time.sleep(rng.random() * 0.002)
            self._barrier.wait(scaled(30))
            self.programs[rank].step(number, {}, {})
            if self.programs[rank].should_stop():
                self.stopped[rank] = number
                return


@pytest.mark.parametrize("seed", range(4))
def test_all_ranks_stop_after_the_same_step(tmp_path: Path, seed: int) -> None:
    ranks = StoppingRanks(tmp_path, 3)
    threads = [threading.Thread(target=ranks.train, args=(rank, seed)) for rank in range(3)]
    for thread in threads:
        thread.start()
    rng = random.Random(seed)
    time.sleep(0.05 + rng.random() * 0.05)
    for path in ranks.paths:
        request_stop(path)
        time.sleep(rng.random() * 0.01)
    checks = [progress(path).stop_checks for path in ranks.paths]
    for path in ranks.paths:
        time.sleep(rng.random() * 0.01)
        stop_at(path, max(checks) + 1)
    for thread in threads:
        thread.join(scaled(30))
    assert ranks.stopped == [max(checks) + 1] * 3


def test_a_stop_request_without_a_reply_times_out(record: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainium_worker, "_STOP_TIMEOUT_SECONDS", 0.05)
    trainium_worker.step(1)
    request_stop(record)
    assert not trainium_worker.should_stop()
    stop_at(record, 2)
    assert trainium_worker.should_stop()
    assert trainium_worker.should_stop(), "the answer does not change"


@pytest.mark.parametrize("local_rank", [0, 1])
def test_ranks_of_a_launcher_have_one_record_and_no_agreed_stop(
    record: Path, monkeypatch: pytest.MonkeyPatch, local_rank: int
) -> None:
    for name, number in {"TRAINIUM_WORLD_SIZE": 2, "WORLD_SIZE": 64, "LOCAL_RANK": local_rank}.items():
        monkeypatch.setenv(name, str(number))
    assert trainium_worker.count_launched_ranks() == 32
    trainium_worker.step(1)
    assert record.exists() == (local_rank == 0)
    if record.exists():
        assert progress(record).step == 1
        stop_at(record, 1)
    assert not trainium_worker.should_stop(), "the agents cannot agree with ranks that they do not see"


def test_a_stop_request_to_an_earlier_attempt_is_ignored(record: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainium_worker.step(1)
    stop_at(record, 1)
    monkeypatch.setattr(trainium_worker, "_reporter", None)
    trainium_worker.step(1)
    assert not trainium_worker.should_stop()
    request_stop(record.with_name("of-no-process"))  # a rank that has not reported yet
    assert not record.with_name("of-no-process").exists()

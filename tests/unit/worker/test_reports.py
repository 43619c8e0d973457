"""Reports of a program to its agent, and the step after which all ranks stop."""

import ast
import json
import math
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
from trainium_worker import Activity, ProgressPhase, Waiting, read_notice, read_progress, read_with_pulse
from trainium_worker.dcp import session

SOURCE = Path(trainium_worker.__file__)


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "progress" / "g3-r0"
    monkeypatch.setenv("TRAINIUM_PROGRESS_FILE", str(path))
    monkeypatch.setenv("TRAINIUM_GENERATION", "3")
    monkeypatch.setenv("TRAINIUM_ATTEMPT", "2")
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setattr(trainium_worker, "_program", None)
    return path


def activity(path: Path) -> tuple[Activity, Waiting]:
    record = read_with_pulse(path)
    assert record is not None
    assert record[1] is not None
    return record[1].activity, record[1].waiting


def test_steps_are_recorded_with_their_figures(record: Path) -> None:
    trainium_worker.step(8, loss=np.float32(2.5), tokens=np.int64(100), learning_rate=0.1, total_steps=20)
    progress = read_progress(record)
    assert progress is not None
    assert (progress.pid, progress.generation, progress.attempt) == (os.getpid(), 3, 2)
    assert progress.phase is ProgressPhase.TRAINING
    assert (progress.resume_step, progress.step, progress.total_steps) == (7, 8, 20)
    assert (progress.loss, progress.learning_rate, progress.tokens) == (2.5, 0.1, 100)
    assert math.isnan(progress.tokens_per_second), "the start of the first step is unknown"
    assert progress.step_seconds == 0.0
    time.sleep(0.01)
    trainium_worker.step(9, tokens=300, samples=4)
    progress = read_progress(record)
    assert progress is not None
    assert (progress.step, progress.tokens, progress.loss) == (9, 400, 2.5)
    assert progress.step_seconds >= 0.01
    assert progress.tokens_per_second == pytest.approx(300 / progress.step_seconds)
    assert (progress.samples, progress.samples_per_second) == (4, pytest.approx(4 / progress.step_seconds))
    assert activity(record) == (Activity.STEP, Waiting.MAYBE)
    trainium_worker.step(9, loss=1.25)
    again = read_progress(record)
    assert again is not None
    assert (again.loss, again.updated) == (1.25, progress.updated), "a second report of a step adds to it"


def test_stages_have_their_activity(record: Path) -> None:
    expected = {"load": Activity.LOAD, "compile": Activity.COMPILE, "shuffle": Activity.INIT, "save": Activity.SAVE}
    for name, what in expected.items():
        trainium_worker.stage(name)
        assert activity(record)[0] is what
    trainium_worker.stage("evaluate", 0.25)
    progress = read_progress(record)
    assert progress is not None
    assert (progress.stage, progress.stage_progress) == ("Evaluate", 0.25)
    assert progress.stage_since > 0
    trainium_worker.step(1)
    progress = read_progress(record)
    assert progress is not None
    assert (progress.stage, progress.stage_progress, progress.stage_since) == ("Train", 0.0, 0.0)
    assert progress.step_seconds > 0, "it began with the newest stage"
    trainium_worker.stage("shuffle")
    assert activity(record)[0] is Activity.STEP, "after the first step an unknown stage is work between steps"
    trainium_worker.stage("x" * 40)
    progress = read_progress(record)
    assert progress is not None
    assert progress.stage == "X" + "x" * 31


def test_saved_steps_are_recorded_by_storage(record: Path) -> None:
    trainium_worker.saved(4, "/checkpoints/4")
    trainium_worker.saved(5, trainium_worker.MEMORY)
    progress = read_progress(record)
    assert progress is not None
    assert (progress.durable_step, progress.memory_step) == (4, 5)


def test_decreasing_steps_are_reported(record: Path) -> None:
    trainium_worker.step(9)
    trainium_worker.step(4)
    progress = read_progress(record)
    assert progress is not None
    assert progress.step == 4
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
    assert trainium_worker.rank == 6, "a warm process is forked before it has a rank"
    with pytest.raises(AttributeError, match="no attribute 'ranks'"):
        _ = trainium_worker.ranks  # type: ignore[attr-defined]


def test_a_fork_writes_its_record(record: Path) -> None:
    trainium_worker.step(1)
    child = os.fork()
    if child == 0:
        trainium_worker.step(2)
        os._exit(1)
    os.waitpid(child, 0)
    progress = read_progress(record)
    assert progress is not None
    assert (progress.pid, progress.step) == (child, 2)


def test_environment_variables_equal_those_of_the_contract() -> None:
    ours = trainium_worker
    assert (ours.ENV_PROGRESS_FILE, ours.ENV_GENERATION, ours.ENV_ATTEMPT) == (
        worker_env.ENV_PROGRESS_FILE, worker_env.ENV_GENERATION, worker_env.ENV_ATTEMPT,
    )  # fmt: skip
    assert (session.ENV_MEMORY_DIRECTORY, session.ENV_RUN_ID, session.DEFAULT_MEMORY_DIRECTORY) == (
        worker_env.ENV_MEMORY_DIRECTORY, worker_env.ENV_RUN_ID, worker_env.MEMORY_DIRECTORY,
    )  # fmt: skip


def test_the_module_is_one_file_of_python_3_9_without_dependencies() -> None:
    ast.parse(SOURCE.read_text(), feature_version=(3, 9))
    script = "import json, sys; import trainium_worker; print(json.dumps([*sys.modules]))"
    command = [sys.executable, "-S", "-c", script]
    environment = {"PYTHONPATH": str(SOURCE.parents[1])}
    loaded = json.loads(subprocess.run(command, env=environment, check=True, capture_output=True).stdout)
    assert "trainium_worker" in loaded
    assert {name.partition(".")[0] for name in loaded} - {"trainium_worker", "__main__"} <= set(sys.stdlib_module_names)


# ---- stopping ------------------------------------------------------------------------------------------------------


class Ranks:
    """Ranks that collectives keep in step: none is two steps ahead of another."""

    def __init__(self, folder: Path, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.paths = [folder / f"r{rank}" for rank in range(count)]
        self.programs = [
            trainium_worker._Program(trainium_worker.ProgressWriter(path, generation=1)) for path in self.paths
        ]
        self.stopped: list[int | None] = [None] * count
        self._barrier = threading.Barrier(count)

    def train(self, rank: int, seed: int) -> None:
        chance = random.Random(seed * 100 + rank)
        for number in range(1, 2000):
            time.sleep(chance.random() * 0.002)
            self._barrier.wait(scaled(30))
            self.programs[rank].step(number, {}, {})
            if self.programs[rank].should_stop():
                self.stopped[rank] = number
                return


@pytest.mark.parametrize("seed", range(4))
def test_all_ranks_stop_after_the_same_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    ranks = Ranks(tmp_path, 3, monkeypatch)
    threads = [threading.Thread(target=ranks.train, args=(rank, seed)) for rank in range(3)]
    for thread in threads:
        thread.start()
    chance = random.Random(seed)
    time.sleep(0.05 + chance.random() * 0.05)
    for path in ranks.paths:
        trainium_worker.request_stop(path)
        time.sleep(chance.random() * 0.01)
    checks = [progress.stop_checks for path in ranks.paths if (progress := read_progress(path)) is not None]
    for path in ranks.paths:
        time.sleep(chance.random() * 0.01)
        trainium_worker.stop_at(path, max(checks) + 1)
    for thread in threads:
        thread.join(scaled(30))
    assert ranks.stopped == [max(checks) + 1] * 3


def test_a_stop_request_without_a_reply_times_out(record: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainium_worker, "_STOP_TIMEOUT_SECONDS", 0.05)
    trainium_worker.step(1)
    trainium_worker.request_stop(record)
    assert not trainium_worker.should_stop()
    trainium_worker.stop_at(record, 2)
    assert trainium_worker.should_stop()
    assert trainium_worker.should_stop(), "who asks again gets the same answer"


def test_a_stop_request_to_an_earlier_attempt_is_ignored(record: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainium_worker.step(1)
    trainium_worker.stop_at(record, 1)
    monkeypatch.setattr(trainium_worker, "_program", None)
    trainium_worker.step(1)
    assert not trainium_worker.should_stop()
    trainium_worker.request_stop(record.with_name("of-no-process"))  # as of a rank that has not reported yet
    assert not record.with_name("of-no-process").exists()

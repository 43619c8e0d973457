"""Observe a program from outside: steps in its output, problems, activity, checkpoints."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from pod_environment import environment

from trainium_agent.ranks.output import Tail
from trainium_agent.ranks.processes import RankProcess
from trainium_agent.settings import settings_from
from trainium_agent.workload import program_progress
from trainium_agent.workload.base import AttemptLayout, progress_file
from trainium_agent.workload.program import Program
from trainium_contract.spec.program import ProgramSpec
from trainium_contract.wire.messages import HangDetection
from trainium_trainer.monitor.progress import ProgressWriter
from trainium_worker import ProgressPhase

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

STEPS = r"step (?P<step>\d+)( loss (?P<loss>\S+))?"


class Followed:
    """A monitor of one pod, and its ranks' output."""

    def __init__(self, tmp_path: Path, pattern: str | None = STEPS, **more: Any) -> None:
        self.settings = settings_from(environment(tmp_path))
        self.settings.progress_directory.mkdir(parents=True)
        progress = {} if pattern is None else {"progress": {"pattern": pattern}}
        spec = ProgramSpec.model_validate({"image": "i", "command": ["c"], **progress, **more})
        self.monitor = Program(self.settings, spec, {})
        self.begin()

    def begin(self, attempt: int = 0, node_rank: int = 0) -> None:
        layout = AttemptLayout(1, attempt, node_rank, 2, 2, "127.0.0.1", 1)
        self.output: list[Callable[[bytes], None]] = [self.monitor.on_output(layout, rank) for rank in range(2)]

    def path(self, rank: int = 0) -> Path:
        return progress_file(self.settings, 1, rank)

    def writes(self, *lines: str, rank: int = 0) -> None:
        for line in lines:
            self.output[rank](line.encode())
        self.monitor.observe()

    def record(self, rank: int = 0) -> Any:
        found = self.monitor.read(self.path(rank))
        assert found is not None
        return found[0]


@pytest.fixture(autouse=True)
def _read_always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_progress, "_READ_SECONDS", 0.0)


@pytest.fixture
def followed(tmp_path: Path) -> Followed:
    return Followed(tmp_path)


def test_steps_and_losses_in_output_become_a_record_with_their_times(followed: Followed) -> None:
    assert followed.record().phase is ProgressPhase.LOADING
    followed.writes("loading", "step 1 loss 2.5", "noise step x", "step 2 loss 2.25")
    found = followed.monitor.read(followed.path())
    assert found is not None
    record, pulse = found
    assert (record.phase, record.step, record.loss, record.resume_step) == (ProgressPhase.TRAINING, 2, 2.25, 0)
    assert pulse is not None
    assert pulse.first_step_seconds > 0
    assert abs(record.updated - time.time()) < 5
    followed.writes("step 4")
    assert followed.record().step == 4
    assert followed.record().loss != followed.record().loss, "a line without a loss has none"
    assert followed.monitor.hang_detection is HangDetection.STEPS
    assert followed.monitor.problem == ""


def test_a_restart_keeps_the_productive_time_of_steps_that_are_not_repeated(followed: Followed) -> None:
    followed.writes("step 1")
    time.sleep(0.05)
    followed.writes("step 11")
    before = followed.record()
    assert before.productive_seconds >= 0.05
    followed.begin(attempt=1)
    followed.writes("step 6")
    after = followed.record()
    assert after.attempt == 1
    assert after.productive_seconds == pytest.approx(before.productive_seconds / 2, rel=0.01)
    assert after.resume_step == 5, "no checkpoint is known, so it went on before the first step that it printed"


def test_a_step_that_several_ranks_of_one_process_print_counts_once(followed: Followed) -> None:
    followed.writes("step 1", "step 1")
    time.sleep(0.05)
    followed.writes("step 2 loss 2.0", "step 2 loss 2.5")
    record = followed.record()
    assert (record.step, record.loss) == (2, 2.0)
    assert record.step_seconds >= 0.05, "not the time between the lines of two ranks"


def test_a_rank_that_was_started_again_loads_until_its_first_step(followed: Followed) -> None:
    followed.writes("step 7")
    ProgressWriter(followed.path(), generation=1, attempt=0).publish(step=8)
    followed.begin(attempt=1)
    assert (followed.record().attempt, followed.record().phase) == (1, ProgressPhase.LOADING)
    followed.writes("step 6")
    assert (followed.record().attempt, followed.record().step) == (1, 6)


def test_the_last_step_is_known_however_shortly_before_the_end_it_was_printed(
    followed: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    followed.writes("step 1")
    monkeypatch.setattr(program_progress, "_READ_SECONDS", 60.0)
    followed.writes("step 2")
    newest = [followed.monitor.newest(())]
    followed.monitor.observe(fresh=True)
    newest.append(followed.monitor.newest(()))
    assert [found[0].step for found in newest if found is not None] == [1, 2]


def test_the_library_takes_precedence_over_the_pattern(followed: Followed) -> None:
    followed.writes("step 1")
    writer = ProgressWriter(followed.path(), generation=1, attempt=0)
    assert followed.record().step == 1, "the library has no step yet"
    writer.publish(step=7, phase=ProgressPhase.TRAINING)
    assert followed.record().step == 7
    writer.close()


def test_success_after_a_request_to_stop_completes_only_what_has_made_its_last_step(followed: Followed) -> None:
    writer = ProgressWriter(followed.path(), generation=1, attempt=0)
    codes = (0, 75, 1, 143)
    for step, total, meaning in ((4, 0, 75), (4, 5, 75), (5, 5, 0)):
        writer.publish(step=step, total_steps=total)
        followed.monitor.observe()
        assert [followed.monitor.code_after_request(code) for code in codes] == [meaning, 75, 1, 143]


def test_a_program_without_a_pattern_trains_as_soon_as_it_runs(tmp_path: Path) -> None:
    followed = Followed(tmp_path, pattern=None)
    record = followed.record()
    assert (record.phase, record.step) == (ProgressPhase.TRAINING, -1)
    assert followed.monitor.hang_detection is HangDetection.OFF
    followed.writes("hello")
    assert followed.monitor.hang_detection is HangDetection.OUTPUT
    assert not followed.monitor.has_steps


def test_only_the_first_node_waits_for_a_step_in_its_output_and_not_for_ever(
    followed: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    followed.writes("banner")
    assert followed.record().phase is ProgressPhase.LOADING
    monkeypatch.setattr(program_progress, "_UNMATCHED_SECONDS", -1)
    assert followed.record().phase is ProgressPhase.TRAINING
    monkeypatch.undo()
    followed.begin(node_rank=1)
    assert followed.record().phase is ProgressPhase.TRAINING


def test_a_pattern_that_matches_nothing_is_a_problem_after_a_minute_of_output(
    followed: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    followed.writes("epoch 1")
    assert followed.monitor.problem == ""
    monkeypatch.setattr(program_progress, "_UNMATCHED_SECONDS", -1)
    assert "has matched no line of output" in followed.monitor.problem
    assert "the last line of rank 0 is 'epoch 1': correct the pattern" in followed.monitor.problem
    followed.writes("step 1", rank=1)
    assert followed.monitor.problem == ""


def test_steps_that_run_backwards_are_a_problem(followed: Followed) -> None:
    followed.writes("step 5", "step 3")
    assert followed.monitor.problem.startswith("step 3 of rank 0 follows step 5 within one start")


def test_ranks_that_report_different_steps_are_a_problem(followed: Followed) -> None:
    followed.writes("step 10")
    followed.writes("step 11", rank=1)
    assert followed.monitor.problem == ""
    followed.writes("step 80", rank=1)
    assert followed.monitor.problem.startswith("rank 0 reports step 10 and rank 1 step 80")


def test_an_expression_that_explodes_is_stopped_and_then_given_up(tmp_path: Path) -> None:
    followed = Followed(tmp_path, pattern=r"(a+)+(?P<step>\d+)b")
    began = time.monotonic()
    followed.writes(*["a" * 64 + "1"] * 30)
    assert time.monotonic() - began < 10
    assert "takes more than 50 ms a line and is no longer searched for" in followed.monitor.problem


def test_a_search_that_ends_in_time_leaves_no_alarm(followed: Followed) -> None:
    followed.writes(*[f"step {step}" for step in range(1, 200)])
    time.sleep(0.1)
    assert followed.record().step == 199


def test_of_a_flood_of_output_the_newest_lines_are_searched(followed: Followed) -> None:
    for step in range(1, 1001):
        followed.output[0](f"step {step}".encode())
    followed.monitor.observe()
    assert followed.record().step == 1000


def test_output_and_processor_time_are_signs_of_activity_and_idleness_is_none(
    followed: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = RankProcess(0, 0, 0, os.getpid(), Tail(""))
    assert followed.monitor.quiet_sign(process, 0.0) is None, "it has written nothing"
    followed.writes("hello")
    used = [1.0]
    monkeypatch.setattr(program_progress.kernel, "state_of", lambda _: SimpleNamespace(cpu_seconds=used[0]))
    monkeypatch.setattr(program_progress.kernel, "descendants", lambda _: [])
    first = followed.monitor.quiet_sign(process, 10.0)
    assert followed.monitor.quiet_sign(process, 20.0) == first, "idle"
    used[0] = 3.0
    busy = followed.monitor.quiet_sign(process, 30.0)
    assert busy != first
    followed.writes("again")
    assert followed.monitor.quiet_sign(process, 31.0) != busy


def test_the_newest_complete_checkpoint_is_observed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (folder / "step-20").mkdir(parents=True)
    (folder / "step-20/.metadata").touch()
    (folder / "step-30").mkdir()
    (folder / "step-x").mkdir()
    spec = {"path": str(folder), "committed": "step-{step}/.metadata"}
    followed = Followed(tmp_path, checkpoints=spec)
    deadline = time.monotonic() + 20
    while followed.monitor.durable_step < 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert followed.monitor.durable_step == 20
    followed.writes("step 0", "step 25")
    assert followed.record().resume_step == 20, "a progress bar begins at 0, wherever the program resumes"
    (folder / "step-30/.metadata").touch()
    assert followed.monitor.on_finish(()) == ""
    assert followed.monitor.durable_step == 30, "the one that is saved at the end, between two listings"


def test_a_folder_of_checkpoints_that_is_not_there_is_a_problem(tmp_path: Path) -> None:
    followed = Followed(tmp_path, checkpoints={"path": "/nowhere/run", "committed": "{step}"})
    deadline = time.monotonic() + 20
    while not followed.monitor.problem and time.monotonic() < deadline:
        time.sleep(0.01)
    assert followed.monitor.problem == (
        "program.checkpoints.path /nowhere/run cannot be listed (it is not there): mount the volume there, or correct "
        "the path"
    )


def test_a_folder_that_the_first_checkpoint_creates_is_no_problem_before_an_hour(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    followed = Followed(tmp_path, checkpoints={"path": str(tmp_path / "run/checkpoint"), "committed": "{step}"})
    followed.monitor.on_finish(())
    assert followed.monitor.problem == ""
    monkeypatch.setattr(program_progress, "_CREATED_SECONDS", 0.0)
    followed.monitor.on_finish(())
    assert "cannot be listed (it is not there)" in followed.monitor.problem

"""Progress of a program from its output, its processor time and its checkpoints."""

import itertools
import json
import os
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tqdm import tqdm

from tests.testing.suite.timeouts import until
from tests.unit.agent.pod_environment import environment
from trainium_agent import show_checkpoints
from trainium_agent.linux import kernel
from trainium_agent.ranks.output import OutputTail
from trainium_agent.ranks.processes import RankProcess
from trainium_agent.settings import parse_settings
from trainium_agent.workload import program_checkpoints, program_progress
from trainium_agent.workload.attempt import AttemptLayout, find_progress_file
from trainium_agent.workload.master_port import MasterPort
from trainium_agent.workload.workload import Workload
from trainium_contract.spec.program import ProgramSpec
from trainium_contract.views.checkpoints import parse_checkpoint_rows
from trainium_contract.wire.messages import HangDetection
from trainium_trainer.monitor.progress import ProgressWriter
from trainium_worker.progress_record import ProgressPhase

STEPS = r"step (?P<step>\d+)( loss (?P<loss>\S+))?"


class MonitoredProgram:
    """A program on one pod, with its monitor and the output of its ranks."""

    def __init__(self, tmp_path: Path, pattern: str | None = STEPS, **more: Any) -> None:
        self.settings = parse_settings(environment(tmp_path))
        self.settings.progress_directory.mkdir(parents=True)
        progress = {} if pattern is None else {"progress": {"pattern": pattern}}
        spec = ProgramSpec.model_validate({"image": "i", "command": ["c"], **progress, **more})
        self.monitor = Workload(replace(self.settings, program=spec), {})
        self.start_attempt()

    def start_attempt(self, attempt: int = 0, node_rank: int = 0) -> None:
        layout = AttemptLayout(1, attempt, node_rank, 2, 2, "127.0.0.1", MasterPort(1))
        self.output: list[Callable[[bytes], None]] = [self.monitor.on_output(layout, rank) for rank in range(2)]

    def path(self, rank: int = 0) -> Path:
        return find_progress_file(self.settings, 1, rank)

    def print_lines(self, *lines: str, rank: int = 0) -> None:
        for line in lines:
            self.output[rank](line.encode())
        self.monitor.observe()

    def record(self, rank: int = 0) -> Any:
        reading = self.monitor.read(self.path(rank))
        assert reading is not None
        return reading.record


@pytest.fixture(autouse=True)
def _observe_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_progress, "_READ_SECONDS", 0.0)


@pytest.fixture
def monitored_program(tmp_path: Path) -> MonitoredProgram:
    return MonitoredProgram(tmp_path)


def test_steps_and_losses_are_parsed_from_output(monitored_program: MonitoredProgram) -> None:
    assert monitored_program.record().phase is ProgressPhase.LOADING
    monitored_program.print_lines("loading", "step 1 loss 2.5", "noise step x", "step 2 loss 2.25")
    reading = monitored_program.monitor.read(monitored_program.path())
    assert reading is not None
    record, pulse = reading.record, reading.pulse
    assert (record.phase, record.step, record.figures["loss"], record.resume_step) == (
        ProgressPhase.TRAINING,
        2,
        2.25,
        0,
    )
    assert pulse is not None
    assert pulse.first_step_seconds > 0
    assert abs(record.updated - time.time()) < 5
    monitored_program.print_lines("step 4")
    assert monitored_program.record().step == 4
    assert monitored_program.record().figures["loss"] != monitored_program.record().figures["loss"], (
        "a line without a loss has none"
    )
    assert monitored_program.monitor.hang_detection is HangDetection.STEPS
    assert monitored_program.monitor.problem == ""


@pytest.mark.parametrize(
    ("printed", "loss"),
    [
        ("\x1b[32mstep 7\x1b[0m loss \x1b[1;33m2.5\x1b[0m lr 0.1", 2.5),
        ("step 7 loss 2.5\x1b[39m", 2.5),
        ("\x1b]8;;http://x\x07step 7\x1b]8;;\x07 loss 2.5", 2.5),
        ("step 7 loss 2.5, lr 0.1", 2.5),
        ("step 7 loss tensor(2.5,grad_fn=<A>)", 2.5),
        ("step 7 loss 1,024.5", 1024.5),
        ("step 7 loss -2.5e-3;", -0.0025),
        ("step 7 loss inf", float("inf")),
    ],
)
def test_a_number_is_read_from_coloured_output_and_with_what_follows(
    monitored_program: MonitoredProgram, printed: str, loss: float
) -> None:
    monitored_program.print_lines(printed)
    assert (monitored_program.record().step, monitored_program.record().figures["loss"]) == (7, loss)


def test_the_pattern_of_the_page_for_a_progress_bar_reads_no_other_bar(tmp_path: Path) -> None:
    page = (Path(__file__).parents[4] / "docs/program.md").read_text(encoding="utf-8")
    pattern = re.search(r"as in `([^`]+/600[^`]+)`", page)
    assert pattern is not None
    program = MonitoredProgram(tmp_path, pattern[1])
    bars = (("", 30, 600), ("", 12, 12), ("Generating train split", 600, 600), ("Map", 90, 600))
    program.print_lines(*(tqdm.format_meter(done, total, 3.0, ncols=80, prefix=title) for title, done, total in bars))
    assert program.record().step == 30


def test_a_step_has_separators_of_thousands_and_a_pattern_may_name_colours(tmp_path: Path) -> None:
    program = MonitoredProgram(tmp_path, r"\x1b\[32m(?P<step>[\d,]+)")
    program.print_lines("\x1b[31m7", "\x1b[32m1,024")
    assert program.record().step == 1024


def test_a_restart_keeps_the_productive_time_of_kept_steps(monitored_program: MonitoredProgram) -> None:
    monitored_program.print_lines("step 1")
    time.sleep(0.05)
    monitored_program.print_lines("step 11")
    before = monitored_program.record()
    assert before.productive_seconds >= 0.05
    monitored_program.start_attempt(attempt=1)
    monitored_program.print_lines("step 6")
    after = monitored_program.record()
    assert after.attempt == 1
    assert after.productive_seconds == pytest.approx(before.productive_seconds / 2, rel=0.01)
    assert after.resume_step == 5, "no checkpoint is known, so it resumed before the first step that it printed"


def test_a_step_that_is_printed_twice_counts_once(monitored_program: MonitoredProgram) -> None:
    monitored_program.print_lines("step 1", "step 1")
    time.sleep(0.05)
    monitored_program.print_lines("step 2 loss 2.0", "step 2 loss 2.5")
    record = monitored_program.record()
    assert (record.step, record.figures["loss"]) == (2, 2.0)
    assert record.step_seconds >= 0.05, "not the time between the lines of two ranks"


def test_a_restarted_rank_is_loading_until_its_first_step(monitored_program: MonitoredProgram) -> None:
    monitored_program.print_lines("step 7")
    ProgressWriter(monitored_program.path(), generation=1, attempt=0).publish(step=8)
    monitored_program.start_attempt(attempt=1)
    assert (monitored_program.record().attempt, monitored_program.record().phase) == (1, ProgressPhase.LOADING)
    monitored_program.print_lines("step 6")
    assert (monitored_program.record().attempt, monitored_program.record().step) == (1, 6)


def test_the_last_step_is_read_at_the_end_of_a_rank(
    monitored_program: MonitoredProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    monitored_program.print_lines("step 1")
    monkeypatch.setattr(program_progress, "_READ_SECONDS", 60.0)
    monitored_program.print_lines("step 2")
    files = [monitored_program.path()]
    newest = [monitored_program.monitor.read_newest(files)]
    monitored_program.monitor.observe(fresh=True)
    newest.append(monitored_program.monitor.read_newest(files))
    assert [progress[0].step for progress in newest if progress is not None] == [1, 2]


def test_a_spare_that_has_trained_before_has_no_newest_step(monitored_program: MonitoredProgram) -> None:
    monitored_program.print_lines("step 1")
    assert monitored_program.monitor.read_newest([monitored_program.path()]) is not None
    assert monitored_program.monitor.read_newest(()) is None, "else its next start would be dated back to that step"


def test_the_library_takes_precedence_over_the_pattern(monitored_program: MonitoredProgram) -> None:
    monitored_program.print_lines("step 1")
    writer = ProgressWriter(monitored_program.path(), generation=1, attempt=0)
    assert monitored_program.record().step == 1, "the library has no step yet"
    writer.publish(step=7, phase=ProgressPhase.TRAINING)
    assert monitored_program.record().step == 7
    writer.close()


def test_exit_code_0_after_a_stop_request_completes_only_a_program_at_its_last_step(
    monitored_program: MonitoredProgram,
) -> None:
    writer = ProgressWriter(monitored_program.path(), generation=1, attempt=0)
    codes = (0, 75, 1, 143)
    for step, total, meaning in ((4, 0, 75), (4, 5, 75), (5, 5, 0)):
        writer.publish(step=step, total_steps=total)
        monitored_program.monitor.observe()
        assert [monitored_program.monitor.exit_code_after_request(code) for code in codes] == [meaning, 75, 1, 143]


def test_a_program_without_a_pattern_is_training_at_once(tmp_path: Path) -> None:
    monitored_program = MonitoredProgram(tmp_path, pattern=None)
    record = monitored_program.record()
    assert (record.phase, record.step) == (ProgressPhase.TRAINING, -1)
    assert monitored_program.monitor.hang_detection is HangDetection.OFF
    monitored_program.print_lines("hello")
    assert monitored_program.monitor.hang_detection is HangDetection.OUTPUT
    assert not monitored_program.monitor.has_steps


def test_only_the_first_node_is_loading_until_a_step_or_a_timeout(
    monitored_program: MonitoredProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    monitored_program.print_lines("banner")
    assert monitored_program.record().phase is ProgressPhase.LOADING
    monkeypatch.setattr(program_progress, "_UNMATCHED_SECONDS", -1)
    assert monitored_program.record().phase is ProgressPhase.TRAINING
    monkeypatch.undo()
    monitored_program.start_attempt(node_rank=1)
    assert monitored_program.record().phase is ProgressPhase.TRAINING


def test_a_pattern_that_matches_nothing_is_a_problem_after_a_minute_of_output(
    monitored_program: MonitoredProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    monitored_program.print_lines("epoch 1")
    assert monitored_program.monitor.problem == ""
    monkeypatch.setattr(program_progress, "_UNMATCHED_SECONDS", -1)
    assert "has matched no line of output" in monitored_program.monitor.problem
    assert "the last line of rank 0 is 'epoch 1': correct the pattern" in monitored_program.monitor.problem
    monitored_program.print_lines("step 1", rank=1)
    assert monitored_program.monitor.problem == ""


def test_steps_that_run_backwards_are_a_problem(monitored_program: MonitoredProgram) -> None:
    monitored_program.print_lines("step 5", "step 3")
    assert monitored_program.monitor.problem.startswith("step 3 of rank 0 follows step 5 within one start")


def test_ranks_that_report_different_steps_are_a_problem(monitored_program: MonitoredProgram) -> None:
    monitored_program.print_lines("step 10")
    monitored_program.print_lines("step 11", rank=1)
    assert monitored_program.monitor.problem == ""
    monitored_program.print_lines("step 80", rank=1)
    assert monitored_program.monitor.problem.startswith("rank 0 reports step 10 and rank 1 step 80")


def test_a_slow_expression_is_interrupted_and_then_disabled(tmp_path: Path) -> None:
    monitored_program = MonitoredProgram(tmp_path, pattern=r"(a+)+(?P<step>\d+)b")
    started_at = time.thread_time()
    monitored_program.print_lines(*["a" * 64 + "1"] * 30)
    assert time.thread_time() - started_at < 10
    assert "takes more than 50 ms of CPU time a line and is no longer searched for" in monitored_program.monitor.problem


def test_a_search_is_limited_by_processor_time_not_by_time_in_which_the_agent_is_suspended() -> None:
    with program_progress.limit_cpu_time(0.05):
        time.sleep(0.2)
    with pytest.raises(TimeoutError), program_progress.limit_cpu_time(0.05):
        all(number >= 0 for number in itertools.count())


def test_a_fast_search_leaves_no_timer(monitored_program: MonitoredProgram) -> None:
    monitored_program.print_lines(*[f"step {step}" for step in range(1, 200)])
    time.sleep(0.1)
    assert monitored_program.record().step == 199


def test_the_newest_lines_of_a_burst_are_searched(monitored_program: MonitoredProgram) -> None:
    for step in range(1, 1001):
        monitored_program.output[0](f"step {step}".encode())
    monitored_program.monitor.observe()
    assert monitored_program.record().step == 1000


def test_output_and_processor_time_are_activity_and_idleness_is_not(
    monitored_program: MonitoredProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = RankProcess(0, 0, 0, os.getpid(), OutputTail(""))
    assert monitored_program.monitor.count_activity(process, 0.0) is None, "it has written nothing"
    monitored_program.print_lines("hello")
    used = [1.0]
    monkeypatch.setattr(kernel, "read_process_state", lambda _: SimpleNamespace(cpu_seconds=used[0]))
    monkeypatch.setattr(program_progress, "list_descendants", lambda _: [])
    first = monitored_program.monitor.count_activity(process, 10.0)
    assert monitored_program.monitor.count_activity(process, 20.0) == first, "idle"
    used[0] = 3.0
    busy = monitored_program.monitor.count_activity(process, 30.0)
    assert busy != first
    monitored_program.print_lines("again")
    assert monitored_program.monitor.count_activity(process, 31.0) != busy


def test_the_newest_complete_checkpoint_is_observed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (folder / "step-20").mkdir(parents=True)
    (folder / "step-20/.metadata").touch()
    (folder / "step-30").mkdir()
    (folder / "step-x").mkdir()
    spec = {"path": str(folder), "committed": "step-{step}/.metadata"}
    monitored_program = MonitoredProgram(tmp_path, checkpoints=spec)
    until(lambda: monitored_program.monitor.durable_step >= 0, "the checkpoint is listed", pause=0.01)
    assert monitored_program.monitor.durable_step == 20
    monitored_program.print_lines("step 0", "step 25")
    assert monitored_program.record().resume_step == 20, "a progress bar begins at 0, wherever the program resumes"
    (folder / "step-30/.metadata").touch()
    assert monitored_program.monitor.on_finish(()) == ""
    assert monitored_program.monitor.durable_step == 30, "saved at the end, between two listings"


def test_the_checkpoints_of_a_program_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (9, 10):
        (tmp_path / f"step-{step}" / "shards").mkdir(parents=True)
        (tmp_path / f"step-{step}" / "shards" / "0").write_bytes(b"12345")
    (tmp_path / "step-9" / "complete").touch()
    checkpoints = {"path": str(tmp_path), "committed": "step-{step}/complete"}
    program = {"image": "i", "command": ["c"], "checkpoints": checkpoints}
    for committed, expected in (("step-{step}/complete", ("step-9", 9, 5)), ("last.ckpt", ("last.ckpt", -1, 3))):
        checkpoints["committed"] = committed
        (tmp_path / "last.ckpt").write_bytes(b"123")
        monkeypatch.setenv("TRAINIUM_PROGRAM", json.dumps(program))
        show_checkpoints.main()
        (row,) = parse_checkpoint_rows(capsys.readouterr().out) or ()
        assert (row.name, row.step, row.bytes, row.state) == (*expected, "committed")


def test_a_file_that_each_save_replaces_has_the_step_that_had_ended(tmp_path: Path) -> None:
    file = tmp_path / "run" / "last.ckpt"
    file.parent.mkdir()
    file.touch()
    checkpoints = {"path": str(file.parent), "committed": "last.ckpt"}
    monitored_program = MonitoredProgram(tmp_path, checkpoints=checkpoints)
    monitored_program.monitor.on_finish(())
    assert monitored_program.monitor.durable_step == -1, "its step is known to the program alone"
    monitored_program.print_lines("step 7")
    os.utime(file, (time.time() + 0.1, time.time() + 0.1))
    time.sleep(0.2)
    for step in (8, 9):
        monitored_program.print_lines(f"step {step}")
    monitored_program.monitor.on_finish(())
    assert monitored_program.monitor.durable_step == 7
    monitored_program.monitor.on_finish(())
    assert monitored_program.monitor.durable_step == 7, "nothing was saved since"
    file.unlink()
    monitored_program.monitor.on_finish(())
    assert (monitored_program.monitor.durable_step, monitored_program.monitor.problem) == (7, ""), "being replaced"


def test_a_missing_folder_of_checkpoints_is_a_problem(tmp_path: Path) -> None:
    monitored_program = MonitoredProgram(tmp_path, checkpoints={"path": "/nowhere/run", "committed": "{step}"})
    until(lambda: monitored_program.monitor.problem, "the problem is reported", pause=0.01)
    assert monitored_program.monitor.problem == (
        "program.checkpoints.path /nowhere/run cannot be listed (it does not exist): mount the volume there, or "
        "correct the path"
    )


def test_a_folder_that_is_not_created_yet_is_no_problem_for_an_hour(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monitored_program = MonitoredProgram(
        tmp_path, checkpoints={"path": str(tmp_path / "run/checkpoint"), "committed": "{step}"}
    )
    monitored_program.monitor.on_finish(())
    assert monitored_program.monitor.problem == ""
    monkeypatch.setattr(program_checkpoints, "_CREATED_SECONDS", 0.0)
    monitored_program.monitor.on_finish(())
    assert "cannot be listed (it does not exist)" in monitored_program.monitor.problem

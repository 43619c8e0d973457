"""A disk that is really full: logs and curves are buffered, training continues, and so do later starts."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.testing.suite.timeouts import until
from tests.unit.trainer.conftest import Job, Launcher
from trainium_trainer.monitor.json_lines import FALLBACK_BYTES, LineWriter
from trainium_trainer.monitor.step_metrics import StepMetrics
from trainium_trainer.monitor.writers import METRICS_NAME, Recorder
from trainium_worker.progress_record import read_notice, read_progress


class SmallDisk:
    """A separate file system that can be filled to the last byte, and emptied again."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._filler = root / "filler"

    def fill(self) -> None:
        with self._filler.open("ab", buffering=0) as file:
            for size in (1 << 16, 1 << 12, 1):
                try:
                    while file.write(b"x" * size) == size:
                        pass
                except OSError:
                    continue

    def empty(self) -> None:
        self._filler.unlink()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    root = tmp_path / "run"
    root.mkdir()
    if os.getuid() != 0:
        pytest.skip("needs root to mount a small tmpfs")
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(root)], check=False).returncode:
        pytest.skip("mounting is not allowed here")
    yield SmallDisk(root)
    subprocess.run(["umount", "--lazy", str(root)], check=True)


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def figures(step: int) -> StepMetrics:
    return StepMetrics(step=step, loss=2.0, grad_norm=1.0, learning_rate=0.1, tokens=step, samples=step, batch=1)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_lines_that_a_full_disk_does_not_take_are_written_in_order_when_it_does(disk: SmallDisk) -> None:
    messages: list[str] = []
    clock = Clock()
    writer = LineWriter(disk.root / "metrics.jsonl", notify=messages.append, clock=clock)
    writer.write({"step": 1})
    disk.fill()
    for step in range(2, 400):  # more than the block that the first line lies in
        writer.write({"step": step, "text": "x" * 40})
    assert writer.waiting > 100
    disk.empty()
    clock.now += 60
    writer.write({"step": 400})
    assert writer.waiting == 0
    assert steps(disk.root / "metrics.jsonl") == list(range(1, 401))
    assert len(messages) == 2, messages
    assert "No space left on device): free space; training goes on" in messages[0]
    assert "can be written again" in messages[1]
    writer.close()


def test_the_lines_kept_aside_are_bounded_and_lost_lines_counted(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()  # takes no line ever
    fallback = tmp_path / "aside"
    messages: list[str] = []
    writer = LineWriter(tmp_path / "metrics.jsonl", fallback=fallback, notify=messages.append)
    line = {"text": "x" * 65_000}
    for step in range(300):
        writer.write({"step": step} | line)
    assert writer.waiting + writer.dropped_lines == 300
    assert writer.dropped_lines > 200
    assert (fallback / "metrics.jsonl").stat().st_size <= 2 * FALLBACK_BYTES + 100_000
    assert len(messages) == 1
    writer.close()


def test_the_next_process_writes_what_the_last_one_could_not_up_to_the_step_that_is_resumed(disk: SmallDisk) -> None:
    path, fallback = disk.root / "metrics.jsonl", disk.root.parent / "aside"
    first = LineWriter(path, fallback=fallback)
    first.write({"step": 1})
    disk.fill()
    (disk.root / "one-more").touch()
    for step in range(2, 301):
        first.write({"step": step, "text": "x" * 40})
    assert first.waiting
    # Killed: nothing is closed. Steps up to 250 are in the state that is resumed.
    assert not Recorder.is_missing_line(disk.root, 250, fallback)
    assert Recorder.is_missing_line(disk.root, 301, fallback)
    second = LineWriter(path, fallback=fallback, last=250)
    second.write({"step": 251})
    second.close()
    assert steps(path)[-1] < 250
    disk.empty()
    third = LineWriter(path, fallback=fallback, last=251)
    third.write({"step": 252})
    assert steps(path) == list(range(1, 253))
    assert not (fallback / "metrics.jsonl").exists()
    third.close()


def test_a_line_that_was_written_and_still_lies_aside_is_written_once(tmp_path: Path) -> None:
    fallback = tmp_path / "aside"
    fallback.mkdir()
    (tmp_path / "metrics.jsonl").write_text('{"step":1}\n{"step":2}\n')
    (fallback / "metrics.jsonl").write_text('{"step":2}\n{"step":3}\n{"step":4')
    LineWriter(tmp_path / "metrics.jsonl", fallback=fallback, last=5).close()
    assert steps(tmp_path / "metrics.jsonl") == [1, 2, 3]


def test_curves_that_cannot_be_written_stop_no_step(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").write_text("a file where a folder should be")
    messages: list[str] = []
    options: dict[str, Any] = {"rank": 0, "dp_rank": 0, "tensorboard": True, "record_samples": False}
    recorder = Recorder(tmp_path, resume_step=0, notify=messages.append, **options)
    for step in (1, 2, 3):
        recorder.step(figures(step))
    recorder.close()
    assert steps(tmp_path / METRICS_NAME) == [1, 2, 3]
    assert len(messages) == 1
    assert "goes on without its curves" in messages[0]


def test_a_run_trains_through_a_full_disk_and_a_restart_on_it_and_its_history_is_whole(
    launch: Launcher, disk: SmallDisk, tmp_path: Path
) -> None:
    overrides = [
        "steps=100000",
        "checkpoint.durable.everySteps=5",
        "checkpoint.durable.failureTolerance=1000",
        "monitor.tensorboard=true",
        "monitor.recordSamples=true",
    ]
    progress = tmp_path / "r0"

    def step() -> int:
        record = read_progress(progress)
        return -1 if record is None else record.step

    def beyond(more: int, job: Job) -> None:
        """Wait for further steps without an end of the process, from its current step."""
        least = step() + more
        until(lambda: step() >= least, job.log, pause=0.02)

    job = launch(1, "run", overrides, memory=True, TRAINIUM_PROGRESS_FILE=str(progress))
    job.wait_for_step(6)
    disk.fill()
    beyond(30, job)
    disk.fill()  # what a failed save has freed
    beyond(30, job)
    os.kill(job.pids[0], signal.SIGKILL)
    job.wait()
    reached = step()

    disk.fill()
    again = launch(1, "run", overrides, memory=True, TRAINIUM_PROGRESS_FILE=str(progress))
    until(lambda: step() > reached, again.log, pause=0.02)
    beyond(20, again)
    assert "from memory" in again.log(), again.log()
    assert "training goes on" in again.log(), again.log()
    assert read_notice(progress)
    disk.empty()
    newest = step()
    again.request_exit(step=newest + 1)
    recorded = [line["step"] for line in again.metrics()]
    assert recorded == list(range(1, len(recorded) + 1)), "a line of each step, once and in order"
    samples = [json.loads(line) for line in (disk.root / "samples-0.jsonl").read_text().splitlines()]
    assert [line["step"] for line in samples] == recorded

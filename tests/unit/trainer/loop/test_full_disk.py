"""Buffer logs and curves on a disk that is really full, and continue the training and later starts."""

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
    """A separate file system that tests fill to the last byte and empty."""

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


def test_lines_of_a_full_disk_are_written_in_order_later(disk: SmallDisk) -> None:
    messages: list[str] = []
    clock = Clock()
    writer = LineWriter(disk.root / "metrics.jsonl", notify=messages.append, clock=clock)
    writer.write({"step": 1})
    disk.fill()
    for step in range(2, 400):  # more than one block
        writer.write({"step": step, "text": "x" * 40})
    assert writer.waiting > 100
    disk.empty()
    clock.now += 60
    writer.write({"step": 400})
    assert writer.waiting == 0
    assert steps(disk.root / "metrics.jsonl") == list(range(1, 401))
    assert len(messages) == 2, messages
    assert "No space left on device): free space; training continues" in messages[0]
    assert "can be written again" in messages[1]
    writer.close()


def test_buffered_lines_are_bounded_and_dropped_lines_counted(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()  # cannot be written
    fallback = tmp_path / "fallback"
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


def test_the_next_process_writes_buffered_lines_up_to_the_resumed_step(disk: SmallDisk) -> None:
    path, fallback = disk.root / "metrics.jsonl", disk.root.parent / "fallback"
    first = LineWriter(path, fallback=fallback)
    first.write({"step": 1})
    disk.fill()
    (disk.root / "one-more").touch()
    for step in range(2, 301):
        first.write({"step": step, "text": "x" * 40})
    assert first.waiting
    # The process is killed, so nothing is closed. The resumed state has steps up to 250.
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


def test_a_line_in_both_files_is_written_once(tmp_path: Path) -> None:
    fallback = tmp_path / "fallback"
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
    assert "continues without its curves" in messages[0]


def test_a_run_keeps_its_whole_history_through_a_full_disk_and_a_restart(
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

    def wait_for_steps(count: int, job: Job) -> None:
        target = step() + count
        until(lambda: step() >= target, job.log, pause=0.02)

    job = launch(1, "run", overrides, memory=True, TRAINIUM_PROGRESS_FILE=str(progress))
    job.wait_for_step(6)
    disk.fill()
    wait_for_steps(30, job)
    disk.fill()  # the space that a failed save has freed
    wait_for_steps(30, job)
    os.kill(job.pids[0], signal.SIGKILL)
    job.wait()
    last_step = step()

    disk.fill()
    restarted = launch(1, "run", overrides, memory=True, TRAINIUM_PROGRESS_FILE=str(progress))
    until(lambda: step() > last_step, restarted.log, pause=0.02)
    wait_for_steps(20, restarted)
    assert "from memory" in restarted.log(), restarted.log()
    assert "training continues" in restarted.log(), restarted.log()
    assert read_notice(progress)
    disk.empty()
    newest = step()
    restarted.request_exit(step=newest + 1)
    recorded = [line["step"] for line in restarted.metrics()]
    assert recorded == list(range(1, len(recorded) + 1)), "one line of each step, in order"
    samples = [json.loads(line) for line in (disk.root / "samples-0.jsonl").read_text().splitlines()]
    assert [line["step"] for line in samples] == recorded

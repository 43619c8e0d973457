"""Write and read the progress record, metrics and TensorBoard files."""

import json
import pathlib
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.testing.suite.trials import trials
from trainium_contract.status.results import (
    MAX_ARTIFACTS,
    ArtifactReport,
    EvaluationFigure,
    RunStage,
    get_results_path,
    read_results,
)
from trainium_trainer.monitor.json_lines import LineWriter, truncate_after
from trainium_trainer.monitor.progress import ProgressWriter
from trainium_trainer.monitor.step_metrics import Rewards, StepMetrics
from trainium_trainer.monitor.step_monitor import Throughput
from trainium_trainer.monitor.writers import ScalarWriter
from trainium_worker.progress_record import ProgressPhase, read_alerts, read_notice, read_progress, read_with_pulse
from trainium_worker.pulse import Activity, Waiting


def record_step(writer: ProgressWriter, step: int, seconds: float = 2.0) -> None:
    figures = StepMetrics(
        step=step,
        loss=1.5,
        grad_norm=0.5,
        learning_rate=1e-3,
        tokens=100 * step,
        samples=8 * step,
        batch=8,
        tokens_per_second=50.0,
        samples_per_second=4.0,
        rewards=Rewards(chosen=0.5, rejected=0.125, accuracy=0.75),
    )
    writer.record_step(figures, seconds=seconds)


def test_a_reader_reads_the_record_of_the_writer(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "r0"
    writer = ProgressWriter(path, generation=3, attempt=1)
    fresh = read_progress(path)
    assert (fresh.generation, fresh.attempt, fresh.phase, fresh.step) == (3, 1, ProgressPhase.LOADING, -1)
    writer.record_resume(4, tokens=400, samples=32)
    record_step(writer, 5)
    writer.publish(memory_step=5, durable_step=-1)
    assert read_progress(path) == writer.record
    assert writer.record.productive_seconds == 2.0
    assert {
        name: writer.record.figures[name] for name in ("tokens_per_second", "reward_margin", "reward_accuracy")
    } == {
        "tokens_per_second": 50.0,
        "reward_margin": 0.375,
        "reward_accuracy": 0.75,
    }
    writer.close()


def test_a_missing_or_foreign_progress_file_is_read_as_none(tmp_path: Path) -> None:
    assert read_progress(tmp_path / "none") is None
    (tmp_path / "other").write_bytes(b"x" * 200)
    assert read_progress(tmp_path / "other") is None


def test_a_torn_record_is_read_as_none(tmp_path: Path) -> None:
    path = tmp_path / "r0"
    writer = ProgressWriter(path)
    data = bytearray(path.read_bytes())
    data[40] ^= 1
    path.write_bytes(data)
    assert read_progress(path) is None
    writer.close()


def test_productive_seconds_are_carried_over_restarts_without_the_lost_steps(tmp_path: Path) -> None:
    path = tmp_path / "r0"
    first = ProgressWriter(path, generation=2, attempt=0)
    first.record_resume(0, tokens=0, samples=0)
    for step in range(1, 6):
        record_step(first, step)
    first.close()
    second = ProgressWriter(path, generation=2, attempt=1)
    second.record_resume(4, tokens=0, samples=0)
    assert second.record.productive_seconds == 8.0
    second.close()
    other = ProgressWriter(path, generation=3)
    other.record_resume(4, tokens=0, samples=0)
    assert other.record.productive_seconds == 0.0
    other.close()


def test_stages_after_the_last_step_are_recorded_and_a_step_ends_them(tmp_path: Path) -> None:
    writer = ProgressWriter(tmp_path / "r0")
    writer.record_resume(10, tokens=0, samples=0)
    writer.publish(total_steps=11)
    record_step(writer, 11)
    writer.enter_stage(RunStage.EXPORT, 0.0)
    stage_start = writer.record.stage_since
    writer.enter_stage(RunStage.EXPORT, 0.25)
    record = read_progress(tmp_path / "r0")
    assert record == writer.record
    assert (record.total_steps, record.stage, record.stage_progress) == (11, RunStage.EXPORT, 0.25)
    assert record.stage_since == stage_start > 0, "the stage has one start"
    for invalid, recorded in ((float("nan"), 0.0), (-1.0, 0.0), (7.0, 1.0)):
        writer.enter_stage(RunStage.EVALUATE, invalid)
        assert writer.record.stage_progress == recorded
    record_step(writer, 13)
    assert (writer.record.stage, writer.record.stage_progress, writer.record.stage_since) == (RunStage.TRAIN, 0.0, 0.0)
    writer.close()


def test_each_report_of_a_stage_is_a_sign_of_life_within_the_limit_of_a_save(tmp_path: Path) -> None:
    writer = ProgressWriter(tmp_path / "r0")
    writer.record_resume(0, tokens=0, samples=0)
    readings = []
    for done in (0.0, 0.0, 0.5):
        writer.enter_stage(RunStage.EXPORT, done)
        readings.append(read_with_pulse(tmp_path / "r0").pulse)
    assert len({reading.beats for reading in readings}) == 3
    assert {(reading.activity, reading.waiting) for reading in readings} == {(Activity.SAVE, Waiting.MAYBE)}
    record_step(writer, 1)
    reading = read_with_pulse(tmp_path / "r0").pulse
    assert (reading.activity, reading.waiting) == (Activity.STEP, Waiting.NO)
    writer.close()


def test_results_survive_a_restart_in_place(tmp_path: Path) -> None:
    path = tmp_path / "r0"
    writer = ProgressWriter(path, generation=2)
    assert read_results(path).artifacts == ()
    adapter = ArtifactReport(kind="Adapter", path="/checkpoints/a", step=10, bytes=5, digest="ab")
    writer.record_artifact(adapter)
    writer.record_artifact(adapter.model_copy(update={"digest": "cd"}))
    writer.close()
    restarted = ProgressWriter(path, generation=2, attempt=1)
    figures = (EvaluationFigure(name="perplexity", before=9.0, after=float("nan")),)
    restarted.record_evaluation(figures)
    results = read_results(path)
    assert [(report.kind, report.digest) for report in results.artifacts] == [("Adapter", "cd")], "kept once"
    assert results.evaluation == (EvaluationFigure(name="perplexity", before=9.0),), "NaN is left out"
    for step in range(20, 20 + MAX_ARTIFACTS):
        restarted.record_artifact(adapter.model_copy(update={"step": step}))
    assert [report.step for report in read_results(path).artifacts] == list(range(20, 20 + MAX_ARTIFACTS))
    restarted.close()
    other = ProgressWriter(path, generation=3)
    other.record_evaluation(figures)
    assert read_results(path).artifacts == (), "results of an earlier generation are not used"
    other.close()


def test_results_that_cannot_be_read_are_none(tmp_path: Path) -> None:
    for text in ("", "{", '{"artifacts": 3}', '{"artifacts": [{"kind": ""}]}'):
        get_results_path(tmp_path / "r0").write_text(text)
        assert read_results(tmp_path / "r0").artifacts == ()


def test_messages_during_a_background_artifact_report_are_in_their_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, written, alerted = tmp_path / "r0", threading.Event(), threading.Event()
    replace = pathlib.Path.replace

    def replace_after_alert(draft: Path, target: Path) -> Path:
        if threading.current_thread() is background:
            written.set()
            alerted.wait(10)
        return replace(draft, target)

    monkeypatch.setattr(pathlib.Path, "replace", replace_after_alert)
    writer = ProgressWriter(path)
    failures: list[OSError] = []

    def report() -> None:
        try:
            writer.record_artifact(ArtifactReport(kind="Adapter", path="/checkpoints/a", step=10, bytes=5, digest="ab"))
        except OSError as error:
            failures.append(error)

    background = threading.Thread(target=report)
    background.start()
    assert written.wait(10)
    writer.write_alert("LossSpike", 7, "the loss rises")
    writer.write_notice("room is short")
    alerted.set()
    background.join()
    writer.close()
    assert failures == []
    assert [report.digest for report in read_results(path).artifacts] == ["ab"]
    assert read_alerts(path) == {"LossSpike": {"step": 7, "message": "the loss rises"}}
    assert read_notice(path) == "room is short"


def test_the_progress_record_is_read_without_torch() -> None:
    script = "import sys, trainium_worker; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def read_steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


@given(count=st.integers(0, 40), step=st.integers(0, 45), torn=st.booleans())
@settings(max_examples=trials(40))
def test_a_resume_keeps_exactly_the_lines_up_to_its_step(
    tmp_path_factory: pytest.TempPathFactory, count: int, step: int, torn: bool
) -> None:
    path = tmp_path_factory.mktemp("lines") / "metrics.jsonl"
    writer = LineWriter(path)
    for number in range(1, count + 1):
        writer.write({"step": number, "loss": number / 7})
    writer.close()
    if torn:
        with path.open("a") as file:
            file.write('{"step": 1')
    truncate_after(path, step)
    assert read_steps(path) == list(range(1, min(count, step) + 1))


def test_a_resume_without_a_metrics_file_creates_none(tmp_path: Path) -> None:
    truncate_after(tmp_path / "none.jsonl", 3)
    assert not (tmp_path / "none.jsonl").exists()


def test_a_metrics_file_that_cannot_be_opened_is_reported_and_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    messages: list[str] = []
    writer = LineWriter(tmp_path / "metrics.jsonl", notify=messages.append)
    writer.write({"step": 1})
    writer.write({"step": 2})
    assert len(messages) == 1
    assert re.search(r"metrics.jsonl: cannot be written \(Is a directory\): .*training continues", messages[0])


def test_tensorboard_reads_the_final_history(tmp_path: Path) -> None:
    first = ScalarWriter(tmp_path, resume_step=0)
    for step in range(1, 6):
        first.write(step, {"train/loss": step / 2, "train/tokens": 100.0 * step})
    first.close()
    second = ScalarWriter(tmp_path, resume_step=3)
    for step in range(4, 8):
        second.write(step, {"train/loss": step * 10.0})
    second.close()
    script = (
        "import sys, warnings\nwarnings.simplefilter('ignore')\n"
        "from tensorboard.backend.event_processing.event_accumulator import EventAccumulator\n"
        "events = EventAccumulator(sys.argv[1]).Reload()\n"
        "print([(event.step, event.value) for event in events.Scalars('train/loss')])\n"
    )
    completed = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], check=True, capture_output=True, text=True
    )
    assert completed.stdout.strip() == str([(1, 0.5), (2, 1.0), (3, 1.5), (4, 40.0), (5, 50.0), (6, 60.0), (7, 70.0)])


def test_throughput_is_that_of_the_newest_steps() -> None:
    throughput = Throughput()
    for _ in range(100):
        throughput.add(10, 1, 10.0)
    for _ in range(20):
        rates = throughput.add(100, 4, 2.0)
    assert rates == (50.0, 2.0)

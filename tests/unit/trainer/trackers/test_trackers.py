"""Send runs to trackers: each step once over restarts, without a stop when a tracker is unavailable.

Tests of a tracker need its package (`make test-trackers`) and are skipped without it.
"""

import importlib.util
import json
import os
import struct
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from tests.testing.suite.loopback_http import LoopbackServer
from tests.testing.suite.timeouts import scaled, until
from tests.testing.trainer.mlflow_server import run_mlflow_server
from trainium_contract.trainer.config import TrainingConfig
from trainium_contract.trainer.monitor import MonitorConfig, Tracker
from trainium_trainer.cli import run as command
from trainium_trainer.configuration.config import read_launch, resolve_settings
from trainium_trainer.trackers import process
from trainium_trainer.trackers.__main__ import Notes, Sender
from trainium_trainer.trackers.process import TrackedRun, record_start
from trainium_trainer.trackers.services import Step

RUN_ID = "0b5ae7a2-5d7f-4d53-9d0c-3f1c0f9f7a11"


CONFIG = {"steps": 20, "batch": {"globalSize": 8}, "lora": {"rankPattern": {"model.layers.1.*": 2, "q?": 3}}}


def needs_package(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is not installed")


def metrics_line(step: int, **changes: Any) -> str:
    return json.dumps({"step": step, "time": 1000.0 + step, "loss": 9.0 / step, "tokens": step * 10} | changes) + "\n"


class SenderProcess:
    """The process of the trackers, started like on rank 0."""

    def __init__(self, root: Path, tracker: Tracker, start: str = "after step 0 on 1 node", **environment: str) -> None:
        run = {
            "trackers": [tracker], "project": "team", "name": "llama", "run_id": RUN_ID, "notice": str(root / "r0"),
            "metrics": str(root / "metrics.jsonl"), "config": CONFIG,
            "facts": {"data": "abc123"}, "start": start,
        }  # fmt: skip
        record_start(root, RUN_ID, start)
        with (root / "log").open("a") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "trainium_trainer.trackers"],
                stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=log, text=True,
                env=os.environ | environment,
            )  # fmt: skip
        self._stdin = self._process.stdin
        self.send({"run": run})

    def send(self, message: dict[str, Any]) -> None:
        self._stdin.write(json.dumps(message) + "\n")
        self._stdin.flush()

    def finish(self) -> None:
        self.send({"finish": True})
        assert self._process.wait(scaled(90)) == 0
        self._stdin.close()

    def kill_rank_0(self) -> None:
        self._stdin.close()
        assert self._process.wait(scaled(30)) == 1


def sent_steps(root: Path, tracker: Tracker) -> int:
    try:
        return int(json.loads((root / "trackers.json").read_text()).get("steps", {}).get(tracker, 0))
    except (OSError, ValueError):
        return 0


def run_with_restart(root: Path, tracker: Tracker, **environment: str) -> None:
    """Send a run that is killed after step 8, resumes after step 5 and ends at step 20."""
    root.mkdir()
    metrics = root / "metrics.jsonl"
    metrics.write_text("".join(metrics_line(step) for step in range(1, 9)))
    first = SenderProcess(root, tracker, **environment)
    until(lambda: sent_steps(root, tracker) == 8, (root / "log").read_text)
    first.kill_rank_0()
    repeated = [metrics_line(step, loss=7.0, **{"resumed": True} if step == 6 else {}) for step in range(6, 21)]
    metrics.write_text("".join([*(metrics_line(step) for step in range(1, 6)), *repeated]))
    second = SenderProcess(root, tracker, "after step 5 on 2 nodes", **environment)
    second.send({"artifact": {"kind": "Model", "step": 20, "path": "/models/llama", "digest": "d1", "bytes": 3}})
    second.finish()


@pytest.fixture
def mlflow_server(tmp_path: Path) -> Iterator[str]:
    with run_mlflow_server(tmp_path) as server:
        yield server.address


@needs_package("mlflow")
def test_mlflow_has_each_step_once_over_a_restart_and_shows_starts_and_artifacts(
    tmp_path: Path, mlflow_server: str
) -> None:
    from mlflow import MlflowClient

    root = tmp_path / "run"
    run_with_restart(root, Tracker.MLFLOW, MLFLOW_TRACKING_URI=mlflow_server)
    client = MlflowClient(mlflow_server)
    experiment = client.get_experiment_by_name("team")
    (run,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(run.info.run_id, "loss")

    assert [metric.step for metric in history] == list(range(1, 21))
    assert [metric.value for metric in history[:8]] == [9.0 / step for step in range(1, 9)], "sent before the restart"
    assert [metric.timestamp for metric in history] == [1000 * (1000 + step) for step in range(1, 21)]
    assert run.info.status == "FINISHED"
    pattern = {"lora.rankPattern": '{"model.layers.1.*": 2, "q?": 3}'}
    assert run.data.params == {"steps": "20", "batch.globalSize": "8", "data": "abc123"} | pattern
    text = run.data.tags["mlflow.note.content"]
    assert "- start 1: after step 0 on 1 node\n- start 2: after step 5 on 2 nodes" in text
    assert "Model of step 20: `/models/llama` (digest `d1`)" in text


@needs_package("mlflow")
def test_a_server_that_was_unavailable_receives_missed_steps(tmp_path: Path, mlflow_server: str) -> None:
    from mlflow import MlflowClient

    proxy = RefusingProxy(mlflow_server)
    root = tmp_path / "run"
    root.mkdir()
    (root / "metrics.jsonl").write_text("".join(metrics_line(step) for step in range(1, 201)))
    sender = SenderProcess(root, Tracker.MLFLOW, MLFLOW_TRACKING_URI=proxy.address)
    until((root / "r0.notice").exists, "the refusal is reported")
    notice = (root / "r0.notice").read_text()
    assert notice.startswith("monitor.trackers: MLflow does not take this run (")
    assert "training continues" in notice
    proxy.is_open = True
    until(lambda: sent_steps(root, Tracker.MLFLOW) == 200, (root / "log").read_text, 90)
    sender.finish()
    proxy.close()
    client = MlflowClient(mlflow_server)
    (run,) = client.search_runs([client.get_experiment_by_name("team").experiment_id])
    assert [metric.step for metric in client.get_metric_history(run.info.run_id, "loss")] == list(range(1, 201))


@needs_package("mlflow")
def test_the_end_of_a_run_waits_for_a_slow_tracker_that_receives_steps(
    tmp_path: Path, mlflow_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    proxy = RefusingProxy(mlflow_server, is_open=True, seconds=3.0)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", proxy.address)
    monkeypatch.setattr(process, "_FINISH_SECONDS", scaled(12))
    (tmp_path / "metrics.jsonl").write_text("".join(metrics_line(step) for step in range(1, 301)))
    monitor = {"trackers": ["MLflow"], "trackerProject": "team"}
    config = TrainingConfig.model_validate({"monitor": monitor, "checkpoint": {"path": str(tmp_path)}})
    settings = resolve_settings(config, read_launch({}), vocabulary=300)
    process.TrackerProcess(settings, tmp_path, {}, step=0).close(finished=True)
    proxy.close()

    client = MlflowClient(mlflow_server)
    (run,) = client.search_runs([client.get_experiment_by_name("team").experiment_id])
    assert len(client.get_metric_history(run.info.run_id, "loss")) == 300
    assert run.info.status == "FINISHED"


class SlowTracker:
    """A tracker that receives the next step while it records a step."""

    def __init__(self, metrics: Path) -> None:
        self._metrics = metrics
        self.steps: list[int] = []
        self.text = ""

    def open(self, run: TrackedRun, run_id: str) -> int:
        return 0

    def send(self, steps: Sequence[Step]) -> None:
        self.steps += [step.number for step in steps]
        with self._metrics.open("a") as file:
            file.write(metrics_line(self.steps[-1] + 1))

    def describe(self, text: str) -> None:
        self.text = text

    def close(self) -> None:
        pass

    leave = close


def test_the_description_is_sent_while_steps_arrive_continuously(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text(metrics_line(1))
    run = TrackedRun(
        trackers=("SlowTracker",), project="team", name="llama", run_id=RUN_ID, metrics=str(metrics), notice="",
        config={}, facts={}, start="after step 0 on 1 node",
    )  # fmt: skip
    tracker, notes = SlowTracker(metrics), Notes(run)
    sender = Sender("SlowTracker", tracker, run, notes)
    sender.start()
    until(
        lambda: "start 1: after step 0 on 1 node" in tracker.text and tracker.steps,
        "the first step and the description are sent",
    )
    notes.add_artifact({"kind": "Model", "step": 20, "path": "/models/llama", "digest": "d1"})
    until(lambda: "/models/llama" in tracker.text, "the artifact is shown")
    sender.finish()
    sender.join(scaled(30))
    assert tracker.steps == list(range(1, tracker.steps[-1] + 1))


class RefusingProxy:
    """A proxy that answers 403 until it is opened, like a server without permission for the key."""

    def __init__(self, server: str, *, is_open: bool = False, seconds: float = 0.0) -> None:
        """`seconds`: the delay of a request that adds to a run."""
        proxy = self
        self.is_open = is_open

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0)) or None
                status, content = 403, b'{"error_code": "PERMISSION_DENIED", "message": "Permission denied"}'
                if self.path.endswith("log-batch"):
                    time.sleep(seconds)
                if proxy.is_open:
                    headers = {"Content-Type": self.headers.get("Content-Type") or "application/json"}
                    request = urllib.request.Request(server + self.path, body, headers, method=self.command)
                    try:
                        with urllib.request.urlopen(request, timeout=30) as answer:
                            status, content = answer.status, answer.read()
                    except urllib.error.HTTPError as error:
                        status, content = error.code, error.read()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.send_header("Content-Type", "application/json")
                self.end_headers()
                self.wfile.write(content)

            do_POST = do_PATCH = do_GET  # noqa: N815 - names of http.server

            def log_message(self, *_: Any) -> None:
                pass

        self._running = LoopbackServer(Handler).running()
        self.address = self._running.__enter__().url

    def close(self) -> None:
        self._running.__exit__(None, None, None)


def wandb_records(data: bytes) -> Iterator[bytes]:
    """Yield the records of an offline run: a header, then blocks of LevelDB's log format."""
    offset, record = 7, b""
    while offset + 7 <= len(data):
        block_rest = 32768 - offset % 32768
        if block_rest < 7:
            offset += block_rest
            continue
        length, kind = struct.unpack_from("<HB", data, offset + 4)
        record += data[offset + 7 : offset + 7 + length]
        offset += 7 + length
        if kind in (1, 4):  # a complete record, or its last part
            yield record
            record = b""


@needs_package("wandb")
def test_wandb_has_each_step_once_over_a_restart(tmp_path: Path) -> None:
    from wandb.proto import wandb_internal_pb2

    root = tmp_path / "run"
    run_with_restart(root, Tracker.WANDB, WANDB_MODE="offline")
    steps = []
    for file in sorted(root.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime):
        assert RUN_ID in file.name
        for data in wandb_records(file.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "history":
                steps.append(record.history.step.num)
    assert steps == list(range(1, 21))


def test_a_start_that_ended_before_its_tracker_process_is_shown(tmp_path: Path) -> None:
    record_start(tmp_path, "another", "of another run")
    record_start(tmp_path, RUN_ID, "because of Hang")
    record_start(tmp_path, RUN_ID, "because of Resize")
    with (tmp_path / "starts.jsonl").open("ab") as file:
        file.write(b'["cut \xff')
    run = TrackedRun(
        trackers=(Tracker.MLFLOW,), project="team", name="llama", run_id=RUN_ID, notice="", config={}, facts={},
        metrics=str(tmp_path / "metrics.jsonl"), start="because of Resize",
    )  # fmt: skip
    assert Notes(run).format_text() == "### Starts\n- start 1: because of Hang\n- start 2: because of Resize"


@pytest.mark.parametrize("tracker", Tracker)
def test_a_tracker_that_is_not_installed_is_refused_before_the_run_starts(
    tmp_path: Path, tracker: Tracker, capsys: pytest.CaptureFixture[str]
) -> None:
    package = {Tracker.MLFLOW: "mlflow", Tracker.WANDB: "wandb"}[tracker]
    if importlib.util.find_spec(package):
        pytest.skip(f"{package} is installed")
    (tmp_path / "text.txt").write_text("a text\n" * 100)
    config = tmp_path / "run.yaml"
    config.write_text(
        f"data: {{source: {tmp_path}/text.txt, sequenceLength: 16}}\nsteps: 2\n"
        f"checkpoint: {{path: {tmp_path}/run}}\nmonitor: {{trackers: [{tracker}]}}\n"
    )
    for verb in ("check", "train"):
        assert command([verb, "--config", str(config)]) == 64
        assert f"pip install 'trainium-trainer[{package}]'" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_tracker_is_named_once() -> None:
    with pytest.raises(ValueError, match="names a tracker twice"):
        MonitorConfig.model_validate({"trackers": ["MLflow", "MLflow"]})
    with pytest.raises(ValueError, match="MLflow"):
        MonitorConfig.model_validate({"trackers": ["TensorBoard"]})

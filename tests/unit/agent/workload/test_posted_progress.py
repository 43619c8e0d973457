"""Progress that transformers posts: by its own callback, and by others."""

import http.client
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.testing.suite.timeouts import until
from tests.unit.agent.pod_environment import environment
from trainium_agent.settings import parse_settings
from trainium_agent.workload.attempt import AttemptLayout, find_progress_file
from trainium_agent.workload.master_port import MasterPort
from trainium_agent.workload.workload import Workload
from trainium_contract.spec.program import ProgramSpec
from trainium_contract.wire.messages import HangDetection


class PostingProgram:
    """A program of one node with two ranks."""

    def __init__(self, folder: Path, container: dict[str, str] | None = None, **progress: str) -> None:
        self.settings = parse_settings(environment(folder))
        self.settings.progress_directory.mkdir(parents=True)
        spec = ProgramSpec.model_validate({"image": "i", "command": ["c"], "progress": progress})
        self.monitor = Workload(replace(self.settings, program=spec), container or {})

    def start(self, attempt: int = 0) -> list[dict[str, str]]:
        """Start an attempt; return the environments of its ranks."""
        layout = AttemptLayout(1, attempt, 0, 1, 2, "127.0.0.1", MasterPort(1))
        for rank in range(2):
            self.monitor.on_output(layout, rank)
        return [dict(self.monitor.request(layout, rank).environment) for rank in range(2)]

    @property
    def record(self) -> Any:
        self.monitor.observe(fresh=True)
        reading = self.monitor.read(find_progress_file(self.settings, 1, 0))
        assert reading is not None
        return reading.record


def post(variables: dict[str, str], body: bytes, token: str | None = None, length: int | None = None) -> int:
    url = urlsplit(variables["KUBEFLOW_TRAINER_SERVER_URL"])
    token = Path(variables["KUBEFLOW_TRAINER_SERVER_TOKEN"]).read_text() if token is None else token
    connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=10)
    headers = {"Authorization": f"Bearer {token}", "Content-Length": str(len(body) if length is None else length)}
    connection.request("POST", url.path, body, headers)
    return connection.getresponse().status


def write_body(**metrics: object) -> bytes:
    values = [{"name": name, "value": str(value)} for name, value in metrics.items()]
    return json.dumps({"trainerStatus": {"lastUpdatedTime": "now", "metrics": values}}).encode()


def test_the_callback_of_transformers_reports_steps_and_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    integrations = pytest.importorskip("transformers.integrations")
    program = PostingProgram(tmp_path)
    first, second = program.start()
    assert not any(name.startswith("KUBEFLOW") for name in second), "only rank 0 posts"
    for name, value in first.items():
        if name.startswith("KUBEFLOW"):
            monkeypatch.setenv(name, value)
    callback = integrations.KubeflowCallback()
    callback._MIN_UPDATE_INTERVAL = 0.0
    state = SimpleNamespace(is_world_process_zero=True, max_steps=40, global_step=0, epoch=0.5)
    callback.on_train_begin(None, state, None)
    callback.on_log(None, state, None, logs={"loss": 2.5, "learning_rate": 0.1, "eval_loss": 3.0})
    for step in (3, 4):
        state.global_step = step
        callback.on_step_end(None, state, None)
    until(lambda: program.record.step == 4, "the step")
    record = program.record
    assert (record.total_steps, record.figures) == (40, {"loss": 2.5, "learning_rate": 0.1})
    assert record.resume_step == 2
    assert program.monitor.hang_detection is HangDetection.STEPS
    callback.on_train_end(None, state, None)
    assert (program.record.step, program.monitor.problem) == (4, "")


def test_requests_of_others_have_no_effect(tmp_path: Path) -> None:
    program = PostingProgram(tmp_path)
    old = program.start()[0]
    new = program.start(attempt=1)[0]
    body = write_body(current_step=7, total_steps=9)
    assert post(old, body) == 404, "a process of the attempt before"
    assert post(new, body, token="another") == 401
    assert post(new, body, length=10**7) == 413
    for malformed in (b"", b"[]", b"\xff", b'{"trainerStatus": {"metrics": [{"name": "loss"}]}}', b"{" * 9000):
        assert post(new, malformed) == 400
    for figures in ({"current_step": "x"}, {"current_step": -1}, {"current_step": 10**30}, {"loss": "x"}):
        assert post(new, write_body(**figures)) == 400
    assert program.record.step == -1
    assert post(new, body) == 200
    assert program.record.step == 7
    token = Path(new["KUBEFLOW_TRAINER_SERVER_TOKEN"])
    assert token.stat().st_mode & 0o077 == 0


def test_a_pattern_of_the_job_takes_precedence(tmp_path: Path) -> None:
    program = PostingProgram(tmp_path, pattern=r"step (?P<step>\d+)")
    assert post(program.start()[0], write_body(current_step=7)) == 200
    assert program.record.step == -1


def test_an_address_in_the_container_is_kept(tmp_path: Path) -> None:
    program = PostingProgram(tmp_path, {"KUBEFLOW_TRAINER_SERVER_URL": "https://own"})
    assert not any(name.startswith("KUBEFLOW") for name in program.start()[0]), "the container's variables apply"

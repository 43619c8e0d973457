"""A job in MLflow through faults, a resize and an outage of MLflow's server: one run, each step once.

Needs the package mlflow and is skipped without: `make test-trackers`.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

import pytest

from tests.testing.cluster.jobs import curves_agree
from tests.testing.suite.timeouts import until
from tests.testing.trainer.mlflow_server import run_mlflow_server

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.testing.cluster.jobs import Job

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("mlflow") is None, reason="mlflow is not installed"),
]
STEPS = 600
CHANGE = f"""
workers: {{replicas: 3, minReplicas: 2, spares: 1}}
trainer:
  data: {{sequenceLength: 128}}
  steps: {STEPS}
  monitor: {{trackers: [MLflow], trackerProject: team}}
  artifacts: {{kinds: [Model]}}
recovery: {{rescaleAfterSeconds: 60}}
"""


def until_recovered_from(job: Job, cause: str) -> None:
    """Wait until training continues after an interruption with this cause."""
    job.wait_until(
        f"the recovery from {cause}",
        lambda status: any(
            entry["cause"] == cause and entry.get("recoveredSeconds") is not None
            for entry in status.get("history") or ()
        ),
        120,
    )


def test_mlflow_has_each_step_once_after_faults_and_an_outage(new_job: Callable[..., Job], tmp_path: Path) -> None:
    from mlflow import MlflowClient

    with run_mlflow_server(tmp_path) as server:
        client = MlflowClient(server.address)

        def runs() -> list[Any]:
            experiment = client.get_experiment_by_name("team")
            return [] if experiment is None else client.search_runs([experiment.experiment_id])

        job = new_job("llama", change=CHANGE, environment={"MLFLOW_TRACKING_URI": server.address})
        job.wait_until("a warm spare", lambda status: status.get("spares") == 1 and job.log.newest >= 20)
        until(runs, "the job opens its run")
        server.stop()
        job.kill_rank(0)
        until_recovered_from(job, "Crash")
        job.wait_for_step(job.log.newest + 20)
        server.start()
        with job.cluster.without_power(job.list_members()[1]["nodeName"]):
            until_recovered_from(job, "NodeLost")
        job.kill_rank(1, "STOP")
        until_recovered_from(job, "Hang")
        job.scale(2)
        until_recovered_from(job, "Resize")
        assert job.log.newest < STEPS, "the resize came before the last step"
        status = job.wait_for_phase("Completed", 180)

        (run,) = runs()
        history = client.get_metric_history(run.info.run_id, "loss")

    assert [entry.step for entry in history] == list(range(1, STEPS + 1))
    assert curves_agree({entry.step: entry.value for entry in history}, job.read_losses(), 1e-5)
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "llama"
    assert run.data.params["steps"] == str(STEPS)
    text = run.data.tags["mlflow.note.content"]
    causes = [line.rpartition("because of ")[2] for line in text.splitlines() if "because of" in line]
    assert {"Crash", "NodeLost", "Hang", "Resize"} <= set(causes)
    assert f"- data: `{run.data.params['data']}`" in text
    (artifact,) = status["artifacts"]
    assert f"Model of step {STEPS}: `{artifact['path']}` (digest `{artifact['digest']}`)" in text

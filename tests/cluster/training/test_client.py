"""`kubectl trn` on a real job: what it shows through a fault, and that acting works."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from tests.testing.suite.patience import until
from trainium_client.commands.main import main

if TYPE_CHECKING:
    from pathlib import Path

    from tests.testing.cluster.jobs import Job
    from tests.testing.cluster.sites import Site

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

LONG = "workers: {replicas: 2, spares: 1}\ntrainer: {steps: 5000}"


Trn = Callable[..., Any]


@pytest.fixture
def trn(operator: Site, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Trn:
    """A command on a job, in this process: its JSON, or what it printed where there is none."""
    for name, value in operator.variables.items():
        monkeypatch.setenv(name, value)

    def run(job: Job, command: str, *arguments: str, as_json: bool = True) -> Any:
        options = ["-n", job.namespace, *(["-o", "json"] if as_json else [])]
        with pytest.raises(SystemExit) as left:
            main([command, job.name, *arguments, *options])
        said = capsys.readouterr()
        assert not left.value.code, said.err
        return json.loads(said.out) if as_json else said.out

    return run


@pytest.mark.long
def test_a_fault_is_seen_by_every_command_and_a_rank_is_followed_into_its_next_pod(
    new_job: Callable[..., Job], trn: Trn, tmp_path: Path
) -> None:
    job = new_job(change=LONG)
    job.until_step(3)
    lost = job.members()[1]["podName"]
    followed = tmp_path / "followed"
    command = [sys.executable, "-m", "trainium_client.commands.main", "logs", job.name, "-n", job.namespace]
    with followed.open("w") as file, subprocess.Popen(
        [*command, "--rank", "1", "--follow"], env={**_environment(job)}, stdout=file, stderr=file
    ) as follower:  # fmt: skip
        try:
            until(lambda: "start-up" in followed.read_text(), followed.read_text)
            job.site.kubectl("delete", "pod", lost, "-n", job.namespace, "--wait=false")
            job.until_recovered()
            new = job.members()[1]["podName"]
            until(lambda: f"rank 1 is now in {new}" in followed.read_text(), followed.read_text)
            until(lambda: followed.read_text().rpartition("is now in")[2].count("start-up"), followed.read_text)
        finally:
            follower.terminate()
    assert new != lost

    status = trn(job, "status")
    assert status["phase"] == "Running"
    assert status["workers"]["members"] == {"Running": 2}
    assert status["last"]["pod"] == lost
    ranks = {row["rank"]: row for row in trn(job, "ranks")}
    assert ranks[1]["pod"] == new
    assert all(row["step"] > 0 for row in ranks.values())
    assert trn(job, "why")["entry"]["rung"] == "Spare"
    assert trn(job, "history")[-1]["cause"] == "Preempted"
    assert trn(job, "goodput")["wallSeconds"] > 0
    stacks = trn(job, "stacks")
    assert {row["rank"] for row in stacks} == {0, 1}
    assert all("trainium_trainer" in row["stack"] for row in stacks)
    job.until("a durable checkpoint", lambda status: status["checkpoint"].get("durableStep", 0) > 0)
    page = tmp_path / "page.html"
    trn(job, "report", "--output", str(page), as_json=False)
    assert "<polyline" in page.read_text()
    stored = trn(job, "checkpoints")["storage"]
    assert "committed" in {row["state"] for row in stored}

    trn(job, "suspend", as_json=False)
    job.until_phase("Suspended")
    trn(job, "resume", as_json=False)
    job.until_phase("Running")


def test_a_failed_job_tells_why_and_runs_again_corrected(new_job: Callable[..., Job], trn: Trn, tmp_path: Path) -> None:
    change = "workers: {replicas: 1}\ntrainer: {steps: 6, data: {source: /nowhere.parquet}}"
    job = new_job("broken", change)
    job.until_phase("Failed")
    uid = job.object()["metadata"]["uid"]

    story = trn(job, "why")
    assert story["entry"]["cause"] == "UserCode"
    assert "/nowhere.parquet" in story["entry"]["message"]
    assert "/nowhere.parquet" in trn(job, "status", as_json=False)

    until(lambda: [pod["status"]["phase"] for pod in job.pods()] == ["Failed"], lambda: str(job.pods()))
    log = job.site.kubectl("logs", job.pods()[0]["metadata"]["name"], "-n", job.namespace)
    assert "/nowhere.parquet: there is no such file or folder" in log, "it is kept"
    assert any("/nowhere.parquet" in line for line in trn(job, "logs", "--rank", "0", as_json=False).splitlines())

    job.change = change.replace("nowhere", "elsewhere")
    file = tmp_path / "fixed.yaml"
    file.write_text(json.dumps(job.manifest))
    trn(job, "retry", "-f", str(file), as_json=False)
    assert job.object()["metadata"]["uid"] != uid
    assert "/elsewhere.parquet" in job.until_phase("Failed")["verdict"]
    assert trn(job, "status")["changes"] == []

    job.change = "workers: {replicas: 1}\ntrainer: {steps: 6}"
    generation = job.apply().object()["metadata"]["generation"]
    job.until("the change is seen", lambda status: status["observedGeneration"] == generation)
    assert job.status()["phase"] == "Failed", "nothing starts before it is asked for"
    said = " ".join(trn(job, "status", as_json=False).split())
    assert 'Changed since it failed: trainer.data.source (was "/elsewhere.parquet", is' in said
    assert trn(job, "why")["entry"]["rank"] == 0
    trn(job, "retry", as_json=False)
    assert job.until_phase("Completed")["progress"]["step"] == 6


def _environment(job: Job) -> dict[str, str]:
    import os

    return {**os.environ, **job.site.variables}

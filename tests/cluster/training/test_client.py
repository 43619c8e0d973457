"""All commands of `kubectl trn` on real jobs: their output through a fault, and their effects."""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
import tarfile
import urllib.request
from collections.abc import Callable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from tests.testing.suite.timeouts import scaled, until
from trainium_client.commands.main import main

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.testing.cluster.jobs import Job
    from tests.testing.cluster.shared_cluster import SharedCluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

LONG = "workers: {replicas: 2, spares: 1}\ntrainer: {steps: 5000}"


Trn = Callable[..., Any]


@pytest.fixture
def trn(operator: SharedCluster, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Trn:
    """Return a function that runs a command, on a job if given, and returns its JSON or its output."""
    for name, value in operator.variables.items():
        monkeypatch.setenv(name, value)

    def run(job: Job | None, command: str, *arguments: str, as_json: bool = True) -> Any:
        about = [job.name, "-n", job.namespace] if job is not None else []
        with pytest.raises(SystemExit) as left:
            main([command, *about, *arguments, *(["-o", "json"] if as_json else [])])
        output = capfd.readouterr()
        assert not left.value.code, output.err
        return json.loads(output.out) if as_json else output.out

    return run


@contextmanager
def in_background(job: Job, command: str, *arguments: str, to: Path) -> Iterator[Callable[[], str]]:
    """Run a command on the job in the background; yield its output until now."""
    words = [sys.executable, "-m", "trainium_client.commands.main", command, job.name, "-n", job.namespace, *arguments]
    with (
        to.open("w") as file,
        subprocess.Popen(words, env={**os.environ, **job.cluster.variables}, stdout=file, stderr=file) as running,
    ):
        try:
            yield to.read_text
        finally:
            running.terminate()


@contextmanager
def node_renamed(cluster: SharedCluster, node: str) -> Iterator[str]:
    """Stop a node and register its machine under another name; yield that name, then restore the node."""
    name = f"{node}-renamed"
    machine = cluster.kubectl("get", "node", node, "-o", "jsonpath={.spec.providerID}")
    new = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}, "spec": {"providerID": machine}}
    with cluster.without_power(node):
        try:
            cluster.kubectl("delete", "node", node)
            cluster.kubectl("create", "-f", "-", stdin=json.dumps(new))
            yield name
        finally:
            cluster.kubectl("delete", "node", name, "--ignore-not-found")


@pytest.mark.long
def test_every_command_shows_a_fault(new_job: Callable[..., Job], trn: Trn, tmp_path: Path) -> None:
    job = new_job(change=LONG)
    job.wait_for_step(3)
    lost = job.list_members()[1]["podName"]
    with (
        in_background(job, "logs", "--rank", "1", "--follow", to=tmp_path / "followed") as followed,
        in_background(job, "watch", to=tmp_path / "watched") as watched,
    ):
        until(lambda: "start-up" in followed() and ", 0 interruptions" in watched(), lambda: followed() + watched())
        job.cluster.kubectl("delete", "pod", lost, "-n", job.namespace, "--wait=false")
        job.wait_for_recovery()
        new = job.list_members()[1]["podName"]
        until(lambda: f"rank 1 is now in {new}" in followed(), followed)
        until(lambda: followed().rpartition("is now in")[2].count("start-up"), followed)
        until(lambda: re.search(r"  Running, step \d+/5000, .* 1 interruption$", watched(), re.MULTILINE), watched)
    assert new != lost

    listed = trn(None, "list", "-n", job.namespace)
    assert [row["phase"] for row in listed if row["name"] == job.name] == ["Running"]
    status = trn(job, "status")
    assert status["phase"] == "Running"
    assert status["workers"]["members"] == {"Running": 2}
    assert status["last"]["pod"] == lost
    ranks = {row["rank"]: row for row in trn(job, "ranks")}
    assert ranks[1]["pod"] == new
    assert all(row["step"] > 0 for row in ranks.values())
    assert trn(job, "why")["entry"]["response"] == "Spare"
    assert trn(job, "history")[-1]["cause"] == "Preempted"
    assert trn(job, "goodput")["wallSeconds"] > 0
    assert [(row["trains"], row["current"]) for row in trn(job, "sizes")] == [(2, True), (1, False)]
    stacks = trn(job, "stacks")
    assert {row["rank"] for row in stacks} == {0, 1}
    assert all("trainium_trainer" in row["stack"] for row in stacks)
    job.wait_until("a durable checkpoint", lambda status: status["checkpoint"].get("durableStep", 0) > 0)
    stored = trn(job, "checkpoints")["storage"]
    assert "committed" in {row["state"] for row in stored}


@pytest.mark.long
def test_a_running_job_is_shown_simulated_and_changed(new_job: Callable[..., Job], trn: Trn, tmp_path: Path) -> None:
    job = new_job(change=LONG)
    job.wait_for_step(3)

    page = tmp_path / "page.html"
    trn(job, "report", "--output", str(page), as_json=False)
    assert "<polyline" in page.read_text()
    archive = tmp_path / "bundle.tar.gz"
    bundle = trn(job, "support-bundle", "-f", str(archive))
    assert bundle["missing"] == []
    with tarfile.open(archive) as files:
        names = {name.partition("/")[2] for name in files.getnames()}
    assert names == set(bundle["files"])
    assert {f"logs/{pod['metadata']['name']}.log" for pod in job.list_pods()} <= names
    assert any(name.startswith("operator/logs/") for name in names)

    with in_background(job, "ui", "--no-browser", "--port", "0", to=tmp_path / "ui") as output:
        until(lambda: "served to this machine" in output(), output)
        with urllib.request.urlopen(output().split()[0], timeout=scaled(60)) as answer:
            assert f"{job.namespace}/{job.name}" in answer.read().decode()

    assert json.loads(trn(job, "simulate", "--days", "1", "--seeds", "1", "--output", "json", as_json=False))

    assert trn(job, "scale", "1")["nodes"] == 1
    job.wait_until("one worker trains", lambda status: status["replicas"] == 1 and status["phase"] == "Running")
    until(lambda: {row["nodes"] for row in trn(job, "scaling")} == {1, 2}, lambda: str(trn(job, "scaling")))
    trn(job, "suspend", as_json=False)
    job.wait_for_phase("Suspended")
    assert trn(job, "resume")["changed"]
    job.wait_for_phase("Running")


@pytest.mark.long
def test_a_quarantined_machine_is_listed_and_released(new_job: Callable[..., Job], trn: Trn) -> None:
    job = new_job(change=LONG)
    if job.cluster.devcluster is None:
        pytest.skip("conditions are set by the development cluster's nodes")
    faults = job.cluster.devcluster.faults
    job.wait_until("a warm spare", lambda status: status.get("spares") == 1 and job.log.newest >= 3)
    node = job.list_members()[0]["nodeName"]

    def find_machines_of_node() -> list[dict[str, Any]]:
        return [machine for machine in trn(None, "nodes") if machine["node"] == node]

    def is_attributed() -> bool:
        strikes = [strike for machine in find_machines_of_node() for strike in machine["strikes"]]
        source = f"{job.namespace}/{job.name}"
        return bool(strikes) and all(source in strike["by"].split("+") for strike in strikes)

    faults.set_condition(node, "NeuronHealth", "True", "NeuronHasError_HBM_UNCORRECTABLE_ERROR")
    try:
        entry = job.wait_for_recovery()
        assert (entry["cause"], entry["response"], entry["node"]) == ("Device", "Spare", node)
        assert entry["stepsLost"] == 0, "the node still answers, so all save before the rank moves"
        assert node not in {member["nodeName"] for member in job.list_members()}
        until(is_attributed, lambda: str(trn(None, "nodes")))
    finally:
        faults.clear_condition(node, "NeuronHealth")
    (found,) = find_machines_of_node()
    assert {strike["cause"] for strike in found["strikes"]} == {"Device"}

    def find_machines(machine: str) -> list[dict[str, Any]]:
        return [item for item in trn(None, "nodes") if item["machine"] == machine]

    with node_renamed(job.cluster, node) as name:
        (renamed,) = find_machines(found["machine"])
        assert name in {renamed["renamed"], renamed["node"]}, "the operator records the new name a moment later"
        assert renamed["present"]
        assert name in trn(None, "nodes", as_json=False)
        assert trn(None, "release", name)["was"]["strikes"] == found["strikes"]
        assert find_machines(found["machine"]) == []


@pytest.mark.long
def test_a_failed_job_is_explained_and_retried(new_job: Callable[..., Job], trn: Trn, tmp_path: Path) -> None:
    change = "workers: {replicas: 1}\ntrainer: {steps: 6, data: {source: /nowhere.parquet}}"
    job = new_job("broken", change)
    job.wait_for_phase("Failed")
    uid = job.read_object()["metadata"]["uid"]

    report = trn(job, "why")
    assert report["entry"]["cause"] == "UserError"
    assert "/nowhere.parquet" in report["entry"]["message"]
    assert "/nowhere.parquet" in trn(job, "status", as_json=False)

    until(lambda: [pod["status"]["phase"] for pod in job.list_pods()] == ["Failed"], lambda: str(job.list_pods()))
    log = job.cluster.kubectl("logs", job.list_pods()[0]["metadata"]["name"], "-n", job.namespace)
    assert "/nowhere.parquet: there is no such file or folder" in log, "it is kept"
    assert any("/nowhere.parquet" in line for line in trn(job, "logs", "--rank", "0", as_json=False).splitlines())

    job.change = change.replace("nowhere", "elsewhere")
    file = tmp_path / "fixed.yaml"
    file.write_text(json.dumps(job.manifest))
    trn(job, "retry", "-f", str(file), as_json=False)
    assert job.read_object()["metadata"]["uid"] != uid
    assert "/elsewhere.parquet" in job.wait_for_phase("Failed")["verdict"]
    assert trn(job, "status")["changes"] == []

    job.change = "workers: {replicas: 1}\ntrainer: {steps: 6}"
    generation = job.apply().read_object()["metadata"]["generation"]
    job.wait_until("the change is seen", lambda status: status["observedGeneration"] == generation)
    assert job.read_status()["phase"] == "Failed", "nothing starts before it is asked for"
    output = " ".join(trn(job, "status", as_json=False).split())
    assert 'Changed since the failure: trainer.data.source (was "/elsewhere.parquet", is' in output
    assert trn(job, "why")["entry"]["rank"] == 0
    trn(job, "retry", as_json=False)
    assert job.wait_for_phase("Completed")["progress"]["step"] == 6


@pytest.mark.long
def test_steps_of_two_ranks_are_profiled_together(new_job: Callable[..., Job], trn: Trn, tmp_path: Path) -> None:
    job = new_job(change="workers: {replicas: 2}\ntrainer: {steps: 100000}")
    job.wait_for_step(3)
    file = tmp_path / "trace.json.gz"
    recorded = trn(job, "profile", "--steps", "2", "--file", str(file))
    assert {row["rank"] for row in recorded} == {0, 1}
    windows = {(row["summary"]["first"], row["summary"]["last"]) for row in recorded}
    assert len(windows) == 1, "both recorded the same steps"
    first, last = windows.pop()
    assert last - first + 1 == 2
    for row in recorded:
        assert {"aten::mm", "gloo:all_reduce"} <= {span["name"] for span in row["summary"]["spans"]}
        assert "forward and backward" in {part["name"] for part in row["summary"]["parts"]}
        name = f"steps-{first}-{last}-rank-{row['rank']}.json.gz"
        assert row["stored"].endswith(f"/profiles/{name}")
        assert (job.folder / "profiles" / name).is_file()
    with gzip.open(file) as stream:
        events = json.load(stream)["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    begins = {event["pid"]: event["ts"] for event in spans if event["name"] == f"step {first}"}
    assert len(begins) == 2, "each rank is a process of the trace"
    assert max(begins.values()) - min(begins.values()) < 10e6, "on one clock"
    text = trn(job, "profile", "--steps", "1", "--ranks", "1", "--file", str(file), as_json=False)
    assert "MILLISECONDS OF A STEP, BY PART" in text
    assert job.read_status()["membership"]["generation"] == 1
    assert not job.read_history(), "nothing was restarted"

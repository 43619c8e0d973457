"""JSON output, closed pipes and narrow terminals of all commands, and `kubectl trn simulate`."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.testing.api.recorded_jobs import JOBS, RecordedApiServer
from tests.unit.client.conftest import QUARANTINE, Command
from trainium_client import pod_exec
from trainium_client.pod_exec import ExecOutput

SHORT_SIMULATION = ("--days", "0.1", "--seeds", "1", "--failures-per-1000-node-days", "4")
EXAMPLE = Path(__file__).parents[3] / "manifests" / "examples" / "laptop.yaml"


def run_as_json(trn: Command, *arguments: str) -> Any:
    code, out, err = trn(*arguments, "-o", "json")
    assert (code, err) == (0, ""), (out, err)
    return json.loads(out)


def test_json_output_reports_what_an_action_changed(trn: Command, server: RecordedApiServer) -> None:
    server.answers[f"{JOBS}/llama/scale"] = {}
    identity = {"name": "llama", "namespace": "team"}

    assert run_as_json(trn, "suspend", "llama") == {
        "message": "llama saves and releases its nodes; to resume it: kubectl trn resume llama", **identity,
        "suspend": True, "changed": True,
    }  # fmt: skip
    assert run_as_json(trn, "resume", "llama")["changed"] is False
    scaled = run_as_json(trn, "scale", "llama", "4")
    assert scaled == {"message": scaled["message"], **identity, "nodes": 4}


def test_json_output_of_release_has_the_strikes_of_the_machine(trn: Command, server: RecordedApiServer) -> None:
    strikes = [{"at": 1.0, "cause": "Device", "job": "team/llama", "evidence": "e"}]
    record = {"node": "node-2", "machine": "i-1", "strikes": strikes, "since": 1.0}
    server.answers[QUARANTINE] = {"data": {"i-1": json.dumps(record)}}

    printed = run_as_json(trn, "release", "node-2")

    assert printed["message"].startswith("node-2 is released")
    assert (printed["machine"], len(printed["was"]["strikes"])) == ("node-2", 1)
    assert server.requests[-1][0] == "PATCH"


def test_json_output_of_logs_has_one_object_per_line(trn: Command) -> None:
    code, out, _ = trn("logs", "llama", "--all", "-o", "json")
    lines = [json.loads(line) for line in out.splitlines()]
    plain = trn("logs", "llama", "--all").out

    assert code == 0
    assert len(lines) == len(plain.splitlines())
    assert {line["pod"] for line in lines} == {"llama-w-0"}
    assert {None, 0} <= {line["rank"] for line in lines}, "lines of the agent have no rank"
    assert not any(line["line"].startswith("[rank ") for line in lines)
    assert all(line["time"].startswith("2026-") for line in lines)


def test_json_output_of_report_has_the_content_of_the_page(
    trn: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    printed = run_as_json(trn, "report", "llama")

    assert printed["view"]["name"] == "llama"
    assert {"entries", "members", "checkpoints", "curve", "notes", "pods"} <= set(printed)
    assert not (tmp_path / "json").exists()


def test_json_output_of_support_bundle_names_the_file_and_what_is_missing(trn: Command, tmp_path: Path) -> None:
    file = tmp_path / "bundle.tar.gz"
    printed = run_as_json(trn, "support-bundle", "llama", "-f", str(file))

    assert (printed["file"], printed["bytes"]) == (str(file), file.stat().st_size)
    assert "job.json" in printed["files"]
    assert any(problem.startswith("nodes:") for problem in printed["missing"])
    assert f"; {len(printed['missing'])} things could not be read (missing.txt)" in printed["message"]


def test_stacks_prints_the_training_thread_before_waiting_threads(trn: Command) -> None:
    waiting = 'Thread 0x1 (most recent call first):\n  File "thread.py", line 81 in _worker'
    training = 'Current thread 0x2 (most recent call first):\n  File "train.py", line 89 in loop'
    output = ExecOutput(json.dumps({"localRank": 0, "stack": f"{waiting}\n\n{training}\n"}).encode(), b"")
    with mock.patch.object(pod_exec, "run_in_pod", return_value=output):
        code, out, _ = trn("stacks", "llama", "--rank", "1")
        shown = json.loads(trn("stacks", "llama", "--rank", "1", "-o", "json").out)

    assert code == 0
    assert out == f"--- rank 1 in llama-w-2 on node-1\n{training}\n\n{waiting}\n"
    assert shown[0]["stack"] == f"{waiting}\n\n{training}\n", "JSON has the order of Python"


@pytest.mark.parametrize("command", ["status llama", "history llama", "logs llama --all", "sizes llama -o json"])
def test_a_closed_pipe_ends_a_command_silently(server: RecordedApiServer, command: str) -> None:
    words = [sys.executable, "-m", "trainium_client.commands.main", *command.split()]
    environment = {**os.environ, "KUBECONFIG": str(server.kubeconfig)}
    reader, writer = os.pipe()
    os.close(reader)
    try:
        ended = subprocess.run(words, env=environment, stdout=writer, stderr=subprocess.PIPE, check=False, timeout=60)
    finally:
        os.close(writer)

    assert (ended.returncode, ended.stderr.decode()) == (1, "")


@pytest.mark.parametrize("columns", ["20", "40", "80", "200"])
@pytest.mark.parametrize(
    "command", ["status", "why", "history", "goodput", "sizes", "scaling", "ranks --no-steps", "checkpoints"]
)
def test_no_line_is_wider_than_the_terminal_and_every_row_is_shown(
    trn: Command, monkeypatch: pytest.MonkeyPatch, command: str, columns: str
) -> None:
    name, *options = command.split()
    monkeypatch.setenv("COLUMNS", columns)
    code, out, _ = trn(name, "llama", *options)

    assert code == 0
    assert out.strip()
    assert max(map(len, out.splitlines())) <= int(columns)
    words = {"status": "Running", "history": "Crash Preempted InPlace Spare" if int(columns) >= 40 else ""}
    assert all(word in out for word in words.get(name, "").split())


def test_a_manifest_is_simulated_by_the_operators_program(trn: Command) -> None:
    code, out, err = trn("simulate", "-f", str(EXAMPLE), *SHORT_SIMULATION, "-o", "json")

    assert (code, err) == (0, "")
    assert json.loads(out)["results"][0]["days"] == 0.1


def test_a_job_of_the_cluster_is_simulated_with_its_spec(trn: Command, server: RecordedApiServer) -> None:
    server.answers[f"{JOBS}/llama"]["spec"] = {
        "workers": {"replicas": 3, "accelerator": {"device": "cpu"}}, "trainer": {"batch": {"globalSize": 24}}
    }  # fmt: skip
    code, out, _ = trn("simulate", "llama", "--learn", *SHORT_SIMULATION, "-o", "json")

    assert code == 0
    assert json.loads(out)["results"][0]["nodes"] == 3


def test_simulate_without_a_job_a_file_or_the_program_is_one_sentence(
    trn: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for words in ([], ["--days", "3", "llama"]):
        code, _, err = trn("simulate", *words)
        assert (code, err) == (1, "error: give the NAME of a job in the cluster first, or a manifest with -f FILE\n")
    code, _, err = trn("simulate", "-f", str(tmp_path / "none.yaml"))
    assert (code, err.count("\n")) == (1, 1)

    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    code, _, err = trn("simulate", "llama")
    assert (code, err.count("\n")) == (1, 1)
    assert "trainium-operator is not installed here" in err

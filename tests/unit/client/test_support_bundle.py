"""Content of a support bundle, which must have no secret."""

import json
import tarfile
from pathlib import Path

from tests.testing.api.recorded_jobs import CORE, RecordedApiServer, recorded_object
from tests.unit.client.conftest import Command
from trainium_client.commands.bundle import redact

SECRET = "hunter2hunter2"


def build_pod(name: str) -> dict[str, object]:
    env = [
        {"name": "MY_SETTING", "value": SECRET},
        {"name": "WANDB", "valueFrom": {"secretKeyRef": {"name": "wandb", "key": "key"}}},
        {"name": "TRAINIUM_JOB", "value": "llama"},
    ]
    applied = {"kubectl.kubernetes.io/last-applied-configuration": SECRET, "api-key": SECRET}
    return {
        "metadata": {"name": name, "annotations": applied},
        "spec": {"nodeName": "node-2", "containers": [{"name": "worker", "env": env}]},
        "status": {"phase": "Running"},
    }


def test_a_support_bundle_has_every_part_and_no_secret(trn: Command, server: RecordedApiServer, tmp_path: Path) -> None:
    answers = server.answers
    answers[f"{CORE}/pods"] = {"items": [build_pod("llama-w-0"), build_pod("llama-w-2")]}
    answers[f"{CORE}/pods/llama-w-0/log"] = f"2026-11-23T02:00:00Z password={SECRET}\n2026-11-23T02:00:01Z step 1\n"
    answers["/api/v1/nodes"] = {"items": [{"metadata": {"name": "node-2"}, "status": {"images": [1]}}]}
    path = tmp_path / "bundle.tar.gz"
    assert trn("support-bundle", "llama", "--file", str(path)).code == 0
    assert path.stat().st_mode & 0o077 == 0
    with tarfile.open(path) as archive:
        parts = {
            member.name.partition("/")[2]: archive.extractfile(member).read().decode()  # type: ignore[union-attr]
            for member in archive
        }
    assert {"job.json", "membership.json", "events.json", "pods.json", "nodes.json", "logs/llama-w-0.log"} <= set(parts)
    assert not any(SECRET in text for text in parts.values())
    assert "step 1" in parts["logs/llama-w-0.log"]
    assert json.loads(parts["job.json"])["status"]["progress"]["tokensPerSecond"]
    variables = json.loads(parts["pods.json"])["items"][0]["spec"]["containers"][0]["env"]
    assert variables[1:] == build_pod("x")["spec"]["containers"][0]["env"][1:]  # type: ignore[index]
    assert "log of llama-w-2" in parts["missing.txt"]
    assert "operator" in parts["missing.txt"]


def test_an_unknown_job_leaves_no_archive(trn: Command, tmp_path: Path) -> None:
    path = tmp_path / "bundle.tar.gz"
    assert trn("support-bundle", "none", "--file", str(path)).code == 1
    assert not path.exists()


def test_the_job_itself_is_not_changed_by_redaction() -> None:
    job = recorded_object("job")

    redacted = redact(job)

    assert redacted["status"] == job["status"]
    assert "managedFields" not in redacted["metadata"]
    assert "managedFields" in job["metadata"]

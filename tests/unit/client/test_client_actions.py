"""Commands that change a job or release a machine: their requests, what they refuse, and what they print."""

import json
from pathlib import Path
from typing import Any

import yaml

from tests.testing.api.recorded_jobs import (
    JOBS,
    RecordedApiServer,
    recorded_object,
)
from tests.unit.client.conftest import QUARANTINE, Command


def test_suspend_and_scale_patch_only_their_field(trn: Command, server: RecordedApiServer) -> None:
    server.answers[f"{JOBS}/llama/scale"] = {}

    assert trn("suspend", "llama").code == 0
    assert trn("scale", "llama", "4").code == 0
    changes = [(method, path.partition("?")[0], body) for method, path, body in server.requests if method != "GET"]
    assert changes == [
        ("PATCH", f"{JOBS}/llama", {"spec": {"suspend": True}}),
        ("PATCH", f"{JOBS}/llama/scale", {"spec": {"replicas": 4}}),
    ]
    assert "is not suspended already" in trn("resume", "llama").err


def test_scale_of_a_role_patches_its_replicas_only(trn: Command, server: RecordedApiServer) -> None:
    job = server.answers[f"{JOBS}/llama"]
    assert (
        "llama has no role rollout; it has no roles (spec.roles)" in trn("scale", "llama", "--role", "rollout", "6").err
    )
    job["spec"]["roles"] = [{"name": "judge", "port": 80}, {"name": "rollout", "port": 8000}]
    code, _, err = trn("scale", "llama", "--role", "rollout", "6")
    assert (code, err) == (0, "role rollout of llama is asked to have 6 pods; see: kubectl trn status llama\n")
    (patch,) = [body for method, _, body in server.requests if method == "PATCH"]
    assert patch == [
        {"op": "test", "path": "/spec/roles/1/name", "value": "rollout"},
        {"op": "add", "path": "/spec/roles/1/replicas", "value": 6},
    ]
    assert (
        "llama has no role rollouts; its roles are judge, rollout"
        in trn("scale", "llama", "--role", "rollouts", "6").err
    )


def test_scale_to_zero_is_refused_and_suggests_suspend(trn: Command, server: RecordedApiServer) -> None:
    code, _, err = trn("scale", "llama", "0")
    assert (code, err.count("\n")) == (1, 1)
    assert "llama cannot train on 0 nodes; to release all of its nodes, suspend it: kubectl trn suspend llama" in err
    assert "cannot train on -2 nodes" in trn("scale", "llama", "--", "-2").err
    assert all(method == "GET" for method, _, _ in server.requests)


def test_an_ended_job_is_not_changed_and_only_a_failed_one_is_retried(trn: Command, server: RecordedApiServer) -> None:
    for words in (("suspend", "broken"), ("scale", "broken", "2"), ("retry", "llama")):
        assert trn(*words).code == 1
    assert all(method == "GET" for method, _, _ in server.requests)


def test_actions_print_the_next_command_and_where_a_retry_resumes(trn: Command, server: RecordedApiServer) -> None:
    job = recorded_object("job")
    server.answers[f"{JOBS}/llama"] = job
    job["spec"]["suspend"] = True
    assert (
        trn("resume", "llama").err
        == "llama resumes, from its newest checkpoint if it has one; see: kubectl trn watch llama\n"
    )
    job["spec"]["suspend"] = False
    assert trn("suspend", "llama").err.endswith("to resume it: kubectl trn resume llama\n")

    failed = server.answers[f"{JOBS}/broken"]
    _allow_recreation(server, "broken")
    assert "runs again; from the beginning, no checkpoint of it is known; see: " in trn("retry", "broken").err
    server.requests.clear()
    failed["status"]["checkpoint"]["durableStep"] = 7
    assert "runs again; it resumes from its newest checkpoint; see: " in trn("retry", "broken").err


def test_a_job_that_cannot_be_recreated_is_not_deleted(trn: Command, server: RecordedApiServer) -> None:
    server.answers[f"POST {JOBS}"] = 422

    code, _, err = trn("retry", "broken")

    assert code == 1
    assert "create trainingjobs" in err
    assert not any(method == "DELETE" for method, _, _ in server.requests)


def _allow_recreation(server: RecordedApiServer, name: str) -> None:
    """Serve the job until its deletion is requested, and accept its creation."""
    path, job = f"{JOBS}/{name}", server.answers[f"{JOBS}/{name}"]
    requests = server.requests

    class Answers(dict[str, Any]):
        def get(self, key: str, default: Any = None) -> Any:
            if key == path:
                return 404 if any(method == "DELETE" for method, _, _ in requests) else job
            return {} if key in (f"POST {JOBS}", f"DELETE {path}") else super().get(key, default)

    server.answers = Answers(server.answers)


def _created_jobs(server: RecordedApiServer) -> list[tuple[bool, Any]]:
    return [("dryRun=All" in path, body) for method, path, body in server.requests if method == "POST"]


def test_a_failed_job_is_recreated_as_the_corrected_file_specifies(
    trn: Command, server: RecordedApiServer, tmp_path: Path
) -> None:
    _allow_recreation(server, "broken")
    owner = [{"apiVersion": "v1", "kind": "ConfigMap", "name": "flow", "uid": "u"}]
    server.answers[f"{JOBS}/broken"]["metadata"]["ownerReferences"] = owner
    file = tmp_path / "fixed.yaml"
    job = {
        "kind": "TrainingJob",
        "metadata": {"name": "broken", "labels": {"a": "b"}},
        "spec": {"trainer": {"seed": 7}},
    }
    file.write_text(yaml.safe_dump_all([{"kind": "ConfigMap", "metadata": {"name": "broken"}}, job]))

    code, _, err = trn("retry", "broken", "-f", str(file))

    assert (code, "broken runs again" in err) == (0, True)
    probe, recreated = _created_jobs(server)
    assert (probe[0], probe[1]["metadata"]["name"]) == (True, "broken-probe")
    assert recreated[0] is False
    assert recreated[1] == {
        "apiVersion": "trainium.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": "broken", "namespace": "team", "labels": {"a": "b"}, "ownerReferences": owner},
        "spec": {"trainer": {"seed": 7}},
    }
    order = [method for method, _, _ in server.requests if method in ("POST", "DELETE")]
    assert order == ["POST", "DELETE", "POST"]


def test_retry_keeps_the_last_applied_configuration_for_kubectl_apply(
    trn: Command, server: RecordedApiServer, tmp_path: Path
) -> None:
    last = "kubectl.kubernetes.io/last-applied-configuration"
    server.answers[f"{JOBS}/broken"]["metadata"]["annotations"] = {last: "what was applied", "mine": "yes"}
    _allow_recreation(server, "broken")
    file = tmp_path / "fixed.yaml"
    file.write_text("{kind: TrainingJob, metadata: {name: broken, annotations: {mine: 'no'}}, spec: {suspend: false}}")

    assert trn("retry", "broken").code == 0
    assert _created_jobs(server)[-1][1]["metadata"]["annotations"] == {last: "what was applied", "mine": "yes"}
    server.requests.clear()
    assert trn("retry", "broken", "-f", str(file)).code == 0
    recreated = _created_jobs(server)[-1][1]
    applied = json.loads(recreated["metadata"]["annotations"].pop(last))
    assert applied == recreated


def test_retry_refuses_a_file_of_another_job(trn: Command, server: RecordedApiServer, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    for text, output in (
        ("kind: Pod", "has no TrainingJob with a name"),
        ("{kind: TrainingJob, metadata: {name: llama}}", "has no TrainingJob 'broken'; there are llama"),
        ("{kind: TrainingJob, metadata: {name: broken, namespace: other}}", "is of namespace other"),
        ("kind: [", "cannot be read"),
    ):
        file.write_text(text)
        code, _, err = trn("retry", "broken", "-f", str(file))
        assert (code, err.count("\n"), output in err) == (1, 1, True), err
    assert all(method == "GET" for method, _, _ in server.requests)


def test_release_removes_the_entry_of_a_machine(trn: Command, server: RecordedApiServer) -> None:
    entry = "machine: aws:///a/i-0\nnode: node-3\nstate: Permanent\n"
    server.answers[QUARANTINE] = {"data": {"about": "", "aws.a.i-0": entry}}

    assert "node-3" in trn("nodes").out
    code, _, err = trn("release", "node-3")
    assert (code, "node-3 is released" in err) == (0, True)
    assert server.requests[-1][2] == [{"op": "remove", "path": "/data/aws.a.i-0"}]
    assert "no fault was attributed to node-4; recorded machines: node-3" in trn("release", "node-4").err


def test_a_machine_whose_node_was_renamed_is_shown_and_released_by_the_new_name(
    trn: Command, server: RecordedApiServer
) -> None:
    entry = "machine: aws:///a/i-0\nnode: node-3\nstate: Permanent\n"
    server.answers[QUARANTINE] = {"data": {"aws.a.i-0": entry}}

    def set_nodes(**nodes: str) -> None:
        items = [{"metadata": {"name": name}, "spec": {"providerID": machine}} for name, machine in nodes.items()]
        server.answers["/api/v1/nodes"] = {"items": items}

    set_nodes(other="aws:///a/i-1")
    assert "node-3 (deleted)" in trn("nodes").out
    set_nodes(**{"node-3": "aws:///a/i-1"})
    assert "node-3 (deleted)" in trn("nodes").out, "another machine has its name"
    set_nodes(**{"node-9": "aws:///a/i-0", "node-3": "aws:///a/i-1"})
    assert "node-9 (was node-3)" in trn("nodes").out
    code, _, err = trn("release", "node-9")
    assert (code, "node-9 is released" in err) == (0, True)
    assert server.requests[-1][2] == [{"op": "remove", "path": "/data/aws.a.i-0"}]

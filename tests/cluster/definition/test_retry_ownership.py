"""Field ownership of a job after `kubectl trn retry`, with server-side apply of a real API server."""

import json
import os
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest

from tests.cluster.definition.conftest import Api
from trainium_client.api import Api as Client
from trainium_client.commands.options import open_api
from trainium_client.retry import correct_manifest, retry_job
from trainium_contract.api_server.errors import ClientError

pytestmark = pytest.mark.cluster

NAME = "again"
SPEC: dict[str, Any] = {
    "workers": {"replicas": 4, "maxReplicas": 8, "accelerator": {"device": "cpu"}},
    "trainer": {"batch": {"globalSize": 24}, "data": {"source": "/nowhere.txt"}, "steps": 100},
}


def written(**trainer: Any) -> dict[str, Any]:
    spec = {**SPEC, "trainer": {**SPEC["trainer"], **trainer}}
    return {"apiVersion": "trainium.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": NAME}, "spec": spec}


@pytest.fixture
def client(defined: Api) -> Iterator[Client]:
    with patch.dict(os.environ, defined.variables):
        yield open_api(defined.namespace, None, None)
    defined.run("kubectl", "-n", defined.namespace, "delete", "trn", NAME, "--wait=false", "--ignore-not-found")


def applied(api: Api, document: dict[str, Any], *options: str) -> str:
    """Return the refusal of server-side apply; empty when it is accepted."""
    return api.refusal(document, "--server-side", *options)


def failed(api: Api, client: Client) -> dict[str, Any]:
    status = json.dumps({"status": {"phase": "Failed"}})
    api.kubectl("patch", "trn", NAME, "--subresource=status", "--type=merge", "-p", status)
    return client.job(NAME)


def trainer(client: Client) -> dict[str, Any]:
    return dict(client.job(NAME)["spec"]["trainer"])


@pytest.mark.parametrize("tool", [(), ("--field-manager=argocd-controller",)])
def test_server_side_apply_after_a_retry_has_no_conflict(defined: Api, client: Client, tool: tuple[str, ...]) -> None:
    assert applied(defined, written(seed=7), *tool) == ""
    recreated = retry_job(client, failed(defined, client))
    owners = [(entry["manager"], entry["operation"]) for entry in recreated["metadata"]["managedFields"]]
    assert owners == [(tool[0].partition("=")[2] if tool else "kubectl", "Apply")]

    failed(defined, client)
    assert applied(defined, written(steps=50), *tool) == ""
    assert trainer(client)["steps"] == 50
    assert trainer(client).get("seed", 0) != 7, "the file no longer sets it"


def test_server_side_apply_after_a_corrected_retry_owns_its_fields(defined: Api, client: Client) -> None:
    assert applied(defined, written(seed=7)) == ""
    job = failed(defined, client)
    right = written(data={"source": "/there.txt"})
    recreated = retry_job(client, job, correct_manifest(job, right, "the file"))
    assert recreated["spec"]["trainer"]["data"]["source"] == "/there.txt"

    assert applied(defined, right) == "", "the same again"
    assert trainer(client)["data"]["source"] == "/there.txt"
    failed(defined, client)
    assert applied(defined, written(data={"source": "/other.txt"}, steps=90)) == ""
    assert (trainer(client)["data"]["source"], trainer(client)["steps"]) == ("/other.txt", 90)


def test_a_scaled_field_conflicts_after_a_retry(defined: Api, client: Client) -> None:
    assert applied(defined, written()) == ""
    client.scale_job(NAME, 6)
    recreated = retry_job(client, failed(defined, client))
    assert recreated["spec"]["workers"]["replicas"] == 6
    assert "conflict" in applied(defined, written()), "as it would have been without the retry"


def test_a_client_side_applied_job_can_be_applied_server_side_after_a_retry(defined: Api, client: Client) -> None:
    assert defined.refusal(written(seed=7)) == ""
    retry_job(client, failed(defined, client))
    failed(defined, client)
    assert applied(defined, written(steps=50)) == ""
    assert (trainer(client)["steps"], trainer(client).get("seed", 0)) == (50, 0)

    job = failed(defined, client)
    retry_job(client, job, correct_manifest(job, written(steps=60, seed=8), "the file"))
    failed(defined, client)
    assert applied(defined, written(steps=70)) == ""
    assert (trainer(client)["steps"], trainer(client).get("seed", 0)) == (70, 0)


def test_a_job_recreated_by_another_tool_is_kept(defined: Api, client: Client) -> None:
    assert applied(defined, written(), "--field-manager=argocd-controller") == ""
    deleted = client.delete_job

    def and_recreated(name: str, uid: str, *, foreground: bool) -> None:
        deleted(name, uid, foreground=foreground)
        assert applied(defined, written(), "--field-manager=argocd-controller") == ""

    with patch.object(client, "delete_job", and_recreated):
        job = failed(defined, client)
        assert retry_job(client, job)["metadata"]["uid"] == client.job(NAME)["metadata"]["uid"]
        job = failed(defined, client)
        with pytest.raises(ClientError, match="recreated by argocd-controller"):
            retry_job(client, job, correct_manifest(job, written(steps=50), "the file"))
        job = failed(defined, client)
        retry_job(client, job, correct_manifest(job, written(), "the file"))
    assert trainer(client)["steps"] == 100

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


def build_manifest(**trainer: Any) -> dict[str, Any]:
    spec = {**SPEC, "trainer": {**SPEC["trainer"], **trainer}}
    return {"apiVersion": "trainium.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": NAME}, "spec": spec}


@pytest.fixture
def client(crd_api: Api) -> Iterator[Client]:
    with patch.dict(os.environ, crd_api.variables):
        yield open_api(crd_api.namespace, None, None)
    crd_api.run("kubectl", "-n", crd_api.namespace, "delete", "trn", NAME, "--wait=false", "--ignore-not-found")


def apply_server_side(api: Api, document: dict[str, Any], *options: str) -> str:
    """Return the refusal of server-side apply; empty when it is accepted."""
    return api.refusal(document, "--server-side", *options)


def mark_failed(api: Api, client: Client) -> dict[str, Any]:
    status = json.dumps({"status": {"phase": "Failed"}})
    api.kubectl("patch", "trn", NAME, "--subresource=status", "--type=merge", "-p", status)
    return client.read_job(NAME)


def get_trainer_spec(client: Client) -> dict[str, Any]:
    return dict(client.read_job(NAME)["spec"]["trainer"])


@pytest.mark.parametrize("tool", [(), ("--field-manager=argocd-controller",)])
def test_server_side_apply_after_a_retry_has_no_conflict(crd_api: Api, client: Client, tool: tuple[str, ...]) -> None:
    assert apply_server_side(crd_api, build_manifest(seed=7), *tool) == ""
    recreated = retry_job(client, mark_failed(crd_api, client))
    owners = [(entry["manager"], entry["operation"]) for entry in recreated["metadata"]["managedFields"]]
    assert owners == [(tool[0].partition("=")[2] if tool else "kubectl", "Apply")]

    mark_failed(crd_api, client)
    assert apply_server_side(crd_api, build_manifest(steps=50), *tool) == ""
    assert get_trainer_spec(client)["steps"] == 50
    assert get_trainer_spec(client).get("seed", 0) != 7, "the manifest no longer sets it"


def test_server_side_apply_after_a_corrected_retry_owns_its_fields(crd_api: Api, client: Client) -> None:
    assert apply_server_side(crd_api, build_manifest(seed=7)) == ""
    job = mark_failed(crd_api, client)
    corrected = build_manifest(data={"source": "/there.txt"})
    recreated = retry_job(client, job, correct_manifest(job, corrected, "the file"))
    assert recreated["spec"]["trainer"]["data"]["source"] == "/there.txt"

    assert apply_server_side(crd_api, corrected) == "", "an unchanged manifest"
    assert get_trainer_spec(client)["data"]["source"] == "/there.txt"
    mark_failed(crd_api, client)
    assert apply_server_side(crd_api, build_manifest(data={"source": "/other.txt"}, steps=90)) == ""
    assert (get_trainer_spec(client)["data"]["source"], get_trainer_spec(client)["steps"]) == ("/other.txt", 90)


def test_a_scaled_field_conflicts_after_a_retry(crd_api: Api, client: Client) -> None:
    assert apply_server_side(crd_api, build_manifest()) == ""
    client.scale_job(NAME, 6)
    recreated = retry_job(client, mark_failed(crd_api, client))
    assert recreated["spec"]["workers"]["replicas"] == 6
    assert "conflict" in apply_server_side(crd_api, build_manifest()), "as without the retry"


def test_a_client_side_applied_job_can_be_applied_server_side_after_a_retry(crd_api: Api, client: Client) -> None:
    assert crd_api.refusal(build_manifest(seed=7)) == ""
    retry_job(client, mark_failed(crd_api, client))
    mark_failed(crd_api, client)
    assert apply_server_side(crd_api, build_manifest(steps=50)) == ""
    assert (get_trainer_spec(client)["steps"], get_trainer_spec(client).get("seed", 0)) == (50, 0)

    job = mark_failed(crd_api, client)
    retry_job(client, job, correct_manifest(job, build_manifest(steps=60, seed=8), "the file"))
    mark_failed(crd_api, client)
    assert apply_server_side(crd_api, build_manifest(steps=70)) == ""
    assert (get_trainer_spec(client)["steps"], get_trainer_spec(client).get("seed", 0)) == (70, 0)


def test_a_job_recreated_by_another_tool_is_kept(crd_api: Api, client: Client) -> None:
    assert apply_server_side(crd_api, build_manifest(), "--field-manager=argocd-controller") == ""
    original_delete = client.delete_job

    def delete_and_recreate(name: str, uid: str, *, foreground: bool) -> None:
        original_delete(name, uid, foreground=foreground)
        assert apply_server_side(crd_api, build_manifest(), "--field-manager=argocd-controller") == ""

    with patch.object(client, "delete_job", delete_and_recreate):
        job = mark_failed(crd_api, client)
        assert retry_job(client, job)["metadata"]["uid"] == client.read_job(NAME)["metadata"]["uid"]
        job = mark_failed(crd_api, client)
        with pytest.raises(ClientError, match="recreated by argocd-controller"):
            retry_job(client, job, correct_manifest(job, build_manifest(steps=50), "the file"))
        job = mark_failed(crd_api, client)
        retry_job(client, job, correct_manifest(job, build_manifest(), "the file"))
    assert get_trainer_spec(client)["steps"] == 100

"""Cluster and user of kubeconfig files, read as kubectl does."""

import base64
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.testing.api.recorded_jobs import kubeconfig
from trainium_contract.api_server.errors import NoClusterError
from trainium_contract.api_server.kubeconfig import find_access


def write_yaml(path: Path, document: dict[str, Any]) -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_text(yaml.safe_dump(document))
    return str(path)


def test_the_first_kubeconfig_that_defines_a_name_wins(tmp_path: Path) -> None:
    first = write_yaml(
        tmp_path / "a", {"contexts": kubeconfig("")["contexts"], "users": kubeconfig("", token="t1")["users"]}
    )
    second = write_yaml(tmp_path / "b", kubeconfig("https://example.test", token="t2"))

    access = find_access(None, None, {"KUBECONFIG": f"{first}:{second}:{tmp_path / 'none'}"})

    assert (access.server, access.namespace) == ("https://example.test", "team")
    assert access.headers == (("Authorization", "Bearer t1"),)


def test_paths_are_relative_to_their_file_and_inline_data_wins(tmp_path: Path) -> None:
    folder = tmp_path / "deep"
    document = kubeconfig("https://example.test", **{"client-certificate": "me.crt", "client-key": "me.key"})
    document["clusters"][0]["cluster"] |= {
        "certificate-authority": "nowhere.crt",
        "certificate-authority-data": base64.b64encode(b"CA").decode(),
    }
    path = write_yaml(folder / "config", document)
    (folder / "me.crt").write_bytes(b"CERT")
    (folder / "me.key").write_bytes(b"KEY")

    access = find_access(path, None, {})

    assert (access.authority, access.certificate, access.key) == (b"CA", b"CERT", b"KEY")


def test_impersonation_sets_its_headers(tmp_path: Path) -> None:
    user = {"token": "t", "as": "viewer", "as-groups": ["readers"]}
    path = write_yaml(tmp_path / "config", kubeconfig("https://example.test", **user))

    headers = find_access(path, None, {}).headers

    assert headers[1:] == (("Impersonate-User", "viewer"), ("Impersonate-Group", "readers"))


@pytest.mark.parametrize(
    ("change", "output"),
    [
        ({"current-context": ""}, "no current-context"),
        ({"clusters": []}, "no cluster named 'here'"),
        ({"users": []}, "no user named 'me'"),
        ({"users": [{"name": "me", "user": {"auth-provider": {"name": "gcp"}}}]}, "exec plugin"),
        ({"users": [{"name": "me", "user": {"client-certificate": "gone.crt"}}]}, "client-certificate"),
        ({"clusters": [{"name": "here", "cluster": {}}]}, "names no server"),
    ],
)
def test_a_kubeconfig_that_cannot_be_used_is_one_sentence(tmp_path: Path, change: dict[str, Any], output: str) -> None:
    path = write_yaml(tmp_path / "config", {**kubeconfig("https://example.test"), **change})

    with pytest.raises(NoClusterError, match=output) as error:
        find_access(path, None, {})
    assert "\n" not in str(error.value)


def test_a_token_is_never_in_an_error_message(tmp_path: Path) -> None:
    path = tmp_path / "config"
    path.write_text("users: [{name: me, user: {token: s3cret}\n")

    with pytest.raises(NoClusterError) as error:
        find_access(str(path), None, {})
    assert "s3cret" not in str(error.value)

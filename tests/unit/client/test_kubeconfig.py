"""Cluster and user of kubeconfig files: errors, and what the Kubernetes library would read otherwise than kubectl.

`tests/wire/cluster/test_like_kubectl.py` compares requests with kubectl's.
"""

import base64
import os
import stat
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


def test_paths_are_relative_to_their_file_and_inline_data_wins(tmp_path: Path) -> None:
    document = kubeconfig("https://example.test")
    document["clusters"][0]["cluster"] |= {
        "certificate-authority": "nowhere.crt",
        "certificate-authority-data": base64.b64encode(b"CA").decode(),
    }
    user = {"users": kubeconfig("", **{"client-certificate": "me.crt", "client-key": "me.key"})["users"]}
    clusters = write_yaml(tmp_path / "clusters/config", {**document, "users": None})
    users = write_yaml(tmp_path / "users/config", user)
    for name in ("me.crt", "me.key"):
        (tmp_path / "users" / name).touch()

    found = find_access(f"{clusters}{os.pathsep}{users}", None, {}).configuration

    assert (found.cert_file, found.key_file) == (str(tmp_path / "users/me.crt"), str(tmp_path / "users/me.key"))
    assert Path(found.ssl_ca_cert).read_bytes() == b"CA"
    assert stat.S_IMODE(Path(found.ssl_ca_cert).stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("change", "output"),
    [
        ({"current-context": ""}, "no current-context"),
        ({"clusters": []}, "no cluster named 'here'"),
        ({"users": []}, "no user named 'me'"),
        ({"users": [{"name": "me", "user": {"auth-provider": {"name": "gcp"}}}]}, "exec plugin"),
        ({"users": [{"name": "me", "user": {"client-certificate": "gone.crt"}}]}, "gone.crt"),
        ({"users": [{"name": "me", "user": {"tokenFile": "gone"}}]}, "gone"),
        ({"users": [{"name": "me", "user": {"exec": {}}}]}, "key command"),
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

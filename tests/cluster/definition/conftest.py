"""A real API server for the definition and the chart; these tests need no node.

`--cluster=existing` uses the cluster of KUBECONFIG, with the kubectl and helm on PATH; any other choice starts a
control plane of the development cluster without nodes, for this folder alone.
"""

from __future__ import annotations

import http.client
import json
import os
import secrets
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

from tests.testing.suite.patience import patient, until
from trainium_contract.definition.crd import custom_resource_definition

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[3]
NAMESPACE = f"definition-tests-{secrets.token_hex(3)}"


@dataclass(frozen=True, slots=True)
class Api:
    """kubectl and helm against one API server."""

    variables: dict[str, str]
    existing: bool
    root: Path = ROOT
    chart: str = str(ROOT / "helm/trainium-operator")
    namespace: str = NAMESPACE

    def run(self, *command: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            input=stdin,
            env=os.environ | self.variables,
            text=True,
            capture_output=True,
            check=False,
            timeout=patient(50),
        )

    def kubectl(self, *arguments: str, stdin: str = "") -> str:
        """Standard output of a kubectl that must succeed."""
        done = self.run("kubectl", "--namespace", self.namespace, *arguments, stdin=stdin)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def established(self, definition: str) -> None:
        """Wait until jobs can be written; kubectl's own wait fails while a new definition has no condition at all."""
        condition = 'jsonpath={.status.conditions[?(@.type=="Established")].status}'
        command = ("kubectl", "get", "crd", definition, "-o", condition)
        until(lambda: self.run(*command).stdout == "True", f"{definition} is established", 20)

    def helm(self, *arguments: str) -> str:
        """Standard output of a helm that must succeed."""
        done = self.run("helm", *arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def refusal(self, document: dict[str, Any], *arguments: str) -> str:
        """What `kubectl apply` says against the object; empty when it takes it."""
        done = self.run(
            "kubectl", "--namespace", self.namespace, "apply", *arguments, "-f", "-", stdin=json.dumps(document)
        )
        return done.stderr if done.returncode else ""

    def refusal_of_new(self, document: dict[str, Any]) -> str:
        """What the API server says against a new job, which is not kept; `kubectl apply` shows these words."""
        if self.existing:
            return self.refusal(document, "--dry-run=server")
        return self._request("POST", "?dryRun=All&fieldValidation=Strict", document)

    def report_status(self, name: str, status: dict[str, Any]) -> None:
        """What an operator would write."""
        if self.existing:
            patch = json.dumps({"status": status})
            self.kubectl("patch", "trn", name, "--subresource=status", "--type=merge", "--patch", patch)
        else:
            assert self._request("PATCH", f"/{name}/status", {"status": status}) == ""

    def delete_job(self, name: str) -> None:
        """Delete a job that is there."""
        if self.existing:
            self.kubectl("delete", "trn", name, "--wait=false")
        else:
            assert self._request("DELETE", f"/{name}", {"propagationPolicy": "Background"}) == ""

    def _request(self, method: str, path: str, body: dict[str, Any]) -> str:
        """Why a request about jobs was refused, "" when it was not. A kubectl would cost 0.15 processor seconds."""
        from trainium_devcluster.node.api.client import load_kubeconfig

        credentials = load_kubeconfig(Path(self.variables["KUBECONFIG"]))
        connection = http.client.HTTPSConnection(
            urlsplit(credentials.server).netloc, context=credentials.tls, timeout=patient(60)
        )
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        try:
            path = f"/apis/trainium.dev/v1alpha1/namespaces/{self.namespace}/trainingjobs{path}"
            connection.request(method, path, json.dumps(body), {"Content-Type": kind})
            answer = connection.getresponse()
            said = json.load(answer)
        finally:
            connection.close()
        return "" if answer.status < 300 else str(said["message"])


@pytest.fixture(scope="session")
def api(request: pytest.FixtureRequest) -> Iterator[Api]:
    if request.config.getoption("--cluster", default="local") == "existing":
        yield Api(variables={}, existing=True)
        return
    from trainium_devcluster.cluster import Cluster

    with Cluster.start(nodes=()) as cluster:
        yield Api(variables=cluster.variables(), existing=False)


@pytest.fixture(scope="session")
def defined(api: Api) -> Iterator[Api]:
    """The API server with the definition and a namespace to write in."""
    api.kubectl(
        "apply", "--server-side", "--force-conflicts", "-f", "-", stdin=json.dumps(custom_resource_definition())
    )
    api.established("trainingjobs.trainium.dev")
    api.run("kubectl", "create", "namespace", NAMESPACE)
    yield api
    api.run("kubectl", "delete", "namespace", NAMESPACE, "--wait=false")

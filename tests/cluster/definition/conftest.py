"""A real API server for the definition and the chart; these tests need no node.

`--cluster=existing` uses the cluster of KUBECONFIG, with the kubectl and helm on PATH; any other choice starts a
control plane of the development cluster without nodes, for this folder alone.
"""

import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.testing.cluster.access import ROOT, Access
from tests.testing.cluster.installed import apply_definition, make_namespace
from tests.testing.suite.lanes import DEFINITION
from tests.testing.suite.last_tests import exit_stack_of_group
from tests.testing.suite.timeouts import scaled
from trainium_contract.api_server.connection import Connection
from trainium_contract.api_server.kubeconfig import find_access

NAMESPACE = "definition-tests"


@dataclass(frozen=True, slots=True)
class Api:
    """kubectl and helm against one API server."""

    access: Access
    connection: Connection | None = None
    """Requests of ours, kept open; None where only the kubectl on PATH knows the credentials."""
    root: Path = ROOT
    chart: str = str(ROOT / "helm/trainium-operator")
    namespace: str = NAMESPACE

    @property
    def variables(self) -> dict[str, str]:
        return self.access.variables

    @property
    def is_existing(self) -> bool:
        return self.access.is_existing

    def run(self, *command: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        return self.access.run(*command, stdin=stdin)

    def kubectl(self, *arguments: str, stdin: str = "") -> str:
        """Run kubectl, which must succeed, and return its standard output."""
        return self.access.kubectl("--namespace", self.namespace, *arguments, stdin=stdin)

    def helm(self, *arguments: str) -> str:
        """Run helm, which must succeed, and return its standard output."""
        return self.access.helm(*arguments)

    def make_namespaces(self, *names: str) -> None:
        """Create namespaces with the mark by which the leftovers of an interrupted session are removed."""
        for name in names:
            make_namespace(self.access, name)

    def delete_namespaces(self, *names: str) -> None:
        """Start the deletion of namespaces."""
        self.run("kubectl", "delete", "namespace", *names, "--wait=false", "--ignore-not-found")

    def refusal(self, document: dict[str, Any], *arguments: str) -> str:
        """Return the refusal of `kubectl apply`; empty when it accepts the object."""
        done = self.run(
            "kubectl", "--namespace", self.namespace, "apply", *arguments, "-f", "-", stdin=json.dumps(document)
        )
        return done.stderr if done.returncode else ""

    def refusal_of_change(self, document: dict[str, Any], *, dry_run: bool = False) -> str:
        """Return the API server's refusal of a job that is to be so, whether it is there or not; empty: it is taken."""
        if self.is_existing:
            return self.refusal(document, *["--dry-run=server"][:dry_run])
        options = f"fieldManager=tests&force=true&fieldValidation=Strict{'&dryRun=All' * dry_run}"
        kind = "application/apply-patch+yaml"
        return self._request("PATCH", f"/{document['metadata']['name']}?{options}", document, kind)

    def refusal_of_new(self, document: dict[str, Any]) -> str:
        """Return the API server's refusal of a new job, which is not kept; `kubectl apply` shows this text."""
        if self.is_existing:
            return self.refusal(document, "--dry-run=server")
        return self._request("POST", "?dryRun=All&fieldValidation=Strict", document)

    def report_status(self, name: str, status: dict[str, Any]) -> None:
        """Write a status as an operator does."""
        if self.is_existing:
            patch = json.dumps({"status": status})
            self.kubectl("patch", "trn", name, "--subresource=status", "--type=merge", "--patch", patch)
        else:
            kind = "application/merge-patch+json"
            assert self._request("PATCH", f"/{name}/status", {"status": status}, kind) == ""

    def delete_job(self, name: str) -> None:
        """Delete an existing job."""
        if self.is_existing:
            self.kubectl("delete", "trn", name, "--wait=false")
        else:
            assert self._request("DELETE", f"/{name}", {"propagationPolicy": "Background"}) == ""

    def _request(self, method: str, path: str, body: dict[str, Any], kind: str = "application/json") -> str:
        """Send a request about jobs; return why it was refused, or "". (kubectl would cost 0.15 processor seconds.)"""
        assert self.connection is not None
        path = f"/apis/trainium.dev/v1alpha1/namespaces/{self.namespace}/trainingjobs{path}"
        answer = self.connection.request(method, path, body=body, content_type=kind)
        return "" if answer.status < 300 else str(json.loads(answer.body)["message"])


@pytest.fixture(scope="session")
def api(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Api:
    if request.config.getoption("--cluster") == "existing":
        return Api(request.getfixturevalue("shared_cluster"))
    from trainium_devcluster.cluster import Cluster

    group = exit_stack_of_group(request.config, DEFINITION)
    cluster = group.enter_context(Cluster.start(nodes=()))
    connection = Connection(find_access(cluster.list_variables()["KUBECONFIG"], None, {}), timeout=scaled(60))
    group.callback(connection.close)
    return Api(Access("local", cluster.list_variables(), tmp_path_factory.mktemp("shared")), connection)


@pytest.fixture(scope="session")
def crd_api(api: Api) -> Iterator[Api]:
    """Return the API server with the definition, without an operator, and a namespace to write in."""
    if not api.is_existing:  # there it is so whenever a test here begins
        apply_definition(api.access)
    api.make_namespaces(NAMESPACE)
    yield api
    if api.is_existing:  # any other has gone with the last test
        api.delete_namespaces(NAMESPACE)

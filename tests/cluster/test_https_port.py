"""The chart with metrics over HTTPS and a provided certificate, on nodes: probes, mounts, both replicas."""

import base64
import http.client
import json
import socket
import ssl
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.testing.cluster.installed import install_operator
from tests.testing.cluster.shared_cluster import SharedCluster
from tests.testing.suite.timeouts import scaled, until
from trainium_devcluster.cluster import Cluster, create_system_node, create_system_values
from trainium_operator.coordinator.certificates import renew_material

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

SYSTEM = "trainium-system"
SERVICE = f"trainium-operator-metrics.{SYSTEM}.svc"
READER = {"kind": "ServiceAccount", "name": "prometheus", "namespace": "default"}


@pytest.fixture(scope="module")
def https_cluster(request: pytest.FixtureRequest) -> Iterator[SharedCluster]:
    if request.config.getoption("--cluster") != "local":
        pytest.skip("the addresses of pods are reached on the development cluster only")
    with (
        tempfile.TemporaryDirectory(prefix="trainium-https-") as folder,
        Cluster.start(nodes=[create_system_node()]) as devcluster,
    ):
        cluster = SharedCluster("local", devcluster.list_variables(), Path(folder), {}, devcluster)
        cluster.kubectl("create", "serviceaccount", "prometheus")
        ours = {"metrics": {"secure": True, "readers": [READER]}, "https": {"certificateSecret": "issued"}}
        install_operator(cluster, ours | create_system_values())
        yield cluster


def issue_certificate(cluster: SharedCluster) -> ssl.SSLContext:
    """Write a new authority and certificate into the Secret; return a context that trusts it."""
    material = renew_material(None, (SERVICE,), time.time())
    data = {"tls.crt": material.server_cert, "tls.key": material.server_key, "ca.crt": material.ca_bundle}
    secret: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "kubernetes.io/tls",
        "metadata": {"name": "issued", "namespace": SYSTEM},
        "data": {key: base64.b64encode(value).decode() for key, value in data.items()},
    }
    cluster.kubectl("apply", "-f", "-", stdin=json.dumps(secret))
    return ssl.create_default_context(cadata=material.ca_bundle.decode())


def addresses(cluster: SharedCluster) -> list[str]:
    pods = cluster.get("pods", "-n", SYSTEM, "-l", "app.kubernetes.io/component=operator")["items"]
    return [pod["status"]["podIP"] for pod in pods]


def get(address: str, trust: ssl.SSLContext, token: str) -> int:
    """Return the status of /metrics at the HTTPS port of this pod, whose certificate has the name of the Service."""
    connection = http.client.HTTPSConnection(address, 8444, timeout=scaled(10), context=trust)
    connection.sock = trust.wrap_socket(socket.create_connection((address, 8444), scaled(10)), server_hostname=SERVICE)
    try:
        connection.request("GET", "/metrics", headers={"Authorization": f"Bearer {token}"} if token else {})
        return connection.getresponse().status
    finally:
        connection.close()


@pytest.mark.long
def test_a_late_and_changed_certificate_is_served_by_every_replica(https_cluster: SharedCluster) -> None:
    """The operator runs without it: agents do not wait for the issuer of readers' certificates."""
    log = lambda: https_cluster.kubectl("logs", "-n", SYSTEM, "deployment/trainium-operator", "--tail=20")  # noqa: E731
    token = https_cluster.kubectl("create", "token", "prometheus").strip()
    pods = addresses(https_cluster)
    assert len(pods) == 2

    def all_pods_respond(trust: ssl.SSLContext) -> bool:
        try:
            return {get(pod, trust, token) for pod in pods} == {200}
        except OSError:  # not listening yet, or with another certificate
            return False

    first = issue_certificate(https_cluster)
    until(lambda: all_pods_respond(first), log)
    assert {get(pod, first, "") for pod in pods} == {401}
    second = issue_certificate(https_cluster)
    until(lambda: all_pods_respond(second), log)
    with pytest.raises(ssl.SSLCertVerificationError):
        get(pods[0], first, token)
    assert addresses(https_cluster) == pods
    restarts = https_cluster.get("pods", "-n", SYSTEM, "-l", "app.kubernetes.io/component=operator")["items"]
    assert [pod["status"]["containerStatuses"][0]["restartCount"] for pod in restarts] == [0, 0]
    for address in pods:
        plain = http.client.HTTPConnection(address, 8080, timeout=scaled(10))
        plain.request("GET", "/metrics")
        assert plain.getresponse().status == 404
        plain.close()


@pytest.mark.long
def test_helm_test_reports_that_the_installed_operator_works(https_cluster: SharedCluster) -> None:
    output = https_cluster.helm("test", "trainium-operator", "-n", SYSTEM, "--timeout", "120s", "--logs")
    assert "the operator works: 2 of 2 replicas ready, " in output
    assert "leads, certificates are its own" in output

"""A namespace for the tests of plain pods, and the tests' image."""

import time
from collections.abc import Iterator

import pytest

from tests.testing.cluster.installed import make_namespace
from tests.testing.cluster.pod_client import PodClient
from tests.testing.cluster.shared_cluster import SharedCluster
from tests.testing.suite.timeouts import until


@pytest.fixture(scope="session")
def client(shared_cluster: SharedCluster) -> Iterator[PodClient]:
    """Return a client of a namespace for plain pods, which is deleted at the end."""
    namespace = f"plain-{int(time.time())}"
    make_namespace(shared_cluster, namespace)
    # Pods are refused until their namespace has its service account.
    until(
        lambda: shared_cluster.kubectl("-n", namespace, "get", "serviceaccount", "default", "--ignore-not-found"),
        "the controller manager makes the default service account",
    )
    yield PodClient(shared_cluster, namespace, shared_cluster.settings.get("plainImage", "python:3.11-slim"))
    if shared_cluster.is_existing:  # any other has gone with the last test
        shared_cluster.kubectl("delete", "namespace", namespace, "--wait=false")

"""A namespace for the tests of plain pods, and the tests' image."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from tests.testing.cluster.installed import make_namespace
from tests.testing.cluster.lab import Lab
from tests.testing.suite.timeouts import until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.testing.cluster.sites import Site


@pytest.fixture(scope="session")
def lab(site: Site) -> Iterator[Lab]:
    """Plain pods run here; all of it is removed at the end."""
    namespace = f"plain-{int(time.time())}"
    make_namespace(site, namespace)
    # Pods are refused until their namespace has its service account.
    until(
        lambda: site.kubectl("-n", namespace, "get", "serviceaccount", "default", "--ignore-not-found"),
        "the controller manager makes the default service account",
    )
    yield Lab(site, namespace, site.settings.get("plainImage", "python:3.11-slim"))
    if site.is_lent:  # any other has gone with the last test
        site.kubectl("delete", "namespace", namespace, "--wait=false")

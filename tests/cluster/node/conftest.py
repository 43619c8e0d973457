"""A namespace for the tests of plain pods, and the tests' image."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from tests.testing.cluster.lab import Lab

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.testing.cluster.sites import Site


@pytest.fixture(scope="session")
def lab(site: Site) -> Iterator[Lab]:
    """Plain pods run here; all of it is removed at the end."""
    namespace = f"plain-{int(time.time())}"
    site.kubectl("create", "namespace", namespace)
    # Pods are refused until their namespace has its service account.
    end = time.monotonic() + 30
    while not site.kubectl("-n", namespace, "get", "serviceaccount", "default", "--ignore-not-found"):
        assert time.monotonic() < end, "the controller manager made no default service account"
        time.sleep(0.1)
    yield Lab(site, namespace, site.settings.get("plainImage", "python:3.11-slim"))
    site.kubectl("delete", "namespace", namespace, "--wait=false")

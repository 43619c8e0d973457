"""The operator installed by helm, a namespace for each test, and an undisturbed run to compare with."""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from tests.testing.cluster.installed import InstalledParts, make_namespace
from tests.testing.cluster.jobs import Job
from tests.testing.suite.timeouts import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.testing.cluster.shared_cluster import SharedCluster


@pytest.fixture(scope="session")
def operator(shared_cluster: SharedCluster) -> SharedCluster:
    """Return the shared cluster with the chart, installed by the real helm."""
    shared_cluster.installed.ensure(InstalledParts.OPERATOR)
    return shared_cluster


@pytest.fixture
def namespace(operator: SharedCluster, request: pytest.FixtureRequest) -> Iterator[str]:
    """Yield a namespace of this test, and delete it afterwards."""
    words = re.sub(r"[^a-z0-9]+", "-", request.node.name.removeprefix("test_"))[:32].strip("-")
    name = f"t-{words}-{zlib.crc32(request.node.nodeid.encode()):08x}"
    make_namespace(operator, name)
    yield name
    operator.kubectl("delete", "trainingjobs", "--all", "-n", name, "--wait=false")
    operator.kubectl("delete", "namespace", name, "--wait=false")
    until(
        lambda: not operator.get("pods", "-n", name)["items"],
        lambda: f"pods go: {operator.kubectl('get', 'pods', '-n', name)}",
        pause=0.2,
    )


@pytest.fixture
def new_job(operator: SharedCluster, namespace: str) -> Callable[..., Job]:
    """Return a function that applies a job of a name and a YAML fragment of its spec."""

    def apply(name: str = "job", change: str = "", **more: Any) -> Job:
        return Job(operator, namespace, name, change, **more).apply()

    return apply


@dataclass(frozen=True)
class UninterruptedRun:
    """The results of the base job on two nodes without faults; the job itself is deleted."""

    status: dict[str, Any]
    losses: dict[int, float]
    folder: Path
    policies: list[dict[str, Any]]
    """NetworkPolicies of the namespace."""


@pytest.fixture(scope="session")
def uninterrupted_run(operator: SharedCluster) -> UninterruptedRun:
    name = "reference"
    make_namespace(operator, name)
    job = Job(operator, name, name).apply()
    status = job.wait_for_phase("Completed")
    results = UninterruptedRun(
        status, job.read_losses(), job.folder, operator.get("networkpolicies", "-n", name)["items"]
    )
    job.delete()
    operator.kubectl("delete", "namespace", name, "--wait=false")
    return results


@pytest.fixture(scope="session")
def reference(uninterrupted_run: UninterruptedRun) -> dict[int, float]:
    """Return the loss by step of the undisturbed base job on two nodes."""
    return uninterrupted_run.losses

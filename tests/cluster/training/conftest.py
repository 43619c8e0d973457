"""The operator installed by helm, a namespace for each test, and an undisturbed run to compare with."""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from tests.testing.cluster.installed import RingNeed, make_namespace
from tests.testing.cluster.jobs import Job
from tests.testing.suite.timeouts import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.testing.cluster.sites import Site


@pytest.fixture(scope="session")
def operator(site: Site) -> Site:
    """The chart, installed with the real helm; a cluster that rings share has it whenever a test here begins."""
    site.installed.ensure(RingNeed.OPERATOR)
    return site


@pytest.fixture
def namespace(operator: Site, request: pytest.FixtureRequest) -> Iterator[str]:
    """A namespace of the test's own; nothing of it is left running."""
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
def new_job(operator: Site, namespace: str) -> Callable[..., Job]:
    """Apply a job: name, then a YAML fragment of its spec."""

    def apply(name: str = "job", change: str = "", **more: Any) -> Job:
        return Job(operator, namespace, name, change, **more).apply()

    return apply


@dataclass(frozen=True)
class Undisturbed:
    """Return what the base job on two nodes leaves when nothing happens to it; the job itself is deleted."""

    status: dict[str, Any]
    losses: dict[int, float]
    folder: Path
    policies: list[dict[str, Any]]
    """NetworkPolicies beside it."""


@pytest.fixture(scope="session")
def undisturbed(operator: Site) -> Undisturbed:
    name = "reference"
    make_namespace(operator, name)
    job = Job(operator, name, name).apply()
    status = job.until_phase("Completed")
    left = Undisturbed(status, job.losses(), job.folder, operator.get("networkpolicies", "-n", name)["items"])
    job.delete()
    operator.kubectl("delete", "namespace", name, "--wait=false")
    return left


@pytest.fixture(scope="session")
def reference(undisturbed: Undisturbed) -> dict[int, float]:
    """Step -> loss of the base job on two nodes, undisturbed."""
    return undisturbed.losses

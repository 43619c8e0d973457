"""Options and fixtures of all tests: which cluster the cluster tests use."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from sites import Site, open_site
from trials import TRIALS, trials

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

# A busy machine is no finding, and what lands is not held up by a new example: `make test-long` looks for those.
settings.register_profile("trainium", deadline=None, derandomize=not TRIALS, max_examples=trials(100))
settings.load_profile("trainium")


def _guard_exit() -> None:
    """`os._exit(0)` of code under test would end the session early, as if all had passed; forked children may."""
    leave, session = os._exit, os.getpid()

    def guarded(code: int) -> None:
        assert os.getpid() != session, f"os._exit({code}) in the process of the tests: call what comes before it"
        leave(code)

    os._exit = guarded  # type: ignore[assignment]


_guard_exit()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cluster",
        choices=("local", "kind", "existing"),
        default="local",
        help="local: the development cluster; kind: a kind cluster; existing: that of KUBECONFIG (docs/testing.md)",
    )


_LONG_SECONDS = 3600
"""Of a property test with many times as many examples."""


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in this hook too
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep what shares a cluster, or a file's fixtures, in one lane."""
    for item in items:
        shares_cluster = "site" in getattr(item, "fixturenames", ())
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group("cluster" if shares_cluster else item.nodeid.partition("::")[0]))
        if TRIALS:
            item.add_marker(pytest.mark.timeout(_LONG_SECONDS), append=False)


_OPENED = pytest.StashKey[Site]()


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop(session: pytest.Session) -> Generator[None, object, object]:
    """Make a kind cluster and its images before the first test: their minutes are not that test's."""
    config = session.config
    needed = any("site" in getattr(item, "fixturenames", ()) for item in session.items)
    if config.getoption("--cluster") != "kind" or not needed or config.option.collectonly:
        return (yield)
    with open_site("kind") as opened:
        config.stash[_OPENED] = opened
        return (yield)


@pytest.fixture(scope="session")
def site(request: pytest.FixtureRequest) -> Iterator[Site]:
    """The cluster with nodes that all tests of this session share."""
    opened = request.config.stash.get(_OPENED, None)
    if opened is not None:
        yield opened
        return
    with open_site(request.config.getoption("--cluster")) as opened:
        yield opened

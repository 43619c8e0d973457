"""Options and fixtures of all tests: which cluster the cluster tests use."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import pytest_timeout
from hypothesis import settings

from tests.testing.cluster.sites import Site, open_site
from tests.testing.suite.patience import patient
from tests.testing.suite.times_record import TimesRecord
from tests.testing.suite.trials import TRIALS, trials

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
    parser.addoption(
        "--ring",
        choices=("each", "night", "all"),
        default="each",
        help="each: the tests of each change; night: those marked `long`, which `make test-long` runs; all: both",
    )
    parser.addoption("--times", metavar="FILE", help="write what each test cost, as JSON (docs/testing.md)")


def pytest_configure(config: pytest.Config) -> None:
    if path := config.getoption("--times"):
        in_lane = hasattr(config, "workerinput")
        config.pluginmanager.register(TimesRecord(None if in_lane else Path(path).absolute()))


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: pytest_timeout.Settings) -> object:
    """A test that hangs ends later on a slow machine, where those that do not take longer too."""
    slow = settings._replace(timeout=patient(settings.timeout))
    return pytest_timeout.pytest_timeout_set_timer(item, slow)


_FIRST = ("tests/cluster/", "tests/fleet/", "tests/wire/", "tests/unit/trainer/")
"""Files that take longest, so that lanes end together with small ones."""
_LONG_SECONDS = 3600
"""Of a property test with many times as many examples."""


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in this hook too
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave what another ring runs; what shares a cluster, or a file's fixtures, is one lane's; the longest first."""
    _choose_ring(config, items)
    items.sort(key=lambda item: next((at for at, part in enumerate(_FIRST) if part in item.nodeid), len(_FIRST)))
    for item in items:
        shares_cluster = "site" in getattr(item, "fixturenames", ())
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group("cluster" if shares_cluster else item.nodeid.partition("::")[0]))
        if TRIALS:
            item.add_marker(pytest.mark.timeout(_LONG_SECONDS), append=False)


def _choose_ring(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A test that is named by its own id runs in any ring."""
    ring = config.getoption("--ring")
    if ring == "all" or any("::" in argument for argument in config.args):
        return
    others = [item for item in items if (item.get_closest_marker("long") is not None) != (ring == "night")]
    if others:
        left = set(others)
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in left]


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

"""Options and fixtures of all tests: which cluster the cluster tests use."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import pytest_timeout
from hypothesis import settings

from tests.testing.cluster.installed import RingNeed
from tests.testing.cluster.sites import Site, open_site
from tests.testing.suite.lanes import CLUSTER, DEFINITION, LaneScheduling, group_of
from tests.testing.suite.last_tests import close_after_last, find_last_tests, for_group
from tests.testing.suite.timeouts import scaled
from tests.testing.suite.times_record import TimesRecord
from tests.testing.suite.trials import TRIALS, trials

if TYPE_CHECKING:
    from collections.abc import Generator

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
    slow = settings._replace(timeout=scaled(settings.timeout))
    return pytest_timeout.pytest_timeout_set_timer(item, slow)


_FIRST = ("tests/cluster/", "tests/fleet/", "tests/wire/", "tests/unit/trainer/")
"""Files that take longest, so that lanes end together with small ones."""
_LONG_SECONDS = 3600
"""Of a property test with many times as many examples."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LaneScheduling | None:
    """Lanes of `--dist loadgroup` are ours: each takes whole groups."""
    return LaneScheduling(config, log) if config.getoption("dist") == "loadgroup" else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave what another ring runs; what shares a cluster, or a file's fixtures, is one lane's; the longest first."""
    _choose_ring(config, items)
    items.sort(key=lambda item: next((at for at, part in enumerate(_FIRST) if part in item.nodeid), len(_FIRST)))
    lent = {"site", "api", *_NEEDS} if config.getoption("--cluster") == "existing" else set()
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            shares = lent & set(getattr(item, "fixturenames", ()))
            item.add_marker(pytest.mark.xdist_group(CLUSTER if shares else group_of(item.nodeid)))
        if TRIALS:
            item.add_marker(pytest.mark.timeout(_LONG_SECONDS), append=False)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Freeze collected items: they live to the end, so the garbage collector can skip them."""
    gc.disable()
    try:
        done = yield
        find_last_tests(session.config, session.items)
        return done
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, None, None]:
    """A cluster ends with the last test that needs it: an idle one takes a twentieth of a processor to the end."""
    yield
    close_after_last(item)


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
_NEEDS = {"defined": RingNeed.DEFINITION, "operator": RingNeed.OPERATOR}
"""The state in which a fixture finds a shared cluster."""


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop(session: pytest.Session) -> Generator[None, object, object]:
    """Open a cluster that is not the development cluster before the first test: its minutes are not that test's."""
    config = session.config
    needed = any({"site", *_NEEDS} & set(getattr(item, "fixturenames", ())) for item in session.items)
    with for_group(config, CLUSTER), for_group(config, DEFINITION):
        in_lane = hasattr(config, "workerinput")  # one of several, of which one at most needs it
        if needed and not in_lane and not config.option.collectonly and config.getoption("--cluster") != "local":
            _opened(config)
        return (yield)


def _opened(config: pytest.Config) -> Site:
    if _OPENED not in config.stash:
        site = open_site(config.getoption("--cluster"))
        config.stash[_OPENED] = for_group(config, CLUSTER).enter_context(site)
    return config.stash[_OPENED]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """On a cluster that is lent, each ring finds the definition and the operator as it needs them."""
    needs = [need for name, need in _NEEDS.items() if name in getattr(item, "fixturenames", ())]
    if needs and item.config.getoption("--cluster") == "existing":
        _opened(item.config).installed.ensure(needs[0])


@pytest.fixture(scope="session")
def site(request: pytest.FixtureRequest) -> Site:
    """The cluster with nodes that all tests of this session share."""
    return _opened(request.config)

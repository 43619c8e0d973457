"""Options and fixtures of all tests: which cluster the cluster tests use."""

import gc
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import pytest_timeout
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants

from tests.testing.cluster.installed import InstalledParts
from tests.testing.cluster.shared_cluster import SharedCluster, open_cluster
from tests.testing.suite.lanes import CLUSTER, DEFINITION, LaneScheduling, group_of
from tests.testing.suite.last_tests import close_after_last, exit_stack_of_group, find_last_tests
from tests.testing.suite.timeouts import scaled
from tests.testing.suite.times_record import TimesRecord
from tests.testing.suite.trials import TRIALS, trials

# Slow examples are no failures, and examples are fixed for each change: `make test-long` searches new ones.
settings.register_profile(
    "trainium",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=not TRIALS,
    max_examples=trials(50),
)
settings.load_profile("trainium")
if not TRIALS:
    # Hypothesis also draws constants of loaded modules, so that each lane would have other examples.
    providers._get_local_constants = Constants


def _guard_exit() -> None:
    """Fail a call of `os._exit` in the session, which would end it early as if all tests had passed."""
    exit_process, session = os._exit, os.getpid()

    def exit_forked_process(code: int) -> None:
        assert os.getpid() != session, f"os._exit({code}) in the process of the tests: test the code before it"
        exit_process(code)

    os._exit = exit_forked_process  # type: ignore[assignment]


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
    """Scale pytest's timeout by the slowness of the machine."""
    slow = settings._replace(timeout=scaled(settings.timeout))
    return pytest_timeout.pytest_timeout_set_timer(item, slow)


_LONGEST_GROUPS = ("tests/cluster/", "tests/fleet/", "tests/unit/trainer/", "tests/unit/data/", "tests/wire/")
"""Groups that run first because they take longest, so that lanes end together."""
_LONG_SECONDS = 3600
"""Timeout of a property test with many times as many examples."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LaneScheduling | None:
    """Assign whole groups to lanes with `--dist loadgroup`."""
    return LaneScheduling(config, log) if config.getoption("dist") == "loadgroup" else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Select the tests of the ring, start with the longest groups, and mark the group of each test."""
    _choose_ring(config, items)
    items.sort(key=_order)
    shared = {"shared_cluster", "api", *_NEEDS} if config.getoption("--cluster") == "existing" else set()
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            shares = shared & set(getattr(item, "fixturenames", ()))
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
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, None, None]:
    """Stop a cluster after the last test that needs it; an idle one uses 5% of a processor."""
    yield
    close_after_last(item)


def _order(item: pytest.Item) -> int:
    return next((number for number, part in enumerate(_LONGEST_GROUPS) if part in item.nodeid), len(_LONGEST_GROUPS))


def _choose_ring(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests of the other ring, unless a test is named by its id."""
    ring = config.getoption("--ring")
    if ring == "all" or any("::" in argument for argument in config.args):
        return
    others = [item for item in items if (item.get_closest_marker("long") is not None) != (ring == "night")]
    if others:
        deselected = set(others)
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in deselected]


_OPENED = pytest.StashKey[SharedCluster]()
_NEEDS = {"defined": InstalledParts.DEFINITION, "operator": InstalledParts.OPERATOR}
"""The parts that a fixture needs on a shared cluster."""


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop(session: pytest.Session) -> Generator[None, object, object]:
    """Open a kind or existing cluster before the first test, whose timeout must not include its minutes."""
    config = session.config
    needed = any({"shared_cluster", *_NEEDS} & set(getattr(item, "fixturenames", ())) for item in session.items)
    with exit_stack_of_group(config, CLUSTER), exit_stack_of_group(config, DEFINITION):
        in_lane = hasattr(config, "workerinput")  # at most one lane needs the cluster
        if needed and not in_lane and not config.option.collectonly and config.getoption("--cluster") != "local":
            _open_once(config)
        return (yield)


def _open_once(config: pytest.Config) -> SharedCluster:
    if _OPENED not in config.stash:
        cluster = open_cluster(config.getoption("--cluster"))
        config.stash[_OPENED] = exit_stack_of_group(config, CLUSTER).enter_context(cluster)
    return config.stash[_OPENED]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Install or remove the definition and the operator on an existing cluster, as the ring of the test needs it."""
    needs = [need for name, need in _NEEDS.items() if name in getattr(item, "fixturenames", ())]
    if needs and item.config.getoption("--cluster") == "existing":
        _open_once(item.config).installed.ensure(needs[0])


@pytest.fixture(scope="session")
def shared_cluster(request: pytest.FixtureRequest) -> SharedCluster:
    """Return the cluster with nodes that all tests of this session share."""
    return _open_once(request.config)

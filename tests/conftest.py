"""Options and fixtures of all tests: which cluster the cluster tests use."""

import gc
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import pytest_timeout
from hypothesis import settings
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants

from tests.testing.cluster.installed import InstalledParts
from tests.testing.cluster.shared_cluster import SharedCluster, open_cluster
from tests.testing.suite.lanes import CLUSTER, DEFINITION, LaneScheduling, group_of
from tests.testing.suite.last_tests import close_after_last, exit_stack_of_group, find_last_tests
from tests.testing.suite.timeouts import scaled
from tests.testing.suite.times_record import TimesRecord
from tests.testing.suite.trials import TRIALS, trials

# A busy machine is no finding, and what lands is not held up by a new example: `make test-long` looks for those.
settings.register_profile("trainium", deadline=None, derandomize=not TRIALS, max_examples=trials(50))
settings.load_profile("trainium")
if not TRIALS:
    # Hypothesis also tries constants of the modules that are loaded: each lane would try other examples.
    providers._get_local_constants = Constants


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
    """Scale pytest's timeout by the slowness of the machine."""
    slow = settings._replace(timeout=scaled(settings.timeout))
    return pytest_timeout.pytest_timeout_set_timer(item, slow)


_FIRST = ("tests/cluster/", "tests/fleet/", "tests/unit/trainer/", "tests/unit/data/", "tests/wire/")
"""Groups that take longest, so that lanes end together with small files."""
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
    """Stop a cluster after the last test that needs it: an idle one takes a twentieth of a processor."""
    yield
    close_after_last(item)


def _choose_ring(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests of the other ring, unless a test is named by its id."""
    ring = config.getoption("--ring")
    if ring == "all" or any("::" in argument for argument in config.args):
        return
    others = [item for item in items if (item.get_closest_marker("long") is not None) != (ring == "night")]
    if others:
        left = set(others)
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in left]


_OPENED = pytest.StashKey[SharedCluster]()
_NEEDS = {"defined": InstalledParts.DEFINITION, "operator": InstalledParts.OPERATOR}
"""The state in which a fixture finds a shared cluster."""


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop(session: pytest.Session) -> Generator[None, object, object]:
    """Open a cluster that is not the development cluster before the first test: its minutes are not that test's."""
    config = session.config
    needed = any({"shared_cluster", *_NEEDS} & set(getattr(item, "fixturenames", ())) for item in session.items)
    with exit_stack_of_group(config, CLUSTER), exit_stack_of_group(config, DEFINITION):
        in_lane = hasattr(config, "workerinput")  # one of several, of which one at most needs it
        if needed and not in_lane and not config.option.collectonly and config.getoption("--cluster") != "local":
            _opened(config)
        return (yield)


def _opened(config: pytest.Config) -> SharedCluster:
    if _OPENED not in config.stash:
        cluster = open_cluster(config.getoption("--cluster"))
        config.stash[_OPENED] = exit_stack_of_group(config, CLUSTER).enter_context(cluster)
    return config.stash[_OPENED]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Install or remove the definition and the operator on an existing cluster, as the ring of the test needs it."""
    needs = [need for name, need in _NEEDS.items() if name in getattr(item, "fixturenames", ())]
    if needs and item.config.getoption("--cluster") == "existing":
        _opened(item.config).installed.ensure(needs[0])


@pytest.fixture(scope="session")
def shared_cluster(request: pytest.FixtureRequest) -> SharedCluster:
    """The cluster with nodes that all tests of this session share."""
    return _opened(request.config)

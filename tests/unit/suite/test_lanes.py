"""Selection and distribution of tests: rings, lanes, and resources that are closed after the last test of a group."""

import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import yaml

from tests.conftest import _choose_ring
from tests.testing.cluster.api_reader import path_of
from tests.testing.suite.lanes import AGENTS, CLUSTER, DEFINITION, FORKS, RANKS, TUNING, group_of
from tests.testing.suite.last_tests import close_after_last, exit_stack_of_group, find_last_tests

ROOT = Path(__file__).parents[3]
FILES = ("tests/unit/suite/test_timeouts.py", "tests/unit/contract/status/test_failed_spec.py")


@pytest.mark.parametrize(
    ("test", "group"),
    [
        ("tests/cluster/node/test_node_network.py::test_a", CLUSTER),
        ("tests/cluster/training/test_recovery.py::test_b[x-1]", CLUSTER),
        ("tests/cluster/definition/test_tables.py::test_c", DEFINITION),
        ("tests/wire/agent/test_agent_hang.py::test_f", AGENTS),
        ("tests/unit/trainer/backends/test_context.py::test_g", RANKS),
        ("tests/unit/trainer/backends/test_network_interface.py::test_h", FORKS),
        ("tests/unit/trainer/loop/test_tuning_layouts.py::test_i", TUNING),
        ("tests/unit/trainer/loop/test_loop.py::test_j", RANKS),
        ("tests/unit/data/test_online.py::test_k", FORKS),
        ("tests/cluster/test_gang.py::test_d", "tests/cluster/test_gang.py"),
        ("tests/unit/plan/test_life.py::test_e[a::b]", "tests/unit/plan/test_life.py"),
    ],
)
def test_a_test_belongs_to_a_shared_resource_or_its_file(test: str, group: str) -> None:
    assert group_of(test) == group


@pytest.mark.long
def test_each_file_runs_in_one_lane() -> None:
    command = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "loadgroup", "--no-loadscope-reorder", "-v"]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", *FILES], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    lanes = defaultdict(set)
    for lane, file in re.findall(r"\[(gw\d)\].* PASSED ([^:]+)::", done.stdout):
        lanes[file].add(lane)
    assert {file: len(lanes_of_file) for file, lanes_of_file in lanes.items()} == dict.fromkeys(FILES, 1), done.stdout


class FakeItem:
    """A test with or without a group."""

    def __init__(self, config: Any, group: str = "") -> None:
        self.config = config
        self._mark = pytest.mark.xdist_group(group).mark if group else None

    def get_closest_marker(self, name: str) -> Any:
        assert name == "xdist_group"
        return self._mark


def test_each_group_is_closed_after_its_last_test() -> None:
    config: Any = SimpleNamespace(stash=pytest.Stash())
    closed: list[str] = []
    items: list[Any] = [FakeItem(config, group) for group in ("a", "b", "a", "", "b", "a", "")]
    find_last_tests(config, items)
    for group in ("a", "b"):
        exit_stack_of_group(config, group).callback(closed.append, group)
    closed_after = []
    for item in items:
        close_after_last(item)
        closed_after.append("".join(closed))
    assert closed_after == ["", "", "", "", "b", "ba", "ba"]


def test_open_groups_are_closed_with_the_session() -> None:
    config: Any = SimpleNamespace(stash=pytest.Stash())
    closed: list[str] = []
    with exit_stack_of_group(config, "a"):
        exit_stack_of_group(config, "a").callback(closed.append, "a")
        assert closed == []
    assert closed == ["a"]


@pytest.mark.parametrize(
    ("arguments", "path"),
    [
        (("node/a",), None),
        (("nodes",), "/api/v1/nodes"),
        (("pod", "p", "-n", "x"), "/api/v1/namespaces/x/pods/p"),
        (("pods", "-n", "x", "-l", "app=a,b"), "/api/v1/namespaces/x/pods?labelSelector=app%3Da%2Cb"),
        (("trainingjob", "j", "-n", "x"), "/apis/trainium.dev/v1alpha1/namespaces/x/trainingjobs/j"),
        (("pods", "-A"), None),
        (("configmaps,services", "-n", "x"), None),
    ],
)
def test_the_api_path_of_kubectl_get_arguments(arguments: tuple[str, ...], path: str | None) -> None:
    assert path_of(arguments) == path


def test_the_nightly_workflow_runs_nightly_tests() -> None:
    night = yaml.safe_load((ROOT / ".github/workflows/nightly.yaml").read_text())
    assert "test-long" in night["jobs"]["long"]["strategy"]["matrix"]["target"]
    rule = (ROOT / "Makefile").read_text().partition("\ntest-long:")[2].partition("\n\n")[0]
    assert "--ring=night" in rule


SAMPLE = """
import pytest

@pytest.mark.long
def test_of_the_night(): pass

def test_of_each_change(): pass
"""


@pytest.mark.parametrize(
    ("ring", "selected"), [("each", ["change"]), ("night", ["night"]), ("all", ["night", "change"])]
)
def test_a_ring_selects_its_tests(ring: str, selected: list[str]) -> None:
    tests: dict[str, Any] = {name: mock.Mock() for name in ("night", "change")}
    tests["change"].get_closest_marker.return_value = None
    config, items = mock.Mock(args=["tests"]), list(tests.values())
    config.getoption.return_value = ring
    _choose_ring(config, items)
    assert items == [tests[name] for name in selected]


def test_a_test_given_by_its_id_runs_in_any_ring(tmp_path: Path) -> None:
    (tmp_path / "test_sample.py").write_text(SAMPLE)
    (tmp_path / "conftest.py").write_text((ROOT / "tests/conftest.py").read_text())
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path)]
    command += ["-o", f"pythonpath={ROOT}", "--collect-only", "-q", "-p", "no:cacheprovider"]
    command.append("test_sample.py::test_of_the_night")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(re.findall(r"::(\w+)", done.stdout)) == {"test_of_the_night"}

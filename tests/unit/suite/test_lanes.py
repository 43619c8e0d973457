"""Tests of one group run in one lane, whatever pytest makes of their ids."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from tests.testing.suite.lanes import CLUSTER, DEFINITION, group_of

ROOT = Path(__file__).parents[3]
FILES = ("tests/unit/suite/test_last_tests.py", "tests/unit/contract/status/test_failed_spec.py")


@pytest.mark.parametrize(
    ("test", "group"),
    [
        ("tests/cluster/node/test_node_network.py::test_a", CLUSTER),
        ("tests/cluster/training/test_recovery.py::test_b[x-1]", CLUSTER),
        ("tests/cluster/definition/test_tables.py::test_c", DEFINITION),
        ("tests/cluster/test_gang.py::test_d", "tests/cluster/test_gang.py"),
        ("tests/unit/plan/test_life.py::test_e[a::b]", "tests/unit/plan/test_life.py"),
    ],
)
def test_a_group_is_a_shared_cluster_or_a_file(test: str, group: str) -> None:
    assert group_of(test) == group


@pytest.mark.long
def test_no_file_is_divided_between_two_lanes() -> None:
    command = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "loadgroup", "--no-loadscope-reorder", "-v"]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", *FILES], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    lanes = defaultdict(set)
    for lane, file in re.findall(r"\[(gw\d)\].* PASSED ([^:]+)::", done.stdout):
        lanes[file].add(lane)
    assert {file: len(found) for file, found in lanes.items()} == dict.fromkeys(FILES, 1), done.stdout

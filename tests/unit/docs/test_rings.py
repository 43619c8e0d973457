"""The rings of the suite: the page names what runs by night, the night runs it, a test runs where it is asked for."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml

from tests.conftest import _choose_ring

ROOT = Path(__file__).parents[3]


def marked() -> set[str]:
    """Files with tests that are left to the night."""
    files = {path for path in (ROOT / "tests").rglob("test_*.py") if "pytest.mark.long" in path.read_text()}
    return {path.name for path in files if path.name != Path(__file__).name}


def test_the_page_names_each_file_with_tests_of_the_night_and_no_other() -> None:
    page = (ROOT / "docs/testing.md").read_text()
    section = page.partition("## What runs by night\n")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    assert {name for row in rows for name in re.findall(r"`(test_\w+\.py)`", row)} == marked()


def test_the_workflow_of_the_night_runs_them() -> None:
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


@pytest.mark.parametrize(("ring", "chosen"), [("each", ["change"]), ("night", ["night"]), ("all", ["night", "change"])])
def test_a_ring_has_its_own_tests_and_all_has_both(ring: str, chosen: list[str]) -> None:
    tests: dict[str, Any] = {name: mock.Mock() for name in ("night", "change")}
    tests["change"].get_closest_marker.return_value = None
    config, items = mock.Mock(args=["tests"]), list(tests.values())
    config.getoption.return_value = ring
    _choose_ring(config, items)
    assert items == [tests[name] for name in chosen]


def test_a_test_that_is_named_by_its_id_runs_in_any_ring(tmp_path: Path) -> None:
    assert collected(tmp_path, "test_sample.py::test_of_the_night") == {"test_of_the_night"}


def collected(folder: Path, name: str, *arguments: str) -> set[str]:
    """Plan a run with this project's options and hooks."""
    (folder / "test_sample.py").write_text(SAMPLE)
    (folder / "conftest.py").write_text((ROOT / "tests/conftest.py").read_text())
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(folder)]
    command += ["-o", f"pythonpath={ROOT}", "--collect-only", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run([*command, name, *arguments], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return set(re.findall(r"::(\w+)", done.stdout))

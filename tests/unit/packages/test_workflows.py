"""The workflows call what there is: targets of the Makefile, stages of the Dockerfile, files, each other."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[3]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yaml"))


def jobs(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text())["jobs"]
    return found


def test_every_target_of_make_and_every_stage_of_an_image_is_there() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    stages = set(re.findall(r"^FROM \S+ AS (\S+)", (ROOT / "Dockerfile").read_text(), re.MULTILINE))
    made, built = set(), set()
    for path in WORKFLOWS:
        made |= set(re.findall(r"\bmake ([a-z][a-z-]*)", path.read_text()))
        for job in jobs(path).values():
            matrix = job.get("strategy", {}).get("matrix", {})
            made |= {target.split()[0] for target in matrix.get("target", ())}
            built |= {each["target"] for each in matrix.get("include", ())}
    assert made <= targets
    assert built == {"operator", "trainer-cpu", "trainer"}
    assert built <= stages


def test_no_workflow_may_write_more_than_it_has_to() -> None:
    for path in WORKFLOWS:
        assert yaml.safe_load(path.read_text())["permissions"] == {"contents": "read"}, path.name
    rights = {
        name: job["permissions"] for path in WORKFLOWS for name, job in jobs(path).items() if "permissions" in job
    }
    assert rights == {"images": {"contents": "read", "id-token": "write"}, "chart": {"contents": "write"}}


@pytest.mark.skipif(shutil.which("actionlint") is None, reason="needs actionlint on PATH")
def test_actionlint_finds_nothing() -> None:
    done = subprocess.run(["actionlint", *map(str, WORKFLOWS)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout

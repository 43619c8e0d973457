"""Images of a kind cluster of the tests, with programs that only write down how they were called."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.testing.cluster.access import Access, CommandError
from tests.testing.cluster.kind_images import load_images

ROOT = Path(__file__).parents[3]
STAGES = set(re.findall(r"^FROM \S+ AS (\S+)", (ROOT / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE))
WORKERS = ["--name", "control-plane-tests", "--nodes", "control-plane-tests-worker,control-plane-tests-worker2"]
PROGRAM = """#!/bin/sh
echo "$(basename "$0") $*" >>"{calls}"
[ "$1 $2" != "get nodes" ] || printf '%s\\n' {nodes}
[ "$1" != build ] || [ -z "$REFUSED" ]
"""


class Machine:
    """A machine with docker and kind."""

    def __init__(self, folder: Path, settings: dict[str, Any], **variables: str) -> None:
        self._calls = folder / "calls"
        nodes = " ".join(f"control-plane-tests-{name}" for name in ("worker", "control-plane", "worker2"))
        for name in ("docker", "kind"):
            (folder / name).write_text(PROGRAM.format(calls=self._calls, nodes=nodes))
            (folder / name).chmod(0o755)
        self.access = Access("kind", {"PATH": f"{folder}:/usr/bin:/bin", **variables}, folder, settings)

    def load(self) -> None:
        load_images(self.access, "control-plane-tests")

    def calls(self, *of: str) -> list[list[str]]:
        """Arguments of the calls that begin with these words."""
        words = [line.split() for line in self._calls.read_text().splitlines()]
        return [each[len(of) :] for each in words if each[: len(of)] == list(of)]


def test_both_images_are_built_and_loaded_on_the_nodes_that_take_pods_alone(tmp_path: Path) -> None:
    machine = Machine(tmp_path, {})
    machine.load()

    built = machine.calls("docker", "build", "--target")
    assert {each[0] for each in built} == {"operator", "trainer-cpu"} <= STAGES
    assert machine.calls("kind", "load", "docker-image") == [[each[each.index("-t") + 1], *WORKERS] for each in built]
    values = machine.access.settings["chartValues"]
    assert values["image"] == {"repository": "trainium-operator", "tag": "test"}
    assert values["trainerImage"] == "trainium-trainer:test"


def test_a_base_of_the_settings_is_the_workers_alone(tmp_path: Path) -> None:
    machine = Machine(tmp_path, {"trainerBase": "torch-for-cpus"})
    machine.load()

    given = {each[0]: "PYTHON_IMAGE=torch-for-cpus" in each for each in machine.calls("docker", "build", "--target")}
    assert given == {"operator": False, "trainer-cpu": True}


def test_archives_of_the_settings_are_loaded_and_nothing_is_built(tmp_path: Path) -> None:
    machine = Machine(tmp_path, {"images": ["/one.tar", "/two.tar"], "chartValues": {"replicas": 1}})
    machine.load()

    assert machine.calls("kind", "load", "image-archive") == [["/one.tar", *WORKERS], ["/two.tar", *WORKERS]]
    assert machine.calls("docker") == []
    assert machine.access.settings["chartValues"] == {"replicas": 1}


def test_an_image_that_cannot_be_built_says_which(tmp_path: Path) -> None:
    machine = Machine(tmp_path, {}, REFUSED="yes")
    with pytest.raises(CommandError, match="docker build --target operator"):
        machine.load()
    assert machine.calls("kind", "load") == []

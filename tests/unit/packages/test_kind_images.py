"""Build and load of images for a kind cluster, with fakes of docker and kind that record their calls."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.testing.cluster.access import Access, CommandError
from tests.testing.cluster.kind_images import load_images

ROOT = Path(__file__).parents[3]
STAGES = set(re.findall(r"^FROM \S+ AS (\S+)", (ROOT / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE))
NODES = ["control-plane-tests-worker", "control-plane-tests-second"]
WORKERS = [["--name", "control-plane-tests", "--nodes", node] for node in NODES]
PROGRAM = """#!/bin/sh
echo "$(basename "$0") $*" >>"{calls}"
[ "$1 $2" != "get nodes" ] || printf '%s\\n' {nodes}
case "$*" in
exec*"content ls")
    echo "DIGEST SIZE AGE LABELS"
    echo "sha256:pause 1kB 1 day containerd.io/uncompressed=sha256:1"
    echo "sha256:later 1kB 1 day -"
    grep -qe "--nodes $2" "{calls}" || exit 0
    echo "sha256:packed-$2 1GB 1 second containerd.io/uncompressed=sha256:2"
    echo "sha256:manifest 1kB 1 second containerd.io/gc.ref.content.config=sha256:3"
    ;;
build*) [ -z "$REFUSED" ] ;;
esac
"""


class FakePrograms:
    """Fakes of docker and kind on PATH."""

    def __init__(self, folder: Path, settings: dict[str, Any], **variables: str) -> None:
        self._calls = folder / "calls"
        nodes = " ".join(f"control-plane-tests-{name}" for name in ("worker", "control-plane", "second"))
        for name in ("docker", "kind"):
            (folder / name).write_text(PROGRAM.format(calls=self._calls, nodes=nodes))
            (folder / name).chmod(0o755)
        self.access = Access("kind", {"PATH": f"{folder}:/usr/bin:/bin", **variables}, folder, settings)

    def load(self) -> None:
        load_images(self.access, "control-plane-tests")

    def calls(self, *of: str) -> list[list[str]]:
        """Return the further arguments of calls that start with these words."""
        words = [line.split() for line in self._calls.read_text().splitlines()]
        return [word[len(of) :] for word in words if word[: len(of)] == list(of)]


def test_both_images_are_built_and_loaded_onto_worker_nodes(tmp_path: Path) -> None:
    machine = FakePrograms(tmp_path, {})
    machine.load()

    built = machine.calls("docker", "build", "--target")
    assert {item[0] for item in built} == {"operator", "trainer-cpu"} <= STAGES
    images = [item[item.index("-t") + 1] for item in built]
    assert machine.calls("kind", "load", "docker-image") == [[image, *node] for image in images for node in WORKERS]
    values = machine.access.settings["chartValues"]
    assert values["image"] == {"repository": "trainium-operator", "tag": "test"}
    assert values["trainerImage"] == "trainium-trainer:test"


def test_archives_of_the_settings_replace_the_build(tmp_path: Path) -> None:
    machine = FakePrograms(tmp_path, {"images": ["/one.tar", "/two.tar"], "chartValues": {"replicas": 1}})
    machine.load()

    loads = [[archive, *node] for archive in ("/one.tar", "/two.tar") for node in WORKERS]
    assert machine.calls("kind", "load", "image-archive") == loads
    assert machine.calls("docker", "build") == []
    assert machine.access.settings["chartValues"] == {"replicas": 1}


def test_a_node_removes_packed_layers_of_a_loaded_image(tmp_path: Path) -> None:
    machine = FakePrograms(tmp_path, {"images": ["/one.tar"]})
    machine.load()

    returned = [call for call in machine.calls("docker", "exec") if "rm" in call]
    assert [(call[0], call[call.index("rm") + 1 : call.index("&&")]) for call in returned] == [
        (node, [f"sha256:packed-{node}"]) for node in NODES
    ]


def test_a_failed_build_names_its_image(tmp_path: Path) -> None:
    machine = FakePrograms(tmp_path, {}, REFUSED="yes")
    with pytest.raises(CommandError, match="docker build --target operator"):
        machine.load()
    assert machine.calls("kind", "load") == []

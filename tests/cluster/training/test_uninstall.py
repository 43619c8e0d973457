"""The uninstalled operator leaves no objects behind, by the cluster's own garbage collector."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from tests.testing.cluster.access import ROOT
from tests.testing.suite.timeouts import scaled, until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.testing.cluster.shared_cluster import SharedCluster

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(600)]

NAME = "second"
MEMORY = f"{NAME}-quarantine"
ENTRY = "machine: i-0123456789abcdef0\nnode: node-1\nstate: Permanent\n"


class ChartRelease:
    """A second release of the chart, limited to one namespace; the definition belongs to the first release."""

    def __init__(self, cluster: SharedCluster, namespace: str) -> None:
        self.cluster, self.namespace = cluster, namespace
        values = cluster.settings.get("chartValues", {}) | {
            "fullnameOverride": NAME,
            "crds": {"install": False},
            "watchNamespaces": [namespace],
            "networkPolicy": {"jobs": {"create": False}},
        }
        self._values = cluster.shared / f"{namespace}.json"
        self._values.write_text(json.dumps(values))

    def install(self, *, keep_memory: bool = False) -> None:
        chart, keep = str(ROOT / "helm" / "trainium-operator"), f"quarantine.keepMemory={str(keep_memory).lower()}"
        common = (
            "-n",
            self.namespace,
            "-f",
            str(self._values),
            "--set",
            keep,
            "--wait",
            f"--timeout={scaled(120):.0f}s",
        )
        self.cluster.helm("upgrade", "--install", NAME, chart, *common)

    def uninstall(self) -> None:
        self.cluster.helm("uninstall", NAME, "-n", self.namespace, "--wait", "--ignore-not-found")

    def owners(self, kind: str, name: str) -> list[str] | None:
        """Return the kinds of the owners, or None if the object does not exist."""
        items = self.cluster.get(kind, "-n", self.namespace)["items"]
        metadata = next((item["metadata"] for item in items if item["metadata"]["name"] == name), None)
        return None if metadata is None else [owner["kind"] for owner in metadata.get("ownerReferences") or []]

    def memory(self) -> dict[str, Any]:
        data: dict[str, Any] = self.cluster.get("configmap", MEMORY, "-n", self.namespace)["data"]
        return data

    def remaining_objects(self) -> list[str]:
        """Return all objects in the namespace with the name of the release."""
        listable = self.cluster.kubectl("api-resources", "--namespaced", "--verbs=list", "-o", "name").split()
        kinds = ",".join(kind for kind in listable if not kind.startswith("events"))
        return [
            name
            for name in self.cluster.kubectl("get", kinds, "-n", self.namespace, "-o", "name").split()
            if name.rpartition("/")[2].startswith(NAME)
        ]


@pytest.fixture
def release(operator: SharedCluster, namespace: str) -> Iterator[ChartRelease]:
    release = ChartRelease(operator, namespace)
    yield release
    release.uninstall()


def eventually(observe: Callable[[], object], wanted: object) -> None:
    until(lambda: observe() == wanted, lambda: f"{wanted}; there is {observe()}", 90, pause=0.5)


def test_an_uninstall_leaves_only_the_kept_memory(release: ChartRelease) -> None:
    def owned_by(memory: list[str]) -> None:
        for kind, name, owners in (("lease", NAME, ["Deployment"]), ("configmap", MEMORY, memory)):
            eventually(partial(release.owners, kind, name), owners)

    release.install()
    owned_by(["Deployment"])
    patch = json.dumps({"data": {"i-0123456789abcdef0": ENTRY}})
    release.cluster.kubectl("patch", "configmap", MEMORY, "-n", release.namespace, "--type=merge", "-p", patch)

    release.install(keep_memory=True)
    owned_by([])
    assert release.memory()["i-0123456789abcdef0"], "an upgrade keeps all records"
    release.uninstall()
    eventually(release.remaining_objects, [f"configmap/{MEMORY}"])

    release.install()
    owned_by(["Deployment"])
    assert "state: Permanent" in release.memory()["i-0123456789abcdef0"], "the next release keeps the records too"
    release.uninstall()
    eventually(release.remaining_objects, [])

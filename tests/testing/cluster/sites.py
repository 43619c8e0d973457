"""Clusters that the same tests run on: the development cluster, kind, or whatever KUBECONFIG names.

A site knows how to reach the API, which folder every node and this machine see at the same path, what the chart and the
workers need to start there, and how a node loses its power. `docs/testing.md` describes the settings file of the
clusters that are not ours.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from tests.testing.cluster.access import Access
from tests.testing.cluster.api_reader import ApiReader
from tests.testing.cluster.installed import Installed
from tests.testing.cluster.kind_images import load_images
from tests.testing.cluster.leftovers import OccupiedError, refuse_to_disturb, sweep
from tests.testing.cluster.marks import POWERED_OFF, cordon_of
from tests.testing.cluster.session_lease import SessionLease, TakenError
from tests.testing.suite.timeouts import scaled

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

NODES = 5
DEVICES = {"aws.amazon.com/neuron": "16"}
"""Capacity that a node of kind reports, as the development cluster's do; workers on it train on its processors."""


@dataclass
class Site(Access):
    """A cluster with nodes, which tests disturb."""

    def __post_init__(self) -> None:
        self.installed = Installed(self)
        self.powerless: set[str] = set()
        """Nodes without power."""

    def worker_nodes(self) -> list[str]:
        """Nodes that take a worker."""
        nodes = self.get("nodes")["items"]
        kept_free = [any(t["effect"] == "NoSchedule" for t in node["spec"].get("taints", [])) for node in nodes]
        return [node["metadata"]["name"] for node, free in zip(nodes, kept_free, strict=True) if not free]

    # --- faults --------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def cordoned(self, *nodes: str) -> Iterator[None]:
        """Nodes that take no more pods, until the block ends."""
        try:
            self._cordon(nodes, on=True)
            yield
        finally:
            self._cordon(nodes, on=False)

    @contextlib.contextmanager
    def without_power(self, node: str) -> Iterator[None]:
        """A node that is off, until the block ends."""
        self.power_off(node)
        try:
            yield
        finally:
            self.power_on(node)

    def power_off(self, node: str) -> None:
        """The node and all that runs on it is gone at once."""
        self.powerless.add(node)
        if self.cluster is not None:
            self.cluster.faults.kill_node(node)
        else:
            command = self._command("powerOff")
            self._note(POWERED_OFF, "yes", node)
            subprocess.run(command.format(node=node), shell=True, check=True, timeout=scaled(120))

    def power_on(self, node: str) -> None:
        """The node comes back."""
        if self.cluster is not None:
            self.cluster.faults.start_node(node)
        else:
            command = self._command("powerOn")
            subprocess.run(command.format(node=node), shell=True, check=True, timeout=scaled(120))
            self._forget(POWERED_OFF, node)
        self.powerless.discard(node)
        self.wait("create", f"node/{node}", seconds=90)  # its object may have been deleted meanwhile
        self.wait("condition=Ready", f"node/{node}", seconds=90)

    def _cordon(self, nodes: Sequence[str], *, on: bool) -> None:
        if nodes:
            self.kubectl("patch", "node", *nodes, "--type=merge", "-p", json.dumps(cordon_of(on=on)))

    def _note(self, key: str, value: str, node: str) -> None:
        """For a later session, should this one be interrupted."""
        if self.is_lent:
            self.kubectl("annotate", "node", node, f"{key}={value}", "--overwrite")

    def _forget(self, key: str, node: str) -> None:
        if self.is_lent:
            self.kubectl("annotate", "node", node, f"{key}-")

    def _command(self, key: str) -> str:
        command = self.settings.get(key)
        if not command:
            pytest.skip(f"the site's settings have no {key} command")
        return str(command)


@contextlib.contextmanager
def open_site(kind: str) -> Iterator[Site]:
    """The chosen cluster, ready; the development cluster is stopped afterwards, others are left as they were."""
    if kind == "local":
        with _local() as site:
            yield site
        return
    for program in ("kubectl", "helm", *(("kind", "docker") if kind == "kind" else ())):
        if shutil.which(program) is None:
            pytest.exit(f"--cluster={kind} needs {program} on PATH; --cluster=local needs nothing", returncode=2)
    settings = _settings()
    if kind == "kind":
        with _kind(settings) as site:
            yield site
        return
    with _lent(settings) as site:
        yield site


@contextlib.contextmanager
def _lent(settings: dict[str, Any]) -> Iterator[Site]:
    """The cluster of KUBECONFIG, for this session alone; what tests left there goes before and after."""
    shared = Path(settings.get("shared") or tempfile.gettempdir()) / f"trainium-tests-{os.getpid()}"
    shared.mkdir(mode=0o777, parents=True)
    shared.chmod(0o777)  # workers run as another user
    site = Site("existing", {}, shared, settings)

    def power_on(node: str) -> None:
        if "powerOn" not in settings:
            raise OccupiedError(
                f"Tests left node {node} without power, and the site's settings have no powerOn command."
            )
        site.power_on(node)

    try:
        with SessionLease(site).held():
            refuse_to_disturb(site)
            sweep(site, power_on)
            try:
                yield site
            finally:
                sweep(site, power_on)
    except (TakenError, OccupiedError) as error:
        pytest.exit(str(error), returncode=2)
    finally:
        shutil.rmtree(shared, ignore_errors=True)


def _settings() -> dict[str, Any]:
    path = os.environ.get("TRAINIUM_TEST_SITE")
    return yaml.safe_load(Path(path).read_text()) if path else {}


@contextlib.contextmanager
def _local() -> Iterator[Site]:
    from trainium_devcluster.cluster import Cluster, node_specs, system_node, system_values

    nodes = [*node_specs(NODES, cpu="4", memory="8Gi"), system_node()]
    with (
        tempfile.TemporaryDirectory(prefix="trainium-tests-") as folder,
        Cluster.start(nodes=nodes) as cluster,
    ):
        reader = ApiReader(cluster.kubeconfig)
        yield Site("local", cluster.variables(), Path(folder), {"chartValues": system_values()}, cluster, reader)


@contextlib.contextmanager
def _kind(settings: dict[str, Any]) -> Iterator[Site]:
    """A kind cluster of this session's own; images are built and loaded unless the settings name them."""
    name = f"trainium-{os.getpid()}"
    with tempfile.TemporaryDirectory(prefix="trainium-kind-", dir=settings.get("shared")) as folder:
        shared = Path(folder)
        shared.chmod(0o777)
        mounts = [{"hostPath": path, "containerPath": path} for path in (folder, *settings.get("mounts", ()))]
        cluster = {
            "kind": "Cluster",
            "apiVersion": "kind.x-k8s.io/v1alpha4",
            **settings.get("kindCluster", {}),
            "nodes": [
                {"role": "control-plane", "extraMounts": mounts},
                *({"role": "worker", "extraMounts": mounts} for _ in range(settings.get("nodes", NODES))),
            ],
        }
        config = shared / "kind.yaml"
        config.write_text(yaml.safe_dump(cluster))
        kubeconfig = shared / "kubeconfig"
        site = Site("kind", {"KUBECONFIG": str(kubeconfig)}, shared, settings)
        command = ["kind", "create", "cluster", "--name", name, "--config", str(config), "--wait", "180s"]
        command += ["--kubeconfig", str(kubeconfig)]
        if settings.get("kindImage"):
            command += ["--image", settings["kindImage"]]
        try:
            site.must(*command, seconds=600)
            load_images(site, name)
            devices = json.dumps({"status": {"capacity": DEVICES}})
            site.kubectl("patch", "node", *site.worker_nodes(), "--subresource=status", "--type=merge", "-p", devices)
            settings.setdefault("powerOff", "docker stop -t 0 {node}")
            settings.setdefault("powerOn", "docker start {node}")
            yield site
        finally:
            site.run("kind", "delete", "cluster", "--name", name, "--kubeconfig", str(kubeconfig), seconds=120)

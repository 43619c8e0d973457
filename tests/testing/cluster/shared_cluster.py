"""Clusters that the same tests run on: the development cluster, kind, or the cluster of KUBECONFIG.

A cluster has its kubeconfig, a folder that all nodes and this machine mount at the same path, the values of chart and
workers, and the commands that power nodes off and on. `docs/testing.md` describes the settings file.
"""

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.testing.cluster.access import Access
from tests.testing.cluster.installed import Installed
from tests.testing.cluster.kind_images import load_images
from tests.testing.cluster.leftovers import OccupiedError, check_unoccupied, remove_leftovers
from tests.testing.cluster.marks import POWERED_OFF, cordon_patch
from tests.testing.suite.timeouts import scaled

DEVICES = {"aws.amazon.com/neuron": "16"}
"""Capacity that a node of kind reports, as the development cluster's do; workers on it train on its processors."""


@dataclass
class SharedCluster(Access):
    """A cluster with nodes, into which tests inject faults."""

    def __post_init__(self) -> None:
        self.installed = Installed(self)
        self.powered_off_nodes: set[str] = set()
        """Names of nodes that are powered off."""

    def worker_nodes(self) -> list[str]:
        """Return the names of nodes without a NoSchedule taint."""
        nodes = self.get("nodes")["items"]
        return [
            node["metadata"]["name"]
            for node in nodes
            if not any(taint["effect"] == "NoSchedule" for taint in node["spec"].get("taints", []))
        ]

    # --- faults --------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def cordon_nodes(self, *nodes: str) -> Iterator[None]:
        """Cordon nodes until the block ends."""
        try:
            self._cordon(nodes, on=True)
            yield
        finally:
            self._cordon(nodes, on=False)

    @contextlib.contextmanager
    def without_power(self, node: str) -> Iterator[None]:
        """Power a node off until the block ends."""
        self.power_off(node)
        try:
            yield
        finally:
            self.power_on(node)

    def power_off(self, node: str) -> None:
        """End a node and all that runs on it at once."""
        self.powered_off_nodes.add(node)
        if self.devcluster is not None:
            self.devcluster.faults.kill_node(node)
        else:
            command = self._configured_command("powerOff")
            self._annotate_node(POWERED_OFF, "yes", node)
            subprocess.run(command.format(node=node), shell=True, check=True, timeout=scaled(120))

    def power_on(self, node: str) -> None:
        """Start a node that was powered off, and wait until it is Ready."""
        if self.devcluster is not None:
            self.devcluster.faults.start_node(node)
        else:
            command = self._configured_command("powerOn")
            subprocess.run(command.format(node=node), shell=True, check=True, timeout=scaled(120))
            self._remove_annotation(POWERED_OFF, node)
        self.powered_off_nodes.discard(node)
        self.wait("create", f"node/{node}", seconds=90)  # its object may have been deleted meanwhile
        self.wait("condition=Ready", f"node/{node}", seconds=90)

    def _cordon(self, nodes: Sequence[str], *, on: bool) -> None:
        if nodes:
            self.kubectl("patch", "node", *nodes, "--type=merge", "-p", json.dumps(cordon_patch(on=on)))

    def _annotate_node(self, key: str, value: str, node: str) -> None:
        """Annotate a node for a later session, which repairs it if this one is interrupted."""
        if self.is_existing:
            self.kubectl("annotate", "node", node, f"{key}={value}", "--overwrite")

    def _remove_annotation(self, key: str, node: str) -> None:
        if self.is_existing:
            self.kubectl("annotate", "node", node, f"{key}-")

    def _configured_command(self, key: str) -> str:
        command = self.settings.get(key)
        if not command:
            pytest.skip(f"the cluster's settings have no {key} command")
        return str(command)


@contextlib.contextmanager
def open_cluster(kind: str, nodes: int = 5) -> Iterator[SharedCluster]:
    """Yield the chosen cluster; stop the development cluster, of `nodes`, afterwards and leave others as they were."""
    if kind == "local":
        with _open_development_cluster(nodes) as cluster:
            yield cluster
        return
    for program in ("kubectl", "helm", *(("kind", "docker") if kind == "kind" else ())):
        if shutil.which(program) is None:
            pytest.exit(f"--cluster={kind} needs {program} on PATH; --cluster=local needs nothing", returncode=2)
    settings = _read_settings()
    if kind == "kind":
        with _open_kind_cluster(settings, nodes) as cluster:
            yield cluster
        return
    with _open_existing_cluster(settings) as cluster:
        yield cluster


@contextlib.contextmanager
def _open_existing_cluster(settings: dict[str, Any]) -> Iterator[SharedCluster]:
    """Yield the cluster of KUBECONFIG to this session alone, without leftovers of tests before and after."""
    shared = Path(settings.get("shared") or tempfile.gettempdir()) / f"trainium-tests-{os.getpid()}"
    shared.mkdir(mode=0o777, parents=True)
    shared.chmod(0o777)  # workers run as another user
    cluster = SharedCluster("existing", {}, shared, settings)

    def power_on(node: str) -> None:
        if "powerOn" not in settings:
            raise OccupiedError(
                f"Tests left node {node} without power, and the cluster's settings have no powerOn command."
            )
        cluster.power_on(node)

    try:
        check_unoccupied(cluster)
        remove_leftovers(cluster, power_on)
        try:
            yield cluster
        finally:
            remove_leftovers(cluster, power_on)
    except OccupiedError as error:
        pytest.exit(str(error), returncode=2)
    finally:
        shutil.rmtree(shared, ignore_errors=True)


def _read_settings() -> dict[str, Any]:
    path = os.environ.get("TRAINIUM_TEST_SITE")
    return yaml.safe_load(Path(path).read_text()) if path else {}


@contextlib.contextmanager
def _open_development_cluster(nodes: int) -> Iterator[SharedCluster]:
    from trainium_devcluster.cluster import Cluster, create_node_specs, create_system_node, create_system_values

    specs = [*create_node_specs(nodes, cpu="4", memory="8Gi"), create_system_node()]
    with (
        tempfile.TemporaryDirectory(prefix="trainium-tests-") as folder,
        Cluster.start(nodes=specs) as devcluster,
    ):
        settings = {"chartValues": create_system_values()}
        yield SharedCluster("local", devcluster.list_variables(), Path(folder), settings, devcluster)


@contextlib.contextmanager
def _open_kind_cluster(settings: dict[str, Any], nodes: int) -> Iterator[SharedCluster]:
    """Yield a kind cluster of this session; build and load images unless the settings name them."""
    name = f"trainium-{os.getpid()}"
    with tempfile.TemporaryDirectory(prefix="trainium-kind-", dir=settings.get("shared")) as folder:
        shared = Path(folder)
        shared.chmod(0o777)
        mounts = [{"hostPath": path, "containerPath": path} for path in (folder, *settings.get("mounts", ()))]
        definition = {
            "kind": "Cluster",
            "apiVersion": "kind.x-k8s.io/v1alpha4",
            **settings.get("kindCluster", {}),
            "nodes": [
                {"role": "control-plane", "extraMounts": mounts},
                *({"role": "worker", "extraMounts": mounts} for _ in range(settings.get("nodes", nodes))),
            ],
        }
        config = shared / "kind.yaml"
        config.write_text(yaml.safe_dump(definition))
        kubeconfig = shared / "kubeconfig"
        cluster = SharedCluster("kind", {"KUBECONFIG": str(kubeconfig)}, shared, settings)
        command = ["kind", "create", "cluster", "--name", name, "--config", str(config), "--wait", "180s"]
        command += ["--kubeconfig", str(kubeconfig)]
        if settings.get("kindImage"):
            command += ["--image", settings["kindImage"]]
        try:
            cluster.check_output(*command, seconds=600)
            load_images(cluster, name)
            devices = json.dumps({"status": {"capacity": DEVICES}})
            cluster.kubectl(
                "patch", "node", *cluster.worker_nodes(), "--subresource=status", "--type=merge", "-p", devices
            )
            settings.setdefault("powerOff", "docker stop -t 0 {node}")
            settings.setdefault("powerOn", "docker start {node}")
            yield cluster
        finally:
            cluster.run("kind", "delete", "cluster", "--name", name, "--kubeconfig", str(kubeconfig), seconds=120)

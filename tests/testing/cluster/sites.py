"""Clusters that the same tests run on: the development cluster, kind, or whatever KUBECONFIG names.

A site says how to reach the API, which folder every node and this machine see at the same path, what the chart and the
workers need to start there, and how a node loses its power. `docs/testing.md` describes the settings file of the
clusters that are not ours.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from tests.testing.cluster.api_reader import ApiReader, ReadError, path_of
from tests.testing.suite.patience import patient

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainium_devcluster.cluster import Cluster

ROOT = Path(__file__).parents[3]
NODES = 5


class CommandError(AssertionError):
    """A kubectl or helm that must succeed did not."""


@dataclass
class Site:
    """One cluster; `settings` are those of the settings file, empty for the development cluster."""

    kind: str
    variables: dict[str, str]
    shared: Path
    settings: dict[str, Any] = field(default_factory=dict)
    cluster: Cluster | None = None
    reader: ApiReader | None = None
    """Given, what tests poll is read without a kubectl each time."""

    def run(self, *command: str, stdin: str = "", seconds: float = 60) -> subprocess.CompletedProcess[str]:
        """A command with the cluster's environment; `seconds` on a quiet machine."""
        return subprocess.run(
            command,
            input=stdin,
            env=os.environ | self.variables,
            text=True,
            capture_output=True,
            check=False,
            timeout=patient(seconds),
        )

    def must(self, *command: str, stdin: str = "", seconds: float = 60) -> str:
        done = self.run(*command, stdin=stdin, seconds=seconds)
        if done.returncode != 0:
            raise CommandError(f"{shlex.join(command)}: {done.stderr.strip()}")
        return done.stdout

    def kubectl(self, *arguments: str, stdin: str = "", seconds: float = 60) -> str:
        """Standard output of a kubectl that must succeed."""
        return self.must("kubectl", *arguments, stdin=stdin, seconds=seconds)

    def wait(self, what: str, *of: str, seconds: float) -> None:
        """`kubectl wait --for=WHAT OF...`."""
        self.kubectl("wait", f"--for={what}", *of, f"--timeout={patient(seconds):.0f}s", seconds=seconds + 10)

    def helm(self, *arguments: str) -> str:
        """Standard output of a helm that must succeed."""
        return self.must("helm", *arguments, seconds=180)

    def get(self, *arguments: str) -> dict[str, Any]:
        """`kubectl get ... -o json`."""
        path = path_of(arguments) if self.reader is not None else None
        if self.reader is not None and path is not None:
            try:
                return self.reader.get(path)
            except ReadError as error:
                raise CommandError(f"get {shlex.join(arguments)}: {error}") from error
        document: dict[str, Any] = json.loads(self.kubectl("get", *arguments, "-o", "json"))
        return document

    def worker_nodes(self) -> list[str]:
        """Nodes that take a worker."""
        nodes = self.get("nodes")["items"]
        kept_free = [any(t["effect"] == "NoSchedule" for t in node["spec"].get("taints", [])) for node in nodes]
        return [node["metadata"]["name"] for node, free in zip(nodes, kept_free, strict=True) if not free]

    # --- faults --------------------------------------------------------------------------------------------------

    def power_off(self, node: str) -> None:
        """The node and all that runs on it is gone at once."""
        if self.cluster is not None:
            self.cluster.faults.kill_node(node)
        else:
            self._command("powerOff", node)

    def power_on(self, node: str) -> None:
        """The node comes back."""
        if self.cluster is not None:
            self.cluster.faults.start_node(node)
        else:
            self._command("powerOn", node)
        self.wait("condition=Ready", f"node/{node}", seconds=90)

    def restart_api_server(self) -> None:
        """The API server is away for a moment."""
        if self.cluster is None:
            pytest.skip("only the development cluster's API server may be restarted by a test")
        self.cluster.faults.restart_apiserver()

    def _command(self, key: str, node: str) -> None:
        command = self.settings.get(key)
        if not command:
            pytest.skip(f"the site's settings have no {key} command")
        subprocess.run(command.format(node=node), shell=True, check=True, timeout=patient(120))


@contextlib.contextmanager
def open_site(kind: str) -> Iterator[Site]:
    """The chosen cluster, ready; the development cluster is taken down afterwards, others are left as they were."""
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
    shared = Path(settings.get("shared") or tempfile.gettempdir()) / f"trainium-tests-{os.getpid()}"
    shared.mkdir(mode=0o777, parents=True)
    shared.chmod(0o777)  # workers run as a user of their own
    try:
        yield Site("existing", {}, shared, settings)
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
    """A kind cluster of this session's own; images are built and loaded unless the settings say how pods start."""
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
            for archive in settings.get("images", ()):
                site.must("kind", "load", "image-archive", archive, "--name", name, seconds=300)
            if not settings.get("images"):
                for name_of_image, target in (("operator", "operator"), ("trainer", "trainer-cpu")):
                    image = f"trainium-{name_of_image}:test"
                    site.must("docker", "build", "--target", target, "-t", image, str(ROOT), seconds=1800)
                    site.must("kind", "load", "docker-image", image, "--name", name, seconds=600)
                settings.setdefault("chartValues", {}).update(
                    image={"repository": "trainium-operator", "tag": "test"}, trainerImage="trainium-trainer:test"
                )
            settings.setdefault("powerOff", "docker stop -t 0 {node}")
            settings.setdefault("powerOn", "docker start {node}")
            yield site
        finally:
            site.run("kind", "delete", "cluster", "--name", name, "--kubeconfig", str(kubeconfig), seconds=120)

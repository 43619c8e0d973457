"""An existing cluster (`--cluster=existing`): sessions in any order, after any end.

Run on a control plane of the development cluster without nodes, where the chart has no replicas.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts import generate
from tests.testing.cluster.access import ROOT
from tests.testing.cluster.installed import DEFINITION, InstalledParts, apply_definition, make_namespace
from tests.testing.cluster.leftovers import OccupiedError, check_unoccupied, remove_leftovers
from tests.testing.cluster.marks import HOLD, LABELS, cordon_patch
from tests.testing.cluster.shared_cluster import SharedCluster

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def control_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedCluster]:
    from trainium_devcluster.cluster import Cluster

    with Cluster.start(nodes=()) as cluster:
        shared = tmp_path_factory.mktemp("shared")
        yield SharedCluster("existing", cluster.list_variables(), shared, {"chartValues": {"replicas": 0}})


@pytest.fixture
def cluster(control_plane: SharedCluster) -> Iterator[SharedCluster]:
    """Yield an existing cluster for one test."""
    cluster = replace(control_plane)
    yield cluster
    for left in (("namespace", "trainium-system", "theirs"), ("crd", DEFINITION)):
        cluster.run("kubectl", "delete", *left, "--wait=false", "--ignore-not-found")
    remove_leftovers(cluster, fail_to_power_on)


def fail_to_power_on(node: str) -> None:
    raise AssertionError(node)


def create(cluster: SharedCluster, document: dict[str, Any]) -> None:
    cluster.kubectl("create", "-f", "-", stdin=json.dumps(document))


def names(cluster: SharedCluster, kind: str, namespace: str = "default") -> set[str]:
    return {item["metadata"]["name"] for item in cluster.get(kind, "-n", namespace)["items"]}


# --- what is left ----------------------------------------------------------------------------------------------------


def test_only_objects_of_tests_are_removed(cluster: SharedCluster) -> None:
    for name in ("t-left", "theirs"):
        if name == "theirs":
            cluster.kubectl("create", "namespace", name)
        else:
            make_namespace(cluster, name)
        pod = {"metadata": {"name": "p", "finalizers": [HOLD]}, "spec": {"containers": [{"name": "c", "image": "i"}]}}
        create(
            cluster,
            {"apiVersion": "v1", "kind": "Pod", **pod, "metadata": {**pod["metadata"], "namespace": name}},
        )
    for role, labels in (("left-by-tests", LABELS), ("theirs", {})):
        kind = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "rules": []}
        create(cluster, {**kind, "metadata": {"name": role, "labels": labels}})
    remove_leftovers(cluster, fail_to_power_on)
    assert "t-left" not in names(cluster, "namespaces")
    assert {"theirs"} <= names(cluster, "namespaces")
    assert "left-by-tests" not in names(cluster, "clusterroles")
    assert "theirs" in names(cluster, "clusterroles")
    assert names(cluster, "pods", "theirs") == {"p"}
    cluster.kubectl("patch", "pod", "p", "-n", "theirs", "--type=merge", "-p", '{"metadata":{"finalizers":null}}')
    cluster.kubectl("delete", "clusterrole", "theirs")


def test_disturbed_nodes_are_restored(cluster: SharedCluster) -> None:
    theirs = {"key": "theirs", "effect": "NoSchedule"}
    for name in ("disturbed", "cordoned"):
        spec = {"taints": [theirs], "unschedulable": name == "cordoned"}
        create(cluster, {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}, "spec": spec})
    cluster.kubectl("patch", "node", "disturbed", "--type=merge", "-p", json.dumps(cordon_patch(on=True)))
    remove_leftovers(cluster, fail_to_power_on)
    nodes = {item["metadata"]["name"]: item for item in cluster.get("nodes")["items"]}
    assert "unschedulable" not in nodes["disturbed"]["spec"]
    assert nodes["cordoned"]["spec"]["unschedulable"], "by another user"
    taints = [taint["key"] for taint in nodes["disturbed"]["spec"]["taints"] if not taint["key"].startswith("node.")]
    assert taints == ["theirs"]
    assert not [key for key in nodes["disturbed"]["metadata"].get("annotations", {}) if key.startswith("tests.")]
    cluster.kubectl("delete", "node", *nodes)


def test_a_cordoned_node_is_restored(cluster: SharedCluster) -> None:
    create(cluster, {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n"}})
    before = cluster.get("node", "n")
    with cluster.cordon_nodes("n"):
        assert cluster.get("node", "n")["spec"]["unschedulable"]
    after = cluster.get("node", "n")
    assert after["metadata"].get("annotations", {}) == before["metadata"].get("annotations", {})
    assert "unschedulable" not in after["spec"]
    cluster.kubectl("delete", "node", "n")


def test_a_foreign_operator_or_job_stops_the_session(cluster: SharedCluster) -> None:
    apply_definition(cluster)
    check_unoccupied(cluster)
    job = {"apiVersion": "trainium.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "llama"}}
    trainer = {"data": {"source": "python-docs"}}
    create(cluster, {**job, "spec": {"workers": {"accelerator": {"device": "cpu"}}, "trainer": trainer}})
    with pytest.raises(
        OccupiedError, match=r"has trainingjobs .* no test created \(default/llama\).* delete them first"
    ):
        check_unoccupied(cluster)
    cluster.kubectl("delete", "trn", "llama")
    install = [document for document in yaml.safe_load_all((ROOT / generate.INSTALL).read_text()) if document]
    cluster.run("kubectl", "create", "namespace", "trainium-system")
    (deployment,) = (document for document in install if document["kind"] == "Deployment")
    create(cluster, deployment | {"spec": {**deployment["spec"], "replicas": 0}})
    with pytest.raises(OccupiedError, match=r"deployments .*\(trainium-system/trainium-operator\).*\(helm uninstall\)"):
        check_unoccupied(cluster)


def test_only_a_definition_that_tests_installed_is_removed(
    cluster: SharedCluster,
) -> None:
    apply_definition(cluster)
    crd = str(ROOT / "manifests/crd.yaml")
    cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", crd)
    remove_leftovers(cluster, fail_to_power_on)
    assert DEFINITION not in names(cluster, "crd")
    cluster.kubectl("apply", "--server-side", "-f", crd)
    apply_definition(cluster)
    remove_leftovers(cluster, fail_to_power_on)
    assert DEFINITION in names(cluster, "crd")


# --- rings in any order ----------------------------------------------------------------------------------------------


def deployments(cluster: SharedCluster) -> list[str]:
    return [item["metadata"]["name"] for item in cluster.get("deployments", "-A")["items"]]


def test_each_ring_finds_the_parts_that_it_needs_in_any_order(cluster: SharedCluster) -> None:
    for need in (InstalledParts.OPERATOR, InstalledParts.DEFINITION, InstalledParts.OPERATOR, InstalledParts.OPERATOR):
        cluster.installed.ensure(need)
        assert deployments(cluster) == (["trainium-operator"] if need is InstalledParts.OPERATOR else [])
        assert DEFINITION in names(cluster, "crd")


SAMPLE_FIXTURES = """
import pytest

@pytest.fixture(scope="session")
def defined(shared_cluster): return shared_cluster

@pytest.fixture(scope="session")
def operator(shared_cluster): return shared_cluster
"""
SAMPLE = """
import os, signal
from tests.testing.cluster.installed import make_namespace

def deployments(cluster):
    return [each["metadata"]["name"] for each in cluster.get("deployments", "-A")["items"]]

def test_defined(defined):
    assert deployments(defined) == []
    make_namespace(defined, "t-defined")

def test_operator(operator):
    assert deployments(operator) == ["trainium-operator"]
    make_namespace(operator, "t-operator")
    if os.environ.get("KILL"):
        os.kill(os.getpid(), signal.SIGKILL)

def test_again(defined):
    assert deployments(defined) == []
"""


def run_in(cluster: SharedCluster, folder: Path, *tests: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a separate session with this project's hooks."""
    (folder / "test_sample.py").write_text(SAMPLE)
    (folder / "conftest.py").write_text((ROOT / "tests/conftest.py").read_text() + SAMPLE_FIXTURES)
    settings = folder / "settings.yaml"
    settings.write_text(yaml.safe_dump({"shared": str(folder), **cluster.settings}))
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(folder)]
    command += ["-o", f"pythonpath={ROOT}", "-p", "no:cacheprovider", "--cluster=existing"]
    environment = os.environ | cluster.variables | {"TRAINIUM_TEST_SITE": str(settings)} | more
    command += [f"test_sample.py::{test}" for test in tests]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_sessions_pass_in_any_order_and_after_one_that_was_killed(cluster: SharedCluster, tmp_path: Path) -> None:
    remaining = names(cluster, "namespaces")
    killed = run_in(cluster, tmp_path, "test_defined", "test_operator", KILL="yes")
    assert killed.returncode == -signal.SIGKILL
    assert {"t-defined", "t-operator", "trainium-system"} <= names(cluster, "namespaces")
    assert deployments(cluster) == ["trainium-operator"]
    for order in (("test_defined", "test_operator", "test_again"), ("test_operator", "test_defined")):
        done = run_in(cluster, tmp_path, *order)
        assert done.returncode == 0, done.stdout + done.stderr
        assert names(cluster, "namespaces") == remaining
        assert DEFINITION not in names(cluster, "crd")

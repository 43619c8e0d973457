"""The development cluster's control plane: real components, verified TLS, real accounts, and nothing left behind."""

import contextlib
import json
import os
import signal
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.testing.suite.timeouts import scaled, until
from trainium_contract.api_server.errors import NotFoundError
from trainium_devcluster.binaries.catalog import find_kubernetes
from trainium_devcluster.cluster import Cluster
from trainium_devcluster.controlplane.components import Component
from trainium_devcluster.errors import ClusterError
from trainium_devcluster.state import ClusterPaths, ClusterSpec

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

VERSION = f"v{find_kubernetes().number}"
CLI = [sys.executable, "-m", "trainium_devcluster.cli"]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def pids(cluster: Cluster) -> list[int]:
    state = cluster.read_status()
    return [state["supervisor"]["pid"], *(row["pid"] for row in state["components"].values())]


@pytest.fixture(scope="module", autouse=True)
def state_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return a state folder apart from that of the user's clusters, which are stopped at the end if a test failed."""
    folder = tmp_path_factory.mktemp("state")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(folder))
        yield folder
        subprocess.run([*CLI, "down", "--all"], check=True, capture_output=True)


OWNER = """
import time
from trainium_devcluster.binaries.catalog import find_kubernetes
from trainium_devcluster.cluster import Cluster
cluster = Cluster.start("owned")
print("up", flush=True)
time.sleep(3600)
"""


@pytest.fixture(scope="module")
def owner(state_home: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process that owns a cluster; it is killed afterwards."""
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"up\n"
        yield owner
        owner.kill()


@pytest.fixture(scope="module")
def cluster(owner: subprocess.Popen[bytes]) -> Iterator[Cluster]:
    connected = Cluster.connect("owned")
    with contextlib.closing(connected.api):
        yield connected


def run_command(*arguments: str, name: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([*CLI, *arguments, "--name", name], capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    return done


def test_components_are_ready_and_default_objects_exist(cluster: Cluster) -> None:
    state = cluster.read_status()
    assert state["ready"]
    assert sorted(state["components"]) == sorted(Component)
    assert cluster.kubectl("get", "--raw", "/readyz") == "ok"
    namespaces = cluster.kubectl("get", "namespaces", "-o", "name").split()
    assert {"namespace/default", "namespace/kube-system", "namespace/kube-node-lease"} <= set(namespaces)
    root = cluster.api.get("/api/v1/namespaces/default/configmaps/kube-root-ca.crt")
    assert root["data"]["ca.crt"].encode() == (cluster.paths.pki / "ca.crt").read_bytes()


def test_kubectl_and_helm_have_the_pinned_versions(cluster: Cluster) -> None:
    versions = json.loads(cluster.kubectl("version", "-o", "json"))
    assert versions["clientVersion"]["gitVersion"] == versions["serverVersion"]["gitVersion"] == VERSION
    assert cluster.helm("version", "--short").strip().startswith("v4.3.1")


def test_a_server_certificate_is_needed_and_verified(cluster: Cluster) -> None:
    url = f"{cluster.ports.server}/version"
    with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
        urllib.request.urlopen(url, timeout=scaled(5), context=ssl.create_default_context())
    context = ssl.create_default_context(cafile=str(cluster.paths.pki / "ca.crt"))
    with urllib.request.urlopen(url, timeout=scaled(5), context=context) as answer:
        assert json.load(answer)["gitVersion"] == VERSION


def test_etcd_requires_a_client_certificate(cluster: Cluster) -> None:
    context = ssl.create_default_context(cafile=str(cluster.paths.pki / "ca.crt"))
    with pytest.raises((ssl.SSLError, OSError)):
        urllib.request.urlopen(f"https://127.0.0.1:{cluster.ports.etcd}/health", timeout=scaled(5), context=context)


def test_a_token_is_valid_for_its_audience_and_rights(cluster: Cluster) -> None:
    cluster.kubectl("create", "serviceaccount", "worker")
    token = cluster.kubectl("create", "token", "worker", "--audience", "trainium.dev/coordinator").strip()

    def review(audience: str) -> bool:
        document = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenReview",
            "spec": {"token": token, "audiences": [audience]},
        }
        answer = cluster.api.create("/apis/authentication.k8s.io/v1/tokenreviews", document)
        return bool(answer["status"].get("authenticated", False))

    assert review("trainium.dev/coordinator")
    assert not review("somebody.else")
    plain = cluster.kubectl("create", "token", "worker").strip()
    arguments = ("--token", plain, "--server", cluster.ports.server)
    anonymous = [f"--certificate-authority={cluster.paths.pki / 'ca.crt'}", "--kubeconfig=/dev/null"]
    assert "system:serviceaccount:default:worker" in cluster.kubectl("auth", "whoami", *arguments, *anonymous)
    with pytest.raises(ClusterError, match=r"forbidden.*cannot list resource"):
        cluster.kubectl("get", "secrets", *arguments, *anonymous)


def test_the_garbage_collector_and_admission_work(cluster: Cluster) -> None:
    owner = cluster.api.create(
        "/api/v1/namespaces/default/configmaps",
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "owner"}},
    )
    reference = {"apiVersion": "v1", "kind": "ConfigMap", "name": "owner", "uid": owner["metadata"]["uid"]}
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "owned", "ownerReferences": [reference]},
        "spec": {"containers": [{"name": "c", "image": "any"}]},
    }
    created = cluster.api.create("/api/v1/namespaces/default/pods", pod)
    assert created["spec"]["serviceAccountName"] == "default"
    assert created["spec"]["volumes"][0]["projected"]["sources"][0]["serviceAccountToken"]
    cluster.kubectl("delete", "configmap", "owner")
    until(lambda: cluster.kubectl("get", "pod", "owned", "--ignore-not-found") == "", "the owned pod goes")


def test_a_node_cannot_write_another_node(cluster: Cluster) -> None:
    arguments = ("--as", "system:node:node-1", "--as-group", "system:nodes")
    assert cluster.kubectl("auth", "can-i", "list", "services", *arguments).strip() == "yes"
    manifest = json.dumps({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "node-2"}})
    with pytest.raises(ClusterError, match="not allowed to modify node"):
        cluster.kubectl("create", "-f", "-", *arguments, stdin=manifest)


def test_a_restarted_api_server_keeps_address_and_data(cluster: Cluster) -> None:
    before = cluster.read_status()["components"][Component.APISERVER]["pid"]
    cluster.kubectl("create", "configmap", "kept", "--from-literal=a=b")
    cluster.faults.stop(Component.APISERVER, seconds=0)
    with pytest.raises(ClusterError, match="refused"):
        cluster.kubectl("get", "configmap", "kept")
    assert cluster.read_status()["components"][Component.APISERVER]["state"] == "stopped"
    assert "is ready" in run_command("fault", "restart-apiserver", name="owned").stderr
    assert cluster.kubectl("get", "configmap", "kept", "-o", "jsonpath={.data.a}") == "b"
    assert cluster.read_status()["components"][Component.APISERVER]["pid"] != before


def test_a_crashed_component_is_restarted(cluster: Cluster) -> None:
    before = cluster.read_status()["components"][Component.SCHEDULER]
    os.kill(before["pid"], signal.SIGKILL)
    until(
        lambda: cluster.read_status()["components"][Component.SCHEDULER]["restarts"] == before["restarts"] + 1,
        "the scheduler is started again",
    )
    cluster.wait_for_component(Component.SCHEDULER)


def test_unknown_nodes_and_pods_are_errors(cluster: Cluster) -> None:
    with pytest.raises(ClusterError, match="has no node 'nobody'; its nodes: none"):
        cluster.faults.kill_node("nobody")
    with pytest.raises(ClusterError, match="has no node 'nobody'"):
        cluster.faults.slow_node("nobody")
    with pytest.raises(ClusterError, match="give a share above 0"):
        cluster.faults.slow_node("nobody", 0)
    with pytest.raises(ClusterError, match="True, False or Unknown"):
        cluster.faults.set_condition("nobody", "NeuronHealthy", "no", "Because")
    with pytest.raises(NotFoundError, match='pods "nobody" not found'):
        cluster.faults.kill_container("default", "nobody")


@pytest.mark.long
def test_two_clusters_run_side_by_side_and_stop_completely(cluster: Cluster) -> None:
    paths = ClusterPaths.of("stale")
    (paths.root / "etcd").mkdir(parents=True)
    paths.spec.write_text(ClusterSpec("stale").to_json())
    (paths.root / "etcd" / "rubbish").write_text("x")
    with Cluster.start("stale") as other:
        cluster.kubectl("create", "namespace", "only-here")
        assert "only-here" not in other.kubectl("get", "namespaces")
        processes, root = pids(other), other.paths.root
        assert all(is_alive(pid) for pid in processes)
    assert not any(is_alive(pid) for pid in processes)
    assert not root.exists()
    assert cluster.kubectl("get", "--raw", "/readyz") == "ok"


def test_invalid_flags_have_the_error_of_the_component(state_home: Path) -> None:
    with pytest.raises(ClusterError, match=r"kube-apiserver ended with code 1.*unknown flag: --no-such-flag"):
        Cluster.start("bad-flags", apiserver_args=["--no-such-flag"])
    assert not ClusterPaths.of("bad-flags").root.exists()


def test_a_cluster_ends_with_the_process_that_owns_it(owner: subprocess.Popen[bytes], cluster: Cluster) -> None:
    """The last test of this cluster."""
    processes = pids(cluster)
    owner.kill()
    until(lambda: not any(is_alive(pid) for pid in processes), "every process ends")
    until(lambda: not cluster.paths.root.exists(), "the files go")


def test_the_command_line_starts_and_stops_a_cluster(state_home: Path) -> None:
    command = partial(run_command, name="by-hand")
    assert "is not running" in command("status", code=1).stderr
    assert "is ready after" in command("up", "--nodes", "0").stderr
    processes = pids(Cluster.connect("by-hand"))
    assert "already runs" in command("up", "--nodes", "0", code=1).stderr
    exports = command("env").stdout
    shell = subprocess.run(
        ["bash", "-c", f"{exports}\nkubectl get --raw /readyz"], capture_output=True, text=True, check=True
    )
    assert shell.stdout == "ok"
    assert "kube-apiserver" in command("status").stdout
    assert json.loads(command("status", "--json").stdout)["ready"] is True
    missing = command("fault", "kill-node", "nobody", code=1).stderr
    assert missing.startswith("error: ")
    assert len(missing.strip().splitlines()) == 1
    assert "is down" in command("down").stderr
    assert not any(is_alive(pid) for pid in processes)
    assert "there is no cluster by-hand" in command("down").stderr


@pytest.mark.long
def test_a_killed_supervisor_ends_its_cluster(state_home: Path) -> None:
    subprocess.run([*CLI, "up", "--nodes", "0", "--name", "crashed"], check=True, capture_output=True)
    cluster = Cluster.connect("crashed")
    processes = pids(cluster)
    os.kill(cluster.read_status()["supervisor"]["pid"], signal.SIGKILL)
    until(lambda: not any(is_alive(pid) for pid in processes), "every process ends")
    done = subprocess.run([*CLI, "down", "--name", "crashed"], check=True, capture_output=True, text=True)
    assert "was not running" in done.stderr
    assert not cluster.paths.root.exists()


@pytest.mark.long
def test_run_returns_the_exit_code_of_its_command(state_home: Path) -> None:
    command = ["run", "--nodes", "0", "--", "sh", "-c", "kubectl get --raw /readyz && exit 7"]
    done = subprocess.run([*CLI, *command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (7, "ok")

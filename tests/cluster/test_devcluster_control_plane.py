"""The development cluster's control plane: real components, verified TLS, real accounts, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.testing.suite.timeouts import scaled, until
from trainium_devcluster.cluster import Cluster
from trainium_devcluster.controlplane.components import Component
from trainium_devcluster.errors import ClusterError
from trainium_devcluster.state import ClusterPaths, ClusterSpec

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

CLI = [sys.executable, "-m", "trainium_devcluster.cli"]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def pids(cluster: Cluster) -> list[int]:
    state = cluster.status()
    return [state["supervisor"]["pid"], *(row["pid"] for row in state["components"].values())]


@pytest.fixture(scope="module", autouse=True)
def state_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Clusters of these tests never meet those of a person."""
    folder = tmp_path_factory.mktemp("state")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(folder))
        yield folder


@pytest.fixture(scope="module")
def cluster(state_home: Path) -> Iterator[Cluster]:
    with Cluster.start() as cluster:
        yield cluster


def test_all_components_are_ready_and_the_objects_of_a_new_cluster_exist(cluster: Cluster) -> None:
    state = cluster.status()
    assert state["ready"]
    assert sorted(state["components"]) == sorted(Component)
    assert cluster.kubectl("get", "--raw", "/readyz") == "ok"
    namespaces = cluster.kubectl("get", "namespaces", "-o", "name").split()
    assert {"namespace/default", "namespace/kube-system", "namespace/kube-node-lease"} <= set(namespaces)
    root = cluster.api.get("/api/v1/namespaces/default/configmaps/kube-root-ca.crt")
    assert root["data"]["ca.crt"].encode() == (cluster.paths.pki / "ca.crt").read_bytes()


def test_kubectl_and_helm_have_the_pinned_versions(cluster: Cluster) -> None:
    versions = json.loads(cluster.kubectl("version", "-o", "json"))
    assert versions["clientVersion"]["gitVersion"] == versions["serverVersion"]["gitVersion"] == "v1.36.3"
    assert cluster.helm("version", "--short").strip().startswith("v4.3.1")


def test_a_server_certificate_is_needed_and_verified(cluster: Cluster) -> None:
    url = f"{cluster.ports.server}/version"
    with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
        urllib.request.urlopen(url, timeout=scaled(5), context=ssl.create_default_context())
    own = ssl.create_default_context(cafile=str(cluster.paths.pki / "ca.crt"))
    with urllib.request.urlopen(url, timeout=scaled(5), context=own) as answer:
        assert json.load(answer)["gitVersion"] == "v1.36.3"


def test_etcd_refuses_who_has_no_certificate(cluster: Cluster) -> None:
    own = ssl.create_default_context(cafile=str(cluster.paths.pki / "ca.crt"))
    with pytest.raises((ssl.SSLError, OSError)):
        urllib.request.urlopen(f"https://127.0.0.1:{cluster.ports.etcd}/health", timeout=scaled(5), context=own)


def test_a_token_is_valid_for_its_audience_only_and_its_rights_are_checked(cluster: Cluster) -> None:
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
    made = cluster.api.create("/api/v1/namespaces/default/pods", pod)
    assert made["spec"]["serviceAccountName"] == "default"
    assert made["spec"]["volumes"][0]["projected"]["sources"][0]["serviceAccountToken"]
    cluster.kubectl("delete", "configmap", "owner")
    until(lambda: cluster.kubectl("get", "pod", "owned", "--ignore-not-found") == "", "the owned pod goes")


def test_a_node_may_not_act_for_another(cluster: Cluster) -> None:
    arguments = ("--as", "system:node:node-1", "--as-group", "system:nodes")
    assert cluster.kubectl("auth", "can-i", "list", "services", *arguments).strip() == "yes"
    manifest = json.dumps({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "node-2"}})
    with pytest.raises(ClusterError, match="not allowed to modify node"):
        cluster.kubectl("create", "-f", "-", *arguments, stdin=manifest)


def test_a_restarted_api_server_keeps_address_and_data(cluster: Cluster) -> None:
    before = cluster.status()["components"][Component.APISERVER]["pid"]
    cluster.kubectl("create", "configmap", "kept", "--from-literal=a=b")
    cluster.faults.stop_apiserver()
    with pytest.raises(ClusterError, match="refused"):
        cluster.kubectl("get", "configmap", "kept")
    assert cluster.status()["components"][Component.APISERVER]["state"] == "stopped"
    cluster.faults.start_apiserver()
    assert cluster.kubectl("get", "configmap", "kept", "-o", "jsonpath={.data.a}") == "b"
    assert cluster.status()["components"][Component.APISERVER]["pid"] != before


def test_a_component_that_dies_by_itself_comes_back(cluster: Cluster) -> None:
    before = cluster.status()["components"][Component.SCHEDULER]
    os.kill(before["pid"], signal.SIGKILL)
    until(
        lambda: cluster.status()["components"][Component.SCHEDULER]["restarts"] == before["restarts"] + 1,
        "the scheduler is started again",
    )
    cluster.wait_for_component(Component.SCHEDULER)


def test_unknown_nodes_and_pods_are_sentences(cluster: Cluster) -> None:
    with pytest.raises(ClusterError, match="has no node 'nobody'; its nodes: none"):
        cluster.faults.kill_node("nobody")
    with pytest.raises(ClusterError, match="has no node 'nobody'"):
        cluster.faults.slow_node("nobody")
    with pytest.raises(ClusterError, match="give a share above 0"):
        cluster.faults.slow_node("nobody", 0)
    with pytest.raises(ClusterError, match="True, False or Unknown"):
        cluster.faults.set_condition("nobody", "NeuronHealthy", "no", "Because")
    with pytest.raises(ClusterError, match='pods "nobody" not found'):
        cluster.faults.kill_container("default", "nobody")


def test_two_clusters_run_side_by_side_also_over_files_of_a_dead_one_and_stop_leaves_nothing(cluster: Cluster) -> None:
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


def test_bad_flags_are_reported_as_the_component_reports_them_and_nothing_stays(state_home: Path) -> None:
    with pytest.raises(ClusterError, match=r"kube-apiserver ended with code 1.*unknown flag: --no-such-flag"):
        Cluster.start("bad-flags", apiserver_args=["--no-such-flag"])
    assert not ClusterPaths.of("bad-flags").root.exists()


def test_a_cluster_ends_with_the_process_that_owns_it(state_home: Path) -> None:
    script = (
        "import time\n"
        "from trainium_devcluster.cluster import Cluster\n"
        "cluster = Cluster.start('orphan')\n"
        "print('up', flush=True)\n"
        "time.sleep(300)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"up\n"
        processes = pids(Cluster.connect("orphan"))
        owner.kill()
    until(lambda: not any(is_alive(pid) for pid in processes), "every process ends")
    until(lambda: not ClusterPaths.of("orphan").root.exists(), "the files go")


def test_the_command_line_starts_and_stops_a_cluster(state_home: Path) -> None:
    def command(*arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        done = subprocess.run([*CLI, *arguments, "--name", "by-hand"], capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stderr
        return done

    assert "is not running" in command("status", code=1).stderr
    assert "is ready after" in command("up", "--nodes", "0").stderr
    processes = pids(Cluster.connect("by-hand"))
    assert "runs already" in command("up", "--nodes", "0", code=1).stderr
    exports = command("env").stdout
    shell = subprocess.run(
        ["bash", "-c", f"{exports}\nkubectl get --raw /readyz"], capture_output=True, text=True, check=True
    )
    assert shell.stdout == "ok"
    assert "kube-apiserver" in command("status").stdout
    assert json.loads(command("status", "--json").stdout)["ready"] is True
    assert "is ready" in command("fault", "restart-apiserver").stderr
    missing = command("fault", "kill-node", "nobody", code=1).stderr
    assert missing.startswith("error: ")
    assert len(missing.strip().splitlines()) == 1
    assert "is down" in command("down").stderr
    assert not any(is_alive(pid) for pid in processes)
    assert "there is no cluster by-hand" in command("down").stderr


@pytest.mark.long
def test_a_killed_supervisor_takes_everything_along_and_down_clears_the_rest(state_home: Path) -> None:
    subprocess.run([*CLI, "up", "--nodes", "0", "--name", "crashed"], check=True, capture_output=True)
    cluster = Cluster.connect("crashed")
    processes = pids(cluster)
    os.kill(cluster.status()["supervisor"]["pid"], signal.SIGKILL)
    until(lambda: not any(is_alive(pid) for pid in processes), "every process ends")
    done = subprocess.run([*CLI, "down", "--name", "crashed"], check=True, capture_output=True, text=True)
    assert "was not running" in done.stderr
    assert not cluster.paths.root.exists()


def test_run_gives_the_command_a_cluster_and_its_exit_code(state_home: Path) -> None:
    command = ["run", "--nodes", "0", "--", "sh", "-c", "kubectl get --raw /readyz && exit 7"]
    done = subprocess.run([*CLI, *command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (7, "ok")

"""A cluster that is lent to the tests (`--cluster=existing`): one session at a time, in any order, after any end.

Run on a control plane of the development cluster without nodes, where the chart has no replicas.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from scripts import generate
from tests.testing.cluster.access import ROOT
from tests.testing.cluster.installed import DEFINITION, RingNeed, apply_definition, make_namespace
from tests.testing.cluster.leftovers import OccupiedError, refuse_to_disturb, sweep
from tests.testing.cluster.marks import HOLD, LABELS, cordon_of
from tests.testing.cluster.session_lease import NAME, LeaseHolder, SessionLease, TakenError
from tests.testing.cluster.sites import Site
from tests.testing.suite.timeouts import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def control_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    from trainium_devcluster.cluster import Cluster

    with Cluster.start(nodes=()) as cluster:
        shared = tmp_path_factory.mktemp("shared")
        yield Site("existing", cluster.variables(), shared, {"chartValues": {"replicas": 0}})


@pytest.fixture
def lent(control_plane: Site) -> Iterator[Site]:
    """Lend a cluster for one test."""
    site = replace(control_plane)
    yield site
    for left in (("lease", NAME), ("namespace", "trainium-system", "theirs"), ("crd", DEFINITION)):
        site.run("kubectl", "delete", *left, "--wait=false", "--ignore-not-found")
    sweep(site, power_off_is_not_known)


@pytest.fixture
def contested(control_plane: Site) -> Iterator[Site]:
    """Lend a cluster to several sessions."""
    yield control_plane
    control_plane.run("kubectl", "delete", "lease", NAME, "--ignore-not-found")


def power_off_is_not_known(node: str) -> None:
    raise AssertionError(node)


def made(site: Site, document: dict[str, Any]) -> None:
    site.kubectl("create", "-f", "-", stdin=json.dumps(document))


def names(site: Site, kind: str, namespace: str = "default") -> set[str]:
    return {each["metadata"]["name"] for each in site.get(kind, "-n", namespace)["items"]}


# --- one session at a time -------------------------------------------------------------------------------------------


def test_a_second_session_learns_who_has_the_cluster_and_has_it_afterwards(contested: Site) -> None:
    with (
        SessionLease(contested).held(),
        pytest.raises(TakenError, match=f"this cluster: process {os.getpid()} on "),
    ):
        SessionLease(contested).held().__enter__()
    with SessionLease(contested).held():
        assert names(contested, "leases") == {NAME}
    assert names(contested, "leases") == set()


def test_what_a_process_of_this_machine_left_that_has_ended_is_taken_over_at_once(contested: Site) -> None:
    with subprocess.Popen([sys.executable, "-c", "pass"]) as ended:
        ended.wait()
    missing = replace(LeaseHolder.this(), process=ended.pid)
    # Never released: as after a SIGKILL.
    SessionLease(contested, missing)._take()
    with SessionLease(contested, within=3600).held():
        assert LeaseHolder.read(contested.get("lease", NAME)["spec"]["holderIdentity"]) == LeaseHolder.this()


def test_a_session_on_another_machine_keeps_the_cluster_while_it_renews_and_loses_it_when_it_does_not(
    contested: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.testing.cluster.session_lease.RENEW_SECONDS", 0.1)
    elsewhere = replace(LeaseHolder.this(), machine="elsewhere-1")
    with SessionLease(contested, elsewhere).held(), pytest.raises(TakenError, match="on elsewhere-1"):
        SessionLease(contested, within=60).held().__enter__()
    SessionLease(contested, elsewhere)._take()
    with SessionLease(contested, within=0.5).held():
        assert LeaseHolder.read(contested.get("lease", NAME)["spec"]["holderIdentity"]) == LeaseHolder.this()


def test_a_session_that_has_lost_the_cluster_knows_it_and_leaves_the_lease_alone(
    contested: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.testing.cluster.session_lease.RENEW_SECONDS", 0.1)
    lease = SessionLease(contested)
    with lease.held():
        change = json.dumps({"spec": {"holderIdentity": "elsewhere-1/7/100"}})
        # Between what the session reads and writes: it is refused then.
        until(
            lambda: contested.run("kubectl", "patch", "lease", NAME, "--type=merge", "-p", change).returncode == 0,
            "taken",
        )
        until(lambda: lease.lost, "the loss is seen")
    assert lease.lost == "elsewhere-1/7/100"
    assert names(contested, "leases") == {NAME}


def test_of_two_sessions_that_come_at_once_one_has_the_cluster(contested: Site) -> None:
    missing = replace(LeaseHolder.this(), process=1, began=1)
    SessionLease(contested, missing)._take()
    shown: list[str] = []

    def take() -> None:
        try:
            SessionLease(contested)._take()
        except TakenError:
            shown.append("taken")
        else:
            shown.append("has it")

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(shown) == ["has it", "taken", "taken", "taken"]


# --- what is left ----------------------------------------------------------------------------------------------------


def test_what_tests_made_goes_and_what_somebody_else_has_stays(lent: Site) -> None:
    for name in ("t-left", "theirs"):
        if name == "theirs":
            lent.kubectl("create", "namespace", name)
        else:
            make_namespace(lent, name)
        pod = {"metadata": {"name": "p", "finalizers": [HOLD]}, "spec": {"containers": [{"name": "c", "image": "i"}]}}
        made(lent, {"apiVersion": "v1", "kind": "Pod", **pod, "metadata": {**pod["metadata"], "namespace": name}})
    for role, labels in (("left-by-tests", LABELS), ("theirs", {})):
        kind = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "rules": []}
        made(lent, {**kind, "metadata": {"name": role, "labels": labels}})
    sweep(lent, power_off_is_not_known)
    assert "t-left" not in names(lent, "namespaces")
    assert {"theirs"} <= names(lent, "namespaces")
    assert "left-by-tests" not in names(lent, "clusterroles")
    assert "theirs" in names(lent, "clusterroles")
    assert names(lent, "pods", "theirs") == {"p"}
    lent.kubectl("patch", "pod", "p", "-n", "theirs", "--type=merge", "-p", '{"metadata":{"finalizers":null}}')
    lent.kubectl("delete", "clusterrole", "theirs")


def test_nodes_are_as_they_were(lent: Site) -> None:
    theirs = {"key": "theirs", "effect": "NoSchedule"}
    for name in ("disturbed", "kept-off"):
        spec = {"taints": [theirs], "unschedulable": name == "kept-off"}
        made(lent, {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}, "spec": spec})
    lent.kubectl("patch", "node", "disturbed", "--type=merge", "-p", json.dumps(cordon_of(on=True)))
    sweep(lent, power_off_is_not_known)
    nodes = {each["metadata"]["name"]: each for each in lent.get("nodes")["items"]}
    assert "unschedulable" not in nodes["disturbed"]["spec"]
    assert nodes["kept-off"]["spec"]["unschedulable"], "by somebody else"
    taints = [each["key"] for each in nodes["disturbed"]["spec"]["taints"] if not each["key"].startswith("node.")]
    assert taints == ["theirs"]
    assert not [key for key in nodes["disturbed"]["metadata"].get("annotations", {}) if key.startswith("tests.")]
    lent.kubectl("delete", "node", *nodes)


def test_the_block_around_a_disturbed_node_leaves_it_as_it_was(lent: Site) -> None:
    made(lent, {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n"}})
    before = lent.get("node", "n")
    with lent.cordoned("n"):
        assert lent.get("node", "n")["spec"]["unschedulable"]
    after = lent.get("node", "n")
    assert after["metadata"].get("annotations", {}) == before["metadata"].get("annotations", {})
    assert "unschedulable" not in after["spec"]
    lent.kubectl("delete", "node", "n")


def test_no_test_begins_beside_an_operator_or_jobs_of_somebody_else(lent: Site) -> None:
    apply_definition(lent)
    refuse_to_disturb(lent)
    job = {"apiVersion": "trainium.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "llama"}}
    made(lent, {**job, "spec": {"workers": {"accelerator": {"device": "cpu"}}, "trainer": {}}})
    with pytest.raises(OccupiedError, match=r"has trainingjobs .* no test made \(default/llama\).* delete them first"):
        refuse_to_disturb(lent)
    lent.kubectl("delete", "trn", "llama")
    install = [each for each in yaml.safe_load_all((ROOT / generate.INSTALL).read_text()) if each]
    lent.run("kubectl", "create", "namespace", "trainium-system")
    (deployment,) = (each for each in install if each["kind"] == "Deployment")
    made(lent, deployment | {"spec": {**deployment["spec"], "replicas": 0}})
    with pytest.raises(OccupiedError, match=r"deployments .*\(trainium-system/trainium-operator\).*\(helm uninstall\)"):
        refuse_to_disturb(lent)


def test_a_definition_that_tests_installed_goes_although_others_applied_it_too_and_another_stays(lent: Site) -> None:
    apply_definition(lent)
    crd = str(ROOT / "manifests/crd.yaml")
    lent.kubectl("apply", "--server-side", "--force-conflicts", "-f", crd)
    sweep(lent, power_off_is_not_known)
    assert DEFINITION not in names(lent, "crd")
    lent.kubectl("apply", "--server-side", "-f", crd)
    apply_definition(lent)
    sweep(lent, power_off_is_not_known)
    assert DEFINITION in names(lent, "crd")


# --- rings in any order ----------------------------------------------------------------------------------------------


def deployments(site: Site) -> list[str]:
    return [each["metadata"]["name"] for each in site.get("deployments", "-A")["items"]]


def test_a_ring_finds_the_operator_or_none_whichever_ring_was_before(lent: Site) -> None:
    for need in (RingNeed.OPERATOR, RingNeed.DEFINITION, RingNeed.OPERATOR, RingNeed.OPERATOR):
        lent.installed.ensure(need)
        assert deployments(lent) == (["trainium-operator"] if need is RingNeed.OPERATOR else [])
        assert DEFINITION in names(lent, "crd")


SAMPLE_FIXTURES = """
import pytest

@pytest.fixture(scope="session")
def defined(site): return site

@pytest.fixture(scope="session")
def operator(site): return site
"""
SAMPLE = """
import os, signal
from tests.testing.cluster.installed import make_namespace

def deployments(site):
    return [each["metadata"]["name"] for each in site.get("deployments", "-A")["items"]]

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


def run_in(lent: Site, folder: Path, *tests: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a separate session with this project's hooks."""
    (folder / "test_sample.py").write_text(SAMPLE)
    (folder / "conftest.py").write_text((ROOT / "tests/conftest.py").read_text() + SAMPLE_FIXTURES)
    settings = folder / "site.yaml"
    settings.write_text(yaml.safe_dump({"shared": str(folder), **lent.settings}))
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(folder)]
    command += ["-o", f"pythonpath={ROOT}", "-p", "no:cacheprovider", "--cluster=existing"]
    environment = os.environ | lent.variables | {"TRAINIUM_TEST_SITE": str(settings)} | more
    command += [f"test_sample.py::{test}" for test in tests]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_sessions_pass_in_any_order_and_after_one_that_was_killed(lent: Site, tmp_path: Path) -> None:
    there = names(lent, "namespaces")
    killed = run_in(lent, tmp_path, "test_defined", "test_operator", KILL="yes")
    assert killed.returncode == -signal.SIGKILL
    assert {"t-defined", "t-operator", "trainium-system"} <= names(lent, "namespaces")
    assert deployments(lent) == ["trainium-operator"]
    for order in (("test_defined", "test_operator", "test_again"), ("test_operator", "test_defined")):
        done = run_in(lent, tmp_path, *order)
        assert done.returncode == 0, done.stdout + done.stderr
        assert names(lent, "namespaces") == there
        assert DEFINITION not in names(lent, "crd")


def test_a_session_beside_another_ends_with_a_sentence_and_changes_nothing(lent: Site, tmp_path: Path) -> None:
    with SessionLease(lent).held():
        done = run_in(lent, tmp_path, "test_operator")
    assert done.returncode == 2
    assert "Another session of tests uses this cluster" in done.stdout + done.stderr
    assert deployments(lent) == []

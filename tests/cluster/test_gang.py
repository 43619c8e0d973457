"""Native gang scheduling on a real control plane: a gang is bound whole or not at all, and only a start is a gang.

It has its own control plane, because the API is off by default in Kubernetes 1.36 and 1.37.
"""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.testing.cluster.installed import install_operator
from tests.testing.cluster.jobs import Job
from tests.testing.cluster.shared_cluster import SharedCluster
from tests.testing.operator.job_views import job_spec, job_view
from tests.testing.suite.timeouts import until
from trainium_devcluster.binaries.catalog import find_kubernetes
from trainium_devcluster.cluster import Cluster, create_system_node, create_system_values
from trainium_devcluster.jobs.metrics import has_every_sample_once
from trainium_devcluster.state import NodeSpec
from trainium_operator.cluster.api.client import Api
from trainium_operator.cluster.api.transport import connect
from trainium_operator.cluster.cache.discovery import discover_gang_apis
from trainium_operator.plan.model.actions import ApplyGroup, CreatePod, Plan
from trainium_operator.plan.model.observed import GangApi, Observed, PlanSettings
from trainium_operator.plan.plan import plan

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(600)]

KUBERNETES = find_kubernetes().minor
GATES = "--feature-gates=GenericWorkload=true"
API_VERSIONS = {"1.36": "scheduling.k8s.io/v1alpha2", "1.37": "scheduling.k8s.io/v1beta1"}
SCHEDULER_GATES = {"1.36": f"{GATES},GangScheduling=true", "1.37": GATES}


NODES = 3


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    if request.config.getoption("--cluster") != "local":
        pytest.skip("needs a control plane with an API that is off, which only the development cluster can be given")
    with Cluster.start(
        nodes=[*(NodeSpec(name=f"gang-{at}") for at in range(NODES)), create_system_node()],
        apiserver_args=[f"--runtime-config={API_VERSIONS[KUBERNETES]}=true", GATES],
        controller_manager_args=[GATES],
        scheduler_args=[SCHEDULER_GATES[KUBERNETES]],
    ) as started:
        yield started


async def discover_served_apis(cluster: Cluster) -> dict[GangApi, str]:
    transport = await connect(str(cluster.kubeconfig))
    try:
        return await discover_gang_apis(Api(transport))
    finally:
        await transport.close()


def first_plan(cluster: Cluster, apis: dict[GangApi, str], replicas: int) -> Plan:
    """Return the first plan of a new job of `replicas` CPU workers, whose owner is an existing object."""
    owner = json.loads(cluster.kubectl("get", "configmap", "kube-root-ca.crt", "-o", "json"))["metadata"]["uid"]
    job = job_view(job_spec(workers={"replicas": replicas}), name="gang", uid=owner, created=time.time())
    seen = Observed(
        job=job,
        pods=(),
        nodes={},
        agents={},
        membership=None,
        published=0,
        children={},
        ca_bundle="",
        coordinator_since=0.0,
        now=time.time(),
    )
    return plan(seen, PlanSettings(image="pause", coordinator="nowhere:1", gang_apis=apis))


def apply(cluster: Cluster, manifest: dict[str, Any]) -> None:
    # The garbage collector would take what an owner of another kind does not own.
    manifest = {**manifest, "metadata": {**manifest["metadata"], "ownerReferences": []}}
    cluster.kubectl("apply", "--server-side", "-f", "-", stdin=json.dumps(manifest))


def bound_pods(cluster: Cluster) -> list[str]:
    pods = json.loads(cluster.kubectl("get", "pods", "-l", "trainium.dev/job-name=gang", "-o", "json"))["items"]
    return [pod["metadata"]["name"] for pod in pods if pod["spec"].get("nodeName")]


def test_a_job_that_starts_as_a_gang_trains_through_a_kill_and_resizes(cluster: Cluster, tmp_path: Path) -> None:
    shared = SharedCluster("local", cluster.list_variables(), tmp_path, {}, cluster)
    install_operator(shared, {"statusIntervalSeconds": 1} | create_system_values())
    change = "{scheduling: {gang: Native}, workers: {replicas: 3, minReplicas: 2}, trainer: {steps: 100000}}"
    job = Job(shared, "default", "trained", change).apply()
    job.wait_for_step(5)
    (group,) = {pod["spec"]["schedulingGroup"]["podGroupName"] for pod in job.list_pods()}
    stored = shared.get("podgroup", group)
    assert (stored["apiVersion"], stored["spec"]["schedulingPolicy"]) == (
        API_VERSIONS[KUBERNETES],
        {"gang": {"minCount": 2}},
    )
    before = job.list_uids()

    job.kill_rank(1)
    killed = job.wait_for_recovery(1)
    job.wait_for_step(killed["resumeStep"] + 5)
    assert job.list_uids() == before
    job.scale(2)
    smaller = job.wait_for_recovery(2)
    job.wait_until("one pod less", lambda _: len(job.list_pods()) == 2)
    job.scale(3)
    larger = job.wait_for_recovery(3)
    job.wait_for_step(larger["resumeStep"] + 5)

    assert (smaller["stepsLost"], larger["stepsLost"]) == (0, 0)
    joined = [pod["spec"] for pod in job.list_pods() if pod["metadata"]["uid"] not in before]
    assert [pod.get("schedulingGroup") for pod in joined] == [None], "a pod that joins a running job is scheduled alone"
    job.suspend()
    status = job.wait_for_phase("Suspended")
    assert status["restarts"]["total"] == 1
    assert has_every_sample_once(job.folder, max(job.read_losses()), 12)
    job.delete()
    until(lambda: not shared.get("podgroups")["items"], "the group was not deleted with its job")


async def test_a_native_gang_is_bound_completely_or_not_at_all(cluster: Cluster) -> None:
    apis = await discover_served_apis(cluster)
    assert apis == {GangApi.SCHEDULING_GROUP: API_VERSIONS[KUBERNETES]}
    first = first_plan(cluster, apis, NODES + 1)
    groups = [action.manifest for action in first.actions if isinstance(action, ApplyGroup)]
    pods = [action.manifest for action in first.actions if isinstance(action, CreatePod)]
    assert (len(groups), len(pods)) == (1, NODES + 1)
    apply(cluster, groups[0])
    for pod in pods:
        apply(cluster, pod)
    name = groups[0]["metadata"]["name"]

    def is_unschedulable() -> bool:
        group = json.loads(cluster.kubectl("get", "podgroup", name, "-o", "json"))
        conditions = (group.get("status") or {}).get("conditions") or ()
        return any(
            # 1.37 has another name for it.
            condition["type"] in {"PodGroupScheduled", "PodGroupInitiallyScheduled"} and condition["status"] == "False"
            for condition in conditions
        )

    until(is_unschedulable, "the scheduler never said that the gang does not fit on the nodes")
    assert bound_pods(cluster) == [], "a partial gang holds nodes"
    stored = json.loads(cluster.kubectl("get", "pod", pods[0]["metadata"]["name"], "-o", "json"))
    assert stored["spec"]["schedulingGroup"] == {"podGroupName": name}, "the field survives the real API server"
    cluster.add_node(NodeSpec(name=f"gang-{NODES}"))
    until(lambda: len(bound_pods(cluster)) == NODES + 1, "the gang was not bound although it fits")

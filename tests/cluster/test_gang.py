"""Native gang scheduling on a real control plane: the API is found, and a gang is bound whole or not at all.

It has its own control plane, because the API is off by default in Kubernetes 1.36. No training and no operator process:
the plan's own manifests, and the scheduler's decisions about them.
"""

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.testing.suite.timeouts import until
from trainium_contract.job import TrainingJobSpec, TrainingJobStatus
from trainium_devcluster.cluster import Cluster
from trainium_devcluster.state import NodeSpec
from trainium_operator.cluster.api.client import Api
from trainium_operator.cluster.api.transport import connect
from trainium_operator.cluster.cache.discovery import discover_gang_apis
from trainium_operator.plan.model.actions import ApplyGroup, CreatePod, Plan
from trainium_operator.plan.model.observed import GangApi, JobView, Observed, PlanSettings
from trainium_operator.plan.plan import plan

pytestmark = [pytest.mark.cluster, pytest.mark.long]

GATES = "--feature-gates=GenericWorkload=true"


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    if request.config.getoption("--cluster") != "local":
        pytest.skip("needs a control plane with an alpha API, which only the development cluster can be given")
    with Cluster.start(
        nodes=[NodeSpec(name=f"gang-{at}") for at in range(2)],
        apiserver_args=["--runtime-config=scheduling.k8s.io/v1alpha2=true", GATES],
        scheduler_args=["--feature-gates=GenericWorkload=true,GangScheduling=true"],
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
    job = JobView(
        namespace="default",
        name="gang",
        uid=owner,
        generation=1,
        deleting=False,
        spec=TrainingJobSpec.model_validate(
            {
                "workers": {"replicas": replicas, "accelerator": {"device": "cpu"}},
                "trainer": {"batch": {"globalSize": 12}},
            }
        ),
        status=TrainingJobStatus(),
        created=time.time(),
    )
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


async def test_a_native_gang_is_bound_completely_or_not_at_all(cluster: Cluster) -> None:
    apis = await discover_served_apis(cluster)
    assert apis == {GangApi.SCHEDULING_GROUP: "scheduling.k8s.io/v1alpha2"}
    first = first_plan(cluster, apis, 3)
    groups = [action.manifest for action in first.actions if isinstance(action, ApplyGroup)]
    pods = [action.manifest for action in first.actions if isinstance(action, CreatePod)]
    assert (len(groups), len(pods)) == (1, 3)
    apply(cluster, groups[0])
    for pod in pods:
        apply(cluster, pod)
    name = groups[0]["metadata"]["name"]

    def is_unschedulable() -> bool:
        group = json.loads(cluster.kubectl("get", "podgroup", name, "-o", "json"))
        conditions = (group.get("status") or {}).get("conditions") or ()
        return any(
            condition["type"] == "PodGroupScheduled" and condition["status"] == "False" for condition in conditions
        )

    until(is_unschedulable, "the scheduler never said that a gang of three does not fit on two nodes")
    assert bound_pods(cluster) == [], "a partial gang holds nodes"
    stored = json.loads(cluster.kubectl("get", "pod", pods[0]["metadata"]["name"], "-o", "json"))
    assert stored["spec"]["schedulingGroup"] == {"podGroupName": name}, "the field survives the real API server"
    cluster.add_node(NodeSpec(name="gang-2"))
    until(lambda: len(bound_pods(cluster)) == 3, "the gang was not bound although it fits")

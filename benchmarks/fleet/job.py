"""Build the TrainingJob of the fleet benchmarks and the pods that the operator would create; read its state."""

from __future__ import annotations

import asyncio
import math
import time
from typing import TYPE_CHECKING, Any

from trainium_contract.job import TrainingJobSpec, TrainingJobStatus
from trainium_operator.cluster.cache.membership_record import read_membership
from trainium_operator.plan.manifests.affinity import add_affinity
from trainium_operator.plan.manifests.worker_pod import build_pod_template
from trainium_operator.plan.model.observed import JobView, PlanSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from trainium_contract.wire.messages import Membership
    from trainium_devcluster.node.api.client import Api

Json = dict[str, Any]
NAME = "fleet"
JOBS = "/apis/trainium.dev/v1alpha1/namespaces/default/trainingjobs"
SPARES = 2
INSTANCE = "trn1.32xlarge"
CORES = 32


def build_training_job(replicas: int, *, spares: int, sizes: Sequence[int] = ()) -> Json:
    """Build a job of `replicas` nodes whose global batch is also divisible at each of `sizes`."""
    batch = math.lcm(replicas, *sizes)
    return {
        "apiVersion": "trainium.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": NAME, "namespace": "default"},
        "spec": {
            "workers": {"replicas": replicas, "spares": spares, "accelerator": {"instanceType": INSTANCE}},
            "parallelism": {"tensor": CORES, "sequence": True},
            "trainer": {
                "model": {"preset": "Llama2-7B"},
                "data": {"source": "/data/corpus", "sequenceLength": 4096},
                "batch": {"globalSize": batch, "microSize": 1},
                "steps": 1_000_000,
                "precision": "BFloat16",
            },
        },
    }


def build_worker_manifests(job: Json, count: int, layers: Iterable[str]) -> list[Json]:
    """Build the pods that the operator creates on nodes with these network topology labels, for the floor."""
    metadata = job["metadata"]
    view = JobView(
        namespace=metadata["namespace"],
        name=metadata["name"],
        uid="00000000-0000-0000-0000-000000000000",
        generation=1,
        deleting=False,
        spec=TrainingJobSpec.model_validate(job["spec"]),
        status=TrainingJobStatus(),
        created=0.0,
    )
    settings = PlanSettings(
        image="trainium-trainer:bench",
        coordinator="trainium-operator-coordinator.system.svc:8443",
        topology_layers=frozenset(layers),
    )
    template = build_pod_template(view, settings)
    spec_with_affinity = add_affinity(template["spec"], view, settings)
    pods = []
    for number in range(count):
        pod = f"{view.name}-w-{number}"
        spec = {**spec_with_affinity, "hostname": pod, "subdomain": view.name}
        metadata = {**template["metadata"], "name": pod, "namespace": view.namespace}
        pods.append({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
    return pods


async def read_recorded_membership(kube: Api) -> Membership:
    """Return the recorded membership of the job."""
    membership = read_membership(await kube.get(f"/api/v1/namespaces/default/configmaps/{NAME}-membership"))
    assert membership is not None
    return membership


async def read_status(kube: Api) -> Json:
    """Return the status of the job."""
    status: Json = (await kube.get(f"{JOBS}/{NAME}")).get("status", {})
    return status


async def wait_for_status(kube: Api, condition: Callable[[Json], bool], what: str, seconds: float) -> Json:
    """Wait until the status of the job satisfies the condition; raises TimeoutError with `what`."""
    deadline = time.monotonic() + seconds
    while True:
        status = await read_status(kube)
        if condition(status):
            return status
        if time.monotonic() > deadline:
            excerpt = {key: status.get(key) for key in ("phase", "readyReplicas", "spares", "membership", "conditions")}
            raise TimeoutError(f"not within {seconds:.0f} s: {what}: {excerpt}")
        await asyncio.sleep(0.1)

"""Read a RayJob (ray.io/v1) whose entrypoint is torchrun, or explain why another one cannot be imported.

Fields as in KubeRay. The entrypoint runs on the head of the cluster; only a driver of Ray starts work on other nodes.
"""

from __future__ import annotations

from typing import Any

from trainium_client.importing.common import budget_of, metadata_of
from trainium_client.importing.fields import Fields, explain_unread
from trainium_client.importing.pod import read_pod
from trainium_client.importing.source_job import Note, SourceJob
from trainium_contract.api_server.errors import ClientError

_SENTENCES = {
    "spec.rayClusterSpec.workerGroupSpecs": "torchrun runs on the head alone, so nothing starts on these nodes",
    "spec.rayClusterSpec": "a TrainingJob has no Ray cluster",
    "spec.runtimeEnvYAML": "install packages in the image, set variables in workers.template",
    "spec.submissionMode": "the agents start the program",
    "spec.submitterPodTemplate": "the agents start the program",
    "spec.shutdownAfterJobFinishes": "cleanPodPolicy decides which pods end with the job",
    "spec.deletionStrategy": "cleanPodPolicy and ttlSecondsAfterFinished decide what is deleted",
    "spec.entrypointNumCpus": "resources of Ray",
    "spec.entrypointNumGpus": "resources of Ray",
    "spec.entrypointResources": "resources of Ray",
    "spec.managedBy": "the controller of the RayJob",
}


def read_ray_job(document: dict[str, Any]) -> SourceJob:
    """Return the job. Raises ClientError for an entrypoint that is a driver of Ray."""
    fields = Fields(document)
    metadata = metadata_of(fields)
    spec = fields.child("spec")
    entrypoint = spec.text("entrypoint")
    head = spec.child("rayClusterSpec").child("headGroupSpec")
    head.read("rayStartParams")
    head.read("serviceType")
    pod, program = read_pod(
        head.child("template"), ("ray-head",), overrides={"command": ["bash", "-c"], "args": [entrypoint]}
    )
    if not program.launched:
        raise ClientError(
            "the entrypoint of the RayJob is a driver of Ray, which starts its workers through the Ray cluster, and a "
            "TrainingJob has none: move the training function of TorchTrainer into a script that torchrun can start, "
            "and import `torchrun --nnodes N SCRIPT`"
        )
    return SourceJob(
        kind="RayJob",
        **metadata,
        nodes=1,
        program=program,
        pod=pod,
        suspend=spec.boolean("suspend"),
        active_deadline_seconds=spec.integer("activeDeadlineSeconds"),
        startup_deadline_seconds=spec.integer("preRunningDeadlineSeconds"),
        ttl_seconds=spec.integer("ttlSecondsAfterFinished"),
        budget=budget_of(
            ("spec.backoffLimit", spec.integer("backoffLimit")), ("torchrun --max-restarts", program.max_restarts)
        ),
        notes=(
            Note("the entrypoint of a RayJob runs on the head alone", "spec.workers.replicas"),
            *explain_unread(fields, _SENTENCES),
        ),
    )

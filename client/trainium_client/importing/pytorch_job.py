"""Read a PyTorchJob of the training operator (kubeflow.org/v1).

Fields as in the operator's release 1.9: `runPolicy`, `elasticPolicy`, `nprocPerNode` and a template for each role.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_client.importing.common import (
    budget_of,
    clean_pod_policy,
    differing_fields,
    metadata_of,
    with_processes,
)
from trainium_client.importing.fields import Fields, explain_unread
from trainium_client.importing.pod import read_pod
from trainium_client.importing.source_job import Note, SourceJob
from trainium_contract.api_server.errors import ClientError

if TYPE_CHECKING:
    from typing import Any

_RENDEZVOUS = "the agents agree on a rendezvous by themselves"
_SENTENCES = {
    "spec.runPolicy.schedulingPolicy.minAvailable": "all workers start together, an elastic job from its minReplicas",
    "spec.runPolicy.schedulingPolicy.minResources": "the scheduler sums the requests of the workers",
    "spec.runPolicy.schedulingPolicy.queue": "a queue of Volcano; name a LocalQueue of Kueue in scheduling.queueName",
    "spec.runPolicy.managedBy": "the controller of the PyTorchJob",
    "spec.elasticPolicy.rdzvBackend": _RENDEZVOUS,
    "spec.elasticPolicy.rdzvPort": _RENDEZVOUS,
    "spec.elasticPolicy.rdzvHost": _RENDEZVOUS,
    "spec.elasticPolicy.rdzvId": _RENDEZVOUS,
    "spec.elasticPolicy.rdzvConf": _RENDEZVOUS,
    "spec.elasticPolicy.standalone": _RENDEZVOUS,
    "spec.elasticPolicy.metrics": "no autoscaler is created; a HorizontalPodAutoscaler of yours can scale the job",
}


def read_pytorch_job(document: dict[str, Any]) -> SourceJob:
    """Return the job. Raises ClientError if a field has the wrong type or no replica is given."""
    fields = Fields(document)
    metadata = metadata_of(fields)
    spec = fields.child("spec")
    policy, elastic = spec.child("runPolicy"), spec.child("elasticPolicy")
    scheduling = policy.child("schedulingPolicy")
    roles = spec.child("pytorchReplicaSpecs")
    masters, workers = roles.child("Master"), roles.child("Worker")
    counts = [
        1 if count is None else count
        for role in (masters, workers)
        if "template" in role
        for count in [role.integer("replicas")]
    ]
    if not counts:
        raise ClientError("spec.pytorchReplicaSpecs has no Worker and no Master with a template: give one")
    main = workers if "template" in workers else masters
    pod, program = read_pod(main.child("template"), ("pytorch",))
    notes: list[Note] = []
    if main is workers and "template" in masters:
        notes += differing_fields(
            masters.mapping("template"), workers.mapping("template"), "the Master", "the Worker's"
        )
    master_count = sum(counts) - (counts[-1] if main is workers else 0)
    least, most = elastic.integer("minReplicas"), elastic.integer("maxReplicas")
    restart_policy = main.text("restartPolicy") or masters.text("restartPolicy")
    masters.text("restartPolicy")
    if restart_policy in ("Always", "OnFailure"):
        notes.append(
            Note(f"restartPolicy {restart_policy}: ranks restart in place, pods are replaced, within recovery.budgets")
        )
    if restart_policy == "ExitCode":
        notes.append(
            Note("restartPolicy ExitCode: the table of causes decides (docs/causes.md), recovery.rules adds rows")
        )
    processes, elastic_processes = spec.read("nprocPerNode"), elastic.read("nProcPerNode")
    program = with_processes(program, processes or elastic_processes or "auto")
    return SourceJob(
        kind="PyTorchJob",
        **metadata,
        nodes=max(1, sum(counts)),
        min_nodes=None if least is None else max(1, least + (master_count if main is workers else 0)),
        max_nodes=None if most is None else most + (master_count if main is workers else 0),
        program=program,
        pod=pod,
        suspend=policy.boolean("suspend"),
        active_deadline_seconds=policy.integer("activeDeadlineSeconds"),
        ttl_seconds=policy.integer("ttlSecondsAfterFinished"),
        clean_pods=clean_pod_policy(policy.text("cleanPodPolicy")),
        priority_class=scheduling.text("priorityClass"),
        gang_timeout_seconds=scheduling.integer("scheduleTimeoutSeconds"),
        budget=budget_of(
            ("runPolicy.backoffLimit", policy.integer("backoffLimit")),
            ("elasticPolicy.maxRestarts", elastic.integer("maxRestarts")),
            ("torchrun --max-restarts", program.max_restarts),
            ("restartPolicy Never", 0 if restart_policy == "Never" else None),
        ),
        notes=(*notes, *explain_unread(fields, _SENTENCES)),
    )

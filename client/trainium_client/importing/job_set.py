"""Read a JobSet (jobset.x-k8s.io/v1alpha2) of one torch trainer.

Fields as in release 0.13: each of `replicatedJobs` has a number of replicas and a Job as its template.
"""

from __future__ import annotations

from typing import Any

from trainium_client.importing.common import budget_of, choose_part, metadata_of
from trainium_client.importing.fields import Fields, explain_unread
from trainium_client.importing.pod import read_pod
from trainium_client.importing.source_job import Note, SourceJob

_TOPOLOGY = "alpha.jobset.sigs.k8s.io/exclusive-topology"
_SENTENCES = {
    "spec.network": "the operator creates the Service of the workers",
    "spec.successPolicy": "the job is complete when all ranks ended with 0",
    "spec.failurePolicy": "the table of causes decides (docs/causes.md), recovery.rules adds rows",
    "spec.startupPolicy": "all workers start together",
    "spec.coordinator": "the agents agree on a rendezvous by themselves",
    "spec.managedBy": "the controller of the JobSet",
    "spec.volumeClaimPolicies": "name existing claims in workers.template",
    "spec.replicatedJobs.template.spec.podFailurePolicy": "the table of causes decides (docs/causes.md)",
}


def read_job_set(document: dict[str, Any], replica: str = "") -> SourceJob:
    """Return the job; `replica` names the part that trains.

    Raises ClientError if it is not clear which of several replicated Jobs trains.
    """
    fields = Fields(document)
    metadata = metadata_of(fields)
    spec = fields.child("spec")
    chosen, notes = choose_part(spec.children("replicatedJobs"), "spec.replicatedJobs", replica)
    for key in ("dependsOn", "groupName"):
        chosen.read(key)
    replicas = chosen.integer("replicas")
    template = chosen.child("template")
    template.mapping("metadata")
    job = template.child("spec")
    parallelism, completions = job.integer("parallelism"), job.integer("completions")
    job.read("completionMode")
    if _TOPOLOGY in metadata["annotations"]:
        notes += (Note(f"annotation {_TOPOLOGY}: scheduling.topology Required keeps workers in one domain"),)
    pod, program = read_pod(job.child("template"), ("trainer", "pytorch", "main"))
    deadlines = [seconds for seconds in (job.integer("activeDeadlineSeconds"),) if seconds is not None]
    restarts = spec.child("failurePolicy").integer("maxRestarts")
    return SourceJob(
        kind="JobSet",
        **metadata,
        nodes=max(1, (1 if replicas is None else replicas) * (parallelism or completions or 1)),
        program=program,
        pod=pod,
        suspend=spec.boolean("suspend"),
        active_deadline_seconds=min(deadlines, default=None),
        ttl_seconds=spec.integer("ttlSecondsAfterFinished"),
        budget=budget_of(
            ("failurePolicy.maxRestarts", restarts),
            ("backoffLimit of the Job", job.integer("backoffLimit")),
            ("torchrun --max-restarts", program.max_restarts),
        ),
        notes=(*notes, *explain_unread(fields, _SENTENCES)),
    )

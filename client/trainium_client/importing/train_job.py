"""Read a TrainJob of Kubeflow Trainer 2 (trainer.kubeflow.org/v1alpha1) with the runtime that it names.

Fields as in release 2.3: the runtime has a JobSet as its template, in which the label
`trainer.kubeflow.org/trainjob-ancestor-step: trainer` marks the training Job, whose container is `node`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainium_client.importing.common import budget_of, metadata_of, with_processes
from trainium_client.importing.fields import Fields, explain_unread
from trainium_client.importing.pod import read_pod
from trainium_client.importing.source_job import Note, SourceJob
from trainium_contract.api_server.errors import ClientError

if TYPE_CHECKING:
    from collections.abc import Sequence

RUNTIMES = ("ClusterTrainingRuntime", "TrainingRuntime")
_ANCESTOR = "trainer.kubeflow.org/trainjob-ancestor-step"
_SENTENCES = {
    "spec.initializer": "mount the model and the data set, or download them in the program",
    "spec.managedBy": "the controller of the TrainJob",
    "spec.podTemplateOverrides": "merge them into workers.template",
    "spec.runtimePatches": "merge them into workers.template",
    "runtime.spec.template.spec.network": "the operator creates the Service of the workers",
    "runtime.spec.template.spec.successPolicy": "the job is complete when all ranks ended with 0",
    "runtime.spec.template.spec.failurePolicy": "the table of causes decides what a failure leads to (docs/causes.md)",
    "runtime.spec.template.spec.startupPolicy": "only the training Job is imported",
    "runtime.spec.podGroupPolicy.volcano": "scheduling.gang chooses how all workers start together",
}


def read_train_job(document: dict[str, Any], others: Sequence[dict[str, Any]]) -> SourceJob:
    """Return the job; `others` are the documents beside it. Raises ClientError without its runtime."""
    fields = Fields(document)
    metadata = metadata_of(fields)
    spec = fields.child("spec")
    reference = spec.child("runtimeRef")
    runtime = Fields(_find_runtime(reference, others), "runtime")
    metadata_of(runtime)
    runtime_spec = runtime.child("spec")
    policy, trainer = runtime_spec.child("mlPolicy"), spec.child("trainer")
    others_of_policy = [name for name in ("mpi", "jax", "xgboost", "flux", "plainML") if name in policy]
    if others_of_policy:
        raise ClientError(f"the runtime is one of {others_of_policy[0]}: only runtimes of torch can be imported")
    template = runtime_spec.child("template")
    template.mapping("metadata")
    job_set = template.child("spec")
    job, notes = _find_training_job(job_set.children("replicatedJobs"))
    for key in ("name", "dependsOn", "groupName"):
        job.read(key)
    job.integer("replicas")
    job_template = job.child("template")
    job_template.mapping("metadata")
    job_spec = job_template.child("spec")
    parallelism = job_spec.integer("parallelism")
    for key in ("completions", "completionMode"):
        job_spec.read(key)
    pod, program = read_pod(
        job_spec.child("template"),
        ("node", "trainer"),
        overrides={
            "image": trainer.text("image"),
            "command": trainer.texts("command"),
            "args": trainer.texts("args"),
            "env": trainer.read("env") or [],
            "resources": trainer.mapping("resourcesPerNode"),
        },
    )
    torch = policy.child("torch")
    own, default = trainer.read("numProcPerNode"), torch.read("numProcPerNode")
    nodes, default_nodes = trainer.integer("numNodes"), policy.integer("numNodes")
    elastic = torch.child("elasticPolicy")
    gang = runtime_spec.child("podGroupPolicy").child("coscheduling")
    program = with_processes(program, own or default or "auto")
    return SourceJob(
        kind="TrainJob",
        **metadata,
        nodes=nodes or default_nodes or parallelism or 1,
        min_nodes=elastic.integer("minNodes"),
        max_nodes=elastic.integer("maxNodes"),
        program=program,
        pod=pod,
        suspend=spec.boolean("suspend"),
        active_deadline_seconds=spec.integer("activeDeadlineSeconds"),
        ttl_seconds=job_set.integer("ttlSecondsAfterFinished"),
        gang_timeout_seconds=gang.integer("scheduleTimeoutSeconds"),
        budget=budget_of(
            ("failurePolicy.maxRestarts", job_set.child("failurePolicy").integer("maxRestarts")),
            ("backoffLimit", job_spec.integer("backoffLimit")),
            ("elasticPolicy.maxRestarts", elastic.integer("maxRestarts")),
            ("torchrun --max-restarts", program.max_restarts),
        ),
        notes=(
            Note(
                f"image, command and resources are those of the job over those of {reference.text('name')}",
                "spec.program",
            ),
            *notes,
            *explain_unread(fields, _SENTENCES),
            *explain_unread(runtime, _SENTENCES),
        ),
    )


def _find_runtime(reference: Fields, others: Sequence[dict[str, Any]]) -> dict[str, Any]:
    name, kind = reference.text("name"), reference.text("kind", RUNTIMES[0])
    reference.text("apiGroup")
    for document in others:
        metadata = document.get("metadata")
        if document.get("kind") == kind and isinstance(metadata, dict) and metadata.get("name") == name:
            return document
    raise ClientError(
        f"the TrainJob needs its {kind} {name or 'without a name'}, which has its pod template: give it in the same "
        f"stream or as another file (kubectl get {kind.lower()} {name} -o yaml)"
    )


def _find_training_job(jobs: list[Fields]) -> tuple[Fields, tuple[Note, ...]]:
    """Return the Job that trains, and notes on the others, which initialize data and model."""
    marked = [job for job in jobs if _is_marked(job)] or [
        job for job in jobs if job.text("name") in ("node", "trainer")
    ]
    chosen = marked or jobs
    if len(chosen) != 1:
        raise ClientError(f"the runtime has no Job that is marked as the trainer: label one with {_ANCESTOR}: trainer")
    beside = [job for job in jobs if job is not chosen[0]]
    for job in beside:
        job.rest()
    return chosen[0], tuple(
        Note(f"Job {job.text('name')} of the runtime: it is not run before training") for job in beside
    )


def _is_marked(job: Fields) -> bool:
    metadata = job.mapping("template").get("metadata")
    labels = metadata.get("labels") if isinstance(metadata, dict) else None
    return isinstance(labels, dict) and labels.get(_ANCESTOR) == "trainer"

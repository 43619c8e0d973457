"""Read the jobs of Kubeflow: PyTorchJob of the training operator 1.9, and TrainJob of Trainer 2.3 with its runtime."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainium_client.importing.fields import find_differences
from trainium_client.importing.job_form import CAUSES, COMPLETE, RENDEZVOUS, SERVICE, Form, Parts, read_metadata
from trainium_client.importing.source_job import Note
from trainium_contract.api_server.errors import ClientError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainium_client.importing.fields import Fields

Json = dict[str, Any]
RUNTIMES = ("ClusterTrainingRuntime", "TrainingRuntime")
_ANCESTOR = "trainer.kubeflow.org/trainjob-ancestor-step"
"""Label of the Job of a runtime that trains; its container is `node`."""
_OTHER_RUNTIMES = ("mpi", "jax", "xgboost", "flux", "plainML")

_PYTORCH_JOB = {
    "spec.runPolicy.schedulingPolicy.minAvailable": "all workers start together, an elastic job from its minReplicas",
    "spec.runPolicy.schedulingPolicy.minResources": "the scheduler sums the requests of the workers",
    "spec.runPolicy.schedulingPolicy.queue": "a queue of Volcano; name a LocalQueue of Kueue in scheduling.queueName",
    "spec.runPolicy.managedBy": "the controller of the PyTorchJob",
    "spec.elasticPolicy.metrics": "no autoscaler is created; a HorizontalPodAutoscaler of yours can scale the job",
    "spec.elasticPolicy.standalone": RENDEZVOUS,
    **{f"spec.elasticPolicy.rdzv{part}": RENDEZVOUS for part in ("Backend", "Port", "Host", "Id", "Conf")},
}
_TRAIN_JOB = {
    "spec.initializer": "mount the model and the data set, or download them in the program",
    "spec.managedBy": "the controller of the TrainJob",
    "spec.podTemplateOverrides": "merge them into workers.template",
    "spec.runtimePatches": "merge them into workers.template",
    "runtime.spec.template.spec.network": SERVICE,
    "runtime.spec.template.spec.successPolicy": COMPLETE,
    "runtime.spec.template.spec.failurePolicy": "the table of causes decides what a failure leads to (docs/causes.md)",
    "runtime.spec.template.spec.startupPolicy": "only the training Job is imported",
    "runtime.spec.podGroupPolicy.volcano": "scheduling.gang chooses how all workers start together",
}


def _read_pytorch_job(fields: Fields, _others: Sequence[Json], _replica: str) -> Parts:
    """Raise ClientError if no role has a template."""
    spec = fields.read_child("spec")
    policy, elastic = spec.read_child("runPolicy"), spec.read_child("elasticPolicy")
    roles = [spec.read_child(f"pytorchReplicaSpecs.{name}") for name in ("Master", "Worker")]
    used = [role for role in roles if "template" in role]
    counts = [1 if count is None else count for count in [role.read_integer("replicas") for role in used]]
    if not used:
        raise ClientError("spec.pytorchReplicaSpecs has no Worker and no Master with a template: give one")
    main = used[-1]
    notes = _list_differences(used[0].read_mapping("template"), main.read_mapping("template")) if len(used) > 1 else []
    # The limits of an elastic job count its Workers.
    masters = counts[0] if len(used) > 1 else 0
    least, most = elastic.read_integer("minReplicas"), elastic.read_integer("maxReplicas")
    policies = [role.read_text("restartPolicy") for role in (main, roles[0])]
    restarts = policies[0] or policies[1]
    if restarts in ("Always", "OnFailure"):
        notes.append(
            Note(f"restartPolicy {restarts}: ranks restart in place, pods are replaced, within recovery.budgets")
        )
    if restarts == "ExitCode":
        notes.append(Note(f"restartPolicy ExitCode: {CAUSES}"))
    processes = [spec.read("nprocPerNode"), elastic.read("nProcPerNode")]
    return Parts(
        template=main.read_child("template"),
        nodes=sum(counts),
        min_nodes=None if least is None else max(1, least + masters),
        max_nodes=None if most is None else most + masters,
        processes=processes[0] or processes[1] or "auto",
        budgets=(
            ("runPolicy.backoffLimit", policy.read_integer("backoffLimit")),
            ("elasticPolicy.maxRestarts", elastic.read_integer("maxRestarts")),
        ),
        restarts=restarts != "Never",
        notes=tuple(notes),
    )


def _list_differences(masters: Json, workers: Json) -> list[Note]:
    """Return a note that names what differs between the two templates, of which only the Worker's is kept."""
    paths = sorted(find_differences(masters, workers))
    more = ", ..." * (len(paths) > 8)
    return [Note(f"the Master differs in {', '.join(paths[:8])}{more}: the Worker's are used for all")] if paths else []


def _read_train_job(fields: Fields, others: Sequence[Json], _replica: str) -> Parts:
    """Raise ClientError without its runtime, which is one of the other documents, or for one of another framework."""
    reference, trainer = fields.read_child("spec.runtimeRef"), fields.read_child("spec.trainer")
    runtime = fields.attach("runtime", _find_runtime(reference, others))
    read_metadata(runtime)
    policy, job_set = runtime.read_child("spec.mlPolicy"), runtime.read_child("spec.template.spec")
    if other_runtimes := [name for name in _OTHER_RUNTIMES if name in policy]:
        raise ClientError(f"the runtime is one of {other_runtimes[0]}: only runtimes of torch can be imported")
    runtime.skip("spec.template.metadata")
    job, notes = _find_training_job(job_set.read_children("replicatedJobs"))
    job.skip("name", "dependsOn", "groupName", "replicas", "template.metadata")
    job.skip("template.spec.completions", "template.spec.completionMode")
    nodes = [
        trainer.read_integer("numNodes"),
        policy.read_integer("numNodes"),
        job.read_integer("template.spec.parallelism"),
    ]
    processes = [trainer.read("numProcPerNode"), policy.read("torch.numProcPerNode")]
    elastic = policy.read_child("torch.elasticPolicy")
    return Parts(
        template=job.read_child("template.spec.template"),
        nodes=nodes[0] or nodes[1] or nodes[2] or 1,
        min_nodes=elastic.read_integer("minNodes"),
        max_nodes=elastic.read_integer("maxNodes"),
        processes=processes[0] or processes[1] or "auto",
        overrides={
            "image": trainer.read_text("image"),
            "command": trainer.read_texts("command"),
            "args": trainer.read_texts("args"),
            "env": trainer.read("env") or [],
            "resources": trainer.read_mapping("resourcesPerNode"),
        },
        budgets=(
            ("failurePolicy.maxRestarts", job_set.read_integer("failurePolicy.maxRestarts")),
            ("backoffLimit", job.read_integer("template.spec.backoffLimit")),
            ("elasticPolicy.maxRestarts", elastic.read_integer("maxRestarts")),
        ),
        notes=(
            Note(
                f"image, command and resources are those of the job over those of {reference.read_text('name')}",
                "spec.program",
            ),
            *notes,
        ),
    )


def _find_runtime(reference: Fields, others: Sequence[Json]) -> Json:
    name, kind = reference.read_text("name"), reference.read_text("kind", RUNTIMES[0])
    reference.read_text("apiGroup")
    for document in others:
        metadata = document.get("metadata")
        if document.get("kind") == kind and isinstance(metadata, dict) and metadata.get("name") == name:
            return document
    raise ClientError(
        f"the TrainJob needs its {kind} {name or 'without a name'}, which has its pod template: give it in the same "
        f"stream or as another file (kubectl get {kind.lower()} {name} -o yaml)"
    )


def _find_training_job(jobs: list[Fields]) -> tuple[Fields, list[Note]]:
    """Return the Job that trains, and notes on the others, which initialize data and model."""
    marked = [job for job in jobs if _is_marked(job)] or [
        job for job in jobs if job.read_text("name") in ("node", "trainer")
    ]
    chosen = marked or jobs
    if len(chosen) != 1:
        raise ClientError(f"the runtime has no Job that is marked as the trainer: label one with {_ANCESTOR}: trainer")
    beside = [job for job in jobs if job is not chosen[0]]
    for job in beside:
        job.read_rest()
    return chosen[0], [
        Note(f"Job {job.read_text('name')} of the runtime: it is not run before training") for job in beside
    ]


def _is_marked(job: Fields) -> bool:
    metadata = job.read_mapping("template").get("metadata")
    labels = metadata.get("labels") if isinstance(metadata, dict) else None
    return isinstance(labels, dict) and labels.get(_ANCESTOR) == "trainer"


KUBEFLOW_FORMS: dict[tuple[str, str], Form] = {
    ("kubeflow.org/v1", "PyTorchJob"): Form(
        containers=("pytorch",),
        settings={
            "suspend": "spec.runPolicy.suspend",
            "activeDeadlineSeconds": "spec.runPolicy.activeDeadlineSeconds",
            "ttlSecondsAfterFinished": "spec.runPolicy.ttlSecondsAfterFinished",
            "cleanPodPolicy": "spec.runPolicy.cleanPodPolicy",
            "scheduling.priorityClassName": "spec.runPolicy.schedulingPolicy.priorityClass",
            "scheduling.gangTimeoutSeconds": "spec.runPolicy.schedulingPolicy.scheduleTimeoutSeconds",
        },
        sentences=_PYTORCH_JOB,
        read=_read_pytorch_job,
    ),
    ("trainer.kubeflow.org/v1alpha1", "TrainJob"): Form(
        containers=("node", "trainer"),
        settings={
            "suspend": "spec.suspend",
            "activeDeadlineSeconds": "spec.activeDeadlineSeconds",
            "ttlSecondsAfterFinished": "runtime.spec.template.spec.ttlSecondsAfterFinished",
            "scheduling.gangTimeoutSeconds": "runtime.spec.podGroupPolicy.coscheduling.scheduleTimeoutSeconds",
        },
        sentences=_TRAIN_JOB,
        read=_read_train_job,
    ),
}
"""By apiVersion and kind."""

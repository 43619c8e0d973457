"""Read the jobs of other Kubernetes operators: PyTorchJob, TrainJob, JobSet, HyperPodPyTorchJob and RayJob.

Each kind is a row of `FORMS`: which of its fields have a counterpart, why others have none, and a function for what is
special.
Fields as in the training operator 1.9, Kubeflow Trainer 2.3, JobSet 0.13, sagemaker-hyperpod-cli 3.9 (the operator is
closed) and KubeRay.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trainium_client.importing.fields import Fields, find_differences
from trainium_client.importing.pod import read_pod
from trainium_client.importing.source_job import YEAR_SECONDS, Budget, Note, SourceJob
from trainium_contract.api_server.errors import ClientError
from trainium_contract.job import CleanPodPolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

Json = dict[str, Any]
RUNTIMES = ("ClusterTrainingRuntime", "TrainingRuntime")
_FROM_SERVER = (
    "uid", "resourceVersion", "generation", "creationTimestamp", "managedFields", "selfLink", "deletionTimestamp",
    "deletionGracePeriodSeconds", "finalizers", "ownerReferences",
)  # fmt: skip
_POLICIES = {policy.value: policy.value for policy in CleanPodPolicy} | {"OnlyComplete": CleanPodPolicy.RUNNING.value}
_ANCESTOR = "trainer.kubeflow.org/trainjob-ancestor-step"
"""Label of the Job of a runtime that trains; its container is `node`."""
_TOPOLOGY = "alpha.jobset.sigs.k8s.io/exclusive-topology"
_OTHER_RUNTIMES = ("mpi", "jax", "xgboost", "flux", "plainML")

_RENDEZVOUS = "the agents agree on a rendezvous by themselves"
_SERVICE = "the operator creates the Service of the workers"
_COMPLETE = "the job is complete when all ranks ended with 0"
_CAUSES = "the table of causes decides (docs/causes.md), recovery.rules adds rows"
_ANY_SIZE = "each size whose processes form whole groups is legal (parallelism, program.batch)"
_AGENTS_START = "the agents start the program"
_OF_RAY = "resources of Ray"
_PYTORCH_JOB = {
    "spec.runPolicy.schedulingPolicy.minAvailable": "all workers start together, an elastic job from its minReplicas",
    "spec.runPolicy.schedulingPolicy.minResources": "the scheduler sums the requests of the workers",
    "spec.runPolicy.schedulingPolicy.queue": "a queue of Volcano; name a LocalQueue of Kueue in scheduling.queueName",
    "spec.runPolicy.managedBy": "the controller of the PyTorchJob",
    "spec.elasticPolicy.metrics": "no autoscaler is created; a HorizontalPodAutoscaler of yours can scale the job",
    "spec.elasticPolicy.standalone": _RENDEZVOUS,
    **{f"spec.elasticPolicy.rdzv{part}": _RENDEZVOUS for part in ("Backend", "Port", "Host", "Id", "Conf")},
}
_TRAIN_JOB = {
    "spec.initializer": "mount the model and the data set, or download them in the program",
    "spec.managedBy": "the controller of the TrainJob",
    "spec.podTemplateOverrides": "merge them into workers.template",
    "spec.runtimePatches": "merge them into workers.template",
    "runtime.spec.template.spec.network": _SERVICE,
    "runtime.spec.template.spec.successPolicy": _COMPLETE,
    "runtime.spec.template.spec.failurePolicy": "the table of causes decides what a failure leads to (docs/causes.md)",
    "runtime.spec.template.spec.startupPolicy": "only the training Job is imported",
    "runtime.spec.podGroupPolicy.volcano": "scheduling.gang chooses how all workers start together",
}
_JOB_SET = {
    "spec.network": _SERVICE,
    "spec.successPolicy": _COMPLETE,
    "spec.failurePolicy": _CAUSES,
    "spec.startupPolicy": "all workers start together",
    "spec.coordinator": _RENDEZVOUS,
    "spec.managedBy": "the controller of the JobSet",
    "spec.volumeClaimPolicies": "name existing claims in workers.template",
    "spec.replicatedJobs.template.spec.podFailurePolicy": "the table of causes decides (docs/causes.md)",
}
_HYPERPOD_JOB = {
    "spec.runPolicy.restartPolicy.maxFullJobRestarts": "budgets count failures, not restarts of the whole job, which "
    "are rare here",
    "spec.runPolicy.restartPolicy.maxNumRepeatOffendersToAvoid": "health.quarantine avoids nodes with repeated "
    "failures, in all jobs",
    "spec.runPolicy.logMonitoringConfiguration": "hangs are noticed by steps: give program.progress.pattern",
    "spec.runPolicy.faultDeadlineSeconds": "recovery has no deadline; startupDeadlineSeconds limits a start",
    "spec.runPolicy.workloadMode": "a mode of the HyperPod operator",
    "spec.elasticPolicy.replicaIncrementStep": _ANY_SIZE,
    "spec.elasticPolicy.replicaDiscreteValues": _ANY_SIZE,
    "spec.elasticPolicy.scalingTimeoutInSeconds": "a resize has no deadline of its own",
}
_RAY_JOB = {
    "spec.rayClusterSpec.workerGroupSpecs": "torchrun runs on the head alone, so nothing starts on these nodes",
    "spec.rayClusterSpec": "a TrainingJob has no Ray cluster",
    "spec.runtimeEnvYAML": "install packages in the image, set variables in workers.template",
    "spec.submissionMode": _AGENTS_START,
    "spec.submitterPodTemplate": _AGENTS_START,
    "spec.shutdownAfterJobFinishes": "cleanPodPolicy decides which pods end with the job",
    "spec.deletionStrategy": "cleanPodPolicy and ttlSecondsAfterFinished decide what is deleted",
    "spec.entrypointNumCpus": _OF_RAY,
    "spec.entrypointNumGpus": _OF_RAY,
    "spec.entrypointResources": _OF_RAY,
    "spec.managedBy": "the controller of the RayJob",
}
_RAY_DRIVER = (
    "the entrypoint of the RayJob is a driver of Ray, which starts its workers through the Ray cluster, and a "
    "TrainingJob has none: move the training function of TorchTrainer into a script that torchrun can start, "
    "and import `torchrun --nnodes N SCRIPT`"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """Values that the function of a form reads."""

    template: Fields
    """Pod template of the workers."""
    nodes: int
    min_nodes: int | None = None
    max_nodes: int | None = None
    spares: int = 0
    processes: object = None
    """Processes of a node for a launcher without that option; None for a form without such a field."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the job that replace those of the training container."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Further settings, as in `SourceJob`."""
    budgets: tuple[tuple[str, int | None], ...] = ()
    """Failures that the job survives, by the field that limits them; the first that is given counts."""
    window_seconds: int = YEAR_SECONDS
    restarts: bool = True
    """Whether the job restarts at all, where nothing limits it."""
    notes: tuple[Note, ...] = ()


@dataclass(frozen=True, slots=True)
class _Form:
    """A kind of job."""

    containers: tuple[str, ...]
    """Names that the platform gives to the training container."""
    settings: Mapping[str, str]
    """Fields of `spec` of a TrainingJob, and the path of each in the job; of several paths the first one given."""
    sentences: Mapping[str, str]
    """Why a field has no counterpart, by its path without indices."""
    read: Callable[[Fields, Sequence[Json], str], _Parts]
    """Takes the job, the documents beside it, and the name of the part that trains."""
    refusal_without_launcher: str = ""


def read_kubernetes_job(
    form: tuple[str, str], document: Json, others: Sequence[Json] = (), replica: str = ""
) -> SourceJob:
    """Return the job of a form of `FORMS`; `others` are the documents beside it, `replica` the part that trains.

    Raises ClientError if a field has the wrong type, or it is not clear what trains.
    """
    rules, fields = FORMS[form], Fields(document)
    metadata = _read_metadata(fields)
    parts = rules.read(fields, others, replica)
    pod, program = read_pod(parts.template, rules.containers, overrides=parts.overrides)
    if rules.refusal_without_launcher and not program.launched:
        raise ClientError(rules.refusal_without_launcher)
    if parts.processes is not None:
        program = program.set_processes(parts.processes)
    settings = {target: _read_setting(fields, target, paths) for target, paths in rules.settings.items()}
    limits = (*parts.budgets, ("torchrun --max-restarts", program.max_restarts))
    limits += () if parts.restarts else (("restartPolicy Never", 0),)
    return SourceJob(
        kind=form[1],
        **metadata,
        nodes=max(1, parts.nodes),
        min_nodes=parts.min_nodes,
        max_nodes=parts.max_nodes,
        spares=parts.spares,
        program=program,
        pod=pod,
        settings={**settings, **parts.settings},
        budget=next(
            (Budget(min(limit, 100_000), parts.window_seconds, name) for name, limit in limits if limit is not None),
            None,
        ),
        notes=(*parts.notes, *fields.explain_unread(rules.sentences)),
    )


def _read_metadata(fields: Fields) -> dict[str, Any]:
    """Return name, namespace, labels and annotations, and mark what only the API server writes as read."""
    fields.skip("apiVersion", "kind", "status", *(f"metadata.{key}" for key in _FROM_SERVER))
    return {
        "name": fields.read_text("metadata.name") or fields.read_text("metadata.generateName"),
        "namespace": fields.read_text("metadata.namespace"),
        "labels": fields.read_text_map("metadata.labels"),
        "annotations": fields.read_text_map("metadata.annotations"),
    }


def _read_setting(fields: Fields, target: str, paths: str) -> Any:
    """Return the value of a setting; None where the job has none."""
    if target == "suspend":
        return fields.read_boolean(paths) or None
    if target == "scheduling.priorityClassName":
        return fields.read_text(paths) or None
    if target == "cleanPodPolicy":
        name = fields.read_text(paths)
        if name and name not in _POLICIES:
            raise ClientError(f"cleanPodPolicy {name} is unknown: give one of {', '.join(_POLICIES)}")
        return _POLICIES.get(name)
    return next((value for value in [fields.read_integer(path) for path in paths.split()] if value is not None), None)


def _read_pytorch_job(fields: Fields, _others: Sequence[Json], _replica: str) -> _Parts:
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
        notes.append(Note(f"restartPolicy ExitCode: {_CAUSES}"))
    processes = [spec.read("nprocPerNode"), elastic.read("nProcPerNode")]
    return _Parts(
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


def _read_train_job(fields: Fields, others: Sequence[Json], _replica: str) -> _Parts:
    """Raise ClientError without its runtime, which is one of the other documents, or for one of another framework."""
    reference, trainer = fields.read_child("spec.runtimeRef"), fields.read_child("spec.trainer")
    runtime = fields.attach("runtime", _find_runtime(reference, others))
    _read_metadata(runtime)
    policy, job_set = runtime.read_child("spec.mlPolicy"), runtime.read_child("spec.template.spec")
    if found := [name for name in _OTHER_RUNTIMES if name in policy]:
        raise ClientError(f"the runtime is one of {found[0]}: only runtimes of torch can be imported")
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
    return _Parts(
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


def _choose_part(fields: Fields, path: str, name: str) -> tuple[Fields, tuple[Note, ...]]:
    """Return the part that trains: the only one, or the one with this name. Raises ClientError if that is not clear."""
    parts = fields.read_child("spec").read_children(path.removeprefix("spec."))
    by_name = {part.read_text("name"): part for part in parts}
    if name and name not in by_name:
        raise ClientError(f"{path} has no {name}: give --replica with one of {', '.join(by_name) or 'none'}")
    if not parts or (len(parts) > 1 and not name):
        given = f"has {', '.join(by_name)}: give --replica with the one that trains" if parts else "is empty: give one"
        raise ClientError(f"{path} {given}")
    chosen = by_name[name] if name else parts[0]
    beside = [part for part in parts if part is not chosen]
    for part in beside:
        part.read_rest()
    return chosen, tuple(
        Note(f"{path} {part.read_text('name')}: only {chosen.read_text('name')} is imported") for part in beside
    )


def _read_job_set(fields: Fields, _others: Sequence[Json], replica: str) -> _Parts:
    job, notes = _choose_part(fields, "spec.replicatedJobs", replica)
    job.skip("dependsOn", "groupName", "template.metadata", "template.spec.completionMode")
    replicas = job.read_integer("replicas")
    counts = [job.read_integer("template.spec.parallelism"), job.read_integer("template.spec.completions")]
    if _TOPOLOGY in fields.read_text_map("metadata.annotations"):
        notes += (Note(f"annotation {_TOPOLOGY}: scheduling.topology Required keeps workers in one domain"),)
    return _Parts(
        template=job.read_child("template.spec.template"),
        nodes=(1 if replicas is None else replicas) * (counts[0] or counts[1] or 1),
        settings={"activeDeadlineSeconds": job.read_integer("template.spec.activeDeadlineSeconds")},
        budgets=(
            ("failurePolicy.maxRestarts", fields.read_integer("spec.failurePolicy.maxRestarts")),
            ("backoffLimit of the Job", job.read_integer("template.spec.backoffLimit")),
        ),
        notes=notes,
    )


def _read_hyperpod_job(fields: Fields, _others: Sequence[Json], replica: str) -> _Parts:
    chosen, notes = _choose_part(fields, "spec.replicaSpecs", replica)
    spec = fields.read_child("spec")
    policy, elastic = spec.read_child("runPolicy"), spec.read_child("elasticPolicy")
    if policy.read_text("cleanPodPolicy") == "OnlyComplete":
        sentence = "OnlyComplete keeps the pods of a failed job; Running deletes those that still run"
        notes += (Note(sentence, "spec.cleanPodPolicy"),)
    replicas = chosen.read_integer("replicas")
    most, elastic_most = chosen.read_integer("maxReplicas"), elastic.read_integer("maxReplicas")
    return _Parts(
        template=chosen.read_child("template"),
        nodes=1 if replicas is None else replicas,
        min_nodes=elastic.read_integer("minReplicas"),
        max_nodes=most if elastic_most is None else elastic_most,
        spares=chosen.read_integer("spares") or 0,
        processes=spec.read("nprocPerNode") or "auto",
        budgets=(("runPolicy.jobMaxRetryCount", policy.read_integer("jobMaxRetryCount")),),
        window_seconds=policy.read_integer("restartPolicy.evalPeriodSeconds") or YEAR_SECONDS,
        notes=notes,
    )


def _read_ray_job(fields: Fields, _others: Sequence[Json], _replica: str) -> _Parts:
    """Read the head, on which the entrypoint runs; only a driver of Ray starts work on other nodes."""
    head = fields.read_child("spec.rayClusterSpec.headGroupSpec")
    head.skip("rayStartParams", "serviceType")
    return _Parts(
        template=head.read_child("template"),
        nodes=1,
        overrides={"command": ["bash", "-c"], "args": [fields.read_text("spec.entrypoint")]},
        budgets=(("spec.backoffLimit", fields.read_integer("spec.backoffLimit")),),
        notes=(Note("the entrypoint of a RayJob runs on the head alone", "spec.workers.replicas"),),
    )


FORMS: dict[tuple[str, str], _Form] = {
    ("kubeflow.org/v1", "PyTorchJob"): _Form(
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
    ("trainer.kubeflow.org/v1alpha1", "TrainJob"): _Form(
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
    ("jobset.x-k8s.io/v1alpha2", "JobSet"): _Form(
        containers=("trainer", "pytorch", "main"),
        settings={"suspend": "spec.suspend", "ttlSecondsAfterFinished": "spec.ttlSecondsAfterFinished"},
        sentences=_JOB_SET,
        read=_read_job_set,
    ),
    ("sagemaker.amazonaws.com/v1", "HyperPodPyTorchJob"): _Form(
        containers=("pytorch",),
        settings={
            "suspend": "spec.runPolicy.suspend",
            "activeDeadlineSeconds": "spec.runPolicy.activeDeadlineSeconds",
            "startupDeadlineSeconds": "spec.runPolicy.startupDeadlineSeconds",
            "ttlSecondsAfterFinished": "spec.runPolicy.ttlSecondsAfterFinished",
            "cleanPodPolicy": "spec.runPolicy.cleanPodPolicy",
            "recovery.gracePeriodSeconds": "spec.elasticPolicy.gracefulShutdownTimeoutInSeconds",
            "recovery.rescaleAfterSeconds": "spec.elasticPolicy.faultyScaleDownTimeoutInSeconds "
            "spec.runPolicy.restartPolicy.scaleUpSnoozeTimeInSeconds",
            "recovery.maxInPlaceRestarts": "spec.runPolicy.restartPolicy.numRestartBeforeFullJobRestart",
        },
        sentences=_HYPERPOD_JOB,
        read=_read_hyperpod_job,
    ),
    ("ray.io/v1", "RayJob"): _Form(
        containers=("ray-head",),
        settings={
            "suspend": "spec.suspend",
            "activeDeadlineSeconds": "spec.activeDeadlineSeconds",
            "startupDeadlineSeconds": "spec.preRunningDeadlineSeconds",
            "ttlSecondsAfterFinished": "spec.ttlSecondsAfterFinished",
        },
        sentences=_RAY_JOB,
        read=_read_ray_job,
        refusal_without_launcher=_RAY_DRIVER,
    ),
}
"""By apiVersion and kind."""

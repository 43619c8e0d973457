"""Read the jobs of other Kubernetes operators: PyTorchJob, TrainJob, JobSet, HyperPodPyTorchJob and RayJob.

Each kind is a row of `FORMS`: which of its fields have a counterpart, why others have none, and a function for what is
special. Fields as in JobSet 0.13, sagemaker-hyperpod-cli 3.9 (the operator is closed) and KubeRay.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainium_client.importing.fields import Fields
from trainium_client.importing.job_form import CAUSES, COMPLETE, RENDEZVOUS, SERVICE, Form, Parts, read_metadata
from trainium_client.importing.kubeflow_jobs import KUBEFLOW_FORMS
from trainium_client.importing.pod import read_pod
from trainium_client.importing.source_job import YEAR_SECONDS, Budget, Note, SourceJob
from trainium_contract.api_server.errors import ClientError
from trainium_contract.job import CleanPodPolicy

if TYPE_CHECKING:
    from collections.abc import Sequence

Json = dict[str, Any]
_POLICIES = {policy.value: policy.value for policy in CleanPodPolicy} | {"OnlyComplete": CleanPodPolicy.RUNNING.value}
_TOPOLOGY = "alpha.jobset.sigs.k8s.io/exclusive-topology"
_ANY_SIZE = "each size whose processes form whole groups is legal (parallelism, program.batch)"
_AGENTS_START = "the agents start the program"
_OF_RAY = "resources of Ray"
_JOB_SET = {
    "spec.network": SERVICE,
    "spec.successPolicy": COMPLETE,
    "spec.failurePolicy": CAUSES,
    "spec.startupPolicy": "all workers start together",
    "spec.coordinator": RENDEZVOUS,
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


def read_kubernetes_job(
    form: tuple[str, str], document: Json, others: Sequence[Json] = (), replica: str = ""
) -> SourceJob:
    """Return the job of a form of `FORMS`; `others` are the documents beside it, `replica` the part that trains.

    Raises ClientError if a field has the wrong type, or it is not clear what trains.
    """
    rules, fields = FORMS[form], Fields(document)
    metadata = read_metadata(fields)
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


def _read_job_set(fields: Fields, _others: Sequence[Json], replica: str) -> Parts:
    job, notes = _choose_part(fields, "spec.replicatedJobs", replica)
    job.skip("dependsOn", "groupName", "template.metadata", "template.spec.completionMode")
    replicas = job.read_integer("replicas")
    counts = [job.read_integer("template.spec.parallelism"), job.read_integer("template.spec.completions")]
    if _TOPOLOGY in fields.read_text_map("metadata.annotations"):
        notes += (Note(f"annotation {_TOPOLOGY}: scheduling.topology Required keeps workers in one domain"),)
    return Parts(
        template=job.read_child("template.spec.template"),
        nodes=(1 if replicas is None else replicas) * (counts[0] or counts[1] or 1),
        settings={"activeDeadlineSeconds": job.read_integer("template.spec.activeDeadlineSeconds")},
        budgets=(
            ("failurePolicy.maxRestarts", fields.read_integer("spec.failurePolicy.maxRestarts")),
            ("backoffLimit of the Job", job.read_integer("template.spec.backoffLimit")),
        ),
        notes=notes,
    )


def _read_hyperpod_job(fields: Fields, _others: Sequence[Json], replica: str) -> Parts:
    chosen, notes = _choose_part(fields, "spec.replicaSpecs", replica)
    spec = fields.read_child("spec")
    policy, elastic = spec.read_child("runPolicy"), spec.read_child("elasticPolicy")
    if policy.read_text("cleanPodPolicy") == "OnlyComplete":
        sentence = "OnlyComplete keeps the pods of a failed job; Running deletes those that still run"
        notes += (Note(sentence, "spec.cleanPodPolicy"),)
    replicas = chosen.read_integer("replicas")
    most, elastic_most = chosen.read_integer("maxReplicas"), elastic.read_integer("maxReplicas")
    return Parts(
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


def _read_ray_job(fields: Fields, _others: Sequence[Json], _replica: str) -> Parts:
    """Read the head, on which the entrypoint runs; only a driver of Ray starts work on other nodes."""
    head = fields.read_child("spec.rayClusterSpec.headGroupSpec")
    head.skip("rayStartParams", "serviceType")
    return Parts(
        template=head.read_child("template"),
        nodes=1,
        overrides={"command": ["bash", "-c"], "args": [fields.read_text("spec.entrypoint")]},
        budgets=(("spec.backoffLimit", fields.read_integer("spec.backoffLimit")),),
        notes=(Note("the entrypoint of a RayJob runs on the head alone", "spec.workers.replicas"),),
    )


FORMS: dict[tuple[str, str], Form] = {
    **KUBEFLOW_FORMS,
    ("jobset.x-k8s.io/v1alpha2", "JobSet"): Form(
        containers=("trainer", "pytorch", "main"),
        settings={"suspend": "spec.suspend", "ttlSecondsAfterFinished": "spec.ttlSecondsAfterFinished"},
        sentences=_JOB_SET,
        read=_read_job_set,
    ),
    ("sagemaker.amazonaws.com/v1", "HyperPodPyTorchJob"): Form(
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
    ("ray.io/v1", "RayJob"): Form(
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

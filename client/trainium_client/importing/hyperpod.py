"""Read a HyperPodPyTorchJob (sagemaker.amazonaws.com/v1).

The operator is closed. Fields as in the model of its command line, sagemaker-hyperpod-cli 3.9, and its pages.
"""

from __future__ import annotations

from typing import Any

from trainium_client.importing.common import budget_of, choose_part, clean_pod_policy, metadata_of, with_processes
from trainium_client.importing.fields import Fields, explain_unread
from trainium_client.importing.pod import read_pod
from trainium_client.importing.source_job import YEAR_SECONDS, Note, SourceJob

_ANY_SIZE = "each size whose processes form whole groups is legal (parallelism, program.batch)"
_RESTART = "spec.runPolicy.restartPolicy"
_ELASTIC = "spec.elasticPolicy"
_SENTENCES = {
    f"{_RESTART}.maxFullJobRestarts": "budgets count failures, not restarts of the whole job, which are rare here",
    f"{_RESTART}.maxNumRepeatOffendersToAvoid": "health.quarantine avoids nodes with repeated failures, in all jobs",
    "spec.runPolicy.logMonitoringConfiguration": "hangs are noticed by steps: give program.progress.pattern",
    "spec.runPolicy.faultDeadlineSeconds": "recovery has no deadline; startupDeadlineSeconds limits a start",
    "spec.runPolicy.workloadMode": "a mode of the HyperPod operator",
    f"{_ELASTIC}.replicaIncrementStep": _ANY_SIZE,
    f"{_ELASTIC}.replicaDiscreteValues": _ANY_SIZE,
    f"{_ELASTIC}.scalingTimeoutInSeconds": "a resize has no deadline of its own",
}


def read_hyperpod_job(document: dict[str, Any], replica: str = "") -> SourceJob:
    """Return the job; `replica` names the part that trains.

    Raises ClientError if it is not clear which of several replica specs trains.
    """
    fields = Fields(document)
    metadata = metadata_of(fields)
    spec = fields.child("spec")
    chosen, notes = choose_part(spec.children("replicaSpecs"), "spec.replicaSpecs", replica)
    policy, elastic = spec.child("runPolicy"), spec.child("elasticPolicy")
    restart = policy.child("restartPolicy")
    pod, program = read_pod(chosen.child("template"), ("pytorch",))
    program = with_processes(program, spec.read("nprocPerNode") or "auto")
    clean = policy.text("cleanPodPolicy")
    if clean == "OnlyComplete":
        notes += (
            Note(
                "OnlyComplete keeps the pods of a failed job; Running deletes those that still run",
                "spec.cleanPodPolicy",
            ),
        )
    replicas, spares = chosen.integer("replicas"), chosen.integer("spares")
    shrink, snooze = elastic.integer("faultyScaleDownTimeoutInSeconds"), restart.integer("scaleUpSnoozeTimeInSeconds")
    most = chosen.integer("maxReplicas")
    elastic_most = elastic.integer("maxReplicas")
    return SourceJob(
        kind="HyperPodPyTorchJob",
        **metadata,
        nodes=1 if replicas is None else max(1, replicas),
        min_nodes=elastic.integer("minReplicas"),
        max_nodes=most if elastic_most is None else elastic_most,
        spares=spares or 0,
        program=program,
        pod=pod,
        suspend=policy.boolean("suspend"),
        active_deadline_seconds=policy.integer("activeDeadlineSeconds"),
        startup_deadline_seconds=policy.integer("startupDeadlineSeconds"),
        ttl_seconds=policy.integer("ttlSecondsAfterFinished"),
        clean_pods=clean_pod_policy(clean),
        grace_seconds=elastic.integer("gracefulShutdownTimeoutInSeconds"),
        rescale_after_seconds=shrink if shrink is not None else snooze,
        in_place_restarts=restart.integer("numRestartBeforeFullJobRestart"),
        budget=budget_of(
            ("runPolicy.jobMaxRetryCount", policy.integer("jobMaxRetryCount")),
            ("torchrun --max-restarts", program.max_restarts),
            window_seconds=restart.integer("evalPeriodSeconds") or YEAR_SECONDS,
        ),
        notes=(*notes, *explain_unread(fields, _SENTENCES)),
    )

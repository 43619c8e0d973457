"""Names and labels of the objects that belong to one TrainingJob.

Invariants: every name follows from the job's name (and a pod's ordinal), so that a repeated write hits the same object;
an ordinal is never used twice, so neither is a pod's name.
"""

from __future__ import annotations

from trainium_contract.wire.worker_env import FIELD_MANAGER, GROUP, LABEL_JOB, LABEL_ROLE, ROLE_WORKER

ANNOTATION_CONTENT_HASH = f"{GROUP}/content-hash"
"""On the configuration ConfigMap, the budget and the NetworkPolicy: digest of what was wanted when it was applied."""
ANNOTATION_PART = f"{GROUP}/part"
"""On a Workload of Kueue: which part of the job's quota it asks for."""
MEMBERSHIP_PACKED_KEY = "membership.json.gz"
"""In `binaryData` of the membership ConfigMap: the one form that is written."""
MEMBERSHIP_KEY = "membership.json"
"""In `data`, as operators before 0.1.0 wrote small ones: read, and removed with the next generation."""
TRAINER_KEY = "trainer.yaml"
CA_KEY = "ca.crt"
LAST_ORDINAL = 999_999
"""Ordinals have at most six digits, or the longest job name would give host names that are too long."""


def pod_name(job: str, ordinal: int) -> str:
    """Name of the worker pod with this ordinal."""
    return f"{job}-w-{ordinal}"


def ordinal_of(job: str, pod: str) -> int | None:
    """The ordinal in a worker pod's name; None when the name is not one of this job's."""
    digits = pod.removeprefix(f"{job}-w-")
    return int(digits) if digits != pod and digits.isascii() and digits.isdigit() else None


def config_name(job: str) -> str:
    """The ConfigMap with the trainer's configuration and the coordinator's certificate authority."""
    return f"{job}-config"


def membership_name(job: str) -> str:
    """The ConfigMap that records the current membership; only the operator reads and writes it."""
    return f"{job}-membership"


def workload_name(job: str, part: int) -> str:
    """The Workload that asks Kueue for a part of the job's quota."""
    return f"{job}-quota-{part}"


def network_policy_name(job: str) -> str:
    """The NetworkPolicy that keeps others away from the workers."""
    return f"{job}-workers"


def claim_template_name(job: str, digest: str) -> str:
    """The ResourceClaimTemplate with this content; another content is another object."""
    return f"{job}-devices-{digest[:8]}"


def selector_labels(job: str) -> dict[str, str]:
    """Labels that select exactly the worker pods of a job."""
    return {LABEL_JOB: job, LABEL_ROLE: ROLE_WORKER}


def selector(job: str) -> str:
    """The same as a label-selector string, for the scale subresource."""
    return ",".join(f"{key}={value}" for key, value in selector_labels(job).items())


def object_labels(job: str, component: str) -> dict[str, str]:
    """Labels of every object that belongs to a job."""
    return {
        "app.kubernetes.io/name": "trainingjob",
        "app.kubernetes.io/instance": job,
        "app.kubernetes.io/component": component,
        "app.kubernetes.io/part-of": "trainium-operator",
        "app.kubernetes.io/managed-by": FIELD_MANAGER,
        LABEL_JOB: job,
    }

"""Define the identity of a job, the names and labels of its objects, and the node labels that plans read.

Guarantees:
- Every name follows from the job's name (and a pod's ordinal), so a repeated write addresses the same object.
- An ordinal is never used twice, so neither is a pod's name.
- No object is found by a uid alone. Any client that may create an object writes its ownerReferences and can copy any
  uid into them; only the namespace is certain.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainium_contract.accelerators import DEVICE_RESOURCES, EFA, TOPOLOGY_LABEL_DOMAINS
from trainium_contract.wire.worker_env import FIELD_MANAGER, GROUP, LABEL_JOB, LABEL_ROLE, ROLE_WORKER

ANNOTATION_CONTENT_HASH = f"{GROUP}/content-hash"
"""On the configuration ConfigMap, the budget and the NetworkPolicy: digest of the content when it was applied."""
ANNOTATION_JOB_UID = f"{GROUP}/job-uid"
"""On every object with a fixed name: uid of the job that it was written for, also after its owner was removed."""
ANNOTATION_PART = f"{GROUP}/part"
"""On a Workload of Kueue: the part of the job's quota that it requests."""
ANNOTATION_EVALUATES = f"{GROUP}/evaluates"
"""On the pod of an evaluation: the model, and how many of its pods failed before."""
TRAINER_KEY = "trainer.yaml"
CA_KEY = "ca.crt"
LAST_ORDINAL = 999_999
"""Ordinals have at most six digits; otherwise the longest job name would give too long host names."""


def format_pod_name(job: str, ordinal: int) -> str:
    """Return the name of the worker pod with this ordinal."""
    return f"{job}-w-{ordinal}"


def parse_ordinal(job: str, pod: str) -> int | None:
    """Return the ordinal in a worker pod's name; None when the name is not one of this job's."""
    return parse_number(pod, f"{job}-w-")


def parse_number(name: str, prefix: str) -> int | None:
    """Return the number that follows the prefix in a name; None when it is another name."""
    digits = name.removeprefix(prefix)
    return int(digits) if digits != name and digits.isascii() and digits.isdigit() else None


def format_evaluation_name(job: str) -> str:
    """Return the name of the pod that measures a milestone's model; one name means one pod at a time."""
    return f"{job}-evaluation"


def format_role_object_name(job: str, role: str) -> str:
    """Return the name of the headless Service of a role, and of its PodDisruptionBudget."""
    return f"{job}-{role}"


def format_role_pod_name(job: str, role: str, ordinal: int) -> str:
    """Return the name of the pod of a role with this ordinal."""
    return f"{job}-{role}-{ordinal}"


def format_role_policy_name(job: str) -> str:
    """Return the name of the NetworkPolicy that lets pods of roles reach each other."""
    return f"{job}-roles"


def format_config_name(job: str) -> str:
    """Return the name of the ConfigMap with the trainer's configuration and the coordinator's certificate authority."""
    return f"{job}-config"


def format_membership_name(job: str) -> str:
    """Return the name of the ConfigMap that records the current membership; only the operator reads and writes it."""
    return f"{job}-membership"


def format_workload_name(job: str, part: int) -> str:
    """Return the name of the Workload that requests from Kueue a part of the job's quota."""
    return f"{job}-quota-{part}"


def format_unit_name(job: JobId, ordinal: int) -> str:
    """Return the name of the unit whose first pod has this ordinal; other jobs have other names."""
    return f"{job.uid[:8]}-{ordinal}"


def format_network_policy_name(job: str) -> str:
    """Return the name of the NetworkPolicy that restricts access to the workers."""
    return f"{job}-workers"


def format_claim_template_name(job: str, digest: str) -> str:
    """Return the name of the ResourceClaimTemplate with this content; other content gives another name."""
    return f"{job}-devices-{digest[:8]}"


def build_selector_labels(job: str) -> dict[str, str]:
    """Return labels that select exactly the worker pods of a job."""
    return {LABEL_JOB: job, LABEL_ROLE: ROLE_WORKER}


def format_selector(job: str) -> str:
    """Return the same as a label-selector string, for the scale subresource."""
    return ",".join(f"{key}={value}" for key, value in build_selector_labels(job).items())


def build_object_labels(job: str, component: str) -> dict[str, str]:
    """Return labels of every object that belongs to a job."""
    return {
        "app.kubernetes.io/name": "trainingjob",
        "app.kubernetes.io/instance": job,
        "app.kubernetes.io/component": component,
        "app.kubernetes.io/part-of": "trainium-operator",
        "app.kubernetes.io/managed-by": FIELD_MANAGER,
        LABEL_JOB: job,
    }


_DOMAINS_OF_CONTROLLERS = (GROUP, "kubernetes.io", "k8s.io", "helm.sh", "argoproj.io", "fluxcd.io")


def is_inherited_label(key: str) -> bool:
    """Return whether the objects of a job get this label of it too: not those that other controllers act on."""
    domain = key.rpartition("/")[0]
    return domain == "app.kubernetes.io" or not domain.endswith(_DOMAINS_OF_CONTROLLERS)


LABEL_INSTANCE_TYPE = "node.kubernetes.io/instance-type"
LABEL_HOST = "kubernetes.io/hostname"
LABEL_ZONE = "topology.kubernetes.io/zone"
LABEL_HYPERPOD_HEALTH = "sagemaker.amazonaws.com/node-health-status"
LABEL_HYPERPOD_DEEP_CHECK = "sagemaker.amazonaws.com/deep-health-check-status"
LAYERS = tuple(f"topology.k8s.aws/network-node-layer-{number}" for number in (1, 2, 3, 4))
"""Labels of EC2's network topology on EKS nodes, from the widest domain to the nearest."""
_LABELS_READ = frozenset(
    {LABEL_INSTANCE_TYPE, LABEL_HOST, LABEL_HYPERPOD_HEALTH, LABEL_HYPERPOD_DEEP_CHECK, LABEL_ZONE}
)


def is_label_read(key: str) -> bool:
    """Return whether plans read this label of a node; a change of another one triggers nothing."""
    return key in _LABELS_READ or key.startswith(TOPOLOGY_LABEL_DOMAINS)


RESOURCES_READ = DEVICE_RESOURCES | {EFA}
LABEL_POD_SET = "kueue.x-k8s.io/podset"
"""On a worker pod: the pod set of Kueue that it was created for."""
ANNOTATION_GROUP = f"{GROUP}/gang"
"""On a worker pod: name of the group that it was created for."""
CLAIM = "neuron"
"""Name of the claim in a pod, and of its one request."""
TAINT_QUARANTINED = f"{GROUP}/quarantined"
"""The operator's own taint. It follows from the fleet's memory and is never a reason for an entry there."""


@dataclass(frozen=True, slots=True, order=True)
class JobId:
    """One incarnation of a TrainingJob. Raises ValueError if a part is missing."""

    namespace: str
    name: str
    uid: str

    def __post_init__(self) -> None:
        if not (self.namespace and self.name and self.uid):
            raise ValueError(f"a job is known by namespace, name and uid, not by {self}")

"""Build the objects of a role: its pods, its headless Service and its disruption budget. Pure.

A pod of a role is an ordinary pod of the user's template. The operator adds what makes it the job's: owner, labels,
devices, the node selector and tolerations of its instance type, and the security context of workers. It has no token
for the coordinator, no membership and no volume of the workers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainium_contract.wire import worker_env as env
from trainium_operator.plan.manifests.affinity import AvoidedNodes, exclude_nodes
from trainium_operator.plan.manifests.owned_object import (
    build_owned_object,
    build_owner_reference,
    compute_content_hash,
)
from trainium_operator.plan.manifests.strategic_merge import merge_template
from trainium_operator.plan.manifests.worker_needs import find_extended_resources
from trainium_operator.plan.manifests.worker_pod import RESTRICTED, build_pod_base
from trainium_operator.plan.model import names

if TYPE_CHECKING:
    from trainium_contract.spec.roles import RoleSpec
    from trainium_operator.plan.model.observed import JobView, PlanSettings

Json = dict[str, Any]

_PROBE_SECONDS = 2


def build_role_template(job: JobView, settings: PlanSettings, role: RoleSpec) -> Json:
    """Build the parts that all pods of a role share, with their digest as an annotation."""
    merged = merge_template(_build_base(job, settings, role), _set_container_name(role))
    metadata = merged.get("metadata") or {}
    spec = {**(merged.get("spec") or {}), "restartPolicy": "Never"}
    containers = spec["containers"]
    spec["containers"] = [_add_readiness_probe(containers[0], role.port), *containers[1:]]
    labels = {**(metadata.get("labels") or {}), **build_role_labels(job.name, role.name)}
    annotations = {
        **(metadata.get("annotations") or {}),
        env.ANNOTATION_TEMPLATE_HASH: compute_content_hash({"metadata": metadata, "spec": spec}),
    }
    return {"metadata": {"labels": labels, "annotations": annotations}, "spec": spec}


def build_role_pods(job: JobView, role: str, body: Json, ordinals: range, avoided: AvoidedNodes) -> list[Json]:
    """Return complete manifests of the pods with these ordinals."""
    spec = body["spec"]
    if avoided.required or avoided.preferred:
        spec = {**spec, "affinity": exclude_nodes(spec.get("affinity") or {}, avoided)}
    identity = {"namespace": job.namespace, "ownerReferences": [build_owner_reference(job)]}
    return [
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {**body["metadata"], **identity, "name": names.format_role_pod_name(job.name, role, ordinal)},
            "spec": spec,
        }
        for ordinal in ordinals
    ]


def build_service(job: JobView, role: RoleSpec) -> Json:
    """Build the headless Service, whose name resolves to the ready pods."""
    spec = {
        "clusterIP": "None",
        "selector": {env.LABEL_JOB: job.name, env.LABEL_ROLE: role.name},
        "ports": [{"name": "role", "port": role.port, "protocol": "TCP", "targetPort": role.port}],
    }
    name = names.format_role_object_name(job.name, role.name)
    return build_owned_object(job, "v1", "Service", name, {"spec": spec}, role.name)


def build_role_budget(job: JobView, role: RoleSpec) -> Json:
    """Build the budget that lets a drain evict one pod at a time; one that is not ready may always be evicted."""
    spec = {
        "minAvailable": max(0, role.replicas - 1),
        "selector": {"matchLabels": {env.LABEL_JOB: job.name, env.LABEL_ROLE: role.name}},
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
    }
    name = names.format_role_object_name(job.name, role.name)
    return build_owned_object(job, "policy/v1", "PodDisruptionBudget", name, {"spec": spec}, role.name)


def build_role_policy(job: JobView, rules: tuple[Json, ...]) -> Json:
    """Build the NetworkPolicy by which pods of roles accept each other, besides the workers; `rules` are further ones.

    The policy of the workers selects all pods of the job, so a pod of a role cannot reach a worker.
    """
    others = {"matchLabels": {env.LABEL_JOB: job.name}, "matchExpressions": [_NOT_A_WORKER]}
    spec = {
        "podSelector": others,
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [{"podSelector": others}]}, *rules],
    }
    name = names.format_role_policy_name(job.name)
    return build_owned_object(job, "networking.k8s.io/v1", "NetworkPolicy", name, {"spec": spec}, "network")


_NOT_A_WORKER: Json = {
    "key": env.LABEL_ROLE,
    "operator": "NotIn",
    "values": [env.ROLE_WORKER, env.ROLE_EVALUATION],
}


def build_role_labels(job: str, role: str) -> dict[str, str]:
    """Return the labels of the pods of a role."""
    return {**names.build_object_labels(job, role), env.LABEL_ROLE: role}


def _set_container_name(role: RoleSpec) -> Json:
    """Return the template with the role's name for a first container without one."""
    template: Json = role.template
    first, *others = role.containers
    return {**template, "spec": {**template["spec"], "containers": [{"name": role.name, **first}, *others]}}


def _build_base(job: JobView, settings: PlanSettings, role: RoleSpec) -> Json:
    accelerator = role.accelerator
    container: Json = {
        "name": role.containers[0].get("name", role.name),
        "imagePullPolicy": settings.image_pull_policy,
        "env": _build_environment(job, role),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": RESTRICTED,
    }
    if job.spec.workload.image:
        container["image"] = job.spec.workload.image
    if accelerator is not None and (extended := find_extended_resources(accelerator)):
        container["resources"] = {"limits": extended, "requests": extended}
    return {"spec": {**build_pod_base(job, settings, accelerator), "containers": [container]}}


def _build_environment(job: JobView, role: RoleSpec) -> list[Json]:
    values = {
        env.ENV_NAMESPACE: job.namespace,
        env.ENV_JOB: job.name,
        env.ENV_ROLE: role.name,
        env.ENV_ROLE_PORT: str(role.port),
    }
    reference = {"fieldRef": {"fieldPath": "status.podIP"}}
    return [
        *({"name": key, "value": value} for key, value in values.items()),
        {"name": env.ENV_POD_IP, "valueFrom": reference},
    ]


def _add_readiness_probe(container: Json, port: int) -> Json:
    """Return the container with its port, and with a probe of the port if it has none."""
    ports = container.get("ports") or []
    if not any(
        isinstance(container_port, dict) and container_port.get("containerPort") == port for container_port in ports
    ):
        ports = [*ports, {"containerPort": port, "protocol": "TCP"}]
    probe = {"tcpSocket": {"port": port}, "periodSeconds": _PROBE_SECONDS}
    return {"readinessProbe": probe, **container, "ports": ports}

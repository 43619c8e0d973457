"""Build the worker pod.

Guarantees:
- A pod has an ordinal and no rank. It holds no API credentials, only a token for the coordinator.
- It passes the `restricted` pod security standard unless its storage is a host path.
- The user's template cannot change the pod's identity, and nothing in the pod depends on the job's present size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainium_contract.accelerators import DEVICES, EFA, EFA_ENVIRONMENT, LOGICAL_CORE, Device
from trainium_contract.spec.recovery import HangSpec
from trainium_contract.wire import worker_env as env
from trainium_contract.wire.log_line import LogFormat
from trainium_operator.plan.manifests.affinity import AvoidedNodes, add_anti_affinity, exclude_nodes
from trainium_operator.plan.manifests.owned_object import build_owner_reference, compute_content_hash
from trainium_operator.plan.manifests.strategic_merge import merge_template
from trainium_operator.plan.manifests.worker_needs import (
    SHARED_MEMORY,
    WORKER_CONTAINER,
    add_worker_needs,
    build_device_tolerations,
    find_expected_devices,
    find_extended_resources,
)
from trainium_operator.plan.model import names

if TYPE_CHECKING:
    from trainium_contract.job import TrainingJobSpec
    from trainium_contract.spec.storage import StorageSpec
    from trainium_contract.spec.workers import AcceleratorSpec, WorkerAcceleratorSpec
    from trainium_contract.workload import Workload
    from trainium_operator.plan.model.observed import JobView, PlanSettings


Json = dict[str, Any]

PRECOMPILE_CONTAINER = "precompile"
AGENT_CONTAINER = "trainium-agent"
_AGENT_VOLUME, _COPY = "agent", "/copy"
COPY_AGENT = (
    "import shutil, sys; source, copy = sys.argv[1:]; "
    "shutil.rmtree(copy, ignore_errors=True); shutil.copytree(source, copy, symlinks=True)"
)
"""Can be repeated, because a kubelet may run an init container again."""
TEMPLATE_REVISION = 0
"""Counts changes of this package that give the same job other pods (a test states when). No user caused them, so after
an upgrade of the operator no pod is replaced or reported as outdated for them."""
LONG_RUNNING_FIELDS = frozenset({"args", "ports", "lifecycle", "livenessProbe", "readinessProbe", "startupProbe"})
"""Fields of the worker's container that a container which ends by itself does not have."""
_TOKEN_SECONDS = 3600


def build_worker_pods(
    job: JobView, settings: PlanSettings, ordinals: range, avoided: AvoidedNodes, *, extras: int = 0
) -> list[Json]:
    """Return complete manifests of the pods with these ordinals, without the avoided nodes; the last are `extras`.

    They share common parts, so callers must not change them.
    """
    body = build_pod_template(job, settings)
    plain = [_build_worker_pod(job, body, ordinal, avoided) for ordinal in ordinals[: len(ordinals) - extras]]
    return plain + [
        _mark_as_extra(_build_worker_pod(job, body, ordinal, avoided), settings)
        for ordinal in ordinals[len(ordinals) - extras :]
    ]


def _mark_as_extra(pod: Json, settings: PlanSettings) -> Json:
    """Turn the pod into an extra, which any other pod preempts and which preempts none."""
    metadata = {**pod["metadata"], "labels": {**pod["metadata"]["labels"], env.LABEL_EXTRA: "true"}}
    spec = {key: value for key, value in pod["spec"].items() if key not in ("priority", "preemptionPolicy")}
    return {**pod, "metadata": metadata, "spec": {**spec, "priorityClassName": settings.extra_priority_class}}


def _build_worker_pod(job: JobView, body: Json, ordinal: int, avoided: AvoidedNodes) -> Json:
    name = names.format_pod_name(job.name, ordinal)
    metadata = {
        **body["metadata"],
        "name": name,
        "namespace": job.namespace,
        "ownerReferences": [build_owner_reference(job)],
    }
    spec = dict(body["spec"])
    if avoided.required or avoided.preferred:
        spec["affinity"] = exclude_nodes(spec.get("affinity") or {}, avoided)
    if avoided.required:
        avoided_nodes = {env.ANNOTATION_AVOIDED_NODES: ",".join(avoided.required)}
        metadata["annotations"] = {**metadata["annotations"], **avoided_nodes}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def build_pod_template(job: JobView, settings: PlanSettings, *, with_estimates: bool = True) -> Json:
    """Build the parts that all workers of a job share, merged with the templates of chart and user, and their digest.

    Without `with_estimates` memory and CPU are only those that users request.
    """
    base = {
        "metadata": {
            "annotations": {
                "karpenter.sh/do-not-disrupt": "true",
                "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
            }
        },
        "spec": _build_pod_spec(job, settings),
    }
    base = merge_template(base, set_worker_name(dict(settings.worker_template)))
    merged = merge_template(base, set_worker_name(job.spec.workers.template))
    metadata, spec = merged.get("metadata") or {}, merged.get("spec") or {}
    without_estimates = _set_fixed_fields(job, metadata, spec)
    revision = f"{TEMPLATE_REVISION}-" if TEMPLATE_REVISION else ""
    # The operator's own estimates are not part of the digest, so no version makes pods outdated by them.
    described = _remove_compiled_sizes(without_estimates) if job.spec.workload.compile_command else without_estimates
    digest = revision + compute_content_hash(described)
    body = _set_fixed_fields(job, metadata, add_worker_needs(spec, job.spec)) if with_estimates else without_estimates
    if "initContainers" in body["spec"]:
        body["spec"] = {**body["spec"], "initContainers": [*map(_send_log_as_message, body["spec"]["initContainers"])]}
    body["metadata"]["annotations"][env.ANNOTATION_TEMPLATE_HASH] = digest
    body["metadata"]["annotations"][env.ANNOTATION_IMAGE] = _find_agent_image(job, settings)
    return body


def _remove_compiled_sizes(body: Json) -> Json:
    """Return the parts without the sizes to compile: a scale changes them, but nothing in running workers."""
    containers = {
        key: [*map(_remove_sizes, body["spec"][key])] for key in ("initContainers", "containers") if key in body["spec"]
    }
    return {**body, "spec": {**body["spec"], **containers}}


def _remove_sizes(container: Json) -> Json:
    if container.get("name") == PRECOMPILE_CONTAINER:
        container = {**container, "command": container["command"][:-1]}
    if container.get("env"):
        kept = [variable for variable in container["env"] if variable.get("name") != env.ENV_BACKGROUND_SIZES]
        container = {**container, "env": kept}
    return container


def _find_agent_image(job: JobView, settings: PlanSettings) -> str:
    """Return the image with the agent: that of the training container, or of the init container that adds it."""
    workload = job.spec.workload
    return workload.image or settings.image if workload.has_agent else settings.agent_image


def _send_log_as_message(container: Json) -> Json:
    """Return the container with the end of its log as its termination message.

    Its pod is deleted, and the log with it.
    """
    return {"terminationMessagePolicy": "FallbackToLogsOnError", **container}


def _set_fixed_fields(job: JobView, metadata: Json, spec: Json) -> Json:
    """Return metadata and spec as merged, with the fields that no template may change."""
    labels = {
        **{key: value for key, value in (metadata.get("labels") or {}).items() if key != env.LABEL_EXTRA},
        **names.build_object_labels(job.name, "worker"),
        **names.build_selector_labels(job.name),
    }
    if not _fills_its_node(job.spec.workers.accelerator):
        spec = {**spec, "affinity": add_anti_affinity(spec.get("affinity") or {}, job.name)}
    if spec.get("hostNetwork"):
        # Else the pod asks the name servers of its node, which do not know the coordinator's Service.
        spec = {"dnsPolicy": "ClusterFirstWithHostNet", **spec}
    if job.spec.workload.compile_command:
        spec = {
            **spec,
            "initContainers": [*(spec.get("initContainers") or []), *_build_precompile_containers(job, spec)],
        }
    return {
        "metadata": {"labels": labels, "annotations": dict(metadata.get("annotations") or {})},
        "spec": {
            **spec,
            "restartPolicy": "Never",
            "containers": [*map(_set_termination_log, spec.get("containers") or [])],
        },
    }


def _set_termination_log(container: Json) -> Json:
    """Return the container with the path of its termination message for its agent, if its template sets one."""
    path = container.get("terminationMessagePath")
    if container.get("name") != WORKER_CONTAINER or not path:
        return container
    return {**container, "env": [*(container.get("env") or []), {"name": env.ENV_TERMINATION_LOG, "value": path}]}


def compute_template_hash(job: JobView, settings: PlanSettings) -> str:
    """Return the digest of new pods."""
    digest: str = build_pod_template(job, settings, with_estimates=False)["metadata"]["annotations"][
        env.ANNOTATION_TEMPLATE_HASH
    ]
    return digest


def is_outdated(digest: str, current: str) -> bool:
    """Return whether a pod with this digest is older than the present job and operator settings.

    Digests of two revisions differ without a user's change, so they mean nothing.
    """
    return bool(digest) and digest != current and _parse_revision(digest) == _parse_revision(current)


def _parse_revision(digest: str) -> str:
    return digest.partition("-")[0] if "-" in digest else ""


def set_worker_name(template: Json) -> Json:
    """Return the template with its only container named as the worker's, if it has no name."""
    containers = (template.get("spec") or {}).get("containers")
    if not isinstance(containers, list) or len(containers) != 1:
        return template
    if not isinstance(containers[0], dict) or "name" in containers[0]:
        return template
    return {**template, "spec": {**template["spec"], "containers": [{"name": WORKER_CONTAINER, **containers[0]}]}}


def build_pod_base(job: JobView, settings: PlanSettings, accelerator: AcceleratorSpec | None) -> Json:
    """Build the fields that the specs of workers and of roles share."""
    user = settings.worker_user
    body: Json = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": user != 0,
            **({} if user is None else {"runAsUser": user, "runAsGroup": user, "fsGroup": user}),
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }
    if accelerator is not None:
        body["tolerations"] = build_device_tolerations(accelerator)
        if accelerator.instance_type:
            body["nodeSelector"] = {names.LABEL_INSTANCE_TYPE: accelerator.instance_type}
    if job.spec.scheduling.priority_class_name:
        body["priorityClassName"] = job.spec.scheduling.priority_class_name
    if settings.image_pull_secrets:
        body["imagePullSecrets"] = [{"name": name} for name in settings.image_pull_secrets]
    return body


def _build_pod_spec(job: JobView, settings: PlanSettings) -> Json:
    spec, base = job.spec, build_pod_base(job, settings, job.spec.workers.accelerator)
    body: Json = {
        **base,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": spec.recovery.grace_period_seconds + env.EXIT_MARGIN_SECONDS,
        "securityContext": {**base["securityContext"], "fsGroupChangePolicy": "OnRootMismatch"},
        "containers": [_build_container(job, settings)],
        "volumes": _build_volumes(job.name, spec),
        **_merge_feature_fields(job, settings)[0],
    }
    if not spec.workload.has_agent:
        _add_agent(body, settings)
    return body


RESTRICTED: Json = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def _add_agent(body: Json, settings: PlanSettings) -> None:
    """Add an init container that copies the agent to a volume of the pod, and start it in the training container."""
    source, copy = env.AGENT_MOUNT, f"{_COPY}{env.AGENT_MOUNT}"
    mount = {"name": _AGENT_VOLUME, "mountPath": source, "subPath": source.lstrip("/"), "readOnly": True}
    body["containers"][0]["command"] = [*env.AGENT_INTERPRETER, "-m", "trainium_agent"]
    body["containers"][0]["volumeMounts"].append(mount)
    body["volumes"].append({"name": _AGENT_VOLUME, "emptyDir": {}})
    copier = {
        "name": AGENT_CONTAINER,
        "image": settings.agent_image,
        "imagePullPolicy": settings.image_pull_policy,
        "command": [*env.AGENT_INTERPRETER, "-c", COPY_AGENT, source, copy],
        "securityContext": RESTRICTED,
        "resources": {"requests": {"cpu": "100m", "memory": "64Mi"}},
        "volumeMounts": [{"name": _AGENT_VOLUME, "mountPath": _COPY}],
    }
    body["initContainers"] = [copier]


def _build_container(job: JobView, settings: PlanSettings) -> Json:
    container: Json = {
        "name": WORKER_CONTAINER,
        "image": job.spec.workload.image or settings.image,
        "imagePullPolicy": settings.image_pull_policy,
        "command": ["trainium-agent"],
        "env": _build_environment(job, settings),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": RESTRICTED,
        "volumeMounts": [
            {"name": "config", "mountPath": env.CONFIG_DIRECTORY, "readOnly": True},
            {"name": "token", "mountPath": env.TOKEN_PATH.rsplit("/", 1)[0], "readOnly": True},
            {"name": SHARED_MEMORY, "mountPath": env.SHARED_MEMORY_MOUNT},
            {"name": "cache", "mountPath": env.CACHE_DIRECTORY},
            {"name": "checkpoints", "mountPath": env.CHECKPOINT_MOUNT},
        ],
    }
    extended = find_extended_resources(job.spec.workers.accelerator)
    claims = _merge_feature_fields(job, settings)[1]
    if extended or claims:
        container["resources"] = {**({"limits": extended, "requests": extended} if extended else {}), **claims}
    return container


def _merge_feature_fields(job: JobView, settings: PlanSettings) -> tuple[Json, Json]:
    """Return what optional features add to the spec of each pod, and to the resources of the worker container."""
    spec: Json = {}
    resources: Json = {}
    for build_fields in settings.pod_fields:
        spec_fields, resource_fields = build_fields(job)
        spec |= spec_fields
        resources |= resource_fields
    return spec, resources


def _build_precompile_containers(job: JobView, spec: Json) -> list[Json]:
    """Build the init container that compiles, or fetches what another worker compiled."""
    try:
        nodes = job.spec.sizes_to_compile()
    except ValueError:  # the spec contradicts itself, which is reported elsewhere
        return []
    containers = spec.get("containers") or []
    worker = next((container for container in containers if container.get("name") == WORKER_CONTAINER), None)
    if worker is None or not nodes:
        return []
    kept = {key: value for key, value in worker.items() if key not in LONG_RUNNING_FIELDS}
    workload = job.spec.workload
    sizes = ["--cores-per-node", str(workload.processes_per_node), "--sizes", ",".join(map(str, nodes))]
    command = [*workload.compile_command, *sizes]
    return [{**kept, "name": PRECOMPILE_CONTAINER, "command": command}]


def _list_sizes_for_spares(job: JobView) -> tuple[int, ...]:
    try:
        return job.spec.sizes_for_spares()
    except ValueError:  # the spec contradicts itself, which is reported elsewhere
        return ()


def _fills_its_node(accelerator: AcceleratorSpec) -> bool:
    """Return whether the devices alone keep two workers off one node; anti-affinity makes scheduling much slower."""
    instance = accelerator.instance()
    if instance is None or accelerator.resources:
        return False
    return accelerator.claim is None or accelerator.count_claimed_devices() == instance.devices


def _build_volumes(job: str, spec: TrainingJobSpec) -> list[Json]:
    token = {"path": "token", "audience": env.TOKEN_AUDIENCE, "expirationSeconds": _TOKEN_SECONDS}
    return [
        {"name": "config", "configMap": {"name": names.format_config_name(job)}},
        {"name": "token", "projected": {"sources": [{"serviceAccountToken": token}]}},
        {"name": SHARED_MEMORY, "emptyDir": {"medium": "Memory"}},
        {"name": "cache", "emptyDir": {}},
        {"name": "checkpoints", **_build_storage_volume(spec.checkpoint.storage)},
    ]


def _build_storage_volume(storage: StorageSpec) -> Json:
    if storage.host_path is not None:
        return {"hostPath": {"path": storage.host_path.path, "type": "DirectoryOrCreate"}}
    if storage.persistent_volume_claim is not None:
        return {"persistentVolumeClaim": {"claimName": storage.persistent_volume_claim.claim_name}}
    return {"emptyDir": {}}


def _build_environment(job: JobView, settings: PlanSettings) -> list[Json]:
    accelerator, recovery = job.spec.workers.accelerator, job.spec.recovery
    fields = {
        env.ENV_NAMESPACE: "metadata.namespace",
        env.ENV_POD_NAME: "metadata.name",
        env.ENV_POD_UID: "metadata.uid",
        env.ENV_POD_IP: "status.podIP",
        env.ENV_NODE_NAME: "spec.nodeName",
    }
    values = {
        env.ENV_JOB: job.name,
        # A job that is created again under the same name may use its predecessor's checkpoints.
        env.ENV_RUN_ID: job.uid,
        env.ENV_COORDINATOR: settings.coordinator,
        env.ENV_PROCESSES_PER_NODE: str(job.spec.workload.processes_per_node),
        env.ENV_MAX_IN_PLACE_RESTARTS: str(recovery.max_in_place_restarts),
        env.ENV_GRACE_SECONDS: str(recovery.grace_period_seconds),
        env.ENV_PREFLIGHT: ",".join(job.spec.health.preflight.checks),
        env.ENV_PREFLIGHT_SECONDS: str(job.spec.health.preflight.timeout_seconds),
        env.ENV_CONFIG: env.CONFIG_PATH,
        env.ENV_MEMORY_DIRECTORY: env.MEMORY_DIRECTORY,
        env.ENV_TOKEN_PATH: env.TOKEN_PATH,
        env.ENV_CA_PATH: env.CA_PATH,
        # The image's user may have no home; the cache is the pod's own, never shared between nodes.
        "XDG_CACHE_HOME": env.CACHE_DIRECTORY,
        **_build_device_environment(accelerator, job.spec.workload),
        **job.spec.workload.environment,
    }
    if job.spec.health.preflight.minimum_bandwidth_gbps:
        values[env.ENV_MINIMUM_BANDWIDTH] = f"{job.spec.health.preflight.minimum_bandwidth_gbps:g}"
    if settings.cluster:
        values[env.ENV_CLUSTER] = settings.cluster
    if job.spec.workload.compile_command:
        values[env.ENV_IMAGE] = _find_agent_image(job, settings)
        if later := _list_sizes_for_spares(job):
            values[env.ENV_BACKGROUND_SIZES] = ",".join(map(str, later))
    if recovery.hang != HangSpec():
        values[env.ENV_HANG_LIMITS] = recovery.hang.model_dump_json(by_alias=True)
    if settings.worker_log_format is not LogFormat.TEXT:
        values[env.ENV_LOG_FORMAT] = settings.worker_log_format.value
    references = [{"name": key, "valueFrom": {"fieldRef": {"fieldPath": path}}} for key, path in fields.items()]
    return references + [{"name": key, "value": value} for key, value in values.items()]


def _build_device_environment(accelerator: WorkerAcceleratorSpec, workload: Workload) -> dict[str, str]:
    variables = dict(DEVICES[accelerator.device].environment)
    if accelerator.device is Device.NEURON:
        variables |= workload.neuron_environment
    devices = find_expected_devices(accelerator)
    if devices is not None:
        variables[env.ENV_NEURON_DEVICES] = devices
    if accelerator.claim is not None and accelerator.claim.logical_neuron_core is not None:
        variables[LOGICAL_CORE] = str(accelerator.claim.logical_neuron_core)
    if accelerator.device is Device.NEURON and accelerator.count_nodes_per_unit() > 1:
        variables[env.ENV_UNIT_NODES] = str(accelerator.count_nodes_per_unit())
    if EFA in find_extended_resources(accelerator):
        variables |= EFA_ENVIRONMENT
    return variables

"""Find the fields of a pod that this node does not support, and those that it does not enforce.

A pod with an unsupported field that would change its behaviour is refused with a sentence that names the field. Limits
that only protect others (CPU, memory) are not enforced, but reported once per node. Pure functions of the pod.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from trainium_devcluster.node.api.objects import Json, get_containers, get_init_containers
from trainium_devcluster.node.processes.command import ADDABLE_CAPABILITIES

_VOLUMES = frozenset(
    {"emptyDir", "hostPath", "configMap", "secret", "downwardAPI", "projected", "persistentVolumeClaim"}
)
_PROJECTED = frozenset({"serviceAccountToken", "configMap", "secret", "downwardAPI"})
_EPHEMERAL = {"ephemeralContainers": "use `kubectl exec` instead"}
_POD_FIELDS = {
    "hostPID": "processes of the machine are never shown to pods",
    "hostIPC": "the machine's shared memory is never shown to pods",
    "shareProcessNamespace": "each container has a separate process namespace",
    "setHostnameAsFQDN": "the host name is the pod's name",
    "runtimeClassName": "",
    "readinessGates": "",
    "dnsConfig.nameservers": "names come from the pod's /etc/hosts",
    "securityContext.sysctls": "",
    "securityContext.seLinuxOptions": "",
    "securityContext.windowsOptions": "",
} | _EPHEMERAL
"""Fields that are refused, with a reason where there is one."""
_NO_GRPC = "use httpGet, tcpSocket or exec"
_NO_ATTACH = "it has no attach"
_CONTAINER_FIELDS = {
    "lifecycle": "there are no hooks and no other signal than SIGTERM",
    "restartPolicyRules": "",
    "volumeDevices": "there are no block devices",
    "stdin": _NO_ATTACH,
    "tty": _NO_ATTACH,
    "livenessProbe.grpc": _NO_GRPC,
    "readinessProbe.grpc": _NO_GRPC,
    "startupProbe.grpc": _NO_GRPC,
    "securityContext.privileged": "",
    "securityContext.seLinuxOptions": "",
    "securityContext.windowsOptions": "",
}


def find_unsupported(pod: Json) -> list[str]:
    """Return a sentence for each unsupported field; empty if the pod can run."""
    return [*_check_pod(pod), *_check_volumes(pod), *_check_containers(pod)]


def reject_ephemeral(pod: Json) -> str | None:
    """Return the message for a pod with ephemeral containers, which may be added while it runs."""
    return next(_find_set(pod["spec"], _EPHEMERAL), None)


def find_unenforced_fields(pod: Json) -> list[str]:
    """Return the fields of this pod that are accepted without effect."""
    fields: list[str] = []
    for container in [*get_init_containers(pod), *get_containers(pod)]:
        limits = (container.get("resources") or {}).get("limits") or {}
        fields += [f"resources.limits.{name}" for name in ("cpu", "memory", "ephemeral-storage") if name in limits]
        context = container.get("securityContext") or {}
        fields += [
            f"securityContext.{name}" for name in ("runAsUser", "runAsGroup", "seccompProfile") if name in context
        ]
    context = pod["spec"].get("securityContext") or {}
    names = ("runAsUser", "runAsGroup", "fsGroup", "supplementalGroups", "seccompProfile")
    fields += [f"securityContext.{name}" for name in names if name in context]
    for volume in pod["spec"].get("volumes") or []:
        empty = volume.get("emptyDir") or {}
        if "sizeLimit" in empty and empty.get("medium") != "Memory":
            fields.append("emptyDir.sizeLimit of a disk volume")
    return list(dict.fromkeys(fields))


def check_non_root(pod: Json, container: Json) -> str | None:
    """Return the message of a kubelet if runAsNonRoot forbids the user of the container, else None."""
    merged = {**(pod["spec"].get("securityContext") or {}), **(container.get("securityContext") or {})}
    if merged.get("runAsNonRoot") and merged.get("runAsUser") == 0:
        return "container's runAsUser breaks non-root policy"
    return None


def _find_set(part: Json, reasons: Mapping[str, str], prefix: str = "spec.") -> Iterator[str]:
    """Yield a sentence for each of the fields that `part` sets."""
    for path, reason in reasons.items():
        value: Any = part
        for key in path.split("."):
            value = (value or {}).get(key)
        if value:
            yield f"{prefix}{path} is not supported by the process node{reason and ': '}{reason}"


def _check_pod(pod: Json) -> Iterator[str]:
    spec = pod["spec"]
    yield from _find_set(spec, _POD_FIELDS)
    if (spec.get("os") or {}).get("name", "linux") != "linux":
        yield "spec.os.name must be linux on a process node"
    if spec.get("hostUsers") is False:
        yield "spec.hostUsers=false is not supported by the process node"


def _check_volumes(pod: Json) -> Iterator[str]:
    for volume in pod["spec"].get("volumes") or []:
        kinds = volume.keys() - {"name"}
        if not kinds & _VOLUMES:
            yield f"volume {volume['name']} of kind {', '.join(sorted(kinds))} is not supported by the process node"
        for source in (volume.get("projected") or {}).get("sources") or []:
            for kind in source.keys() - _PROJECTED:
                yield f"volume {volume['name']}: projected source {kind} is not supported by the process node"


def _check_containers(pod: Json) -> Iterator[str]:
    for kind, group in (("initContainers", get_init_containers(pod)), ("containers", get_containers(pod))):
        for container in group:
            prefix = f"spec.{kind}[{container['name']}]."
            yield from _find_set(container, _CONTAINER_FIELDS, prefix=prefix)
            yield from (f"{prefix}{problem}" for problem in _check_container(container))


def _check_container(container: Json) -> Iterator[str]:
    if not container.get("command"):
        yield "command must be given on a process node, which reads no image and so knows no entry point"
    if any(port.get("hostPort") for port in container.get("ports") or []):
        yield "ports.hostPort is not supported by the process node: every pod has a separate address on this machine"
    for variable in container.get("env") or []:
        if "resourceFieldRef" in (variable.get("valueFrom") or {}):
            yield f"env[{variable['name']}].valueFrom.resourceFieldRef is not supported by the process node"
    for mount in container.get("volumeMounts") or []:
        if mount.get("mountPropagation", "None") != "None":
            yield f"volumeMounts[{mount['mountPath']}].mountPropagation is not supported by the process node"
        if mount.get("subPathExpr"):
            yield f"volumeMounts[{mount['mountPath']}].subPathExpr is not supported by the process node: use subPath"
    context = container.get("securityContext") or {}
    if context.get("procMount", "Default") != "Default":
        yield "securityContext.procMount is not supported by the process node"
    if (context.get("seccompProfile") or {}).get("type") == "Localhost":
        yield "securityContext.seccompProfile of type Localhost is not supported by the process node"
    for capability in (context.get("capabilities") or {}).get("add") or []:
        if capability.removeprefix("CAP_") not in ADDABLE_CAPABILITIES:
            yield f"securityContext.capabilities.add {capability} is not supported by the process node"

"""Find the fields of a pod that this node does not support, and those that it does not enforce.

A pod with an unsupported field that would change its behaviour is refused with a sentence that names the field. Limits
that only protect others (CPU, memory) are not enforced, but reported once per node. Pure functions of the pod.
"""

from collections.abc import Iterator

from trainium_devcluster.node.api.objects import Json, containers, init_containers
from trainium_devcluster.node.processes.command import ADDABLE_CAPABILITIES
from trainium_devcluster.node.processes.isolation import Isolation

_VOLUMES = frozenset(
    {"emptyDir", "hostPath", "configMap", "secret", "downwardAPI", "projected", "persistentVolumeClaim"}
)
_PROJECTED = frozenset({"serviceAccountToken", "configMap", "secret", "downwardAPI"})
_POD_FLAGS = {
    "hostPID": "processes of the machine are never shown to pods",
    "hostIPC": "the machine's shared memory is never shown to pods",
    "shareProcessNamespace": "each container has a separate process namespace",
    "setHostnameAsFQDN": "the host name is the pod's name",
}


def find_unsupported(pod: Json, isolation: Isolation) -> list[str]:
    """Return a sentence for each unsupported field; empty if the pod can run."""
    return [*_check_pod(pod), *_check_volumes(pod), *_check_containers(pod, isolation)]


def reject_ephemeral(pod: Json) -> str | None:
    """Return the message for a pod with ephemeral containers, which may be added while it runs."""
    if pod["spec"].get("ephemeralContainers"):
        return "spec.ephemeralContainers is not supported by the process node; use `kubectl exec` instead"
    return None


def unenforced_fields(pod: Json) -> list[str]:
    """Return the fields of this pod that are accepted without effect."""
    fields: list[str] = []
    for container in [*init_containers(pod), *containers(pod)]:
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


def _check_pod(pod: Json) -> Iterator[str]:
    spec = pod["spec"]
    for flag, why in _POD_FLAGS.items():
        if spec.get(flag):
            yield f"spec.{flag} is not supported by the process node: {why}"
    if spec.get("runtimeClassName"):
        yield "spec.runtimeClassName is not supported by the process node"
    if (spec.get("os") or {}).get("name", "linux") != "linux":
        yield "spec.os.name must be linux on a process node"
    if spec.get("hostUsers") is False:
        yield "spec.hostUsers=false is not supported by the process node"
    if spec.get("dnsPolicy") == "None" or (spec.get("dnsConfig") or {}).get("nameservers"):
        yield "spec.dnsConfig.nameservers is not supported by the process node: names come from the pod's /etc/hosts"
    context = spec.get("securityContext") or {}
    for key in ("sysctls", "seLinuxOptions", "windowsOptions"):
        if context.get(key):
            yield f"spec.securityContext.{key} is not supported by the process node"
    if reason := reject_ephemeral(pod):
        yield reason


def _check_volumes(pod: Json) -> Iterator[str]:
    for volume in pod["spec"].get("volumes") or []:
        kinds = volume.keys() - {"name"}
        if not kinds & _VOLUMES:
            yield f"volume {volume['name']} of kind {', '.join(sorted(kinds))} is not supported by the process node"
        for source in (volume.get("projected") or {}).get("sources") or []:
            for kind in source.keys() - _PROJECTED:
                yield f"volume {volume['name']}: projected source {kind} is not supported by the process node"


def _check_containers(pod: Json, isolation: Isolation) -> Iterator[str]:
    for kind, group in (("initContainers", init_containers(pod)), ("containers", containers(pod))):
        for container in group:
            where = f"spec.{kind}[{container['name']}]"
            for problem in (*_check_container(container), *_check_security_context(container, isolation)):
                yield f"{where}.{problem}"


def _check_container(container: Json) -> Iterator[str]:
    if not container.get("command"):
        yield "command must be given on a process node, which reads no image and so knows no entry point"
    if container.get("restartPolicyRules"):
        yield "restartPolicyRules is not supported by the process node"
    if container.get("volumeDevices"):
        yield "volumeDevices is not supported by the process node: there are no block devices"
    if container.get("stdin") or container.get("tty"):
        yield "stdin and tty are not supported by the process node: it has no attach"
    for key in ("livenessProbe", "readinessProbe", "startupProbe"):
        if "grpc" in (container.get(key) or {}):
            yield f"{key}.grpc is not supported by the process node: use httpGet, tcpSocket or exec"
    if any(port.get("hostPort") for port in container.get("ports") or []):
        yield "ports.hostPort is not supported by the process node: every pod has a separate address on this machine"
    for mount in container.get("volumeMounts") or []:
        if mount.get("mountPropagation", "None") != "None":
            yield f"volumeMounts[{mount['mountPath']}].mountPropagation is not supported by the process node"


def _check_security_context(container: Json, isolation: Isolation) -> Iterator[str]:
    context = container.get("securityContext") or {}
    if context.get("privileged"):
        yield "securityContext.privileged is not supported by the process node"
    if context.get("procMount", "Default") != "Default":
        yield "securityContext.procMount is not supported by the process node"
    for key in ("seLinuxOptions", "windowsOptions"):
        if context.get(key):
            yield f"securityContext.{key} is not supported by the process node"
    if (context.get("seccompProfile") or {}).get("type") == "Localhost":
        yield "securityContext.seccompProfile of type Localhost is not supported by the process node"
    for capability in (context.get("capabilities") or {}).get("add") or []:
        if capability.removeprefix("CAP_") not in ADDABLE_CAPABILITIES:
            yield f"securityContext.capabilities.add {capability} is not supported by the process node"
    if not isolation.mounts and container.get("volumeMounts"):
        yield "volumeMounts needs mount namespaces, which this machine permits neither as root nor to this user"
    if not isolation.mounts and context.get("readOnlyRootFilesystem"):
        yield "securityContext.readOnlyRootFilesystem needs mount namespaces, which this machine does not permit"

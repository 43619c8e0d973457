"""Implement the downward API: fields of the pod through fieldRef and resourceFieldRef.

Guarantees:
- Paths, escapes and formats are those of a kubelet.
- An unknown path is an error, never an empty string.
"""

import re
from dataclasses import dataclass

from trainium_devcluster.node.api import quantities
from trainium_devcluster.node.api.objects import Json, containers, find, init_containers

_KEYED = re.compile(r"^metadata\.(labels|annotations)\['(.+)'\]$")


class UnknownFieldError(ValueError):
    """A fieldRef or resourceFieldRef names something that does not exist."""


@dataclass(frozen=True, slots=True)
class PodFacts:
    """A pod with facts of its node: addresses, and allocatable resources as defaults of limits."""

    pod: Json
    pod_ip: str
    host_ip: str
    allocatable: dict[str, str]


def field_value(facts: PodFacts, path: str) -> str:
    """Return the text for a fieldRef.

    Raises:
        UnknownFieldError: for a path that the downward API does not have.
    """
    metadata, spec = facts.pod["metadata"], facts.pod["spec"]
    if keyed := _KEYED.match(path):
        return str((metadata.get(keyed[1]) or {}).get(keyed[2], ""))
    match path:
        case "metadata.name" | "metadata.namespace" | "metadata.uid":
            return str(metadata[path.removeprefix("metadata.")])
        case "metadata.labels" | "metadata.annotations":
            entries = metadata.get(path.removeprefix("metadata.")) or {}
            return "\n".join(f'{key}="{_escape(value)}"' for key, value in sorted(entries.items()))
        case "spec.nodeName":
            return str(spec.get("nodeName", ""))
        case "spec.serviceAccountName":
            return str(spec.get("serviceAccountName", ""))
        case "status.hostIP" | "status.hostIPs":
            return facts.host_ip
        case "status.podIP" | "status.podIPs":
            return facts.pod_ip
    raise UnknownFieldError(
        f"fieldRef {path} is not part of the downward API; use one of metadata.*, spec.nodeName, status.podIP"
    )


def resource_value(facts: PodFacts, reference: Json, own_container: str) -> str:
    """Return the text for a resourceFieldRef; a missing limit is the node's allocatable amount, as with a kubelet.

    Raises:
        UnknownFieldError: for a container or a resource that does not exist.
    """
    name = reference.get("containerName") or own_container
    container = find([*containers(facts.pod), *init_containers(facts.pod)], "name", name)
    if container is None:
        raise UnknownFieldError(f"resourceFieldRef names container {name!r}, which the pod does not have")
    kind, _, what = str(reference["resource"]).partition(".")
    amounts = (container.get("resources") or {}).get(kind) or {}
    if kind not in {"limits", "requests"} or not what:
        raise UnknownFieldError(f"resourceFieldRef {reference['resource']} must begin with limits. or requests.")
    fallback = (
        facts.allocatable.get(what, "0") if kind == "limits" and what in {"cpu", "memory", "ephemeral-storage"} else "0"
    )
    return quantities.divide(amounts.get(what, fallback), str(reference.get("divisor") or "1"))


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\t", "\\t").replace("\r", "\\r")

"""Implement the downward API for variables and volumes: fields of the pod through fieldRef.

Guarantees:
- Paths, escapes and formats are those of a kubelet.
- An unknown path is an error, never an empty string.
"""

import re
from dataclasses import dataclass

from trainium_devcluster.node.api.objects import Json

_KEYED = re.compile(r"^metadata\.(labels|annotations)\['(.+)'\]$")


class UnknownFieldError(ValueError):
    """A fieldRef names something that does not exist."""


@dataclass(frozen=True, slots=True)
class PodFacts:
    """A pod with the addresses of itself and its node."""

    pod: Json
    pod_ip: str
    host_ip: str


def resolve_field(facts: PodFacts, path: str) -> str:
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


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\t", "\\t").replace("\r", "\\r")

"""Read common fields of Kubernetes objects in plain JSON.

Guarantees:
- No function changes an object.
- Times are RFC 3339 in UTC with a Z, as the API server writes them.
"""

from collections.abc import Iterable
from datetime import datetime
from typing import Any

Json = dict[str, Any]

EPOCH = "1970-01-01T00:00:00Z"


def parse_time(text: str) -> float:
    """Parse a Time or MicroTime; return seconds since the epoch."""
    return datetime.fromisoformat(text).timestamp()


def get_uid(obj: Json) -> str:
    """Return the unique id of an object."""
    return str(obj["metadata"]["uid"])


def get_name(obj: Json) -> str:
    """Return the name of an object."""
    return str(obj["metadata"]["name"])


def get_namespace(obj: Json) -> str:
    """Return the namespace of an object; empty if it has none."""
    return str(obj["metadata"].get("namespace", ""))


def get_containers(pod: Json) -> list[Json]:
    """Return the main containers of a pod."""
    return list(pod["spec"].get("containers") or [])


def get_init_containers(pod: Json) -> list[Json]:
    """Return the init containers of a pod, including native sidecars."""
    return list(pod["spec"].get("initContainers") or [])


def is_sidecar(container: Json) -> bool:
    """Return whether an init container is a native sidecar, which runs as long as the pod."""
    return container.get("restartPolicy") == "Always"


def find(items: Iterable[Json] | None, key: str, value: str) -> Json | None:
    """Return the first of `items` whose `key` is `value`."""
    return next((item for item in items or () if item.get(key) == value), None)


def is_terminal(pod: Json) -> bool:
    """Return whether the pod has ended permanently."""
    return pod.get("status", {}).get("phase") in {"Succeeded", "Failed"}


def is_ready(pod: Json) -> bool:
    """Return whether a pod or node has condition Ready."""
    condition = find(pod.get("status", {}).get("conditions"), "type", "Ready")
    return condition is not None and condition["status"] == "True"


def get_grace_seconds(pod: Json) -> int:
    """Return the grace period, at least 1 s; for a forced deletion (0) that of the spec, as on a kubelet."""
    grace = pod["metadata"].get("deletionGracePeriodSeconds") or pod["spec"].get("terminationGracePeriodSeconds") or 0
    return max(1, int(grace))

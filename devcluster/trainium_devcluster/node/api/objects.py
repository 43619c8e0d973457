"""Kubernetes objects as plain JSON, and the few readings of them that everything here shares.

Invariants: nothing here changes an object; times are RFC 3339 in UTC with a Z, as the API server writes them.
"""

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

Json = dict[str, Any]

EPOCH = "1970-01-01T00:00:00Z"


def timestamp(seconds: float) -> str:
    """Seconds since the epoch as the API writes a Time (whole seconds)."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def micro_timestamp(seconds: float) -> str:
    """Seconds since the epoch as the API writes a MicroTime."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def parse_time(text: str) -> float:
    """Encode an object."""
    return datetime.fromisoformat(text).timestamp()


def uid(obj: Json) -> str:
    """Return the unique id of an object."""
    return str(obj["metadata"]["uid"])


def name(obj: Json) -> str:
    """Return the name of an object."""
    return str(obj["metadata"]["name"])


def namespace(obj: Json) -> str:
    """Return the namespace of an object; empty if it has none."""
    return str(obj["metadata"].get("namespace", ""))


def containers(pod: Json) -> list[Json]:
    """Return the main containers of a pod."""
    return list(pod["spec"].get("containers") or [])


def init_containers(pod: Json) -> list[Json]:
    """Return the init containers of a pod, including native sidecars."""
    return list(pod["spec"].get("initContainers") or [])


def is_sidecar(container: Json) -> bool:
    """Return whether an init container is a native sidecar, which runs as long as the pod does."""
    return container.get("restartPolicy") == "Always"


def find(items: Iterable[Json] | None, key: str, value: str) -> Json | None:
    """Return the first of `items` whose `key` is `value`."""
    return next((item for item in items or () if item.get(key) == value), None)


def is_terminal(pod: Json) -> bool:
    """Return whether the pod has ended for good."""
    return pod.get("status", {}).get("phase") in {"Succeeded", "Failed"}


def grace_seconds(pod: Json) -> int:
    """Seconds that the pod has to end, at least 1; a forced deletion (period 0) gets the pod's own, as on a kubelet."""
    grace = pod["metadata"].get("deletionGracePeriodSeconds") or pod["spec"].get("terminationGracePeriodSeconds") or 0
    return max(1, int(grace))

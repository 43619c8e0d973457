"""Read objects of an API server without kubectl, which uses a third of a core when a test polls with it.

It reads only kinds that tests wait for; use kubectl for other kinds and other credentials.
"""

from typing import Any
from urllib.parse import quote

Json = dict[str, Any]

_KINDS = {
    "configmap": "api/v1/{}configmaps",
    "node": "api/v1/nodes",
    "nodes": "api/v1/nodes",
    "pod": "api/v1/{}pods",
    "pods": "api/v1/{}pods",
    "events": "api/v1/{}events",
    "events.events.k8s.io": "apis/events.k8s.io/v1/{}events",
    "trainingjob": "apis/trainium.dev/v1alpha1/{}trainingjobs",
    "trainingjobs": "apis/trainium.dev/v1alpha1/{}trainingjobs",
}
_QUERIES = {"-l": "labelSelector", "--field-selector": "fieldSelector"}


def path_of(arguments: tuple[str, ...]) -> str | None:
    """Return path and query of the request of `kubectl get ARGUMENTS -o json`, or None if unknown."""
    words, namespace, query = list(arguments), "default", ""
    for option in ("-n", *_QUERIES):
        if option in words:
            position = words.index(option)
            _, value = words.pop(position), words.pop(position)
            if option == "-n":
                namespace = value
            else:
                query = f"?{_QUERIES[option]}={quote(value)}"
    if not 1 <= len(words) <= 2 or words[0] not in _KINDS or any(word.startswith("-") for word in words):
        return None
    collection = _KINDS[words[0]].format(f"namespaces/{namespace}/")
    return "/" + "/".join([collection, *words[1:]]) + query

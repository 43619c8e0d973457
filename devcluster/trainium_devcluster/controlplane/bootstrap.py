"""Create the first objects of a new cluster: additional permissions of nodes, and a default StorageClass.

Nodes need more permissions than Kubernetes' role for nodes, because the node runtime also replaces kube-proxy and a
volume provisioner. Endpoints cannot hold loopback addresses, so it finds the pods of a Service by its selector.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trainium_devcluster.api_client import ApiClient

STORAGE_CLASS = "standard"
PROVISIONER = "trainium.dev/process-node"

_READ = ("get", "list", "watch")
_RBAC = "rbac.authorization.k8s.io"
_ROLE = "trainium-devcluster:node"


def _create_rule(group: str, resources: Sequence[str], verbs: Sequence[str]) -> Mapping[str, object]:
    return {"apiGroups": [group], "resources": list(resources), "verbs": list(verbs)}


_OBJECTS: Mapping[str, Mapping[str, object]] = {
    f"/apis/{_RBAC}/v1/clusterroles": {
        "apiVersion": f"{_RBAC}/v1",
        "kind": "ClusterRole",
        "metadata": {"name": _ROLE},
        "rules": [
            _create_rule("", ("services", "pods", "persistentvolumeclaims"), _READ),
            _create_rule("", ("persistentvolumes",), (*_READ, "create", "delete")),
            _create_rule("discovery.k8s.io", ("endpointslices",), _READ),
            _create_rule("storage.k8s.io", ("storageclasses",), _READ),
            _create_rule("", ("events",), ("create", "patch", "update")),
            _create_rule("events.k8s.io", ("events",), ("create", "patch", "update")),
        ],
    },
    f"/apis/{_RBAC}/v1/clusterrolebindings": {
        "apiVersion": f"{_RBAC}/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": _ROLE},
        "roleRef": {"apiGroup": _RBAC, "kind": "ClusterRole", "name": _ROLE},
        "subjects": [{"kind": "Group", "apiGroup": _RBAC, "name": "system:nodes"}],
    },
    "/apis/storage.k8s.io/v1/storageclasses": {
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": {
            "name": STORAGE_CLASS,
            "annotations": {"storageclass.kubernetes.io/is-default-class": "true"},
        },
        "provisioner": PROVISIONER,
        "volumeBindingMode": "WaitForFirstConsumer",
    },
}


def bootstrap(client: ApiClient) -> None:
    """Create the missing objects. Idempotent."""
    for path, document in _OBJECTS.items():
        client.create(path, document, exists_ok=True)

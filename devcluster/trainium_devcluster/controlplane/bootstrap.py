"""Create the first objects of a new cluster, which are in bootstrap.yaml."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import yaml

if TYPE_CHECKING:
    from trainium_devcluster.api_client import ApiClient

PROVISIONER = "trainium.dev/process-node"
"""Provisioner of the StorageClass in bootstrap.yaml."""
_PLURALS = {
    "ClusterRole": "clusterroles",
    "ClusterRoleBinding": "clusterrolebindings",
    "StorageClass": "storageclasses",
}


def bootstrap(client: ApiClient) -> None:
    """Create the missing objects. Idempotent."""
    for document in yaml.safe_load_all(Path(__file__).with_name("bootstrap.yaml").read_text()):
        path = f"/apis/{document['apiVersion']}/{_PLURALS[document['kind']]}"
        client.create(path, document, exists_ok=True)

"""Kubeconfig files with embedded certificates, so that one file is all a client needs."""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainium_devcluster.controlplane.certificates import Pair


def render_kubeconfig(*, cluster: str, server: str, authority: bytes, user: str, pair: Pair) -> bytes:
    """Return a kubeconfig for one user of one cluster (JSON, which is YAML)."""

    def text(content: bytes) -> str:
        return base64.b64encode(content).decode("ascii")

    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": cluster, "cluster": {"server": server, "certificate-authority-data": text(authority)}}],
        "users": [
            {
                "name": user,
                "user": {
                    "client-certificate-data": text(pair.certificate),
                    "client-key-data": text(pair.key),
                },
            }
        ],
        "contexts": [{"name": cluster, "context": {"cluster": cluster, "user": user}}],
        "current-context": cluster,
    }
    return (json.dumps(document, indent=1) + "\n").encode()

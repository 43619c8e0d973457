"""Configure kwok: the nodes that it manages, and the status of their pods.

Guarantees:
- Like a kubelet, kwok renews the leases of the nodes and reverts the conditions that the controller manager sets to
  Unknown.
- It keeps every other condition.
- A pod runs as soon as it is bound, has its own address, and is removed as soon as it is deleted.
- A pod that was failed remains failed.
"""

from __future__ import annotations

from typing import Any

import yaml

MANAGED_LABEL = "trainium.dev/fleet"
"""Label of nodes whose kubelet kwok simulates; a node without it has a dead kubelet."""
MANAGED = "kwok"
POD_ADDRESSES = "10.128.0.0/9"

_RUNNING = """
{{ $now := Now }}
phase: Running
startTime: {{ $now | Quote }}
podIP: {{ PodIPWith .spec.nodeName false .metadata.uid .metadata.name .metadata.namespace | Quote }}
conditions:
{{ range $type := list "PodReadyToStartContainers" "Initialized" "ContainersReady" "Ready" }}
- type: {{ $type }}
  status: "True"
  lastTransitionTime: {{ $now | Quote }}
{{ end }}
containerStatuses:
{{ range .spec.containers }}
- name: {{ .name | Quote }}
  image: {{ .image | Quote }}
  imageID: ""
  ready: true
  started: true
  restartCount: 0
  state:
    running:
      startedAt: {{ $now | Quote }}
{{ end }}
"""

_READY = '.status.conditions.[] | select( .type == "Ready" ) | .status'
_NODE_READY = """
{{ $now := Now }}
conditions:
{{ range $type := list "Ready" "MemoryPressure" "DiskPressure" "PIDPressure" }}
- type: {{ $type }}
  status: {{ if eq $type "Ready" }}"True"{{ else }}"False"{{ end }}
  reason: Fleet
  message: ""
  lastTransitionTime: {{ $now | Quote }}
  lastHeartbeatTime: {{ $now | Quote }}
{{ end }}
"""


def build_kwok_configuration(lease_seconds: int) -> str:
    """Return the configuration; leases expire after `lease_seconds` and are renewed four times as often."""
    options = {
        "cidr": POD_ADDRESSES,
        "enableCRDs": [],
        "manageAllNodes": False,
        "manageNodesWithLabelSelector": f"{MANAGED_LABEL}={MANAGED}",
        "manageNodesWithAnnotationSelector": "",
        "nodeLeaseDurationSeconds": lease_seconds,
        "nodeLeaseParallelism": 8,
        "podPlayStageParallelism": 16,
        "nodePlayStageParallelism": 4,
    }
    alive = {"key": ".metadata.deletionTimestamp", "operator": "DoesNotExist"}
    documents: list[dict[str, Any]] = [
        {"apiVersion": "config.kwok.x-k8s.io/v1alpha1", "kind": "KwokConfiguration", "options": options},
        # Without a stage for nodes kwok would not renew their leases.
        _build_stage(
            "node-ready",
            [{"key": _READY, "operator": "In", "values": ["Unknown"]}],
            {"statusTemplate": _NODE_READY.strip()},
            kind="Node",
        ),
        _build_stage(
            "pod-running",
            [alive, {"key": ".status.phase", "operator": "In", "values": ["Pending"]}],
            {"statusTemplate": _RUNNING.strip()},
        ),
        _build_stage("pod-deleted", [{**alive, "operator": "Exists"}], {"delete": True}),
    ]
    return yaml.safe_dump_all(documents, sort_keys=False)


def _build_stage(
    name: str, expressions: list[dict[str, Any]], following: dict[str, Any], *, kind: str = "Pod"
) -> dict[str, Any]:
    return {
        "apiVersion": "kwok.x-k8s.io/v1alpha1",
        "kind": "Stage",
        "metadata": {"name": name},
        "spec": {
            "resourceRef": {"apiGroup": "v1", "kind": kind},
            "selector": {"matchExpressions": expressions},
            "next": following,
        },
    }

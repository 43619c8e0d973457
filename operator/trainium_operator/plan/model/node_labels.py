"""Labels, extended resources and the taint of nodes that plans know, each spelt once."""

from __future__ import annotations

from trainium_contract.wire.worker_env import GROUP

LABEL_INSTANCE_TYPE = "node.kubernetes.io/instance-type"
LABEL_HOST = "kubernetes.io/hostname"
LABEL_ZONE = "topology.kubernetes.io/zone"
LABEL_HYPERPOD_HEALTH = "sagemaker.amazonaws.com/node-health-status"
LABEL_HYPERPOD_DEEP_CHECK = "sagemaker.amazonaws.com/deep-health-check-status"
LAYERS = tuple(f"topology.k8s.aws/network-node-layer-{number}" for number in (1, 2, 3, 4))
"""Labels of EC2's network topology on EKS nodes, from the widest domain to the nearest."""
LABELS_READ = frozenset(
    {
        LABEL_INSTANCE_TYPE,
        LABEL_HOST,
        LABEL_HYPERPOD_HEALTH,
        LABEL_HYPERPOD_DEEP_CHECK,
        LABEL_ZONE,
        *LAYERS,
        "topology.k8s.aws/ultraserver-id",
    }
)
"""Labels of a node that plans read; a change of any other is nobody's business."""
NEURON, EFA = "aws.amazon.com/neuron", "vpc.amazonaws.com/efa"
RESOURCES_READ = frozenset({NEURON, EFA, "nvidia.com/gpu"})
TAINT_QUARANTINED = f"{GROUP}/quarantined"
"""Our own taint; it follows from the fleet's memory and is never a reason for it."""

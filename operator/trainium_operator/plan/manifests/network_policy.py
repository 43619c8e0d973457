"""The NetworkPolicy of a job: who may open connections to its workers. Pure construction.

In come the job's own workers, at every port (the store of a generation, collectives, tests of pairs), the operator's
pods, which look whether the port of a silent agent still answers, and what the chart's `networkPolicy.jobs.ingress`
adds. Nobody else has a reason to: workers serve no metrics, and what goes through the kubelet (probes, logs, exec,
port-forward, so all of `kubectl trn`) is not subject to policies. Policies add up, so a job with ports of its own is
opened further by another policy that selects its pods.

Egress is left open: a job reaches the coordinator, DNS, shared file systems, S3 and hubs, wherever those are, and a
rule that forgets one of them is an outage. EFA traffic passes by the kernel's network, so no policy sees it; the
device's security group decides there. Pods on the network of their host are no target of any policy, and no rule by
pod labels recognises them: a policy that is there lets everybody in then, for what was made before.

Invariant: it depends on names and settings alone, so it is written once in a job's life.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainium_operator.plan.manifests.owned_object import owned_object
from trainium_operator.plan.model import names

if TYPE_CHECKING:
    from trainium_operator.plan.model.observed import JobView, WorkerIngress

Json = dict[str, Any]

KIND = "NetworkPolicy"
API_VERSION = "networking.k8s.io/v1"
_NAMESPACE_NAME = "kubernetes.io/metadata.name"
"""Label that the API server gives every namespace."""


def network_policy(job: JobView, ingress: WorkerIngress) -> Json:
    """The complete manifest."""
    peers = {"from": [{"podSelector": {"matchLabels": names.selector_labels(job.name)}}]}
    operator = {
        "namespaceSelector": {"matchLabels": {_NAMESPACE_NAME: ingress.operator_namespace}},
        "podSelector": {"matchLabels": dict(ingress.operator_labels)},
    }
    # The port that an agent reserves is any free one.
    probes = {"from": [operator], "ports": [{"protocol": "TCP"}]}
    rules: list[Json] = [{}] if on_host_network(job) else [peers, probes, *map(dict, ingress.rules)]
    spec = {
        "podSelector": {"matchLabels": names.selector_labels(job.name)},
        "policyTypes": ["Ingress"],
        "ingress": rules,
    }
    return owned_object(job, API_VERSION, KIND, names.network_policy_name(job.name), {"spec": spec}, "network")


def on_host_network(job: JobView) -> bool:
    """Whether pods made now are on the network of their host."""
    return (job.spec.workers.template.get("spec") or {}).get("hostNetwork") is True

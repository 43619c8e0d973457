"""Create the job's NetworkPolicy as soon as there are pods, and report why it is missing.

Workers accept connections from the job's own workers, at every port (the store of a generation, collectives, tests of
pairs), from the operator's pods, which check whether the port of a silent agent still answers, and from what the
chart's `networkPolicy.jobs.ingress` adds. Workers serve no metrics, and what goes through the kubelet (probes, logs,
exec, port-forward, so all of `kubectl trn`) is not subject to policies. Policies add up, so a job with ports
is opened further by another policy that selects its pods. The policy also selects the pod of an evaluation, which
nobody needs to reach and which may not reach the workers.

Egress is left open: a job reaches the coordinator, DNS, shared file systems, S3 and hubs, wherever those are, and a
rule that omits one of them is an outage. EFA traffic bypasses the kernel's network, so no policy sees it; the security
group of the device decides there. Pods on the network of their host are no target of any policy, and no rule by pod
labels recognizes them: an existing policy then admits everybody.

Guarantees:
- Nothing waits for the policy: it is written after the pods, with a back-off, and a job without it trains.
- It depends on names and settings alone, so it is written once in a job's life.
- The condition NetworkPolicyApplied exists only from the first refusal on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainium_contract.status.conditions import ConditionType
from trainium_contract.wire.worker_env import LABEL_JOB, LABEL_ROLE
from trainium_operator.plan.manifests.owned_object import build_owned_object
from trainium_operator.plan.model import names
from trainium_operator.plan.model.actions import PolicyResult, build_event
from trainium_operator.plan.model.conditions import find_condition, is_terminal, is_true, set_condition
from trainium_operator.plan.model.reasons import Reason
from trainium_operator.plan.view.context import Feature, PlanContext, reconcile_object

if TYPE_CHECKING:
    from trainium_contract.job import TrainingJobStatus
    from trainium_operator.plan.model.observed import JobView, Observed, PlanSettings, WorkerIngress, WriteRefusal

Json = dict[str, Any]

KIND = "NetworkPolicy"
API_VERSION = "networking.k8s.io/v1"
_NAMESPACE_NAME = "kubernetes.io/metadata.name"
"""Label that the API server gives every namespace."""
_CONDITION = ConditionType.NETWORK_POLICY_APPLIED
RECHECK_SECONDS = 5.0
"""Interval of checks until the policies have been read."""


def reconcile_network_policy(context: PlanContext, status: TrainingJobStatus) -> PolicyResult:
    """Create or update the policy, and report a refusal."""
    observed, ingress = context.observed, context.settings.worker_ingress
    if ingress is None:
        return PolicyResult(status=_remove_condition(status))
    if is_terminal(status) or not observed.pods:
        return PolicyResult(status=status)
    place = f"{KIND}/{names.format_network_policy_name(context.job.name)}"
    if place not in observed.children and is_on_host_network(context.job):
        return PolicyResult(status=_remove_condition(status))
    manifest = build_network_policy(context.job, ingress)
    if observed.find_next_write(manifest) is None:
        if find_condition(status, _CONDITION) is not None:
            status = set_condition(status, _CONDITION, True, Reason.POLICY_APPLIED, "", now=context.now)
        return PolicyResult(status=status)
    if not observed.policies_listed:
        return PolicyResult(status=status, requeue_at=(context.now + RECHECK_SECONDS,))
    result, refusal = PolicyResult(status=status), observed.refusals.get(place)
    if refusal is not None:
        result = _report_refusal(context, status, refusal)
    return result.combine(reconcile_object(context, result.status, manifest))


def _report_refusal(context: PlanContext, status: TrainingJobStatus, refusal: WriteRefusal) -> PolicyResult:
    """Set the condition, and add an event when it is new."""
    reason = refusal.reason
    text = f"others can reach the workers' ports: {refusal.sentence}"
    # False because a name is taken would make the job stalled, but it trains.
    status = set_condition(status, _CONDITION, None if refusal.name_in_use else False, reason, text, now=context.now)
    old = find_condition(context.job.status, _CONDITION)
    is_new = old is None or is_true(context.job.status, _CONDITION) or old.reason != reason
    return PolicyResult(status=status, events=(build_event(reason, text, warning=True),) if is_new else ())


def _remove_condition(status: TrainingJobStatus) -> TrainingJobStatus:
    if find_condition(status, _CONDITION) is None:
        return status
    return status.replaced(
        conditions=tuple(condition for condition in status.conditions if condition.type is not _CONDITION)
    )


def build_network_policy(job: JobView, ingress: WorkerIngress) -> Json:
    """Build the complete manifest."""
    peers = {"from": [{"podSelector": {"matchLabels": names.build_selector_labels(job.name)}}]}
    operator = {
        "namespaceSelector": {"matchLabels": {_NAMESPACE_NAME: ingress.operator_namespace}},
        "podSelector": {"matchLabels": dict(ingress.operator_labels)},
    }
    # an agent reserves any free port
    probes = {"from": [operator], "ports": [{"protocol": "TCP"}]}
    rules: list[Json] = [{}] if is_on_host_network(job) else [peers, probes, *map(dict, ingress.rules)]
    spec = {
        "podSelector": {
            "matchLabels": {LABEL_JOB: job.name},
            "matchExpressions": [{"key": LABEL_ROLE, "operator": "Exists"}],
        },
        "policyTypes": ["Ingress"],
        "ingress": rules,
    }
    return build_owned_object(
        job, API_VERSION, KIND, names.format_network_policy_name(job.name), {"spec": spec}, "network"
    )


def is_on_host_network(job: JobView) -> bool:
    """Return whether new pods are on the network of their host."""
    return (job.spec.workers.template.get("spec") or {}).get("hostNetwork") is True


def _is_used(observed: Observed, settings: PlanSettings) -> bool:
    return settings.worker_ingress is not None or find_condition(observed.job.status, _CONDITION) is not None


FEATURE = Feature(name="network policy", is_used=_is_used, finalize=reconcile_network_policy)

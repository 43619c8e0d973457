"""Admission policies of others: objects of one namespace that they refuse or change."""

import contextlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

from tests.testing.cluster.access import Access

_GROUP = "admissionregistration.k8s.io/v1"


def build_refusal(namespace: str, expression: str, message: str, *rules: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a policy, and its binding, that refuses objects for which the expression is false."""
    spec = {"validations": [{"expression": expression, "message": message}]}
    binding = {"validationActions": ["Deny"]}
    return _build_policy("Validating", f"refusal-{namespace}", namespace, rules, spec, binding)


def build_mutation(namespace: str, patch: str, *rules: dict[str, Any], condition: str = "true") -> list[dict[str, Any]]:
    """Return a policy, and its binding, that applies a JSONPatch expression to objects that fulfil the condition."""
    spec = {
        "reinvocationPolicy": "Never",
        "matchConditions": [{"name": "condition", "expression": condition}],
        "mutations": [{"patchType": "JSONPatch", "jsonPatch": {"expression": f"[{patch}]"}}],
    }
    return _build_policy("Mutating", f"mutation-{namespace}", namespace, rules, spec, {})


def build_rule(group: str, *resources: str, operations: Sequence[str] = ("CREATE", "UPDATE")) -> dict[str, Any]:
    """Return which requests a policy sees."""
    return {
        "apiGroups": [group],
        "apiVersions": ["*"],
        "operations": list(operations),
        "resources": list(resources),
    }


def _build_policy(
    kind: str,
    name: str,
    namespace: str,
    rules: Sequence[dict[str, Any]],
    spec: dict[str, Any],
    binding: dict[str, Any],
) -> list[dict[str, Any]]:
    constraints = {
        "resourceRules": list(rules),
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
    }
    meta = {"apiVersion": _GROUP, "metadata": {"name": name}}
    return [
        {
            **meta,
            "kind": f"{kind}AdmissionPolicy",
            "spec": {"failurePolicy": "Fail", "matchConstraints": constraints} | spec,
        },
        {**meta, "kind": f"{kind}AdmissionPolicyBinding", "spec": {"policyName": name} | binding},
    ]


@contextlib.contextmanager
def apply_objects(access: Access, *objects: dict[str, Any]) -> Iterator[None]:
    """Apply objects until the block ends."""
    listed = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
    access.kubectl("apply", "-f", "-", stdin=listed)
    try:
        yield
    finally:
        access.kubectl("delete", "--ignore-not-found", "-f", "-", stdin=listed)


def count_requests(access: Access, verb: str, resource: str) -> int:
    """Return how many requests of a verb the API server has answered."""
    labels = (f'verb="{verb}"', f'resource="{resource}"')
    lines = access.kubectl("get", "--raw", "/metrics").splitlines()
    counted = [line for line in lines if line.startswith("apiserver_request_total{") and all(x in line for x in labels)]
    return round(sum(float(line.rpartition(" ")[2]) for line in counted))

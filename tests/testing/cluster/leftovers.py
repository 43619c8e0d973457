"""Remove the objects of tests from an existing cluster, before the first test and after the last.

Leftovers of an interrupted session have marks (`marks.py`): namespaces with jobs and pods, the operator, roles, the
definition if tests applied it, and changes of nodes. Objects of other users stay; tests do not start if these block
them.
"""

import json
from collections.abc import Callable
from typing import Any

from tests.testing.cluster.access import Access
from tests.testing.cluster.installed import uninstall_operator
from tests.testing.cluster.marks import (
    CHART_SELECTOR,
    CORDONED,
    HOLD,
    POWERED_OFF,
    SELECTOR,
    cordon_patch,
    is_chart_object,
    is_marked,
)
from tests.testing.suite.timeouts import NotInTimeError, until

_CLUSTER_SCOPED_KINDS = (
    "clusterrole,clusterrolebinding,validatingadmissionpolicy,validatingadmissionpolicybinding,priorityclass"
)
"""Kinds that the chart or tests create."""


class OccupiedError(Exception):
    """Report that an object of another owner blocks the tests; the message names it and the remedy."""


def check_unoccupied(access: Access) -> None:
    """Raise OccupiedError when an operator or jobs that tests did not make are on the cluster."""
    test_namespaces = {namespace["metadata"]["name"] for namespace in _test_namespaces(access)}
    for kind, selector, remedy in (
        ("deployments", ("-l", CHART_SELECTOR), "uninstall the operator (helm uninstall)"),
        ("trainingjobs", (), "delete them"),
    ):
        listed = access.run("kubectl", "get", kind, "-A", *selector, "-o", "json")  # fails without a definition
        items = json.loads(listed.stdout)["items"] if listed.returncode == 0 else []
        foreign = [item["metadata"] for item in items if not is_marked(item)]
        names = sorted(
            f"{metadata['namespace']}/{metadata['name']}"
            for metadata in foreign
            if metadata["namespace"] not in test_namespaces
        )
        if names:
            raise OccupiedError(
                f"The cluster of KUBECONFIG has {kind} of this operator that no test created ({', '.join(names[:3])}): "
                f"tests would disturb them. Use a cluster that is yours alone, or {remedy} first."
            )


def remove_leftovers(access: Access, power_on: Callable[[str], None]) -> None:
    """Remove all objects of tests; raise NotInTimeError with the names of those that are not deleted in time."""
    items = access.get(f"nodes,namespaces,{_CLUSTER_SCOPED_KINDS}")["items"]
    for node in (item for item in items if item["kind"] == "Node"):
        _restore_node(access, node, power_on)
    uninstall_operator(access)
    namespaces = [item["metadata"]["name"] for item in items if item["kind"] == "Namespace" and is_marked(item)]
    if namespaces:
        access.kubectl("delete", "namespace", *namespaces, "--wait=false", "--ignore-not-found")
    for item in items:
        if item["kind"] not in ("Node", "Namespace") and (is_marked(item) or is_chart_object(item)):
            access.kubectl("delete", item["kind"], item["metadata"]["name"], "--ignore-not-found")
    if namespaces:
        _wait_for_deletion(access, namespaces)
    # Last: the API server needs it to delete the jobs of a namespace.
    access.kubectl("delete", "crd", "-l", SELECTOR, "--ignore-not-found")


def _test_namespaces(access: Access) -> list[dict[str, Any]]:
    return list(access.get("namespaces", "-l", SELECTOR)["items"])


def _wait_for_deletion(access: Access, names: list[str]) -> None:
    for name in names:
        _remove_finalizers(access, name)
    try:
        until(lambda: not _test_namespaces(access), "the namespaces of tests end", 90, pause=0.5)
    except NotInTimeError:
        for namespace in _test_namespaces(access):  # the end of a pod of a deleted node is not reported
            name = namespace["metadata"]["name"]
            access.run("kubectl", "delete", "pods", "--all", "-n", name, "--force", "--grace-period=0")
        until(lambda: not _test_namespaces(access), lambda: f"namespaces end: {_conditions(access)}", 60, pause=0.5)


def _remove_finalizers(access: Access, namespace: str) -> None:
    """Remove the finalizers of tests from pods, which would block the deletion of their namespace."""
    for pod in access.get("pods", "-n", namespace)["items"]:
        if HOLD in pod["metadata"].get("finalizers", ()):
            change = ("--type=merge", "-p", '{"metadata":{"finalizers":null}}')
            access.run("kubectl", "patch", "pod", pod["metadata"]["name"], "-n", namespace, *change)


def _conditions(access: Access) -> str:
    messages = {
        namespace["metadata"]["name"]: [
            condition.get("message") for condition in namespace["status"].get("conditions", ())
        ]
        for namespace in _test_namespaces(access)
    }
    return json.dumps(messages)


def _restore_node(access: Access, node: dict[str, Any], power_on: Callable[[str], None]) -> None:
    name, annotations = node["metadata"]["name"], node["metadata"].get("annotations", {})
    if CORDONED in annotations:
        access.kubectl("patch", "node", name, "--type=merge", "-p", json.dumps(cordon_patch(on=False)))
    if POWERED_OFF in annotations:
        power_on(name)

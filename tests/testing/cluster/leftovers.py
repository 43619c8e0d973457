"""Remove from an existing cluster what tests made, before the first test and after the last.

What an interrupted session left is found by its marks (`marks.py`) and removed before the first test: namespaces with
jobs and pods in them, the operator, roles, the definition if tests applied it, and what was done to nodes. What
another user has there stays, and where it would be in the way no test begins.
"""

import json
from collections.abc import Callable
from typing import Any

from tests.testing.cluster.access import Access
from tests.testing.cluster.installed import uninstall_operator
from tests.testing.cluster.marks import (
    CORDONED,
    HOLD,
    OF_THE_CHART,
    POWERED_OFF,
    SELECTOR,
    cordon_patch,
    is_marked,
    is_of_the_chart,
)
from tests.testing.suite.timeouts import NotInTimeError, until

_OF_NO_NAMESPACE = (
    "clusterrole,clusterrolebinding,validatingadmissionpolicy,validatingadmissionpolicybinding,priorityclass"
)
"""Kinds that the chart makes, or tests beside it."""


class OccupiedError(Exception):
    """Report that an object of another owner blocks the tests; the message names it and the remedy."""


def check_unoccupied(access: Access) -> None:
    """Raise OccupiedError when an operator or jobs that tests did not make are on the cluster."""
    ours = {each["metadata"]["name"] for each in _test_namespaces(access)}
    for kind, selector, remedy in (
        ("deployments", ("-l", OF_THE_CHART), "take the operator out (helm uninstall)"),
        ("trainingjobs", (), "delete them"),
    ):
        listed = access.run("kubectl", "get", kind, "-A", *selector, "-o", "json")  # fails without a definition
        items = json.loads(listed.stdout)["items"] if listed.returncode == 0 else []
        foreign = [each["metadata"] for each in items if not is_marked(each)]
        names = sorted(f"{each['namespace']}/{each['name']}" for each in foreign if each["namespace"] not in ours)
        if names:
            raise OccupiedError(
                f"The cluster of KUBECONFIG has {kind} of this operator that no test made ({', '.join(names[:3])}): "
                f"tests would disturb them. Use a cluster that is yours alone, or {remedy} first."
            )


def remove_leftovers(access: Access, power_on: Callable[[str], None]) -> None:
    """Remove all that tests made; raise NotInTimeError with the name of what is not deleted in time."""
    found = access.get(f"nodes,namespaces,{_OF_NO_NAMESPACE}")["items"]
    for node in (each for each in found if each["kind"] == "Node"):
        _restore_node(access, node, power_on)
    uninstall_operator(access)
    namespaces = [each["metadata"]["name"] for each in found if each["kind"] == "Namespace" and is_marked(each)]
    if namespaces:
        access.kubectl("delete", "namespace", *namespaces, "--wait=false", "--ignore-not-found")
    for each in found:
        if each["kind"] not in ("Node", "Namespace") and (is_marked(each) or is_of_the_chart(each)):
            access.kubectl("delete", each["kind"], each["metadata"]["name"], "--ignore-not-found")
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
        for each in _test_namespaces(access):  # the end of a pod of a deleted node is not reported
            name = each["metadata"]["name"]
            access.run("kubectl", "delete", "pods", "--all", "-n", name, "--force", "--grace-period=0")
        until(lambda: not _test_namespaces(access), lambda: f"namespaces end: {_conditions(access)}", 60, pause=0.5)


def _remove_finalizers(access: Access, namespace: str) -> None:
    """Remove the finalizers of tests from pods, which would block the deletion of their namespace."""
    for pod in access.get("pods", "-n", namespace)["items"]:
        if HOLD in pod["metadata"].get("finalizers", ()):
            change = ("--type=merge", "-p", '{"metadata":{"finalizers":null}}')
            access.run("kubectl", "patch", "pod", pod["metadata"]["name"], "-n", namespace, *change)


def _conditions(access: Access) -> str:
    found = {
        each["metadata"]["name"]: [one.get("message") for one in each["status"].get("conditions", ())]
        for each in _test_namespaces(access)
    }
    return json.dumps(found)


def _restore_node(access: Access, node: dict[str, Any], power_on: Callable[[str], None]) -> None:
    name, notes = node["metadata"]["name"], node["metadata"].get("annotations", {})
    if CORDONED in notes:
        access.kubectl("patch", "node", name, "--type=merge", "-p", json.dumps(cordon_patch(on=False)))
    if POWERED_OFF in notes:
        power_on(name)

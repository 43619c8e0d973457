"""Marks of the objects of tests on an existing cluster, by which a later session finds leftovers."""

from typing import Any

MARK = "tests.trainium.dev/made-by"
"""Label of namespaces and of cluster-scoped objects."""
LABELS = {MARK: "tests"}
SELECTOR = f"{MARK}=tests"
CORDONED = "tests.trainium.dev/cordoned"
"""Annotations of nodes that a test has cordoned or powered off."""
POWERED_OFF = "tests.trainium.dev/powered-off"
HOLD = "tests.trainium.dev/hold"
"""A finalizer: keeps a deleted pod readable after its containers have ended."""
CHART_SELECTOR = "app.kubernetes.io/part-of=trainium-operator"
"""Label of all objects of the chart, in any installation."""


def cordon_patch(*, on: bool) -> dict[str, Any]:
    """Return the merge patch that cordons or uncordons a node."""
    note = {"annotations": {CORDONED: "yes" if on else None}}
    return {"metadata": note, "spec": {"unschedulable": True if on else None}}


def is_marked(item: dict[str, Any]) -> bool:
    """Return whether tests created this object."""
    return MARK in (item["metadata"].get("labels") or {})


def is_chart_object(item: dict[str, Any]) -> bool:
    """Return whether the object belongs to the chart, in any installation."""
    key, value = CHART_SELECTOR.split("=")
    return (item["metadata"].get("labels") or {}).get(key) == value

"""Marks of the objects that tests make on an existing cluster, by which a later session finds leftovers."""

from typing import Any

MARK = "tests.trainium.dev/made-by"
"""Label of namespaces (and so of all that is in them), and of what belongs to no namespace."""
LABELS = {MARK: "tests"}
SELECTOR = f"{MARK}=tests"
CORDONED = "tests.trainium.dev/cordoned"
"""Annotations of nodes that a test has cordoned or powered off."""
POWERED_OFF = "tests.trainium.dev/powered-off"
HOLD = "tests.trainium.dev/hold"
"""A finalizer: keeps a deleted pod readable after its containers have ended."""
OF_THE_CHART = "app.kubernetes.io/part-of=trainium-operator"
"""Label of all that the chart makes, for any installation."""


def cordon_patch(*, on: bool) -> dict[str, Any]:
    """Return the merge patch that cordons or uncordons a node."""
    note = {"annotations": {CORDONED: "yes" if on else None}}
    return {"metadata": note, "spec": {"unschedulable": True if on else None}}


def is_marked(item: dict[str, Any]) -> bool:
    """Return whether tests made this object."""
    return MARK in (item["metadata"].get("labels") or {})


def is_of_the_chart(item: dict[str, Any]) -> bool:
    """Return whether the chart made it, in any installation."""
    key, value = OF_THE_CHART.split("=")
    return (item["metadata"].get("labels") or {}).get(key) == value

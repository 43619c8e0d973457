"""Nodes that somebody who knows has declared dead: nothing runs there any more, whatever the API server still shows."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainium_operator.plan.model import NodeView

_WRITTEN_OFF = frozenset({"node.kubernetes.io/out-of-service", "node.cloudprovider.kubernetes.io/shutdown"})
"""Set by a person after a power loss, and by the cloud's controller for an instance that was stopped."""


def written_off(node: NodeView) -> bool:
    """Whether the node carries one of the taints that mean it."""
    return any(taint.key in _WRITTEN_OFF for taint in node.taints)

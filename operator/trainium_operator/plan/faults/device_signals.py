"""What is said of the devices that a worker claims: taints in ResourceSlices, and their health by the kubelet.

What each stands for is in the contract's table of faults. A taint says nothing of the other devices of its node, which
the scheduler may give to a new worker; a device that is unhealthy and not tainted would be given out again, so its node
is left. Keys of taints are the driver's own, so only their effects count.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_contract.faults.classify import cause_of_claim_health, cause_of_device_taint
from trainium_contract.faults.node_polarity import Severity
from trainium_operator.plan.faults.node_signals import NodeProblem

if TYPE_CHECKING:
    from trainium_operator.plan.model.devices import DeviceTaint

_SEVERITY = {"NoExecute": Severity.DRAIN, "NoSchedule": Severity.SUSPECT}
"""Of a taint: its holder is about to be evicted, or would not be put there any more."""


def taint_problem(taint: DeviceTaint) -> NodeProblem | None:
    """What a taint of a claimed device says; None where it asks nothing of its holder."""
    cause = cause_of_device_taint(taint.effect)
    if cause is None:
        return None
    key = f"{taint.key}={taint.value}" if taint.value else taint.key
    source, reason = f"device taint {key}", f"{taint.effect}, device {taint.device}"
    return NodeProblem(_SEVERITY.get(taint.effect, Severity.SUSPECT), cause, source, reason, taint.since)


def health_problem(told: tuple[str, str] | None) -> NodeProblem | None:
    """What the kubelet says of a claimed device; None while nothing is known against it."""
    if told is None:
        return None
    health, message = told
    cause = cause_of_claim_health(health)
    return None if cause is None else NodeProblem(Severity.DRAIN, cause, "claim health", f"{health}, {message}")

"""The CEL rule about how many training processes a node of a known type can have (`workers.accelerator.coresPerNode`).

A core is what a process has to itself. A trn2 shows half as many as it has unless configured otherwise (a claim's
logicalNeuronCore, or the node's own setting), so without a claim the physical ones are the bound.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_contract.definition.cel import Rule, format_message
from trainium_contract.sizes import INSTANCES

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainium_contract.sizes import Instance


def _of(figure: Callable[[Instance], int]) -> str:
    """Return an expression for a figure of the job's instance type."""
    known = ", ".join(f"'{name}': {figure(each)}" for name, each in INSTANCES.items())
    return f"{{{known}}}[self.instanceType]"


_KNOWN = "self.?instanceType.orValue('') in [" + ", ".join(f"'{name}'" for name in INSTANCES) + "]"
_ALL = _of(lambda each: each.cores * each.core_parts)
_CLAIMED = f"""{_of(lambda each: each.cores * each.core_parts // each.devices)}
* self.claim.?count.orValue({_of(lambda each: each.devices)})
/ self.claim.?logicalNeuronCore.orValue({_of(lambda each: each.core_parts)})"""
_MOST = f"(has(self.claim) && !self.claim.ultraServerNode ? {_CLAIMED} : {_ALL})"

CORE_RULES: tuple[Rule, ...] = (
    Rule(
        f"self.device != 'neuron' || !has(self.coresPerNode) || !({_KNOWN}) || self.coresPerNode <= {_MOST}",
        "accelerator.coresPerNode must not be above the cores that a worker has on a node of the instance type",
        ".coresPerNode",
        format_message(
            "accelerator.coresPerNode %s is above the %s cores that a worker has on a node of %s: lower it, or leave "
            "it out",
            "self.coresPerNode",
            _MOST,
            "self.instanceType",
        ),
    ),
)
"""Of `spec.workers.accelerator`."""

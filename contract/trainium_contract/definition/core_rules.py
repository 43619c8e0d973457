"""The CEL rule about how many training processes a node of a known type can have (`workers.accelerator.coresPerNode`).

A core is what a process has to itself. A trn2 shows half as many as it has unless told otherwise (a claim's
logicalNeuronCore, or the node's own setting), so without a claim the physical ones are the bound.
"""

from __future__ import annotations

from trainium_contract.definition.cel import Rule, said
from trainium_contract.sizes import INSTANCES

_DEVICES = "{" + ", ".join(f"'{name}': {each.devices}" for name, each in INSTANCES.items()) + "}"
_OF_A_DEVICE = (
    "{"
    + ", ".join(f"'{name}': {each.cores * each.core_parts // each.devices}" for name, each in INSTANCES.items())
    + "}"
)
"""Physical cores."""
_KNOWN = f"self.?instanceType.orValue('') in {_DEVICES}"
_ALL = f"{_OF_A_DEVICE}[self.instanceType] * {_DEVICES}[self.instanceType]"
_CLAIMED = f"""{_OF_A_DEVICE}[self.instanceType] * self.claim.?count.orValue({_DEVICES}[self.instanceType])
/ self.claim.?logicalNeuronCore.orValue(self.instanceType.startsWith('trn2') ? 2 : 1)"""
_MOST = f"(has(self.claim) && !self.claim.ultraServerNode ? {_CLAIMED} : {_ALL})"

CORE_RULES: tuple[Rule, ...] = (
    Rule(
        f"self.device != 'neuron' || !has(self.coresPerNode) || !({_KNOWN}) || self.coresPerNode <= {_MOST}",
        "accelerator.coresPerNode must not be above the cores that a worker has on a node of the instance type",
        ".coresPerNode",
        said(
            "accelerator.coresPerNode %s is above the %s cores that a worker has on a node of %s: lower it, or leave "
            "it out",
            "self.coresPerNode",
            _MOST,
            "self.instanceType",
        ),
    ),
)
"""Of `spec.workers.accelerator`."""

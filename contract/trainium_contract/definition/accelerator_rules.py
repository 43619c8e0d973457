"""CEL rules of `spec.workers.accelerator`: claimed devices, UltraServers, and training processes on a node.

Each process has a separate core. A trn2 has half as many logical cores unless configured otherwise (a claim's
logicalNeuronCore, or the node's setting), so without a claim the number of physical cores is the bound.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_contract.accelerators import INSTANCES, NEURON
from trainium_contract.definition.cel import RefusalReason, Rule, format_message
from trainium_contract.definition.size_expressions import map_instance_types

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainium_contract.accelerators import Instance


def _select_by_instance_type(read_figure: Callable[[Instance], int]) -> str:
    """Return an expression for a figure of the job's instance type."""
    return f"{map_instance_types(read_figure)}[self.instanceType]"


_DEVICES_BY_TYPE = map_instance_types(lambda instance: instance.devices)
_IS_KNOWN_TYPE = f"self.?instanceType.orValue('') in {_DEVICES_BY_TYPE}"
_DEVICES_OF_TYPE = f"{_DEVICES_BY_TYPE}[self.instanceType]"
_PHYSICAL_CORES = _select_by_instance_type(lambda instance: instance.cores * instance.core_parts)
_CORES_OF_DEVICE = _select_by_instance_type(lambda instance: instance.cores * instance.core_parts // instance.devices)
_CLAIMED_CORES = f"""{_CORES_OF_DEVICE}
* self.claim.?count.orValue({_select_by_instance_type(lambda instance: instance.devices)})
/ self.claim.?logicalNeuronCore.orValue({_select_by_instance_type(lambda instance: instance.core_parts)})"""
_MAX_CORES = f"(has(self.claim) ? {_CLAIMED_CORES} : {_PHYSICAL_CORES})"

_ULTRA_SERVER_SIZES = map_instance_types(lambda instance: list(instance.ultra_server_nodes))
_ULTRA_SERVER_TYPES = ", ".join(name for name, instance in INSTANCES.items() if instance.ultra_server_nodes)
_IS_ULTRA_SERVER_TYPE = f"self.?instanceType.orValue('') in {_ULTRA_SERVER_SIZES}"

_UNIT_RULES: tuple[Rule, ...] = (
    Rule(
        "self.?unit.orValue('Node') == 'UltraServer' || !(has(self.unitNodes) || has(self.unitTopologyKey))",
        "accelerator.unitNodes and unitTopologyKey describe an UltraServer: set accelerator.unit to UltraServer, or "
        "leave them out",
        ".unit",
        reason=RefusalReason.REQUIRED,
    ),
    Rule(
        f"self.?unit.orValue('Node') == 'Node' || !({_IS_KNOWN_TYPE}) || {_IS_ULTRA_SERVER_TYPE}",
        f"this instance type is in no UltraServer: take {_ULTRA_SERVER_TYPES}, or leave out accelerator.unit",
        ".unit",
    ),
    Rule(
        f"""self.?unit.orValue('Node') == 'Node' || {_IS_KNOWN_TYPE}
        || (has(self.unitNodes) && has(self.unitTopologyKey))""",
        f"accelerator.unit UltraServer needs to know which nodes are one: give instanceType {_ULTRA_SERVER_TYPES}, or "
        "unitNodes and unitTopologyKey (the label of your nodes; AWS states none for Trn3)",
        ".unit",
        reason=RefusalReason.REQUIRED,
    ),
    Rule(
        f"""self.?unit.orValue('Node') == 'Node' || !has(self.unitNodes) || !({_IS_ULTRA_SERVER_TYPE})
        || self.unitNodes in {_ULTRA_SERVER_SIZES}[self.instanceType]""",
        "accelerator.unitNodes must be a number of nodes of this type that can work as one: 2 or 4",
        ".unitNodes",
    ),
    Rule(
        "self.?unit.orValue('Node') == 'Node' || !has(self.claim)",
        "accelerator.claim claims the devices of single nodes: leave it out, or leave out accelerator.unit UltraServer",
        ".claim",
        reason=RefusalReason.FORBIDDEN,
    ),
)

ACCELERATOR_RULES: tuple[Rule, ...] = (
    *_UNIT_RULES,
    Rule(
        "!has(self.claim) || self.device != 'cuda'",
        "accelerator.claim is for Neuron devices: leave it out, or set device to neuron",
        ".claim",
        reason=RefusalReason.FORBIDDEN,
    ),
    Rule(
        f"!has(self.claim) || !has(self.resources) || !('{NEURON}' in self.resources)",
        f"accelerator.claim and resources {NEURON} both ask for the devices, and together they would hand "
        "them out twice: leave one of them out",
        ".resources",
    ),
    Rule(
        f"!has(self.claim) || has(self.claim.count) || {_IS_KNOWN_TYPE}",
        "give the number of devices that a worker claims: accelerator.claim.count, or a known instanceType to claim "
        "all of its devices",
        ".claim",
        reason=RefusalReason.REQUIRED,
    ),
    Rule(
        f"!has(self.claim) || !has(self.claim.count) || !({_IS_KNOWN_TYPE}) || self.claim.count <= {_DEVICES_OF_TYPE}",
        "accelerator.claim.count must not be above the devices of the instance type",
        ".claim.count",
        format_message(
            "accelerator.claim.count %s is above the %s devices of %s: lower it",
            "self.claim.count",
            _DEVICES_OF_TYPE,
            "self.instanceType",
        ),
    ),
    Rule(
        f"""!has(self.claim) || has(self.coresPerNode) || !({_IS_KNOWN_TYPE})
        || (self.claim.?count.orValue({_DEVICES_OF_TYPE}) == {_DEVICES_OF_TYPE}
        && self.claim.?logicalNeuronCore.orValue(2) == 2)""",
        "accelerator.coresPerNode must be given when a worker claims fewer devices than its instance type has, or "
        "logical cores of another size: it is the number of cores that its processes see",
        ".coresPerNode",
        reason=RefusalReason.REQUIRED,
    ),
    Rule(
        f"""!has(self.claim) || !self.claim.connected
        || self.claim.?count.orValue({_IS_KNOWN_TYPE} ? {_DEVICES_OF_TYPE} : 0) in [1, 4, 8, 16]""",
        "accelerator.claim.connected needs a count of 1, 4, 8 or 16: devices are connected in groups of these sizes",
        ".claim.connected",
    ),
    Rule(
        """!has(self.claim) || !has(self.claim.logicalNeuronCore)
        || (has(self.instanceType) && ['trn2', 'trn3'].exists(f, self.instanceType.startsWith(f)))""",
        "accelerator.claim.logicalNeuronCore is for trn2 and trn3: elsewhere a core is what a process sees; leave it "
        "out",
        ".claim.logicalNeuronCore",
        reason=RefusalReason.FORBIDDEN,
    ),
    Rule(
        f"""self.device != 'neuron' || !has(self.coresPerNode) || !({_IS_KNOWN_TYPE})
        || self.coresPerNode <= {_MAX_CORES}""",
        "accelerator.coresPerNode must not be above the cores that a worker has on a node of the instance type",
        ".coresPerNode",
        format_message(
            "accelerator.coresPerNode %s is above the %s cores that a worker has on a node of %s: lower it, or leave "
            "it out",
            "self.coresPerNode",
            _MAX_CORES,
            "self.instanceType",
        ),
    ),
)

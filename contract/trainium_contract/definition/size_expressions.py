"""Sizes of a job in CEL: which are legal, and whether some size in a range is.

Invariant: agrees with `sizes.BatchShape`, from which it is tested. In the expressions `c` is the number of cores per
node and `u` that of nodes in a unit, bound once by `bind_cores`: CEL has no `let`, and a comprehension over one element
is the idiom for it.
"""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING

from trainium_contract.accelerators import INSTANCES
from trainium_contract.definition.cel import ZERO_TO_99, bind_value, exists_up_to, format_message

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainium_contract.accelerators import Instance


def map_instance_types(read_figure: Callable[[Instance], object]) -> str:
    """Return a CEL map from each instance type to this figure, without types for which it is 0 or empty."""
    figures = ((name, read_figure(instance)) for name, instance in INSTANCES.items())
    return "{" + ", ".join(f"'{name}': {figure}" for name, figure in figures if figure) + "}"


_CORES_BY_TYPE = map_instance_types(lambda instance: instance.cores)
_CORES_GIVEN = (
    "self.workers.accelerator.?coresPerNode.orValue("
    f"{_CORES_BY_TYPE}[?self.workers.accelerator.?instanceType.orValue('')].orValue(1))"
)
_PROCESSES = "self.?program.?processesPerNode.orValue(1)"
_CORES = f"({_PROCESSES} > {_CORES_GIVEN} ? {_PROCESSES} : {_CORES_GIVEN})"
"""CEL of the `cores_per_node` of `Workload.batch_shape`."""
UNIT_NODES_BY_TYPE = map_instance_types(lambda instance: max(instance.ultra_server_nodes, default=0))
"""CEL of the nodes of an UltraServer of each type that is in one."""
_UNIT_NODES = f"""(self.workers.accelerator.?unit.orValue('Node') == 'UltraServer'
? self.workers.accelerator.?unitNodes.orValue(
{UNIT_NODES_BY_TYPE}[?self.workers.accelerator.?instanceType.orValue('')].orValue(1)) : 1)"""
"""CEL of `WorkerAcceleratorSpec.count_nodes_per_unit`."""
NODES = "self.workers.replicas"
MICRO_BATCH = "self.?trainer.?batch.?microSize.orValue(self.?program.?batch.?microSize.orValue(1))"
_DERIVED_BATCH = f"has(self.trainer) && {MICRO_BATCH} <= 8 ? 8 : {MICRO_BATCH}"
GLOBAL_BATCH = f"self.?trainer.?batch.?globalSize.orValue(self.?program.?batch.?globalSize.orValue({_DERIVED_BATCH}))"
"""CEL of the global batch size; derived as in `BatchConfig` where it is not given."""
_ALLOWS_ANY_SIZE = (
    "(has(self.trainer) ? self.elasticity.sizes == 'Any' : !has(self.program) || !has(self.program.batch))"
)
MODEL_PARALLEL = "(self.parallelism.tensor * self.parallelism.pipeline * self.parallelism.context)"


def is_divisible(nodes: str) -> str:
    """Return an expression: the training processes of `nodes` form whole model-parallel groups."""
    return f"{nodes} * c % {MODEL_PARALLEL} == 0"


def fills_batch(nodes: str) -> str:
    """Return an expression: the global batch consists of whole micro-batches at `nodes`, or need not.

    Fails at run time unless `is_divisible` holds.
    """
    divides_evenly = f"{GLOBAL_BATCH} % ({nodes} * c / {MODEL_PARALLEL} * {MICRO_BATCH}) == 0"
    return f"({_ALLOWS_ANY_SIZE} || {divides_evenly})"


def _is_legal(nodes: str) -> str:
    """Return an expression: `nodes` is a legal size. Its first half prevents a division by zero in the second."""
    return f"({nodes} % u == 0 && {is_divisible(nodes)} && {fills_batch(nodes)})"


def bind_cores(condition: str) -> str:
    """Bind the cores per node to `c` and the nodes of a unit to `u` in a condition."""
    return bind_value("c", _CORES, bind_value("u", _UNIT_NODES, condition))


def format_size_message(text: str, *values: str) -> str:
    """Return an expression as `format_message` does, with `c` and `u` bound and the legal sizes near that requested."""
    nearby = f"{text}; legal sizes within 100 of it: %s below, %s above"
    below = f"{ZERO_TO_99}.map(i, {NODES} - i).filter(n, n >= 1 && {_is_legal('n')})"
    above = f"{ZERO_TO_99}.map(i, {NODES} + i + 1).filter(n, {_is_legal('n')})"
    message = format_message(nearby, *values, below, above)
    return f"[{_CORES}].map(c, [{_UNIT_NODES}].map(u, {message})[0])[0]"


# Other rules refuse these values; a rule that divided by them would only add a second sentence.
OUT_OF_BOUNDS = f"""
{NODES} < 1 || {MODEL_PARALLEL} < 1 || {GLOBAL_BATCH} < 1 || {MICRO_BATCH} < 1
|| self.workers.accelerator.?coresPerNode.orValue(1) < 1"""
MIN_NODES = "self.workers.?minReplicas.orValue(1)"


def _has_degree(degree: str) -> str:
    """Return an expression: some number of units from s to n has this degree; m processes form a group."""
    return f"({degree} * m % w == 0 && {degree} * m / w >= s && {degree} * m / w <= n)"


# Trying up to 10,000 sizes took an API server a second, a busy one ten. These cost as much as a unit has cores (Any),
# or as the root of the batch in micro-batches (Even), however long the range is.
_UNITS_OF_RANKS = "(k * m / w)"
_HAS_MULTIPLE = exists_up_to("w", 1, "k", f"k * m % w == 0 && n / {_UNITS_OF_RANKS} * {_UNITS_OF_RANKS} >= s")
"""k data-parallel ranks fill whole units of w cores, so every multiple of that many units is legal."""
_MICRO_BATCHES = f"{GLOBAL_BATCH} / {MICRO_BATCH}"
_MAX_MICRO_BATCHES = 1 << 20
_HAS_DIVISOR = exists_up_to("q", 2, "d", f"q % d == 0 && ({_has_degree('d')} || {_has_degree('q / d')})")
_HAS_EVEN_SIZE = f"""({GLOBAL_BATCH} % {MICRO_BATCH} == 0
&& {bind_value("q", _MICRO_BATCHES, f"q > {_MAX_MICRO_BATCHES} || {_HAS_DIVISOR}")})"""
"""The data-parallel degree is a divisor of the micro-batches. Beyond a million of them the operator reports it."""
_HAS_SIZE = f"({_ALLOWS_ANY_SIZE} ? {_HAS_MULTIPLE} : {_HAS_EVEN_SIZE})"
_IN_UNITS = {"n": f"{NODES} / u", "s": f"({MIN_NODES} + u - 1) / u", "w": "c * u", "m": MODEL_PARALLEL}
_SEARCH = reduce(lambda condition, name: bind_value(name, _IN_UNITS[name], condition), _IN_UNITS, _HAS_SIZE)
SOME_SIZE_IS_LEGAL = f"{_is_legal(NODES)} || {_SEARCH}"
_SIZE_FIELDS = (
    ".parallelism.tensor",
    ".parallelism.pipeline",
    ".parallelism.context",
    ".?trainer.?batch.?globalSize.orValue(0)",
    ".?trainer.?batch.?microSize.orValue(0)",
    ".?program.?batch.?globalSize.orValue(0)",
    ".?program.?batch.?microSize.orValue(0)",
    ".?program.?processesPerNode.orValue(0)",
    ".elasticity.sizes",
    ".workers.accelerator",
)
"""Fields that a size depends on; a write that changes none of them does not check the size again."""
SIZE_FIELDS_UNCHANGED = (
    f"(oldSelf.hasValue() && {' && '.join(f'oldSelf.value(){path} == self{path}' for path in _SIZE_FIELDS)})"
)
SIZE_RANGE_UNCHANGED = f"""(oldSelf.value().workers.replicas == {NODES}
&& oldSelf.value().workers.?minReplicas.orValue(1) == {MIN_NODES})"""

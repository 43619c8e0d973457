"""What a schema cannot say: rules in the Common Expression Language (CEL) that the API server checks at every write.

Each rule refuses a write with a sentence that says what to change, at the field to change. Invariants: a rule reads
only bounded fields (the API server estimates its cost), needs nothing newer than Kubernetes 1.30, and agrees with
`sizes.BatchShape`, from which it is tested. A job's size is judged when the job is created, and again when parallelism,
batch or accelerator change; a later size alone (`kubectl scale`, an autoscaler) is floored to a legal one by the
operator instead (docs/decisions/0002-illegal-sizes.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from trainium_contract.job import MAX_NAME
from trainium_contract.sizes import INSTANCES
from trainium_contract.trainer.config import TrainerSpec


class Reason(StrEnum):
    """Reason of the refusal, as the API server reports it."""

    INVALID = "FieldValueInvalid"
    FORBIDDEN = "FieldValueForbidden"
    REQUIRED = "FieldValueRequired"


@dataclass(frozen=True, slots=True)
class Rule:
    """One CEL rule; `message` is a literal sentence, `expression` one that is computed and can give the values.

    The sentence is used when the expression fails or is too long, so it is always given.
    """

    rule: str
    message: str
    field: str = ""
    """Path of the field to change, below the schema that carries the rule; empty for the whole of it."""
    expression: str = ""
    reason: Reason = Reason.INVALID
    optional_old: bool = False
    """Checked at creation too, with `oldSelf` as an optional."""

    def to_schema(self) -> dict[str, Any]:
        """The entry of x-kubernetes-validations."""
        given: dict[str, Any] = {"rule": " ".join(self.rule.split()), "message": self.message}
        if self.expression:
            given["messageExpression"] = " ".join(self.expression.split())
        if self.field:
            given["fieldPath"] = self.field
        if self.reason is not Reason.INVALID:
            given["reason"] = self.reason.value
        if self.optional_old:
            given["optionalOldSelf"] = True
        return given


_KNOWN = "[" + ", ".join(f"'{name}'" for name in INSTANCES) + "]"
_KNOWN_TEXT = ", ".join(INSTANCES)
_CORES_OF = "{" + ", ".join(f"'{name}': {instance.cores}" for name, instance in INSTANCES.items()) + "}"
_CORES = (
    "self.workers.accelerator.?coresPerNode.orValue("
    f"{_CORES_OF}[?self.workers.accelerator.?instanceType.orValue('')].orValue(1))"
)
_NODES = "self.workers.replicas"
ON_NXD = (
    "!has(self.workers.accelerator.instanceType) || !self.workers.accelerator.instanceType.startsWith('trn1') "
    "|| self.trainer.backend == 'Native'"
)
"""Beginning of a rule about what backend Nxd cannot do; Auto takes it on trn1, where TorchNeuron does not run."""
_STEPS_FOLLOW = "self.trainer.epochs > 0.0 || has(self.trainer.schedule.warmupRatio)"
"""Beginning of a rule about steps that only the data tell: the trainer judges them when it has read its data."""
_MODEL_PARALLEL = "(self.parallelism.tensor * self.parallelism.pipeline)"


# In the expressions of these functions `c` is the number of cores per node, bound once by `_with_cores`: CEL has no
# `let`, and a comprehension over one element is the idiom for it.
def _divides(nodes: str) -> str:
    """Whether the training processes of `nodes` (an expression) make whole model-parallel groups."""
    return f"{nodes} * c % {_MODEL_PARALLEL} == 0"


def _fills(nodes: str) -> str:
    """Whether the global batch is whole micro-batches at `nodes`, or need not be.

    Fails at run time unless `_divides` holds.
    """
    whole = f"self.trainer.batch.globalSize % ({nodes} * c / {_MODEL_PARALLEL} * self.trainer.batch.microSize) == 0"
    return f"(self.elasticity.sizes == 'Any' || {whole})"


def _legal(nodes: str) -> str:
    """Whether `nodes` is a legal size; the first half guards the second against a division by zero."""
    return f"({_divides(nodes)} && {_fills(nodes)})"


def _with_cores(condition: str) -> str:
    return f"[{_CORES}].all(c, {condition})"


# CEL before Kubernetes 1.34 has no range, so the numbers below 10,000 are written as hundreds and ones.
_HUNDRED = "[" + ",".join(str(number) for number in range(100)) + "]"


def said(text: str, *values: str) -> str:
    """A computed sentence: `text` with a %s for each expression of `values`, in which `c` is the cores per node.

    Formatting in one call, not by joining: the API server cannot bound the length of `string(number)` and would refuse
    the concatenation as too costly.
    """
    return f"'{text}'.format([{', '.join(f'dyn({value})' for value in values)}])"


def _said_of_size(text: str, *values: str) -> str:
    """As `said`, with `c` bound and the legal sizes near the requested one at the end."""
    nearby = f"{text}; legal sizes within 100 of it: %s below, %s above"
    below = f"{_HUNDRED}.map(i, {_NODES} - i).filter(n, n >= 1 && {_legal('n')})"
    above = f"{_HUNDRED}.map(i, {_NODES} + i + 1).filter(n, {_legal('n')})"
    return f"[{_CORES}].map(c, {said(nearby, *values, below, above)})[0]"


# The schema refuses these by itself; a rule that divided by them would add a second, useless sentence.
_OUT_OF_BOUNDS = f"""
{_NODES} < 1 || {_MODEL_PARALLEL} < 1 || self.trainer.batch.globalSize < 1 || self.trainer.batch.microSize < 1
|| self.workers.accelerator.?coresPerNode.orValue(1) < 1"""
_SMALLEST = "self.workers.?minReplicas.orValue(1)"


def _bound(name: str, value: str, condition: str) -> str:
    """`condition` with a name for a value: each step of a search reads it from there, not from the object."""
    return f"[{value}].all({name}, {condition})"


def _some_below(limit: str, root: int, name: str, condition: str) -> str:
    """Whether `condition` holds for some `name` from 1 on, with name ** root at most `limit`."""
    hundreds = " * ".join(["h * 100"] * root)
    power = " * ".join([name] * root)
    number = f"{name} >= 1 && {power} <= {limit} && {condition}"
    return f"{_HUNDRED}.exists(h, {hundreds} <= {limit} && {_HUNDRED}.map(l, h * 100 + l).exists({name}, {number}))"


def _in_range(degree: str) -> str:
    """Whether a number of nodes from s to n has this data-parallel degree; m processes make a model-parallel group."""
    return f"({degree} * m % c == 0 && {degree} * m / c >= s && {degree} * m / c <= n)"


# Trying up to 10,000 sizes took an API server a second. These cost as much as a node has cores (Any), or as the root of
# the batch in micro-batches (Even), however long the range is.
_UNIT = "(k * m / c)"
_SOME_MULTIPLE = _some_below("c", 1, "k", f"k * m % c == 0 && n / {_UNIT} * {_UNIT} >= s")
"""k data-parallel ranks fill whole nodes, so every multiple of that many nodes is legal."""
_ROWS = "self.trainer.batch.globalSize / self.trainer.batch.microSize"
_MOST_ROWS = 1 << 20
_DIVISOR_OF_ROWS = _some_below("q", 2, "d", f"q % d == 0 && ({_in_range('d')} || {_in_range('q / d')})")
_SOME_DIVISOR = f"""(self.trainer.batch.globalSize % self.trainer.batch.microSize == 0
&& {_bound("q", _ROWS, f"q > {_MOST_ROWS} || {_DIVISOR_OF_ROWS}")})"""
"""The data-parallel degree is a divisor of the micro-batches. Beyond a million of them the operator says it."""
_SOME_SIZE = f"(self.elasticity.sizes == 'Any' ? {_SOME_MULTIPLE} : {_SOME_DIVISOR})"
_SEARCH = _bound("m", _MODEL_PARALLEL, _bound("n", _NODES, _bound("s", _SMALLEST, _SOME_SIZE)))
_SOME_SIZE_IS_LEGAL = f"{_legal(_NODES)} || {_SEARCH}"
_JUDGED_BEFORE = """(oldSelf.hasValue() && oldSelf.value().parallelism == self.parallelism
&& oldSelf.value().trainer.batch == self.trainer.batch
&& oldSelf.value().elasticity == self.elasticity
&& oldSelf.value().workers.accelerator == self.workers.accelerator)"""
_SAME_RANGE = f"""(oldSelf.value().workers.replicas == {_NODES}
&& oldSelf.value().workers.?minReplicas.orValue(1) == {_SMALLEST})"""

SPEC_RULES: tuple[Rule, ...] = (
    Rule(
        f"!has(self.workers.minReplicas) || self.workers.minReplicas <= {_NODES}",
        "workers.minReplicas must not be above workers.replicas: lower minReplicas or raise replicas",
        ".workers.minReplicas",
        said(
            "workers.minReplicas %s is above workers.replicas %s: lower minReplicas or raise replicas",
            "self.workers.minReplicas",
            _NODES,
        ),
    ),
    Rule(
        f"!has(self.workers.maxReplicas) || {_NODES} <= self.workers.maxReplicas",
        "workers.replicas must not be above workers.maxReplicas: lower replicas or raise maxReplicas",
        ".workers.replicas",
        said(
            "workers.replicas %s is above workers.maxReplicas %s: lower replicas or raise maxReplicas",
            _NODES,
            "self.workers.maxReplicas",
        ),
    ),
    Rule(
        "!has(self.elasticity.idleNodes) || self.elasticity.idleNodes == 'Leave' || has(self.workers.maxReplicas)",
        "elasticity.idleNodes Take needs workers.maxReplicas: say to how many nodes the job may grow",
        ".elasticity.idleNodes",
    ),
    Rule(
        f"{_OUT_OF_BOUNDS} || {_JUDGED_BEFORE} || {_with_cores(_divides(_NODES))}",
        "the training processes (replicas x cores per node) must be divisible by parallelism.tensor x pipeline",
        ".workers.replicas",
        _said_of_size(
            "workers.replicas %s x %s cores per node = %s training processes, not divisible by parallelism.tensor x "
            "pipeline = %s: change replicas or parallelism",
            _NODES,
            "c",
            f"{_NODES} * c",
            _MODEL_PARALLEL,
        ),
        optional_old=True,
    ),
    Rule(
        f"""{_OUT_OF_BOUNDS} || {_JUDGED_BEFORE}
        || {_with_cores(f"!({_divides(_NODES)}) || {_fills(_NODES)}")}""",
        "with elasticity.sizes Even trainer.batch.globalSize must be divisible by data-parallel degree x microSize",
        ".workers.replicas",
        _said_of_size(
            "workers.replicas %s gives a data-parallel degree of %s, but trainer.batch.globalSize %s is not divisible "
            "by that x microSize %s: change replicas or trainer.batch, or set elasticity.sizes to Any",
            _NODES,
            f"{_NODES} * c / {_MODEL_PARALLEL}",
            "self.trainer.batch.globalSize",
            "self.trainer.batch.microSize",
        ),
        optional_old=True,
    ),
    Rule(
        f"{_OUT_OF_BOUNDS} || self.trainer.batch.microSize <= self.trainer.batch.globalSize",
        "trainer.batch.microSize must not be above trainer.batch.globalSize",
        ".trainer.batch.microSize",
        said(
            "trainer.batch.microSize %s is above trainer.batch.globalSize %s: every pass of every rank would be partly "
            "empty; lower microSize or raise globalSize",
            "self.trainer.batch.microSize",
            "self.trainer.batch.globalSize",
        ),
    ),
    Rule(
        "!has(self.trainer.batch.tolerance) || self.trainer.batch.tolerance == 0.0 || self.elasticity.sizes == 'Any'",
        "trainer.batch.tolerance must be 0 with elasticity.sizes Even, which allows no size at which the global batch "
        "does not come out even: leave tolerance out, or set elasticity.sizes to Any",
        ".trainer.batch.tolerance",
    ),
    Rule(
        "!has(self.trainer.batch.tolerance) || self.trainer.batch.tolerance == 0.0 || "
        "self.trainer.data.tokenization != 'Online'",
        "trainer.batch.tolerance must be 0 with trainer.data.tokenization Online, where each row of the global batch "
        "is a stream of its own: set tokenization to Ahead, or leave tolerance out",
        ".trainer.batch.tolerance",
    ),
    # Only where the rules of sizes above leave the size alone; there the operator must find some size to floor it to.
    Rule(
        f"{_OUT_OF_BOUNDS} || !{_JUDGED_BEFORE} || {_SAME_RANGE} || {_with_cores(_SOME_SIZE_IS_LEGAL)}",
        "no size between workers.minReplicas and workers.replicas is legal: change replicas or minReplicas",
        ".workers.replicas",
        _said_of_size(
            "no size from %s to %s is legal for parallelism and trainer.batch: change workers.replicas or minReplicas",
            _SMALLEST,
            _NODES,
        ),
        optional_old=True,
    ),
    Rule(
        f"""!has(self.workers.accelerator.instanceType) || self.workers.accelerator.instanceType in {_KNOWN}
        || has(self.workers.accelerator.resources) || has(self.workers.accelerator.coresPerNode)""",
        f"unknown instance type; known are {_KNOWN_TEXT}; for another one give resources and coresPerNode too",
        ".workers.accelerator.instanceType",
        said(
            f"unknown instance type %s; known are {_KNOWN_TEXT}; for another one give resources and coresPerNode too",
            "self.workers.accelerator.instanceType",
        ),
    ),
    Rule(
        """self.workers.accelerator.device == 'cpu' || has(self.workers.accelerator.instanceType)
        || has(self.workers.accelerator.resources) || has(self.workers.accelerator.coresPerNode)""",
        "say what a worker computes on: workers.accelerator.instanceType (for instance trn1.32xlarge), or resources "
        "and coresPerNode, or device: cpu",
        ".workers.accelerator",
        reason=Reason.REQUIRED,
    ),
    Rule(
        f"{ON_NXD} || self.trainer.torchCompile == 'None'",
        "trainer.torchCompile must be None on trn1: its backend Nxd compiles whole steps by itself; leave it out",
        ".trainer.torchCompile",
    ),
    Rule(
        """!has(self.trainer.model.numAttentionHeads) || self.parallelism.tensor < 1
        || self.trainer.model.numAttentionHeads % self.parallelism.tensor == 0""",
        "trainer.model.numAttentionHeads must be divisible by parallelism.tensor",
        ".trainer.model.numAttentionHeads",
        said(
            "trainer.model.numAttentionHeads %s is not divisible by parallelism.tensor %s: each rank of the tensor "
            "group holds whole heads",
            "self.trainer.model.numAttentionHeads",
            "self.parallelism.tensor",
        ),
    ),
    Rule(
        """!has(self.trainer.model.numLayers)
        || self.parallelism.pipeline * self.parallelism.stagesPerRank <= self.trainer.model.numLayers""",
        "parallelism.pipeline x stagesPerRank must not be above trainer.model.numLayers: each stage needs a layer",
        ".parallelism.pipeline",
        said(
            "parallelism.pipeline %s x stagesPerRank %s is above trainer.model.numLayers %s: each stage needs a layer",
            "self.parallelism.pipeline",
            "self.parallelism.stagesPerRank",
            "self.trainer.model.numLayers",
        ),
    ),
    Rule(
        f"{ON_NXD} || self.parallelism.pipeline == 1",
        "parallelism.pipeline must be 1 on trn1: its backend Nxd has no pipeline; raise parallelism.tensor",
        ".parallelism.pipeline",
    ),
    Rule(
        f"{ON_NXD} || !self.trainer.data.maskDocuments",
        "trainer.data.maskDocuments cannot be had on trn1: its backend Nxd has no such mask; leave it out",
        ".trainer.data.maskDocuments",
    ),
    Rule(
        """!has(self.trainer.model.numAttentionHeads) || !has(self.trainer.model.numKeyValueHeads)
        || self.trainer.model.numKeyValueHeads < 1
        || self.trainer.model.numAttentionHeads % self.trainer.model.numKeyValueHeads == 0""",
        "trainer.model.numAttentionHeads must be divisible by numKeyValueHeads",
        ".trainer.model.numKeyValueHeads",
    ),
    Rule(
        """!has(self.trainer.model.numKeyValueHeads) || self.trainer.model.numKeyValueHeads < 1
        || self.parallelism.tensor < 1 || self.trainer.model.numKeyValueHeads % self.parallelism.tensor == 0
        || self.parallelism.tensor % self.trainer.model.numKeyValueHeads == 0""",
        "trainer.model.numKeyValueHeads must be divisible by parallelism.tensor, or divide it",
        ".trainer.model.numKeyValueHeads",
        said(
            "trainer.model.numKeyValueHeads %s neither is divisible by parallelism.tensor %s nor divides it: each rank "
            "of the tensor group holds whole heads",
            "self.trainer.model.numKeyValueHeads",
            "self.parallelism.tensor",
        ),
    ),
    Rule(
        "!has(self.trainer.model.path) || self.trainer.model.preset == 'Tiny'",
        "trainer.model.preset and trainer.model.path both name a shape: leave one of them out",
        ".trainer.model.path",
    ),
    Rule(
        """!has(self.trainer.model.ropeScaling) || !has(self.trainer.model.ropeScaling.lowFrequencyFactor)
        || !has(self.trainer.model.ropeScaling.highFrequencyFactor)
        || self.trainer.model.ropeScaling.lowFrequencyFactor < self.trainer.model.ropeScaling.highFrequencyFactor""",
        "trainer.model.ropeScaling.lowFrequencyFactor must be less than highFrequencyFactor",
        ".trainer.model.ropeScaling.lowFrequencyFactor",
    ),
    Rule(
        """has(self.trainer.model.headDim) || !has(self.trainer.model.hiddenSize)
        || !has(self.trainer.model.numAttentionHeads) || self.trainer.model.numAttentionHeads < 1
        || self.trainer.model.hiddenSize % self.trainer.model.numAttentionHeads == 0""",
        "trainer.model.hiddenSize must be divisible by numAttentionHeads, or trainer.model.headDim be given",
        ".trainer.model.hiddenSize",
    ),
    Rule(
        f"{_STEPS_FOLLOW} || self.trainer.schedule.warmupSteps <= self.trainer.steps",
        "trainer.schedule.warmupSteps must not be above trainer.steps",
        ".trainer.schedule.warmupSteps",
        said(
            "trainer.schedule.warmupSteps %s is above trainer.steps %s: the warm-up must end within the run; lower "
            "warmupSteps or raise steps",
            "self.trainer.schedule.warmupSteps",
            "self.trainer.steps",
        ),
    ),
    Rule(
        """!has(self.trainer.data.validation)
        || has(self.trainer.data.validation.fraction) != has(self.trainer.data.validation.source)""",
        "trainer.data.validation needs either fraction or source: give exactly one of them",
        ".trainer.data.validation",
    ),
    Rule(
        f"""{_STEPS_FOLLOW} || !has(self.trainer.schedule.decaySteps)
        || self.trainer.schedule.warmupSteps + self.trainer.schedule.decaySteps <= self.trainer.steps""",
        "trainer.schedule.warmupSteps and decaySteps must together not be above trainer.steps",
        ".trainer.schedule.decaySteps",
    ),
)

STORAGE_RULES: tuple[Rule, ...] = (
    Rule(
        "[has(self.hostPath), has(self.persistentVolumeClaim), has(self.s3)].filter(given, given).size() == 1",
        "give exactly one of hostPath, persistentVolumeClaim and s3; leave storage out for a folder in the pod",
    ),
)

# The operator writes status before it acts and reports Suspended only when no worker is left; so a change is safe
# while the stored job is suspended, and before the operator has taken it up.
_AT_REST = """
(!has(oldSelf.status) || !has(oldSelf.status.phase)
|| (oldSelf.spec.suspend && oldSelf.status.phase == 'Suspended'))"""


_NOT_WHILE_RUNNING = (
    "cannot change while the job runs: suspend it first (spec.suspend: true), wait for phase Suspended, then change it"
)


def _fixed_while_running(field: str) -> Rule:
    """A field that always has a value, because the schema gives it a default."""
    return Rule(
        f"{_AT_REST} || self.{field} == oldSelf.{field}",
        f"{field.removeprefix('spec.')} {_NOT_WHILE_RUNNING}",
        f".{field}",
        reason=Reason.FORBIDDEN,
    )


_FIXED = (
    "spec.parallelism",
    "spec.workers.accelerator",
    *(f"spec.trainer.{field.alias}" for name, field in TrainerSpec.model_fields.items() if name != "monitor"),
)

_ENDED = "c.type in ['Complete', 'Failed'] && c.status == 'True'"
_STAYS_ENDED = f"""
!has(oldSelf.status) || !has(oldSelf.status.conditions) || !oldSelf.status.conditions.exists(c, {_ENDED})
|| (has(self.status) && has(self.status.conditions) && self.status.conditions.exists(c, {_ENDED}))"""

ROOT_RULES: tuple[Rule, ...] = (
    Rule(
        _STAYS_ENDED,
        "a job that has ended stays ended: its condition Complete or Failed cannot be taken back; create the job again "
        "under its name, and it resumes from its newest checkpoint",
        ".status.conditions",
        reason=Reason.FORBIDDEN,
    ),
    Rule(
        f"size(self.metadata.name) <= {MAX_NAME}",
        f"the name has at most {MAX_NAME} characters, so that host names of its workers stay within 63",
        ".metadata.name",
        said(
            f"the name has %s characters: shorten it to {MAX_NAME}, so that host names of its workers stay within 63",
            "size(self.metadata.name)",
        ),
    ),
    Rule(
        "self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
        "the name of a TrainingJob begins with a small letter and has only small letters, digits and '-' (RFC 1035), "
        "because host names are made from it",
        ".metadata.name",
    ),
    *(_fixed_while_running(field) for field in _FIXED),
    Rule(
        f"""{_AT_REST} || (has(self.spec.checkpoint.storage) == has(oldSelf.spec.checkpoint.storage)
        && (!has(self.spec.checkpoint.storage) || self.spec.checkpoint.storage == oldSelf.spec.checkpoint.storage))""",
        f"checkpoint.storage {_NOT_WHILE_RUNNING}",
        ".spec.checkpoint.storage",
        reason=Reason.FORBIDDEN,
    ),
)

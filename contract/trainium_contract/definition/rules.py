"""Rules in the Common Expression Language (CEL) that the API server checks at every write, beyond the schema.

Each rule refuses a write with a sentence and the remedy, at the field to change. Invariants: a rule reads
only bounded fields (the API server estimates its cost), needs nothing newer than Kubernetes 1.30, and agrees with
`sizes.BatchShape`, from which it is tested. A job's size is judged when the job is created, and again when parallelism,
batch or accelerator change; a later size alone (`kubectl scale`, an autoscaler) is floored to a legal one by the
operator instead (docs/decisions/0084-any-size.md).
"""

from __future__ import annotations

from trainium_contract.definition.cel import RefusalReason, Rule, format_message
from trainium_contract.definition.size_expressions import (
    GLOBAL_BATCH,
    JUDGED_BEFORE,
    MICRO_BATCH,
    MODEL_PARALLEL,
    NODES,
    OUT_OF_BOUNDS,
    SAME_RANGE,
    SMALLEST,
    SOME_SIZE_IS_LEGAL,
    divides,
    fills,
    format_size_message,
    with_cores,
)
from trainium_contract.faults.causes import NO_FAULT_CAUSES, USER_CAUSES, Cause
from trainium_contract.job import MAX_NAME
from trainium_contract.sizes import INSTANCES
from trainium_contract.spec.managed_by import MANAGER
from trainium_contract.trainer.config import TrainerSpec

_KNOWN = "[" + ", ".join(f"'{name}'" for name in INSTANCES) + "]"
_KNOWN_TEXT = ", ".join(INSTANCES)
_ON_NXD = (
    "!has(self.workers.accelerator.instanceType) || !self.workers.accelerator.instanceType.startsWith('trn1') "
    "|| self.trainer.backend == 'Native'"
)
"""Beginning of a rule about what backend Nxd cannot do; Auto takes it on trn1, where TorchNeuron does not run."""
_STEPS_FOLLOW = "self.trainer.epochs > 0.0 || has(self.trainer.schedule.warmupRatio)"
"""Start of a rule about steps that follow from the data: the trainer checks them when it has read its data."""
_WARMUP = "self.trainer.schedule.?warmupSteps.orValue(0)"
"""0 where it is not given: the trainer then fits it to the run."""


_SUSPEND_INSTEAD = (
    "a job trains on 1 node at least: to give all of them back, leave replicas as it is and set spec.suspend: true "
    "(kubectl trn suspend NAME)"
)

_LORA = "self.trainer.tuning.method == 'LoRA'"
_WEIGHTS = "has(self.trainer.model.weights)"
_OBJECTIVE = "has(self.trainer.tuning.objective)"
_PAIRS = "self.trainer.data.format == 'Preference'"
SPEC_RULES: tuple[Rule, ...] = (
    Rule(
        f"{NODES} >= 1",
        f"workers.replicas is below 1; {_SUSPEND_INSTEAD}",
        ".workers.replicas",
        format_message(f"workers.replicas is %s; {_SUSPEND_INSTEAD}", NODES),
    ),
    Rule(
        f"{NODES} < 1 || !has(self.workers.minReplicas) || self.workers.minReplicas <= {NODES}",
        "workers.minReplicas must not be above workers.replicas: lower minReplicas or raise replicas",
        ".workers.minReplicas",
        format_message(
            "workers.minReplicas %s is above workers.replicas %s: lower minReplicas or raise replicas",
            "self.workers.minReplicas",
            NODES,
        ),
    ),
    Rule(
        f"!has(self.workers.maxReplicas) || {NODES} <= self.workers.maxReplicas",
        "workers.replicas must not be above workers.maxReplicas: lower replicas or raise maxReplicas",
        ".workers.replicas",
        format_message(
            "workers.replicas %s is above workers.maxReplicas %s: lower replicas or raise maxReplicas",
            NODES,
            "self.workers.maxReplicas",
        ),
    ),
    Rule(
        "self.elasticity.idleNodes == 'Leave' || has(self.workers.maxReplicas)",
        "elasticity.idleNodes Take needs workers.maxReplicas: say to how many nodes the job may grow",
        ".elasticity.idleNodes",
    ),
    Rule(
        f"{OUT_OF_BOUNDS} || {JUDGED_BEFORE} || {with_cores(divides(NODES))}",
        "the training processes (replicas x cores per node) must be divisible by parallelism.tensor x pipeline",
        ".workers.replicas",
        format_size_message(
            "workers.replicas %s x %s cores per node = %s training processes, not divisible by parallelism.tensor x "
            "pipeline = %s: change replicas or parallelism",
            NODES,
            "c",
            f"{NODES} * c",
            MODEL_PARALLEL,
        ),
        optional_old=True,
    ),
    Rule(
        f"""{OUT_OF_BOUNDS} || {JUDGED_BEFORE}
        || {with_cores(f"!({divides(NODES)}) || {fills(NODES)}")}""",
        "with elasticity.sizes Even trainer.batch.globalSize must be divisible by data-parallel degree x microSize",
        ".workers.replicas",
        format_size_message(
            "workers.replicas %s gives a data-parallel degree of %s, but trainer.batch.globalSize %s is not divisible "
            "by that x microSize %s: change replicas or trainer.batch, or set elasticity.sizes to Any",
            NODES,
            f"{NODES} * c / {MODEL_PARALLEL}",
            GLOBAL_BATCH,
            MICRO_BATCH,
        ),
        optional_old=True,
    ),
    Rule(
        f"{OUT_OF_BOUNDS} || {MICRO_BATCH} <= {GLOBAL_BATCH}",
        "trainer.batch.microSize must not be above trainer.batch.globalSize",
        ".trainer.batch.microSize",
        format_message(
            "trainer.batch.microSize %s is above trainer.batch.globalSize %s: every pass of every rank would be partly "
            "empty; lower microSize or raise globalSize",
            MICRO_BATCH,
            GLOBAL_BATCH,
        ),
    ),
    Rule(
        "self.trainer.batch.tolerance == 0.0 || self.elasticity.sizes == 'Any'",
        "trainer.batch.tolerance must be 0 with elasticity.sizes Even, which allows no size at which the global batch "
        "does not come out even: leave tolerance out, or set elasticity.sizes to Any",
        ".trainer.batch.tolerance",
    ),
    Rule(
        "self.trainer.batch.tolerance == 0.0 || self.trainer.data.tokenization != 'Online'",
        "trainer.batch.tolerance must be 0 with trainer.data.tokenization Online, where each row of the global batch "
        "is a stream of its own: set tokenization to Ahead, or leave tolerance out",
        ".trainer.batch.tolerance",
    ),
    # Only where the rules of sizes above leave the size alone; there the operator must find some size to floor it to.
    Rule(
        f"{OUT_OF_BOUNDS} || !{JUDGED_BEFORE} || {SAME_RANGE} || {with_cores(SOME_SIZE_IS_LEGAL)}",
        "no size between workers.minReplicas and workers.replicas is legal: change replicas or minReplicas",
        ".workers.replicas",
        format_size_message(
            "no size from %s to %s is legal for parallelism and trainer.batch: change workers.replicas or minReplicas",
            SMALLEST,
            NODES,
        ),
        optional_old=True,
    ),
    Rule(
        f"""!has(self.workers.accelerator.instanceType) || self.workers.accelerator.instanceType in {_KNOWN}
        || has(self.workers.accelerator.resources) || has(self.workers.accelerator.coresPerNode)""",
        f"unknown instance type; known are {_KNOWN_TEXT}; for another one give resources and coresPerNode too",
        ".workers.accelerator.instanceType",
        format_message(
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
        reason=RefusalReason.REQUIRED,
    ),
    Rule(
        f"{_ON_NXD} || self.trainer.torchCompile == 'None'",
        "trainer.torchCompile must be None on trn1: its backend Nxd compiles whole steps by itself; leave it out",
        ".trainer.torchCompile",
    ),
    Rule(
        """!has(self.trainer.model.numAttentionHeads) || self.parallelism.tensor < 1
        || self.trainer.model.numAttentionHeads % self.parallelism.tensor == 0""",
        "trainer.model.numAttentionHeads must be divisible by parallelism.tensor",
        ".trainer.model.numAttentionHeads",
        format_message(
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
        format_message(
            "parallelism.pipeline %s x stagesPerRank %s is above trainer.model.numLayers %s: each stage needs a layer",
            "self.parallelism.pipeline",
            "self.parallelism.stagesPerRank",
            "self.trainer.model.numLayers",
        ),
    ),
    Rule(
        f"{_ON_NXD} || self.parallelism.pipeline == 1",
        "parallelism.pipeline must be 1 on trn1: its backend Nxd has no pipeline; raise parallelism.tensor",
        ".parallelism.pipeline",
    ),
    Rule(
        f"{_ON_NXD} || !self.trainer.data.maskDocuments",
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
        format_message(
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
        f"{_STEPS_FOLLOW} || {_WARMUP} <= self.trainer.steps",
        "trainer.schedule.warmupSteps must not be above trainer.steps",
        ".trainer.schedule.warmupSteps",
        format_message(
            "trainer.schedule.warmupSteps %s is above trainer.steps %s: the warm-up must end within the run; lower "
            "warmupSteps or raise steps",
            _WARMUP,
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
        || {_WARMUP} + self.trainer.schedule.decaySteps <= self.trainer.steps""",
        "trainer.schedule.warmupSteps and decaySteps must together not be above trainer.steps",
        ".trainer.schedule.decaySteps",
    ),
    # Fine-tuning; the trainer checks the same in a file that a person wrote.
    Rule(
        f"!{_WEIGHTS} || self.trainer.model.preset == 'Tiny'",
        "trainer.model.weights and trainer.model.preset both name a shape: leave model.preset out",
        ".trainer.model.preset",
        format_message(
            "trainer.model.weights is %s and trainer.model.preset is %s: both name a shape, leave model.preset out",
            "self.trainer.model.?weights.orValue('')",
            "self.trainer.model.preset",
        ),
    ),
    Rule(
        f"!{_WEIGHTS} || !has(self.trainer.model.path)",
        "trainer.model.weights and trainer.model.path both name a shape: leave model.path out",
        ".trainer.model.path",
    ),
    Rule(
        f"(!({_LORA}) && !has(self.trainer.tuning.trainable)) || {_WEIGHTS}",
        "trainer.tuning leaves weights as they are, but there are none: give trainer.model.weights, the folder of a "
        "base model",
        ".trainer.model.weights",
        reason=RefusalReason.REQUIRED,
    ),
    Rule(
        f"{_LORA} || !has(self.trainer.tuning.lora.adapter)",
        "trainer.tuning.lora.adapter is given but trainer.tuning.method is Full: set tuning.method to LoRA",
        ".trainer.tuning.lora.adapter",
    ),
    Rule(
        f"!({_LORA}) || self.trainer.precision != 'BFloat16Stochastic'",
        "trainer.precision is BFloat16Stochastic but trainer.tuning.method is LoRA, whose adapters are in float32: use "
        "BFloat16",
        ".trainer.precision",
    ),
    Rule(
        f"{_LORA} || !has(self.trainer.artifacts.kinds) || !('Adapter' in self.trainer.artifacts.kinds)",
        "trainer.artifacts.kinds names Adapter but trainer.tuning.method is Full: leave Adapter out, or set "
        "tuning.method to LoRA",
        ".trainer.artifacts.kinds",
    ),
    Rule(
        "self.trainer.data.format != 'Function' || has(self.trainer.data.examples.function)",
        "trainer.data.format is Function but trainer.data.examples.function is not given: name module:function",
        ".trainer.data.examples.function",
        reason=RefusalReason.REQUIRED,
    ),
    Rule(
        "!self.trainer.evaluate.enabled || has(self.trainer.data.validation)",
        "trainer.evaluate.enabled is true but no examples are held back: give trainer.data.validation",
        ".trainer.data.validation",
        reason=RefusalReason.REQUIRED,
    ),
    Rule(
        f"{_ON_NXD} || self.trainer.data.format == 'Text' || !self.trainer.data.examples.packing",
        "trainer.data.examples.packing cannot be had on trn1: its backend Nxd has no mask that keeps examples apart; "
        "leave it out",
        ".trainer.data.examples.packing",
    ),
    Rule(
        f"!({_PAIRS}) || {_OBJECTIVE}",
        "trainer.data.format is Preference but trainer.tuning.objective is not given: name its kind, DPO or ORPO",
        ".trainer.tuning.objective",
        reason=RefusalReason.REQUIRED,
    ),
    Rule(
        f"{_PAIRS} || !{_OBJECTIVE}",
        "trainer.tuning.objective is given but trainer.data.format has no two answers to compare: set data.format to "
        "Preference",
        ".trainer.data.format",
    ),
    Rule(
        f"""!{_OBJECTIVE} || {_WEIGHTS} || self.trainer.tuning.objective.kind == 'ORPO'
        || self.trainer.tuning.objective.referenceFree || self.trainer.tuning.objective.reference != 'Base'""",
        "trainer.tuning.objective compares with the model in trainer.model.weights, which is not given: give it, or "
        "set tuning.objective.referenceFree",
        ".trainer.model.weights",
        reason=RefusalReason.REQUIRED,
    ),
    Rule(
        f"!({_PAIRS}) || !self.trainer.data.examples.packing",
        "trainer.data.examples.packing is true but trainer.data.format is Preference, where each answer has a separate "
        "sequence: leave it out",
        ".trainer.data.examples.packing",
    ),
    Rule(
        f"!({_PAIRS}) || self.parallelism.pipeline == 1",
        "parallelism.pipeline is above 1 but trainer.data.format is Preference, which runs without a pipeline: set it "
        "to 1 and raise parallelism.tensor, or set trainer.dataParallel to FullySharded",
        ".parallelism.pipeline",
    ),
    Rule(
        f"{_ON_NXD} || !({_PAIRS})",
        "trainer.data.format is Preference, which cannot be had on trn1: its backend Nxd has no loss on pairs; use "
        "trn2 or trn3",
        ".trainer.data.format",
    ),
    # Deadlines, and the job's controller.
    Rule(
        """!has(self.startupDeadlineSeconds) || !has(self.activeDeadlineSeconds)
        || self.startupDeadlineSeconds <= self.activeDeadlineSeconds""",
        "startupDeadlineSeconds must not be above activeDeadlineSeconds, which would end the job before",
        ".startupDeadlineSeconds",
        format_message(
            "startupDeadlineSeconds %s is above activeDeadlineSeconds %s, which would end the job before: lower it, or "
            "leave one of them out",
            "self.startupDeadlineSeconds",
            "self.activeDeadlineSeconds",
        ),
    ),
    Rule(
        """!has(self.managedBy) || self.managedBy.matches(
        '^[a-z0-9]([-a-z0-9]*[a-z0-9])?([.][a-z0-9]([-a-z0-9]*[a-z0-9])?)*/[-A-Za-z0-9._~%/:@+=]+$')""",
        f"managedBy names a controller as domain/name, for instance {MANAGER} (this operator)",
        ".managedBy",
    ),
)

STORAGE_RULES: tuple[Rule, ...] = (
    Rule(
        "[has(self.hostPath), has(self.persistentVolumeClaim), has(self.uri)].filter(given, given).size() == 1",
        "give exactly one of hostPath, persistentVolumeClaim and uri; leave storage out for a folder in the pod",
    ),
)

# The operator writes status before it acts and reports Suspended only when no worker is left; so a change is safe
# while the stored job is suspended, and before the operator has taken it up. Nothing is ever started for a job that has
# failed: a change of it counts when it is recreated.
_AT_REST = """
(!has(oldSelf.status) || !has(oldSelf.status.phase) || oldSelf.status.phase == 'Failed'
|| (oldSelf.spec.suspend && oldSelf.status.phase == 'Suspended'))"""


_NOT_WHILE_RUNNING = (
    "cannot change while the job runs: suspend it first (spec.suspend: true), wait for phase Suspended; a failed job "
    "takes changes (then kubectl trn retry), a completed one none"
)


def _fixed_while_running(field: str) -> Rule:
    """Fix a field while the job runs; the field always has a value, because the schema gives it a default."""
    return Rule(
        f"{_AT_REST} || self.{field} == oldSelf.{field}",
        f"{field.removeprefix('spec.')} {_NOT_WHILE_RUNNING}",
        f".{field}",
        reason=RefusalReason.FORBIDDEN,
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
        "under its name (kubectl trn retry), and it resumes from its newest checkpoint",
        ".status.conditions",
        reason=RefusalReason.FORBIDDEN,
    ),
    Rule(
        f"size(self.metadata.name) <= {MAX_NAME}",
        f"the name has at most {MAX_NAME} characters, so that host names of its workers stay within 63",
        ".metadata.name",
        format_message(
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
        reason=RefusalReason.FORBIDDEN,
    ),
    Rule(
        """has(self.spec.managedBy) == has(oldSelf.spec.managedBy)
        && (!has(self.spec.managedBy) || self.spec.managedBy == oldSelf.spec.managedBy)""",
        "managedBy cannot change: a job has one controller from its creation on; create the job again, and it resumes "
        "from its newest checkpoint",
        ".spec.managedBy",
        reason=RefusalReason.FORBIDDEN,
    ),
)


def _listed(causes: frozenset[Cause]) -> str:
    return "[" + ", ".join(f"'{cause.value}'" for cause in Cause if cause in causes) + "]"


_NO_FAULTS = ", ".join(cause.value for cause in Cause if cause in NO_FAULT_CAUSES)
_FAULTS = frozenset(Cause) - NO_FAULT_CAUSES

RECOVERY_RULE_RULES: tuple[Rule, ...] = (
    Rule(
        """(has(self.exitCodes) && size(self.exitCodes) > 0) || (has(self.reason) && self.reason != '')
        || (has(self.message) && self.message != '')""",
        "a rule needs a condition: give exitCodes, reason or message, or it would match every failure",
    ),
    Rule(
        f"!(self.cause in {_listed(NO_FAULT_CAUSES)})",
        f"{_NO_FAULTS} are no faults: give the cause that the failure is to be attributed to, for instance UserCode",
        ".cause",
    ),
    Rule(
        f"self.action != 'AvoidNode' || !(self.cause in {_listed(USER_CAUSES)})",
        "a node is not to blame for an error of the user: choose action ReplaceWorker, or a cause such as Host",
        ".action",
    ),
)
"""Of one entry of `spec.recovery.rules`."""

BY_CAUSE_RULES: tuple[Rule, ...] = (
    Rule(
        f"self.all(cause, cause in {_listed(_FAULTS)})",
        "a key of byCause is not the cause of a fault; see the causes of recovery.rules[].cause",
    ),
)
"""Of `spec.recovery.budgets.byCause`."""

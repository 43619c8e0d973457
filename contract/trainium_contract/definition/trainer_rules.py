"""CEL rules of `spec.trainer`. The trainer checks the same in a configuration written by hand.

They start at the root of the spec, because some of them also depend on `parallelism` or `elasticity`.
"""

from __future__ import annotations

from dataclasses import replace

from trainium_contract.definition.cel import RefusalReason, Rule, format_message
from trainium_contract.definition.effect_rules import IS_LORA
from trainium_contract.definition.size_expressions import GLOBAL_BATCH, MICRO_BATCH, OUT_OF_BOUNDS

_IS_NOT_NXD = (
    "!has(self.workers.accelerator.instanceType) || !self.workers.accelerator.instanceType.startsWith('trn1') "
    "|| self.trainer.backend == 'Native'"
)
"""Start of a rule about limits of backend Nxd, which Auto selects on trn1, where TorchNeuron does not run."""
_STEPS_FROM_DATA = "self.trainer.epochs > 0.0 || has(self.trainer.schedule.warmupRatio)"
"""Start of a rule about steps that follow from the data: the trainer checks them once it has read its data."""
_WARMUP_STEPS = "self.trainer.schedule.?warmupSteps.orValue(0)"
"""0 where it is not given: the trainer then fits it to the run."""

_STEPS = "self.trainer.?steps.orValue(100)"
_HAS_WEIGHTS = "has(self.trainer.model.weights)"
_HAS_OBJECTIVE = "has(self.trainer.tuning.objective)"
_EVALUATES_MILESTONES = "self.trainer.evaluate.atMilestones"
_IS_PREFERENCE = "self.trainer.data.format == 'Preference'"

_RULES: tuple[Rule, ...] = (
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
    # Only where the rules of sizes above ignore the size; there the operator must find some size to round it down to.
    Rule(
        f"{_IS_NOT_NXD} || self.trainer.torchCompile == 'None'",
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
        || self.parallelism.pipeline <= self.trainer.model.numLayers""",
        "parallelism.pipeline must not be above trainer.model.numLayers: each stage needs a layer",
        ".parallelism.pipeline",
        format_message(
            "parallelism.pipeline %s is above trainer.model.numLayers %s: each stage needs a layer",
            "self.parallelism.pipeline",
            "self.trainer.model.numLayers",
        ),
    ),
    Rule(
        f"{_IS_NOT_NXD} || self.parallelism.pipeline == 1",
        "parallelism.pipeline must be 1 on trn1: its backend Nxd has no pipeline; raise parallelism.tensor",
        ".parallelism.pipeline",
    ),
    Rule(
        f"{_IS_NOT_NXD} || self.parallelism.context == 1",
        "parallelism.context must be 1 on trn1: its backend Nxd does not divide sequences; raise parallelism.tensor",
        ".parallelism.context",
    ),
    Rule(
        """self.parallelism.context <= 1 || !has(self.trainer.data.sequenceLength)
        || self.trainer.data.sequenceLength % (2 * self.parallelism.context) == 0""",
        "trainer.data.sequenceLength must be divisible by 2 x parallelism.context: each rank holds two chunks of it",
        ".parallelism.context",
        format_message(
            "trainer.data.sequenceLength %s is not divisible by 2 x parallelism.context %s: each rank holds two chunks "
            "of the sequence",
            "self.trainer.data.sequenceLength",
            "self.parallelism.context",
        ),
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
        """!has(self.trainer.model.ropeScaling) || has(self.trainer.model.ropeScaling.factor)
        || self.trainer.model.ropeScaling.kind in ['Llama3', 'Unscaled']""",
        "trainer.model.ropeScaling.factor is not given, but the kind of the scaling needs it: give the ratio of the "
        "longest sequence to that before scaling",
        ".trainer.model.ropeScaling.factor",
        reason=RefusalReason.REQUIRED,
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
        f"{_STEPS_FROM_DATA} || {_WARMUP_STEPS} <= {_STEPS}",
        "trainer.schedule.warmupSteps must not be above trainer.steps",
        ".trainer.schedule.warmupSteps",
        format_message(
            "trainer.schedule.warmupSteps %s is above trainer.steps %s: the warm-up must end within the run; lower "
            "warmupSteps or raise steps",
            _WARMUP_STEPS,
            _STEPS,
        ),
    ),
    Rule(
        "has(self.trainer.data.source) || has(self.trainer.data.hub) || has(self.trainer.data.sources)",
        "trainer.data names nothing to train on: give trainer.data.source (a file, a folder, s3://bucket/prefix, "
        "or python-docs for a first try), trainer.data.hub or trainer.data.sources",
        ".trainer.data.source",
        reason=RefusalReason.REQUIRED,
    ),
    Rule(
        """!has(self.trainer.data.validation) || [has(self.trainer.data.validation.fraction),
        has(self.trainer.data.validation.source), has(self.trainer.data.validation.hubSplit)].exists_one(x, x)""",
        "trainer.data.validation needs one of fraction, source and hubSplit: give exactly one of them",
        ".trainer.data.validation",
    ),
    Rule(
        """!has(self.trainer.data.validation) || !has(self.trainer.data.validation.hubSplit)
        || has(self.trainer.data.hub)""",
        "trainer.data.validation.hubSplit is a split of trainer.data.hub, which is not given: give trainer.data.hub",
        ".trainer.data.hub",
        reason=RefusalReason.REQUIRED,
    ),
    Rule(
        "!has(self.trainer.data.hub) || !has(self.trainer.data.sources)",
        "trainer.data.hub and trainer.data.sources are both given: move trainer.data.hub into trainer.data.sources",
        ".trainer.data.hub",
    ),
    Rule(
        "!has(self.trainer.data.sources) || self.trainer.data.sources.all(one, has(one.source) != has(one.hub))",
        "each of trainer.data.sources needs either source or hub: give exactly one of them",
        ".trainer.data.sources",
    ),
    Rule(
        f"""{_STEPS_FROM_DATA} || !has(self.trainer.schedule.decaySteps)
        || {_WARMUP_STEPS} + self.trainer.schedule.decaySteps <= {_STEPS}""",
        "trainer.schedule.warmupSteps and decaySteps must together not be above trainer.steps",
        ".trainer.schedule.decaySteps",
    ),
    Rule(
        f"""!has(self.trainer.monitor.profile) || size(self.trainer.monitor.profile.steps) != 2
        || self.trainer.monitor.profile.steps[0] <= self.trainer.monitor.profile.steps[1]
        && self.trainer.monitor.profile.steps[1] < self.trainer.monitor.profile.steps[0] + 20
        && (self.trainer.epochs > 0.0 || self.trainer.monitor.profile.steps[1] <= {_STEPS})""",
        "trainer.monitor.profile.steps must be the first and the last of at most 20 steps, both within trainer.steps",
        ".trainer.monitor.profile.steps",
    ),
    # Fine-tuning.
    Rule(
        f"(!({IS_LORA}) && !has(self.trainer.tuning.trainable)) || {_HAS_WEIGHTS}",
        "trainer.tuning leaves weights as they are, but there are none: give trainer.model.weights, the folder of a "
        "base model",
        ".trainer.model.weights",
        reason=RefusalReason.REQUIRED,
    ),
    Rule(
        f"{IS_LORA} || !has(self.trainer.artifacts.kinds) || !('Adapter' in self.trainer.artifacts.kinds)",
        "trainer.artifacts.kinds names Adapter but trainer.tuning.method is Full: leave Adapter out, or set "
        "tuning.method to LoRA",
        ".trainer.artifacts.kinds",
    ),
    Rule(
        """!has(self.trainer.artifacts.push) || (has(self.trainer.artifacts.path)
        ? !self.trainer.artifacts.path.contains('://')
        : !has(self.checkpoint.storage) || !has(self.checkpoint.storage.uri))""",
        "trainer.artifacts.push uploads a folder, but artifacts are written to an object store: set "
        "trainer.artifacts.path to a mounted folder",
        ".trainer.artifacts.path",
    ),
    Rule(
        f"""!{_EVALUATES_MILESTONES} || (has(self.trainer.artifacts.kinds) ? 'Model' in self.trainer.artifacts.kinds
        : {IS_LORA} || {_HAS_WEIGHTS})""",
        "trainer.evaluate.atMilestones is true but the run writes no Model: set trainer.artifacts.kinds to [Model]",
        ".trainer.artifacts.kinds",
    ),
    Rule(
        f"!{_EVALUATES_MILESTONES} || has(self.trainer.artifacts.path) || has(self.checkpoint.storage)",
        "trainer.evaluate.atMilestones is true but no other pod can read the models: give checkpoint.storage, or set "
        "trainer.artifacts.path to a shared folder or an object store",
        ".checkpoint.storage",
        reason=RefusalReason.REQUIRED,
    ),
    Rule(
        f"{_IS_NOT_NXD} || !({_IS_PREFERENCE})",
        "trainer.data.format is Preference, which cannot be had on trn1: its backend Nxd has no loss on pairs; use "
        "trn2 or trn3",
        ".trainer.data.format",
    ),
)

TRAINER_RULES = tuple(replace(rule, rule=f"!has(self.trainer) || ({rule.rule})") for rule in _RULES)

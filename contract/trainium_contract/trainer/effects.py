"""Which fields of the trainer's configuration have an effect only with certain values of others, or conflict."""

from __future__ import annotations

from trainium_contract.effects import Conflict, Requirement, Switch, expand_requirements
from trainium_contract.models.shape import RopeScalingKind
from trainium_contract.trainer.artifacts import ArtifactKind
from trainium_contract.trainer.data import Tokenization
from trainium_contract.trainer.examples import DataFormat, LossOn
from trainium_contract.trainer.optimizer import ScheduleKind
from trainium_contract.trainer.parallelism import DataParallelMode, Precision
from trainium_contract.trainer.tuning import BASE_REFERENCE, TuningMethod

_EXAMPLES = "data.examples."
_ROPE = "model.ropeScaling."
_ROPE_KIND = f"{_ROPE}kind"
_NO_WEIGHTS = Switch("model.weights", on=(None,))
_NO_PATH = Switch("model.path", on=(None,))
_CHANGES_RATE = Switch("schedule.kind", off=(ScheduleKind.CONSTANT,))
_HAS_EXAMPLES = Switch("data.format", off=(DataFormat.TEXT,))
_IS_TEXT = Switch("data.format", on=(DataFormat.TEXT,))


def _format(*formats: DataFormat) -> Switch:
    return Switch("data.format", on=formats)


TRAINER_REQUIREMENTS: tuple[Requirement, ...] = (
    *expand_requirements("steps", Switch("epochs", on=(0.0,))),
    *expand_requirements("model.preset", _NO_WEIGHTS),
    *expand_requirements("model.preset", _NO_PATH),
    *expand_requirements("model.path", _NO_WEIGHTS),
    *expand_requirements("model.initialStd", _NO_WEIGHTS),
    *expand_requirements(f"{_ROPE}factor", Switch(_ROPE_KIND, off=(RopeScalingKind.UNSCALED,))),
    *expand_requirements(
        f"{_ROPE}{{lowFrequencyFactor,highFrequencyFactor}}", Switch(_ROPE_KIND, on=(RopeScalingKind.LLAMA3,))
    ),
    *expand_requirements(
        f"{_ROPE}originalMaxPositions", Switch(_ROPE_KIND, on=(RopeScalingKind.LLAMA3, RopeScalingKind.YARN))
    ),
    *expand_requirements(
        f"{_ROPE}{{fastTurns,slowTurns,attentionFactor}}", Switch(_ROPE_KIND, on=(RopeScalingKind.YARN,))
    ),
    *expand_requirements("tuning.lora", Switch("tuning.method", off=(TuningMethod.FULL,))),
    *expand_requirements("data.source", Switch("data.hub", on=(None,))),
    *expand_requirements("data.source", Switch("data.sources", on=(None,))),
    *expand_requirements("data.{textField,maskDocuments}", _IS_TEXT),
    *expand_requirements(f"{_EXAMPLES}{{where,loss,packing,tooLong}}", _HAS_EXAMPLES),
    *expand_requirements(f"{_EXAMPLES}maskExamples", Switch(f"{_EXAMPLES}packing", on=(True,))),
    *expand_requirements(f"{_EXAMPLES}template.{{prompt,completion}}", _format(DataFormat.INSTRUCTION)),
    *expand_requirements(f"{_EXAMPLES}chat.messagesField", _format(DataFormat.CHAT)),
    *expand_requirements(
        f"{_EXAMPLES}chat.{{template,date}}", _format(DataFormat.CHAT, DataFormat.FUNCTION, DataFormat.PREFERENCE)
    ),
    *expand_requirements(
        f"{_EXAMPLES}classification.{{textFields,labelField,labels,prompt}}", _format(DataFormat.CLASSIFICATION)
    ),
    *expand_requirements(
        f"{_EXAMPLES}preference.{{promptField,chosenField,rejectedField}}", _format(DataFormat.PREFERENCE)
    ),
    *expand_requirements(f"{_EXAMPLES}function", _format(DataFormat.FUNCTION)),
    *expand_requirements("data.validation.split", Switch("data.validation.fraction", off=(None,))),
    *expand_requirements("schedule.warmupSteps", Switch("schedule.warmupRatio", on=(None,))),
    *expand_requirements("schedule.{decaySteps,finalRatio}", _CHANGES_RATE),
    *expand_requirements("optimizer.decayScope", Switch("optimizer.weightDecay", off=(0.0,))),
    *expand_requirements("parallelism.sequence", Switch("parallelism.tensor", off=(1,))),
    *expand_requirements("artifacts.precision", Switch("artifacts.kinds", off=((), (ArtifactKind.ADAPTER,)))),
    *expand_requirements("monitor.trackerProject", Switch("monitor.trackers", off=(None, ()))),
)
"""Seeds may be given without effect. `trainium-trainer evaluate` reads `evaluate` also where a run does not measure."""

_IS_LORA = Switch("tuning.method", on=(TuningMethod.LORA,))
_IS_PREFERENCE = _format(DataFormat.PREFERENCE)
_HAS_OBJECTIVE = Switch("tuning.objective", off=(None,))
_MEASURES_MILESTONES = Switch("evaluate.atMilestones", on=(True,))
_HAS_NO_QUESTIONS = (Switch("data.validation", on=(None,)), Switch("evaluate.tasks", on=(None,)))
_NO_MILESTONES = (
    "trainer.evaluate.atMilestones is true but milestones write no models: give checkpoint.milestones.everyTokens, "
    "and set trainer.artifacts.atMilestones to true"
)

TRAINER_CONFLICTS: tuple[Conflict, ...] = (
    Conflict(
        "batch.tolerance",
        "trainer.batch.tolerance must be 0 with trainer.data.tokenization Online, where each row of the global batch "
        "is a stream of its own: set tokenization to Ahead, or leave tolerance out",
        (Switch("batch.tolerance", off=(0.0,)), Switch("data.tokenization", on=(Tokenization.ONLINE,))),
    ),
    Conflict(
        "precision",
        "trainer.precision is BFloat16Stochastic but trainer.tuning.method is LoRA, whose adapters are in float32: use "
        "BFloat16",
        (Switch("precision", on=(Precision.BFLOAT16_STOCHASTIC,)), _IS_LORA),
    ),
    Conflict(
        "dataParallel",
        "trainer.tuning.lora.dora rounds the trained lengths to bfloat16 where trainer.dataParallel shards them: set "
        "dataParallel to Replicated, or precision to Float32",
        (
            _IS_LORA,
            Switch("tuning.lora.dora", on=(True,)),
            Switch("dataParallel", off=(DataParallelMode.REPLICATED,)),
            Switch("precision", off=(Precision.FLOAT32,)),
        ),
    ),
    Conflict(
        "data.examples.function",
        "trainer.data.format is Function but trainer.data.examples.function is not given: name module:function",
        (_format(DataFormat.FUNCTION), Switch("data.examples.function", on=(None,))),
    ),
    Conflict(
        "data.validation",
        "trainer.evaluate.enabled is true but no examples are held back: give trainer.data.validation or "
        "trainer.evaluate.tasks",
        (Switch("evaluate.enabled", on=(True,)), *_HAS_NO_QUESTIONS),
    ),
    Conflict(
        "evaluate.tasks",
        "trainer.evaluate.atMilestones is true but there is nothing to ask: give trainer.evaluate.tasks or "
        "trainer.data.validation",
        (_MEASURES_MILESTONES, *_HAS_NO_QUESTIONS),
    ),
    Conflict(
        "evaluate.atMilestones",
        _NO_MILESTONES,
        (_MEASURES_MILESTONES, Switch("artifacts.atMilestones", on=(False,))),
    ),
    Conflict(
        "evaluate.atMilestones",
        _NO_MILESTONES,
        (_MEASURES_MILESTONES, Switch("checkpoint.milestones.everyTokens", on=(None,))),
    ),
    Conflict(
        "tuning.objective",
        "trainer.data.format is Preference but trainer.tuning.objective is not given: name its kind, DPO",
        (_IS_PREFERENCE, Switch("tuning.objective", on=(None,))),
    ),
    Conflict(
        "data.format",
        "trainer.tuning.objective is given but trainer.data.format has no two answers to compare: set data.format to "
        "Preference",
        (_HAS_OBJECTIVE, Switch("data.format", off=(DataFormat.PREFERENCE,))),
    ),
    Conflict(
        "parallelism.context",
        "parallelism.context is above 1 but trainer.data.format is Preference, whose loss needs whole answers on a "
        "rank: set parallelism.context to 1",
        (_IS_PREFERENCE, Switch("parallelism.context", off=(1,))),
    ),
    Conflict(
        "data.examples.packing",
        "trainer.data.examples.packing is true but trainer.data.format is Preference, where each answer has a separate "
        "sequence: leave it out",
        (_IS_PREFERENCE, Switch("data.examples.packing", on=(True,))),
    ),
    Conflict(
        "data.examples.loss",
        "trainer.data.examples.loss is All but trainer.data.format is Preference, which compares answers only: leave "
        "it out",
        (_IS_PREFERENCE, Switch("data.examples.loss", on=(LossOn.ALL,))),
    ),
    Conflict(
        "model.weights",
        "trainer.tuning.objective compares with the model in trainer.model.weights, which is not given: give it, or "
        "set tuning.objective.reference",
        (_HAS_OBJECTIVE, Switch("tuning.objective.reference", on=(BASE_REFERENCE,)), _NO_WEIGHTS),
    ),
)

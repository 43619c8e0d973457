"""Which fields of the trainer's configuration have an effect only with certain values of others."""

from __future__ import annotations

from trainium_contract.effects import Requirement, Switch, requirements
from trainium_contract.models.shape import RopeScalingKind
from trainium_contract.trainer.artifacts import ArtifactKind
from trainium_contract.trainer.examples import DataFormat
from trainium_contract.trainer.optimizer import ScheduleKind
from trainium_contract.trainer.tuning import TuningMethod

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
    *requirements("steps", Switch("epochs", on=(0.0,))),
    *requirements("model.preset", _NO_WEIGHTS),
    *requirements("model.preset", _NO_PATH),
    *requirements("model.path", _NO_WEIGHTS),
    *requirements("model.initialStd", _NO_WEIGHTS),
    *requirements(f"{_ROPE}factor", Switch(_ROPE_KIND, off=(RopeScalingKind.UNSCALED,))),
    *requirements(
        f"{_ROPE}{{lowFrequencyFactor,highFrequencyFactor}}", Switch(_ROPE_KIND, on=(RopeScalingKind.LLAMA3,))
    ),
    *requirements(
        f"{_ROPE}originalMaxPositions", Switch(_ROPE_KIND, on=(RopeScalingKind.LLAMA3, RopeScalingKind.YARN))
    ),
    *requirements(f"{_ROPE}{{fastTurns,slowTurns,attentionFactor}}", Switch(_ROPE_KIND, on=(RopeScalingKind.YARN,))),
    *requirements("tuning.lora", Switch("tuning.method", off=(TuningMethod.FULL,))),
    *requirements("data.source", Switch("data.hub", on=(None,))),
    *requirements("data.source", Switch("data.sources", on=(None,))),
    *requirements("data.{textField,maskDocuments}", _IS_TEXT),
    *requirements(f"{_EXAMPLES}{{where,loss,packing,tooLong}}", _HAS_EXAMPLES),
    *requirements(f"{_EXAMPLES}maskExamples", Switch(f"{_EXAMPLES}packing", on=(True,))),
    *requirements(f"{_EXAMPLES}template.{{prompt,completion}}", _format(DataFormat.INSTRUCTION)),
    *requirements(f"{_EXAMPLES}chat.messagesField", _format(DataFormat.CHAT)),
    *requirements(
        f"{_EXAMPLES}chat.{{template,date}}", _format(DataFormat.CHAT, DataFormat.FUNCTION, DataFormat.PREFERENCE)
    ),
    *requirements(
        f"{_EXAMPLES}classification.{{textFields,labelField,labels,prompt}}", _format(DataFormat.CLASSIFICATION)
    ),
    *requirements(f"{_EXAMPLES}preference.{{promptField,chosenField,rejectedField}}", _format(DataFormat.PREFERENCE)),
    *requirements(f"{_EXAMPLES}function", _format(DataFormat.FUNCTION)),
    *requirements("data.validation.split", Switch("data.validation.fraction", off=(None,))),
    *requirements("schedule.warmupSteps", Switch("schedule.warmupRatio", on=(None,))),
    *requirements("schedule.{decaySteps,finalRatio}", _CHANGES_RATE),
    *requirements("optimizer.decayScope", Switch("optimizer.weightDecay", off=(0.0,))),
    *requirements("parallelism.sequence", Switch("parallelism.tensor", off=(1,))),
    *requirements("artifacts.precision", Switch("artifacts.kinds", off=((), (ArtifactKind.ADAPTER,)))),
    *requirements("monitor.trackerProject", Switch("monitor.trackers", off=(None, ()))),
)
"""Seeds may be given without effect. `trainium-trainer evaluate` reads `evaluate` also where a run does not measure."""

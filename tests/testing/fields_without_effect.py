"""Cases for each requirement of a field: the field, documents that switch it off, and documents that switch it on."""

from dataclasses import dataclass
from typing import Any

import yaml

from tests.testing.api.json_objects import merge

DPO = "data.format: Preference, tuning.objective.kind: DPO, model.weights: /base"
WSD = "schedule.kind: WarmupStableDecay"
ROPE = "model.ropeScaling"
EXAMPLES = "data.examples"
CASES = f"""
steps: 7 | epochs: 1.5 | epochs: 0
model.preset: Tiny | model.weights: /base |
model.preset: Llama3-8B | model.path: /config |
model.path: /config | model.weights: /base |
model.initialStd: 0.1 | model.weights: /base |
{ROPE}.factor: 4 | {ROPE}.kind: Unscaled | {ROPE}.kind: Linear
{ROPE}.lowFrequencyFactor: 2 | {ROPE}.kind: YaRN, {ROPE}.factor: 2 | {ROPE}.kind: Llama3
{ROPE}.highFrequencyFactor: 8 | {ROPE}.kind: YaRN, {ROPE}.factor: 2 | {ROPE}.kind: Llama3
{ROPE}.originalMaxPositions: 64 | {ROPE}.kind: Linear, {ROPE}.factor: 2 | {ROPE}.kind: YaRN, {ROPE}.factor: 2
{ROPE}.fastTurns: 16 | {ROPE}.kind: Llama3 | {ROPE}.kind: YaRN, {ROPE}.factor: 2
{ROPE}.slowTurns: 2 | {ROPE}.kind: Linear, {ROPE}.factor: 2 | {ROPE}.kind: YaRN, {ROPE}.factor: 2
{ROPE}.attentionFactor: 1.5 | {ROPE}.kind: Llama3 | {ROPE}.kind: YaRN, {ROPE}.factor: 2
tuning.lora: {{}} | tuning.method: Full, model.weights: /base | model.weights: /base
tuning.lora.rank: 8 | tuning.method: Full, model.weights: /base | tuning.method: LoRA, model.weights: /base
data.source: python-docs | data.hub.dataset: a/b |
data.source: /data | 'data: {{sources: [{{source: /more}}]}}' |
data.textField: body | data.format: Instruction | data.format: Text
data.maskDocuments: true | data.format: Chat | data.format: Text
{EXAMPLES}.where.split: train | data.format: Text | data.format: Chat
{EXAMPLES}.loss: All | data.format: Text | data.format: Instruction
{EXAMPLES}.packing: true | data.format: Text | data.format: Chat
{EXAMPLES}.tooLong: CutLeft | data.format: Text | data.format: Chat
{EXAMPLES}.maskExamples: false | data.format: Chat | data.format: Chat, {EXAMPLES}.packing: true
{EXAMPLES}.template.prompt: "a {{b}}" | data.format: Chat | data.format: Instruction
{EXAMPLES}.template.completion: "a {{b}}" | data.format: Text | data.format: Instruction
{EXAMPLES}.chat.messagesField: turns | data.format: Instruction | data.format: Chat
{EXAMPLES}.chat.template: /t.jinja | data.format: Classification | data.format: Chat
{EXAMPLES}.chat.date: "2026-01-31" | data.format: Instruction | data.format: Chat
{EXAMPLES}.classification.textFields: [a] | data.format: Chat | data.format: Classification
{EXAMPLES}.classification.labelField: kind | data.format: Text | data.format: Classification
{EXAMPLES}.classification.labels: [a, b] | data.format: Chat | data.format: Classification
{EXAMPLES}.classification.prompt: "{{a}}" | data.format: Chat | data.format: Classification
{EXAMPLES}.preference.promptField: a | data.format: Chat | {DPO}
{EXAMPLES}.preference.chosenField: a | data.format: Chat | {DPO}
{EXAMPLES}.preference.rejectedField: a | data.format: Text | {DPO}
{EXAMPLES}.function: "a:b" | data.format: Chat | data.format: Function
data.validation.split: Tail | data.validation.source: /held | data.validation.fraction: 0.1
schedule.warmupSteps: 3 | schedule.warmupRatio: 0.1 |
schedule.decaySteps: 5 | schedule.kind: Constant | {WSD}
schedule.finalRatio: 0.5 | schedule.kind: Constant | {WSD}
optimizer.decayScope: Matrices | optimizer.weightDecay: 0 | optimizer.weightDecay: 0.1
parallelism.sequence: true | parallelism.tensor: 1 | parallelism.tensor: 2
artifacts.precision: Float16 | artifacts.kinds: [Adapter], {{LORA}} | artifacts.kinds: [Model]
monitor.trackerProject: a | seed: 1 | monitor.trackers: [MLflow]
""".replace("{LORA}", "tuning.method: LoRA, model.weights: /base")
JOB_CASES = """
trainer.artifacts.atMilestones: true | trainer.steps: 5 | trainer.steps: 5, checkpoint.milestones.everyTokens: 9
trainer.evaluate.samples: 5 | suspend: true | {EVALUATE}
trainer.evaluate.tasks.names: [mmlu] | suspend: true | {EVALUATE}
trainer.evaluate.before: false | suspend: true | {EVALUATE}
trainer.evaluate.generation.maxNewTokens: 5 | suspend: true | {EVALUATE}
trainer.evaluate.generation.temperature: 0.5 | suspend: true | {EVALUATE}
trainer.evaluate.generation.stop: [a] | suspend: true | {EVALUATE}
trainer.evaluate.generation.batchSize: 5 | suspend: true | {EVALUATE}
trainer.evaluate.generation.topP: 0.5 | {EVALUATE} | {EVALUATE}, trainer.evaluate.generation.temperature: 1
trainer.evaluate.generation.topK: 5 | {EVALUATE} | {EVALUATE}, trainer.evaluate.generation.temperature: 1
precompile.sizes: All | precompile.enabled: false | precompile.enabled: true
recovery.hang.initSeconds: 5 | recovery.hang.enabled: false | recovery.hang.enabled: true
recovery.hang.compileSeconds: 5 | recovery.hang.enabled: false | recovery.hang.enabled: true
recovery.hang.loadSeconds: 5 | recovery.hang.enabled: false | recovery.hang.enabled: true
recovery.hang.saveSeconds: 5 | recovery.hang.enabled: false | recovery.hang.enabled: true
recovery.hang.stepFloorSeconds: 5 | recovery.hang.enabled: false | recovery.hang.enabled: true
recovery.hang.stepFactor: 9 | recovery.hang.enabled: false | recovery.hang.enabled: true
health.preflight.timeoutSeconds: 5 | health.preflight.checks: [] | health.preflight.checks: [Clock]
health.quarantine.debounceSeconds: 5 | health.quarantine.enabled: false | health.quarantine.enabled: true
checkpoint.durable.keepLast: 5 | {PROGRAM} |
checkpoint.durable.failureTolerance: 5 | {PROGRAM} |
checkpoint.durable.saveTimeoutSeconds: 5 | {PROGRAM} |
""".replace("{PROGRAM}", "'program: {image: a, command: [b]}'").replace(
    "{EVALUATE}", "trainer.evaluate.enabled: true, trainer.data.validation.fraction: 0.1"
)


@dataclass(frozen=True, slots=True)
class Case:
    """A field with documents in which it has no effect, and in which it has."""

    field: str
    off: dict[str, Any]
    on: dict[str, Any]


def read_cases(text: str) -> list[Case]:
    """Return the cases of a table with the columns `field: value | off | on`."""
    cases = []
    for line in text.strip().splitlines():
        field, off, on = (column.strip() for column in line.split("|"))
        given = _nested(field)
        cases.append(Case(field.partition(":")[0], merge(_document(off), given), merge(_document(on), given)))
    return cases


def _document(text: str) -> dict[str, Any]:
    """Return nested fields of `a.b: 1, c: 2`, or of a quoted document."""
    if text.startswith("'"):
        return dict(yaml.safe_load(text.strip("'")))
    document: dict[str, Any] = {}
    for part in filter(None, text.split(", ")):
        document = merge(document, _nested(part))
    return document


def _nested(text: str) -> dict[str, Any]:
    path, _, value = text.partition(": ")
    *parents, last = path.split(".")
    fields: dict[str, Any] = {last: yaml.safe_load(value)}
    for name in reversed(parents):
        fields = {name: fields}
    return fields


TRAINER_CASES = read_cases(CASES)
SPEC_CASES = read_cases(JOB_CASES)


def job_spec(case: Case, document: dict[str, Any]) -> dict[str, Any]:
    """Return the spec of a job with the fields of a case, in which some of the trainer's are beside `trainer`."""
    if case in SPEC_CASES:
        return document
    beside: dict[str, Any] = {name: document[name] for name in ("parallelism", "checkpoint") if name in document}
    return {**beside, "trainer": {name: value for name, value in document.items() if name not in beside}}

"""Refusals of a bad TrainingJob: a real API server evaluates schema and rules.

Most are asked of the server itself, whose text kubectl shows; names and changes go through kubectl.
"""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from tests.testing.cluster.jobs import merged
from trainium_contract.sizes import BatchShape, SizeRule

if TYPE_CHECKING:
    from conftest import Api

pytestmark = pytest.mark.cluster

GOOD = """
workers: {replicas: 4, accelerator: {device: cpu}}
trainer: {batch: {globalSize: 12}}
"""


PROGRAM = """
workers: {replicas: 4, accelerator: {device: cpu}}
program: {image: 'team/own:5', command: [python, train.py]}
"""


_MODELS = "{atMilestones: true, kinds: [Model]}"
_AT_MILESTONES = "evaluate: {atMilestones: true, tasks: {names: [mmlu]}}"
_MILESTONES = "checkpoint: {milestones: {everyTokens: 1000}, storage: {uri: 's3://bucket/runs'}}"


def job(change: str = "", name: str = "good", base: str = GOOD) -> dict[str, Any]:
    """The good job with a YAML fragment of its spec merged in."""
    return {
        "apiVersion": "trainium.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": name},
        "spec": merged(yaml.safe_load(base), yaml.safe_load(change) or {}),
    }


def program_job(change: str = "", name: str = "program") -> dict[str, Any]:
    return job(change, name, PROGRAM)


BAD_AT_CREATION = {
    # Unknown and misspelt fields.
    "trainer: {modell: {}}": 'unknown field "spec.trainer.modell"',
    "workers: {replica: 3}": 'unknown field "spec.workers.replica"',
    "trainers: {}": 'unknown field "spec.trainers"',
    # Zero, negative and too large sizes.
    "workers: {replicas: 0}": "replicas as it is and set spec.suspend: true (kubectl trn suspend NAME)",
    "workers: {replicas: -3}": "workers.replicas is -3; a job trains on 1 node at least",
    "workers: {replicas: 10001}": "spec.workers.replicas in body should be less than or equal to 10000",
    "workers: {spares: -1}": "spec.workers.spares in body should be greater than or equal to 0",
    "parallelism: {tensor: 0}": "spec.parallelism.tensor in body should be greater than or equal to 1",
    "parallelism: {pipeline: 257}": "spec.parallelism.pipeline in body should be less than or equal to 256",
    "trainer: {batch: {globalSize: 0}}": "spec.trainer.batch.globalSize in body should be greater than or equal to 1",
    "trainer: {batch: {tolerance: -0.1}}": "spec.trainer.batch.tolerance in body should be greater than or equal to 0",
    "trainer: {batch: {tolerance: 0.6}}": "spec.trainer.batch.tolerance in body should be less than or equal to 0.5",
    "{trainer: {batch: {tolerance: 0.1}}, elasticity: {sizes: Even}}": (
        "trainer.batch.tolerance must be 0 with elasticity.sizes Even, which allows no size at which the global batch "
    ),
    "trainer: {batch: {tolerance: 0.1}, data: {tokenization: Online}}": (
        "trainer.batch.tolerance must be 0 with trainer.data.tokenization Online, where each row of the global batch "
    ),
    "elasticity: {idleNodes: Take}": "elasticity.idleNodes Take needs workers.maxReplicas: say to how many nodes",
    "elasticity: {idleNodes: Some}": 'supported values: "Leave", "Take"',
    "trainer: {batch: {microSize: -1}}": "spec.trainer.batch.microSize in body should be greater than or equal to 1",
    "workers: {accelerator: {coresPerNode: 0}}": "coresPerNode in body should be greater than or equal to 1",
    "trainer: {optimizer: {learningRate: 0}}": "learningRate in body should be greater than 0",
    "trainer: {precision: Float8}": 'supported values: "Float32", "BFloat16", "BFloat16Stochastic"',
    "health: {preflight: {minimumBandwidthGbps: 20}}": (
        "health.preflight.minimumBandwidthGbps has no effect without check Bandwidth: add Bandwidth to "
    ),
    # Deadlines and controllers.
    "activeDeadlineSeconds: 0": "spec.activeDeadlineSeconds in body should be greater than or equal to 1",
    "startupDeadlineSeconds: 31536001": "startupDeadlineSeconds in body should be less than or equal to 31536000",
    "{activeDeadlineSeconds: 60, startupDeadlineSeconds: 61}": (
        "startupDeadlineSeconds 61 is above activeDeadlineSeconds 60, which would end the job before: lower it, or "
        "leave one of them out"
    ),
    "managedBy: me": "managedBy names a controller as domain/name, for instance trainium.dev/trainium-operator",
    "managedBy: Acme.io/x": "managedBy names a controller as domain/name",
    # Floors above sizes.
    "workers: {minReplicas: 5}": "minReplicas 5 is above workers.replicas 4: lower minReplicas or raise replicas",
    "workers: {maxReplicas: 3}": "workers.replicas 4 is above workers.maxReplicas 3: lower replicas or raise maxRep",
    # Sizes that are not legal.
    "{workers: {replicas: 5}, elasticity: {sizes: Even}}": (
        "workers.replicas 5 gives a data-parallel degree of 5, but trainer.batch.globalSize 12 is not divisible by "
        "that x microSize 1: change replicas or trainer.batch, or set elasticity.sizes to Any; legal sizes within 100 "
        "of it: [4, 3, 2, 1] below, [6, 12] above"
    ),
    "{workers: {replicas: 3, accelerator: {coresPerNode: 2}}, parallelism: {tensor: 4}, elasticity: {sizes: Even}}": (
        "workers.replicas 3 x 2 cores per node = 6 training processes, not divisible by parallelism.tensor x pipeline "
        "x context = 4: change replicas or parallelism; legal sizes within 100 of it: [2] below, [4, 6, 8, 12, 24]"
    ),
    """{workers: {replicas: 100, accelerator: {device: neuron, instanceType: trn1.32xlarge}}, parallelism: {tensor: 8},
    trainer: {batch: {globalSize: 1024}}, elasticity: {sizes: Even}}""": (
        "legal sizes within 100 of it: [64, 32, 16, 8, 4, 2, 1] below, [128] ab"
    ),
    "{trainer: {batch: {globalSize: 12, microSize: 5}}, elasticity: {sizes: Even}}": (
        "not divisible by that x microSize 5"
    ),
    "trainer: {batch: {globalSize: 12, microSize: 13}}": (
        "trainer.batch.microSize 13 is above trainer.batch.globalSize 12: every pass of every rank would be partly emp"
    ),
    "elasticity: {sizes: Odd}": 'supported values: "Any", "Even"',
    "{workers: {replicas: 5, accelerator: {coresPerNode: 2}}, parallelism: {tensor: 4}}": (
        "= 10 training processes, not divisible by parallelism.tensor x pipeline x context = 4: change replicas or "
        "parallelism; legal sizes within 100 of it: [4, 2] below, [6, 8, 10, 12,"
    ),
    # Accelerators.
    "workers: {accelerator: {device: neuron}}": "say what a worker computes on: workers.accelerator.instanceType",
    "workers: {accelerator: {device: neuron, instanceType: trn9.metal}}": (
        "unknown instance type trn9.metal; known are trn1.2xlarge, trn1.32xlarge, trn1n.32xlarge"
    ),
    # Devices that are claimed.
    "workers: {accelerator: {device: cuda, coresPerNode: 1, claim: {count: 1}}}": (
        "accelerator.claim is for Neuron devices: leave it out, or set device to neuron"
    ),
    'workers: {accelerator: {coresPerNode: 8, resources: {aws.amazon.com/neuron: "4"}, claim: {count: 4}}}': (
        "accelerator.claim and resources aws.amazon.com/neuron both ask for the devices"
    ),
    "workers: {accelerator: {device: neuron, coresPerNode: 8, claim: {}}}": "say how many devices a worker claims",
    "workers: {accelerator: {device: neuron, coresPerNode: 2, claim: {count: 0}}}": "greater than or equal to 1",
    "workers: {accelerator: {device: neuron, coresPerNode: 2, claim: {count: 33}}}": "less than or equal to 32",
    "workers: {accelerator: {device: neuron, instanceType: trn1.32xlarge, coresPerNode: 2, claim: {count: 17}}}": (
        "accelerator.claim.count 17 is above the 16 devices of trn1.32xlarge: lower it"
    ),
    "workers: {accelerator: {device: neuron, instanceType: trn1.32xlarge, claim: {count: 4}}}": (
        "accelerator.coresPerNode must be given when a worker claims fewer devices than its instance type has"
    ),
    "workers: {accelerator: {device: neuron, instanceType: trn2.48xlarge, claim: {logicalNeuronCore: 1}}}": (
        "accelerator.coresPerNode must be given"
    ),
    "workers: {accelerator: {device: neuron, instanceType: trn1.32xlarge, claim: {logicalNeuronCore: 2}}}": (
        "accelerator.claim.logicalNeuronCore is for trn2"
    ),
    "workers: {accelerator: {device: neuron, coresPerNode: 6, claim: {count: 3, connected: true}}}": (
        "accelerator.claim.connected needs a count of 1, 4, 8 or 16"
    ),
    "workers: {accelerator: {instanceType: trn2u.48xlarge, claim: {count: 1, ultraServerNode: true}}}": (
        "accelerator.claim.ultraServerNode claims the whole node as one device"
    ),
    "workers: {accelerator: {device: neuron, instanceType: trn2.48xlarge, claim: {ultraServerNode: true}}}": (
        "accelerator.claim.ultraServerNode is for nodes of an UltraServer"
    ),
    # Cores that a node does not have.
    "workers: {accelerator: {device: neuron, instanceType: trn1.32xlarge, coresPerNode: 33}}": (
        "accelerator.coresPerNode 33 is above the 32 cores that a worker has on a node of trn1.32xlarge: lower it"
    ),
    "workers: {accelerator: {device: neuron, instanceType: trn2.48xlarge, coresPerNode: 129}}": (
        "accelerator.coresPerNode 129 is above the 128 cores that a worker has on a node of trn2.48xlarge"
    ),
    "workers: {accelerator: {device: neuron, instanceType: trn2.3xlarge, coresPerNode: 9}}": (
        "accelerator.coresPerNode 9 is above the 8 cores that a worker has on a node of trn2.3xlarge"
    ),
    "workers: {accelerator: {device: neuron, instanceType: trn1.32xlarge, coresPerNode: 9, claim: {count: 4}}}": (
        "accelerator.coresPerNode 9 is above the 8 cores that a worker has on a node of trn1.32xlarge"
    ),
    "workers: {accelerator: {device: neuron, instanceType: trn2.48xlarge, coresPerNode: 17, claim: {count: 4}}}": (
        "accelerator.coresPerNode 17 is above the 16 cores that a worker has on a node of trn2.48xlarge"
    ),
    """workers: {accelerator: {device: neuron, instanceType: trn2.48xlarge, coresPerNode: 65,
    claim: {logicalNeuronCore: 2}}}""": "accelerator.coresPerNode 65 is above the 64 cores that a worker has",
    # Storage.
    "checkpoint: {storage: {}}": "give exactly one of hostPath, persistentVolumeClaim and uri",
    "checkpoint: {storage: {hostPath: {path: /a}, persistentVolumeClaim: {claimName: b}}}": "give exactly one of",
    "checkpoint: {storage: {hostPath: {path: a}}}": "write an absolute path",
    "checkpoint: {storage: {hostPath: {path: /a}, subPath: ' '}}": "write names of folders separated by /",
    "checkpoint: {storage: {hostPath: {path: /a}, subPath: 'a b'}}": "write names of folders",
    "checkpoint: {storage: {hostPath: {path: /a}, subPath: a/..}}": "write names of folders",
    "checkpoint: {storage: {hostPath: {path: /a}, takeOver: llama}}": "write namespace/name",
    "trainer: {neuron: {extraCompilerFlags: [O1]}}": "write one option as on a command line",
    "checkpoint: {storage: {hostPath: {path: /a}, uri: 's3://bucket/a'}}": "give exactly one of",
    "checkpoint: {storage: {uri: 's3://Bucket'}}": "write s3://bucket or s3://bucket/prefix",
    # The model and the schedule.
    "{trainer: {model: {numAttentionHeads: 6}}, parallelism: {tensor: 4}, elasticity: {sizes: Even}}": (
        "numAttentionHeads 6 is not divisible by parallelism.tensor 4: each rank of the tensor group holds whole heads"
    ),
    "{trainer: {model: {numLayers: 4}}, parallelism: {pipeline: 2, stagesPerRank: 3}}": (
        "parallelism.pipeline 2 x stagesPerRank 3 is above trainer.model.numLayers 4: each stage needs a layer"
    ),
    "{workers: {replicas: 3, accelerator: {coresPerNode: 2}}, parallelism: {tensor: 2, context: 2}}": (
        "= 6 training processes, not divisible by parallelism.tensor x pipeline x context = 4: change replicas"
    ),
    "{trainer: {data: {sequenceLength: 36}}, parallelism: {context: 4}}": (
        "trainer.data.sequenceLength 36 is not divisible by 2 x parallelism.context 4: each rank holds two chunks"
    ),
    """{workers: {replicas: 4, accelerator: {device: neuron, instanceType: trn1.32xlarge}}, parallelism: {context: 4},
    trainer: {batch: {globalSize: 1024}}}""": "parallelism.context must be 1 on trn1: its backend Nxd does not divide",
    """{workers: {replicas: 4, accelerator: {device: neuron, instanceType: trn1.32xlarge}}, parallelism: {pipeline: 4},
    trainer: {batch: {globalSize: 1024}}}""": "parallelism.pipeline must be 1 on trn1: its backend Nxd has no pipeline",
    """{workers: {replicas: 4, accelerator: {device: neuron, instanceType: trn1.32xlarge}},
    trainer: {batch: {globalSize: 1024}, torchCompile: Layers}}""": "torchCompile must be None on trn1",
    "trainer: {model: {numAttentionHeads: 6, numKeyValueHeads: 4}}": "must be divisible by numKeyValueHeads",
    "trainer: {model: {numAttentionHeads: 6, hiddenSize: 64}}": "hiddenSize must be divisible by numAttentionHeads",
    "{trainer: {model: {numKeyValueHeads: 6}}, parallelism: {tensor: 4}, elasticity: {sizes: Even}}": (
        "numKeyValueHeads 6 neither is divisible by parallelism.tensor 4 nor divides it"
    ),
    "trainer: {model: {preset: Small, path: /model}}": "preset and trainer.model.path both name a shape",
    "trainer: {model: {ropeScaling: {kind: YaRN}}}": "trainer.model.ropeScaling.factor is not given",
    "trainer: {model: {ropeScaling: {lowFrequencyFactor: 4, highFrequencyFactor: 4}}}": "must be less than",
    "trainer: {schedule: {warmupSteps: 10, decaySteps: 95}}": "must together not be above trainer.steps",
    "trainer: {monitor: {profile: {steps: [99, 101]}}}": "both within trainer.steps",
    "trainer: {monitor: {profile: {steps: [3, 2]}}}": "must be the first and the last of at most 20 steps",
    "trainer: {monitor: {profile: {steps: [1, 21]}}}": "must be the first and the last of at most 20 steps",
    "trainer: {data: {validation: {everySteps: 5}}}": "data.validation needs one of fraction, source and hub",
    "trainer: {artifacts: {push: {repo: tuned}}}": "write the name of a repository on the hub, owner/name",
    "trainer: {artifacts: {push: {repo: a/b}, path: 's3://bucket/a'}}": "trainer.artifacts.push uploads a folder, but",
    "trainer: {data: {validation: {hubSplit: test}}}": "hubSplit is a split of trainer.data.hub, which is not given",
    "trainer: {data: {sources: [{weight: 2}]}}": "each of trainer.data.sources needs either source or hub",
    "trainer: {data: {sources: [{source: a, weight: 0}]}}": "weight in body should be greater than 0",
    "trainer: {data: {hub: {dataset: a/b/c}}}": "write the name of a data set on the hub, owner/name",
    "trainer: {data: {hub: {dataset: a/b}, sources: [{source: a}]}}": "move trainer.data.hub into trainer.data.sources",
    # Fine-tuning.
    "trainer: {model: {weights: /base, preset: Llama3-8B}}": (
        "model.weights is /base and trainer.model.preset is Llama3-8B: both name a shape, leave model.preset out"
    ),
    "trainer: {model: {weights: /base, path: /model}}": "both name a shape: leave model.path out",
    "trainer: {tuning: {method: LoRA}}": "give trainer.model.weights, the folder of a base model",
    "trainer: {tuning: {trainable: ['*norm*']}}": "give trainer.model.weights, the folder of a base model",
    "trainer: {model: {weights: /base}, tuning: {lora: {adapter: /old}}}": "set tuning.method to LoRA",
    "trainer: {model: {weights: /base}, tuning: {method: LoRA}, precision: BFloat16Stochastic}": "use BFloat16",
    "trainer: {model: {weights: /base}, tuning: {method: LoRA, lora: {rank: 0}}}": "greater than or equal to 1",
    "trainer: {model: {weights: /base}, artifacts: {kinds: [Model, Adapter]}}": "leave Adapter out",
    "trainer: {model: {weights: /base}, tuning: {method: lora}}": 'supported values: "Full", "LoRA"',
    "trainer: {data: {format: Function}}": "examples.function is not given: name module:function",
    "trainer: {data: {format: Function, examples: {function: read}}}": "write module:name",
    "trainer: {data: {format: Preference}}": "tuning.objective is not given: name its kind, DPO or ORPO",
    "trainer: {model: {weights: /base}, tuning: {objective: {kind: DPO}}}": "set data.format to Preference",
    "trainer: {data: {format: Preference}, tuning: {objective: {kind: DPO}}}": "model.weights, which is not given",
    "trainer: {data: {format: Preference}, tuning: {objective: {kind: PPO}}}": 'supported values: "DPO", "ORPO"',
    "trainer: {data: {format: Preference}, tuning: {objective: {beta: 0}}}": "beta in body should be greater than 0",
    "trainer: {data: {format: Preference, examples: {packing: true}}, tuning: {objective: {kind: ORPO}}}": (
        "examples.packing is true but trainer.data.format is Preference"
    ),
    """{workers: {replicas: 4, accelerator: {device: neuron, instanceType: trn1.32xlarge}},
    trainer: {batch: {globalSize: 1024}, data: {format: Preference}, tuning: {objective: {kind: ORPO}}}}""": (
        "format is Preference, which cannot be had on trn1"
    ),
    "trainer: {evaluate: {enabled: true}}": "no examples are held back: give trainer.data.validation",
    f"{{trainer: {{artifacts: {_MODELS}, evaluate: {{atMilestones: true}}}}, {_MILESTONES}}}": (
        "atMilestones is true but there is nothing to ask: give trainer.evaluate.tasks or trainer.data.validation"
    ),
    f"{{trainer: {{artifacts: {{kinds: [Model]}}, {_AT_MILESTONES}}}, {_MILESTONES}}}": (
        "atMilestones is true but milestones write no models: give checkpoint.milestones.everyTokens"
    ),
    f"{{trainer: {{artifacts: {_MODELS}, {_AT_MILESTONES}}}, checkpoint: {{storage: {{uri: 's3://bucket/a'}}}}}}": (
        "atMilestones is true but milestones write no models: give checkpoint.milestones.everyTokens"
    ),
    f"{{trainer: {{artifacts: {{atMilestones: true}}, {_AT_MILESTONES}}}, {_MILESTONES}}}": (
        "atMilestones is true but the run writes no Model: set trainer.artifacts.kinds to [Model]"
    ),
    f"{{trainer: {{artifacts: {_MODELS}, {_AT_MILESTONES}}}, checkpoint: {{milestones: {{everyTokens: 1000}}}}}}": (
        "atMilestones is true but no other pod can read the models: give checkpoint.storage"
    ),
    "trainer: {epochs: -1}": "spec.trainer.epochs in body should be greater than or equal to 0",
    "trainer: {schedule: {warmupRatio: 0}}": "warmupRatio in body should be greater than 0",
    # Rules and budgets of recovery.
    "recovery: {rules: [{cause: UserCode, action: Stop}]}": "a rule needs a condition: give exitCodes, reason or mess",
    "recovery: {rules: [{exitCodes: [], cause: UserCode, action: Stop}]}": "a rule needs a condition",
    "recovery: {rules: [{exitCodes: [3], cause: Resize, action: Stop}]}": "Finished, Yielded, Resize are no faults",
    "recovery: {rules: [{exitCodes: [0], cause: Host, action: AvoidNode}]}": "should be greater than or equal to 1",
    "recovery: {rules: [{reason: OOMKilled, cause: Memory, action: AvoidNode}]}": (
        "a node is not to blame for an error of the user: choose action ReplaceWorker, or a cause such as Host"
    ),
    "recovery: {rules: [{message: x, cause: Cosmic, action: Stop}]}": "Unsupported value",
    "recovery: {budgets: {byCause: {Hangs: {maxFailures: 3}}}}": "a key of byCause is not the cause of a fault",
    "trainer: {steps: 5, schedule: {warmupSteps: 10}}": "warmupSteps 10 is above trainer.steps 5: the warm-up must",
}


@pytest.mark.parametrize("change", BAD_AT_CREATION)
def test_a_bad_job_is_refused_with_a_sentence_that_names_what_to_change(defined: Api, change: str) -> None:
    output = defined.refusal_of_new(job(change, name="bad"))
    assert BAD_AT_CREATION[change] in output
    assert "evaluating rule" not in output


BAD_PROGRAMS = {
    "trainer: {steps: 3}": "trainer and program are both given: leave one of them out",
    "program: null": "give trainer ({} takes all defaults) for the built-in trainer, or program",
    "program: {progress: {pattern: 'step (?P<step>[0-9]+'}}": "program.progress.pattern is no regular expression",
    "program: {progress: {pattern: 'step (?=[0-9])(?P<step>[0-9]+)'}}": "syntax of RE2",
    "program: {progress: {pattern: 'step ([0-9]+)'}}": r"has no group (?P<step>\d+) that holds the number of the step",
    "program: {command: []}": "spec.program.command in body should have at least 1 items",
    f"program: {{args: [{','.join(['x' * 4000] * 5)}]}}": "have 20014 characters together, and at most 16384",
    "program: {checkpoints: {path: run, committed: '{step}'}}": "write an absolute path",
    "program: {checkpoints: {path: /run, committed: latest}}": "write a path below checkpoints.path with {step} once",
    "program: {checkpoints: {path: /run}}": "spec.program.checkpoints.committed",
    "program: {resize: Sometimes}": "Unsupported value",
    "program: {command: [./train.sh], warm: [torch]}": "program.command does not start with python: leave warm out",
    "program: {warm: ['torch; import os']}": "write the name of a Python module",
    "program: {batch: {globalSize: 4, microSize: 8}}": "microSize 8 is above program.batch.globalSize 4: lower",
    "program: {batch: {globalSize: 6}}": "gives a data-parallel degree of 4, but program.batch.globalSize 6 is not",
    "{program: {batch: {globalSize: 12}, processesPerNode: 2}}": "but program.batch.globalSize 12 is not divisible",
    "parallelism: {tensor: 3}": "4 training processes, not divisible by parallelism.tensor x pipeline x context = 3",
    "program: {processesPerNode: 0}": "should be greater than or equal to 1",
    "image: trainer:1": "image needs spec.trainer, and the job has spec.program: give program.image instead",
    "precompile: {enabled: true}": "precompile.enabled needs spec.trainer, and the job has spec.program",
    "health: {preflight: {checks: [Clock, Bandwidth]}}": "health.preflight.checks needs spec.trainer, and the job has",
    "checkpoint: {milestones: {everyTokens: 5}}": "checkpoint.milestones.everyTokens needs spec.trainer",
    "checkpoint: {storage: {uri: 's3://bucket/runs'}}": "checkpoint.storage.uri needs spec.trainer",
    "checkpoint: {storage: {hostPath: {path: /c}, takeOver: a/b}}": "checkpoint.storage.takeOver needs spec.trainer",
    "checkpoint: {storage: {hostPath: {path: /c}, subPath: a}}": "checkpoint.storage.subPath needs spec.trainer",
    "elasticity: {sizes: Even}": "elasticity.sizes needs spec.trainer, and the job has spec.program: give",
    "{program: {resize: Never}, workers: {minReplicas: 2}}": "program.resize is Never, so the job cannot shrink",
    "{program: {resize: Never}, workers: {maxReplicas: 8}, elasticity: {idleNodes: Take}}": "the job cannot grow",
}


@pytest.mark.parametrize("change", BAD_PROGRAMS)
def test_a_bad_program_is_refused_with_a_sentence_that_names_the_field(defined: Api, change: str) -> None:
    output = defined.refusal_of_new(program_job(change))
    assert BAD_PROGRAMS[change] in output


@pytest.mark.parametrize(
    "change",
    [
        "",
        "program: {progress: {pattern: 'step: *(?P<step>\\d+).*loss: *(?P<loss>\\S+)'}}",
        "program: {args: [-m, train], workingDirectory: /src, processesPerNode: 8, warm: [torch, torch.distributed]}",
        "program: {command: [/opt/venv/bin/python3.11, -m, train], warm: [torch]}",
        "program: {checkpoints: {path: /checkpoints/run, committed: 'step-{step}/.metadata'}}",
        "program: {batch: {globalSize: 24, microSize: 3}}",
        "{program: {batch: {globalSize: 24}}, elasticity: {sizes: Even}}",
        "{program: {resize: Never}, workers: {minReplicas: 4, spares: 1}}",
        "{parallelism: {tensor: 8}, workers: {accelerator: {device: neuron, instanceType: trn2.48xlarge}}}",
        "{parallelism: {tensor: 4}, program: {processesPerNode: 2}, workers: {replicas: 2, minReplicas: 1}}",
        "checkpoint: {storage: {persistentVolumeClaim: {claimName: fsx}}}",
        "workers: {replicas: 10000}",
    ],
)
def test_a_good_program_is_taken(defined: Api, change: str) -> None:
    assert defined.refusal_of_new(program_job(change)) == ""


def test_a_program_and_a_fixed_size_cannot_change_while_the_job_runs(defined: Api) -> None:
    fixed = "program: {resize: Never}"
    assert defined.refusal(program_job(fixed)) == ""
    defined.report_status("program", {"phase": "Running"})
    output = defined.refusal(program_job("program: {resize: Never, args: [--fast]}"))
    assert "program cannot change while the job runs: suspend it first (spec.suspend: true), wait" in output
    output = defined.refusal(program_job("{program: {resize: Never}, workers: {replicas: 6}}"))
    assert "replicas (resize: Never) cannot change while the job runs" in output
    output = defined.refusal(job("", name="program"))
    assert "program cannot change while the job runs" in output
    defined.delete_job("program")
    assert defined.refusal(program_job()) == ""
    defined.report_status("program", {"phase": "Running"})
    assert defined.refusal(program_job("workers: {replicas: 6}")) == "", "a program that can restart at another size"
    defined.delete_job("program")


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("n" * 51, "the name has 51 characters: shorten it to 50"),
        ("9lives", "begins with a small letter"),
        ("a.b", "only small letters, digits and '-'"),
    ],
)
def test_a_name_that_makes_no_host_name_is_refused(defined: Api, name: str, sentence: str) -> None:
    assert sentence in defined.refusal(job(name=name))


@pytest.mark.parametrize(
    "change",
    [
        "",
        "workers: {minReplicas: 2, maxReplicas: 8, spares: 1}",
        "workers: {accelerator: {device: cuda, coresPerNode: 3}}",
        "workers: {accelerator: {device: neuron, instanceType: trn9.metal, coresPerNode: 3, resources: {a.b/c: '1'}}}",
        "workers: {template: {spec: {nodeSelector: {pool: a}, containers: [{name: trainer, env: []}]}}}",
        "checkpoint: {storage: {persistentVolumeClaim: {claimName: fsx}, subPath: runs/one}}",
        "checkpoint: {storage: {uri: 's3://bucket/runs'}, milestones: {everyTokens: 50000000000}}",
        "trainer: {schedule: {warmupSteps: 100}}",
        "trainer: {steps: 3}",
        "trainer: {batch: {microSize: 16, globalSize: null}}",
        "trainer: {schedule: {decaySteps: 95}}",
        "trainer: {model: {ropeScaling: {lowFrequencyFactor: 4}}}",
        "trainer: {epochs: 3, steps: 1}",
        "trainer: {epochs: 0.5, schedule: {decaySteps: 100000}}",
        "trainer: {steps: 5, schedule: {warmupRatio: 0.03}}",
        "trainer: {model: {weights: 's3://bucket/base'}, tuning: {method: LoRA}, artifacts: {kinds: [Adapter, Model]}}",
        "trainer: {model: {weights: /base}, tuning: {trainable: ['*norm*']}, precision: BFloat16Stochastic}",
        "trainer: {data: {format: Function, examples: {function: '/data/read.py:read'}}}",
        "trainer: {data: {format: Preference}, tuning: {objective: {kind: ORPO}}}",
        "trainer: {data: {format: Preference}, tuning: {objective: {referenceFree: true}}, model: {preset: Llama3-8B}}",
        "trainer: {model: {weights: /base}, data: {format: Preference}, tuning: {objective: {beta: 0.5}}}",
        "trainer: {data: {format: Preference}, tuning: {objective: {reference: /reference}}}",
        "trainer: {data: {validation: {fraction: 0.1}}, evaluate: {enabled: true}}",
        f"{{trainer: {{artifacts: {_MODELS}, {_AT_MILESTONES}}}, {_MILESTONES}}}",
        "trainer: {data: {format: Chat, examples: {packing: true}}}",
        "workers: {accelerator: {device: cpu, claim: {count: 16, connected: true}}}",
        "workers: {accelerator: {device: neuron, instanceType: trn1.32xlarge, claim: {}}}",
        "workers: {accelerator: {device: neuron, instanceType: trn1.32xlarge, coresPerNode: 8, claim: {count: 4}}}",
        "workers: {accelerator: {device: neuron, instanceType: trn2.48xlarge, claim: {logicalNeuronCore: 2}}}",
        "workers: {accelerator: {device: neuron, instanceType: trn2u.48xlarge, claim: {ultraServerNode: true}}}",
        "workers: {accelerator: {device: neuron, coresPerNode: 8, claim: {count: 4, selectors: ['true']}}}",
        "workers: {accelerator: {device: neuron, instanceType: trn2.3xlarge}}",
        "workers: {accelerator: {device: neuron, instanceType: trn2.48xlarge, coresPerNode: 128}}",
        """workers: {accelerator: {device: neuron, instanceType: trn2.48xlarge, coresPerNode: 128,
        claim: {logicalNeuronCore: 1}}}""",
        """workers: {accelerator: {device: neuron, instanceType: trn2u.48xlarge, coresPerNode: 64,
        claim: {ultraServerNode: true}}}""",
        "workers: {accelerator: {device: cpu, instanceType: trn1.2xlarge, coresPerNode: 8}}",
        """workers: {accelerator: {device: neuron, instanceType: trn3.48xlarge, coresPerNode: 256,
        resources: {a.b/c: '1'}}}""",
        "workers: {replicas: 5}",
        "workers: {replicas: 40}",
        "trainer: {batch: {globalSize: 12, microSize: 5}}",
        "{workers: {replicas: 5}, trainer: {batch: {globalSize: 12, tolerance: 0.2}}}",
    ],
)
def test_a_good_job_is_taken(defined: Api, change: str) -> None:
    assert defined.refusal_of_new(job(change)) == ""


def test_the_rules_agree_with_the_arithmetic_of_the_trainer(defined: Api) -> None:
    chance = random.Random(7)

    def pick(*numbers: int) -> int:
        return chance.choice(numbers)

    jobs, legal = [], {}
    for number in range(120):
        shape = BatchShape(
            cores_per_node=pick(1, 2, 3, 32),
            tensor=pick(1, 2, 4, 8),
            pipeline=1,
            global_batch_size=pick(12, 96, 256, 1000),
            micro_batch_size=pick(1, 1, 2),
            rule=chance.choice(list(SizeRule)),
        )
        nodes = pick(1, 2, 3, 4, 5, 6, 8, 12, 16, 40)
        legal[f"shape-{number}"] = shape.is_legal(nodes)
        jobs.append(shaped(f"shape-{number}", shape, nodes))
    taken = applied(defined, jobs, "--dry-run=server")
    assert taken == {name for name, good in legal.items() if good}
    assert 20 < len(taken) < 100


def shaped(name: str, shape: BatchShape, nodes: int, smallest: int = 1) -> dict[str, Any]:
    cores = f"{{coresPerNode: {shape.cores_per_node}}}"
    change = (
        f"{{workers: {{replicas: {nodes}, minReplicas: {smallest}, accelerator: {cores}}}, parallelism: "
        f"{{tensor: {shape.tensor}, pipeline: {shape.pipeline}}}, trainer: {{batch: {{globalSize: "
        f"{shape.global_batch_size}, microSize: {shape.micro_batch_size}}}}}, elasticity: {{sizes: {shape.rule}}}}}"
    )
    return job(change, name=name)


def applied(api: Api, jobs: list[dict[str, Any]], *arguments: str) -> set[str]:
    """Names of those that the API server takes."""
    items = json.dumps({"apiVersion": "v1", "kind": "List", "items": jobs})
    done = api.run("kubectl", "-n", api.namespace, "apply", "-o", "name", "-f", "-", *arguments, stdin=items)
    return {line.rsplit("/", 1)[1] for line in done.stdout.split()}


def test_a_range_is_taken_when_some_size_in_it_is_legal(defined: Api) -> None:
    chance = random.Random(11)
    jobs, changed, legal = [], [], {}
    for number in range(80):
        cores, tensor, pipeline = (chance.choice(each) for each in ((1, 2, 6, 32, 128), (1, 2, 8, 32), (1, 3, 4)))
        rule = chance.choice(list(SizeRule))
        start = pipeline * tensor  # whole groups on any node
        micro = chance.choice((1, 2, 3))
        shape = BatchShape(
            cores_per_node=cores,
            tensor=tensor,
            pipeline=pipeline,
            global_batch_size=micro * cores * chance.choice((1, 7, 48, 9967, 10080)),
            micro_batch_size=micro,
            rule=rule,
        )
        nodes = chance.choice((3, 7, 40, 128, 997, 10_000))
        smallest = max(1, nodes - chance.choice((0, 1, 5, 30, 9_999)))
        name = f"range-{number}"
        jobs.append(shaped(name, shape, start))
        changed.append(shaped(name, shape, nodes, smallest))
        searched = rule is SizeRule.ANY or shape.global_batch_size <= micro << 20
        legal[name] = bool(shape.legal_sizes(smallest, nodes)) or nodes == start or not searched
    assert applied(defined, jobs) == {*legal}
    taken = applied(defined, changed, "--dry-run=server")
    defined.kubectl("delete", "trn", "--wait=false", *legal)
    assert taken == {name for name, good in legal.items() if good}
    assert 20 < len(taken) < 75


@pytest.fixture
def running(defined: Api) -> Any:
    """A job that an operator has taken up."""
    assert defined.refusal(job("workers: {minReplicas: 2}")) == ""
    defined.report_status("good", {"phase": "Running"})
    yield defined
    defined.delete_job("good")


IMMUTABLE = {
    "parallelism: {tensor: 2}": "parallelism",
    "parallelism: {sequence: true}": "parallelism",
    "workers: {accelerator: {coresPerNode: 3}}": "workers.accelerator",
    "checkpoint: {storage: {hostPath: {path: /data}}}": "checkpoint.storage",
    "trainer: {steps: 200}": "trainer.steps",
    "trainer: {seed: 1}": "trainer.seed",
    "trainer: {model: {preset: Small}}": "trainer.model",
    "trainer: {data: {source: /other.txt}}": "trainer.data",
    "trainer: {optimizer: {learningRate: 0.1}}": "trainer.optimizer",
    "trainer: {batch: {globalSize: 24}}": "trainer.batch",
    "trainer: {epochs: 2.5}": "trainer.epochs",
    "trainer: {model: {weights: /base}}": "trainer.model",
    "trainer: {model: {weights: /base}, tuning: {method: LoRA}}": "trainer.tuning",
    "trainer: {data: {examples: {where: {category: open_qa}}}}": "trainer.data",
    "trainer: {artifacts: {precision: Float32}}": "trainer.artifacts",
    "trainer: {evaluate: {samples: 8}}": "trainer.evaluate",
}


@pytest.mark.parametrize("change", IMMUTABLE)
def test_what_training_depends_on_is_fixed_while_the_job_runs(running: Api, change: str) -> None:
    minimum = merged({"workers": {"minReplicas": 2}}, yaml.safe_load(change))
    output = running.refusal(job(json.dumps(minimum)))
    assert (
        f"{IMMUTABLE[change]} cannot change while the job runs: suspend it first (spec.suspend: true), wait" in output
    )
    assert "a failed job takes changes (then kubectl trn retry)" in output


@pytest.mark.parametrize(
    "change",
    [
        "trainer: {monitor: {recordSamples: true}}",
        "workers: {template: {spec: {nodeSelector: {pool: b}}}}",
        "workers: {replicas: 6, minReplicas: 1, spares: 2}",
        "checkpoint: {durable: {everySteps: 5}}",
        "recovery: {rescaleAfterSeconds: 1}",
        "trainer: {precision: Float32, steps: 100}",
        "suspend: true",
    ],
)
def test_what_training_does_not_depend_on_may_change_while_the_job_runs(running: Api, change: str) -> None:
    assert running.refusal(job(change)) == ""


def test_deadlines_may_change_at_any_time_and_who_controls_the_job_never(running: Api) -> None:
    assert running.refusal(job("activeDeadlineSeconds: 60")) == ""
    assert running.refusal(job("{activeDeadlineSeconds: 6000, startupDeadlineSeconds: 600}")) == ""
    output = "managedBy cannot change: a job has one controller from its creation on"
    assert output in running.refusal(job("managedBy: acme.io/scheduler"))
    assert running.refusal(job("managedBy: acme.io/scheduler", name="theirs")) == ""
    assert output in running.refusal(job("", name="theirs"))
    assert output in running.refusal(job("managedBy: trainium.dev/trainium-operator", name="theirs"))
    running.delete_job("theirs")


def test_a_suspended_job_may_be_changed_once_no_worker_is_left(running: Api) -> None:
    longer = "{suspend: true, trainer: {steps: 200}}"
    assert running.refusal(job("suspend: true")) == ""
    assert "trainer.steps cannot change while the job runs" in running.refusal(job(longer))
    running.report_status("good", {"phase": "Suspended"})
    assert running.refusal(job(longer)) == ""
    assert running.refusal(job("{suspend: false, trainer: {steps: 300}}")) == ""
    assert "trainer.steps cannot change" in running.refusal(job("{suspend: false, trainer: {steps: 400}}"))


def test_a_failed_job_may_be_changed_and_one_that_has_completed_may_not(running: Api) -> None:
    # As its operator leaves it, and as a person corrects it: one mistake after the other.
    ended = {"type": "Failed", "status": "True", "reason": "UserError", "lastTransitionTime": "2026-01-01T00:00:00Z"}
    running.report_status("good", {"phase": "Failed", "conditions": [ended]})
    for change in IMMUTABLE:
        minimum = merged({"workers": {"minReplicas": 2}}, yaml.safe_load(change))
        refused = running.refusal(job(json.dumps(minimum)))
        assert "cannot change" not in refused, change
    assert running.refusal(job("{trainer: {steps: 300}, checkpoint: {storage: {hostPath: {path: /data}}}}")) == ""
    output = running.refusal(job("{workers: {minReplicas: 2}, trainer: {batch: {microSize: 24}}}"))
    assert "trainer.batch.microSize 24 is above trainer.batch.globalSize 12" in output
    assert "managedBy cannot change" in running.refusal(job("managedBy: acme.io/scheduler"))
    running.report_status("good", {"phase": "Completed", "conditions": [{**ended, "type": "Complete"}]})
    output = running.refusal(job("trainer: {steps: 400}"))
    assert "trainer.steps cannot change while the job runs" in output
    assert "a completed one none" in output


def test_a_size_scaled_to_later_is_left_to_the_operator_within_the_bounds(running: Api) -> None:
    running.kubectl("scale", "trn/good", "--replicas=5")
    assert running.kubectl("get", "trn", "good", "-o", "jsonpath={.spec.workers.replicas}") == "5"
    below = running.run("kubectl", "-n", running.namespace, "scale", "trn/good", "--replicas=1")
    assert "minReplicas 2 is above workers.replicas 1" in below.stderr


@pytest.mark.parametrize("of", ["scale", "apply"])
def test_a_size_of_no_nodes_is_answered_with_how_to_suspend_and_with_nothing_else(running: Api, of: str) -> None:
    if of == "scale":
        output = running.run("kubectl", "-n", running.namespace, "scale", "trn/good", "--replicas=0").stderr
    else:
        output = running.refusal(job("workers: {replicas: 0, minReplicas: 2, maxReplicas: 8}"))
    assert output.count("spec.suspend: true (kubectl trn suspend NAME)") == 1
    assert output.count("spec.workers") == 1, "no second sentence about minReplicas or legal sizes"


def test_what_has_nothing_to_do_with_sizes_can_change_at_a_size_that_the_operator_floors(running: Api) -> None:
    assert running.refusal(job("{elasticity: {sizes: Even}, workers: {maxReplicas: 8}}")) == ""
    running.kubectl("scale", "trn/good", "--replicas=5")
    more = {"spec": {"elasticity": {"idleNodes": "Take"}}}
    running.kubectl("patch", "trn", "good", "--type=merge", "--patch", json.dumps(more))


def test_a_range_without_any_legal_size_is_refused_later_too(running: Api) -> None:
    assert running.refusal(job("{workers: {minReplicas: 2}, elasticity: {sizes: Even}}")) == ""
    output = running.refusal(job("{workers: {replicas: 8, minReplicas: 7}, elasticity: {sizes: Even}}"))
    assert "no size from 7 to 8 is legal" in output
    assert "[6, 4, 3, 2, 1] below, [12] above" in output


def test_the_dearest_check_stays_within_the_budget(defined: Api) -> None:
    change = """{{workers: {{replicas: {}, minReplicas: {}}}, trainer: {{batch: {{globalSize: 69769, microSize: 7}}}},
    elasticity: {{sizes: Even}}}}"""
    assert defined.refusal(job(change.format(1, 1), name="dear")) == ""
    assert "no size from 2 to 9966 is legal" in defined.refusal(job(change.format(9966, 2), name="dear"))
    defined.delete_job("dear")


def test_the_columns_show_how_training_goes(running: Api) -> None:
    running.report_status(
        "good",
        {
            "phase": "Running",
            "stage": "Train",
            "readyReplicas": 4,
            "progress": {"step": 70, "loss": 4.25},
            "checkpoint": {"durableStep": 60},
            "restarts": {"total": 2},
            "goodput": {"ratio": 0.97},
        },
    )
    head, row = running.kubectl("get", "trn", "-o", "wide").splitlines()
    assert head.split()[:9] == ["NAME", "PHASE", "STAGE", "READY", "DESIRED", "STEP", "LOSS", "CKPT", "RESTARTS"]
    assert row.split()[:9] == ["good", "Running", "Train", "4", "4", "70", "4.25", "60", "2"]
    assert row.split()[-1] == "0.97", "nothing is left behind yet"
    artifacts = [{"kind": kind, "path": f"/out/{kind}", "step": 70} for kind in ("Adapter", "Model")]
    running.report_status("good", {"artifacts": artifacts})
    assert running.kubectl("get", "trn", "-o", "wide").splitlines()[1].split()[-1] == "/out/Model", "the newest"
    assert "good" in running.kubectl("get", "training")


def test_a_status_word_that_the_definition_does_not_know_is_taken(running: Api) -> None:
    running.report_status("good", {"phase": "Levitating"})


def test_every_field_can_be_explained(defined: Api) -> None:
    output = defined.kubectl("explain", "trn.spec.workers.minReplicas")
    assert "Elastic floor" in output


@pytest.mark.parametrize("kind", ["Complete", "Failed"])
def test_the_end_of_a_job_cannot_be_taken_back_in_its_status(running: Api, kind: str) -> None:
    ended = {
        "type": kind,
        "status": "True",
        "reason": "It",
        "message": "",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }
    running.report_status("good", {"phase": "Ended", "conditions": [ended]})
    for taken_back in ([], [{**ended, "status": "False"}], None):
        patch = json.dumps({"status": {"conditions": taken_back}})
        done = running.run(
            "kubectl", "--namespace", running.namespace, "patch", "trn", "good", "--subresource=status",
            "--type=merge", "--patch", patch,
        )  # fmt: skip
        assert done.returncode != 0
        assert "a job that has ended stays ended" in done.stderr
    running.report_status("good", {"phase": "Completed", "conditions": [{**ended, "message": "more"}]})

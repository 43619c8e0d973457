"""Define the comparisons of pretraining: settings, each with a reference run, and layouts.

To compare another layout, add a row; no other code lists the rows. Those of fine-tuning are in `tuning_rows`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from pathlib import Path

TOLERANCE = 1e-4
"""Allowed relative difference of the losses of a step, in float32."""
LOGITS_TOLERANCE = 1e-3
"""Allowed difference of logits, in units of their standard deviation."""

BASE: dict[str, Any] = {
    "steps": 200,
    "batch": {"globalSize": 8, "microSize": 8},
    "data": {"source": "python-docs", "sequenceLength": 64, "tokenizer": {"vocabSize": 1024}},
    "model": {
        "numLayers": 4,
        "hiddenSize": 64,
        "intermediateSize": 176,
        "numAttentionHeads": 4,
        "numKeyValueHeads": 2,
        "tieEmbeddings": False,
    },
    "optimizer": {"learningRate": 3e-4},
    "schedule": {"warmupSteps": 20},
    "checkpoint": {"memory": {"everySteps": 0}, "durable": {"everySeconds": None}},
    "monitor": {"tensorboard": False},
}


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a training run."""

    name: str
    description: str
    overrides: dict[str, Any] = field(default_factory=dict)
    base: Settings | None = None
    """Settings whose model is the base of a fine-tuning run."""
    records: str = ""
    """Function of `inputs` that creates the examples of a fine-tuning run; empty for text."""
    family: dict[str, Any] = field(default_factory=dict)
    """Fields of `transformers`' configuration of a base with random weights, instead of a briefly trained one."""
    max_steps: int | None = None
    """Steps of a run, if fewer than those of the other settings are enough."""

    @property
    def slug(self) -> str:
        """Name of the settings in files and on the command line."""
        return self.name.lower().replace(" ", "-").replace(",", "")


def write_config(settings: Settings, out: Path, steps: int, base: Path | None = None, data: Path | None = None) -> Path:
    """Write the YAML file of these settings, for runs that start from the model in `base` and read `data`."""
    content: dict[str, Any] = json.loads(json.dumps(BASE))
    content["steps"] = steps
    content["data"]["cacheDirectory"] = str(out / "cache")
    for path, value in settings.overrides.items():
        node = content
        *parents, last = path.split(".")
        for name in parents:
            node = node.setdefault(name, {})
        node[last] = value
    if base is not None:
        content["model"] = {"weights": str(base)}
        del content["data"]["tokenizer"]  # the base has one
        content["artifacts"] = {"precision": "Float32"}
    if data is not None:
        content["data"]["source"] = str(data)
    file = out / f"{settings.slug}.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(yaml.safe_dump(content))
    return file


HLAT = Settings("HLAT", "cosine to a tenth, decay on all parameters, plain rotary embedding, untied")
LLAMA31 = Settings(
    "Llama 3.1",
    "warm-up, stable, decay; decay on matrices only; scaled rotary embedding; tied; a separate head width",
    {
        "schedule.kind": "WarmupStableDecay",
        "schedule.decaySteps": 60,
        "optimizer.decayScope": "Matrices",
        "model.tieEmbeddings": True,
        "model.headDim": 32,
        "model.ropeTheta": 500.0,
        "model.ropeScaling.originalMaxPositions": 64,
    },
)
SETTINGS = (HLAT, LLAMA31)


@dataclass(frozen=True, slots=True)
class Row:
    """A run of the trainer."""

    settings: Settings
    data_parallel: int = 1
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    context_parallel: int = 1
    accumulation: int = 1
    """Micro-batches of a step; some have empty rows if data_parallel x accumulation does not divide the batch."""
    overrides: tuple[str, ...] = ()
    """Additional `--set` options."""

    @property
    def ranks(self) -> int:
        """Number of processes."""
        return self.data_parallel * self.tensor_parallel * self.pipeline_parallel * self.context_parallel

    @property
    def name(self) -> str:
        """Name of the row in files and on the command line."""
        parts = [f"dp{self.data_parallel}", f"tp{self.tensor_parallel}", f"pp{self.pipeline_parallel}"]
        parts += [f"cp{self.context_parallel}"] if self.context_parallel > 1 else []
        parts += [f"accumulation{self.accumulation}"] if self.accumulation > 1 else []
        parts += [override.rpartition(".")[2].replace("=", "-").lower() for override in self.overrides]
        return "-".join([self.settings.slug, *parts])

    @property
    def set_options(self) -> list[str]:
        """Return the `--set` options of the row."""
        micro_size = -(-BASE["batch"]["globalSize"] // (self.data_parallel * self.accumulation))
        degrees = [f"parallelism.tensor={self.tensor_parallel}", f"parallelism.pipeline={self.pipeline_parallel}"]
        degrees += [f"parallelism.context={self.context_parallel}"] if self.context_parallel > 1 else []
        return [f"batch.microSize={micro_size}", *degrees, *self.overrides]


FULLY_SHARDED = "dataParallel=FullySharded"
SHARDED_OPTIMIZER = "dataParallel=ShardedOptimizer"
SEQUENCE_PARALLEL = "parallelism.sequence=true"
SELECTIVE_RECOMPUTE = "recompute=Selective"
FULL_RECOMPUTE = "recompute=Full"

ROWS = (
    Row(HLAT),
    Row(HLAT, accumulation=4),
    Row(HLAT, data_parallel=2),
    Row(HLAT, data_parallel=2, accumulation=4),
    Row(HLAT, data_parallel=4),
    Row(HLAT, data_parallel=2, overrides=(FULLY_SHARDED,)),
    Row(HLAT, data_parallel=2, accumulation=4, overrides=(FULLY_SHARDED,)),
    Row(HLAT, data_parallel=4, overrides=(FULLY_SHARDED,)),
    Row(HLAT, data_parallel=2, accumulation=4, overrides=(SHARDED_OPTIMIZER,)),
    Row(HLAT, data_parallel=3),
    Row(HLAT, data_parallel=3, accumulation=3),
    Row(HLAT, data_parallel=3, accumulation=3, overrides=(FULLY_SHARDED,)),
    Row(HLAT, data_parallel=3, accumulation=3, overrides=(SHARDED_OPTIMIZER,)),
    Row(HLAT, tensor_parallel=2),
    Row(HLAT, tensor_parallel=2, accumulation=4),
    Row(HLAT, tensor_parallel=2, overrides=(SEQUENCE_PARALLEL,)),
    Row(HLAT, data_parallel=2, tensor_parallel=2),
    Row(HLAT, data_parallel=2, tensor_parallel=2, overrides=(FULLY_SHARDED, SEQUENCE_PARALLEL)),
    Row(HLAT, overrides=(SELECTIVE_RECOMPUTE,)),
    Row(HLAT, accumulation=4, overrides=(FULL_RECOMPUTE,)),
    Row(HLAT, data_parallel=2, tensor_parallel=2, overrides=(FULLY_SHARDED, SEQUENCE_PARALLEL, SELECTIVE_RECOMPUTE)),
    Row(HLAT, data_parallel=2, tensor_parallel=2, overrides=(FULLY_SHARDED, SEQUENCE_PARALLEL, FULL_RECOMPUTE)),
    Row(HLAT, pipeline_parallel=2),
    Row(HLAT, pipeline_parallel=2, accumulation=4),
    Row(HLAT, data_parallel=2, pipeline_parallel=2, accumulation=4, overrides=(FULLY_SHARDED,)),
    Row(HLAT, tensor_parallel=2, pipeline_parallel=2, accumulation=4, overrides=(SEQUENCE_PARALLEL,)),
    Row(HLAT, data_parallel=3, tensor_parallel=2, accumulation=3, overrides=(SEQUENCE_PARALLEL,)),
    Row(HLAT, data_parallel=3, pipeline_parallel=2, accumulation=3),
    Row(HLAT, context_parallel=2),
    Row(HLAT, context_parallel=4),
    Row(HLAT, context_parallel=2, accumulation=4, overrides=(FULL_RECOMPUTE,)),
    Row(HLAT, data_parallel=2, context_parallel=2, overrides=(FULLY_SHARDED,)),
    Row(HLAT, tensor_parallel=2, context_parallel=2, overrides=(SEQUENCE_PARALLEL,)),
    Row(LLAMA31),
    Row(LLAMA31, context_parallel=4),
    Row(LLAMA31, data_parallel=2, tensor_parallel=2, accumulation=2, overrides=(FULLY_SHARDED, SEQUENCE_PARALLEL)),
    Row(LLAMA31, tensor_parallel=2, pipeline_parallel=2, accumulation=4),
)

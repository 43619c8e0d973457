# ruff: noqa: PLC0415 - only fine-tuning needs a base
"""Create the inputs of all runs (a text, or a base model and examples), and the configuration of an attempt."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.proof.suites import Layout, Scenario, Suite

_WORDS = ("gradient", "loss", "step", "batch", "token", "shard", "rank", "node", "mesh", "state", "tensor", "warm")
_VOCABULARY_SIZE = 320
_EXAMPLE_COUNT = 40
_EPOCHS = 5
_MILESTONE_TOKENS = 200
"""Tokens of answers between milestones, enough for a few steps."""
_MODEL = {"numLayers": 2, "hiddenSize": 32, "intermediateSize": 64}


class Inputs:
    """The files that all runs of a suite read."""

    def __init__(self, folder: Path, suite: Suite) -> None:
        """Create the files below `folder`."""
        self._suite = suite
        self._text = folder / "text.txt"
        self._cache = folder / "cache"
        self._base = folder / "base"
        self._examples = folder / "sums.jsonl"
        rng = random.Random(0)
        self._text.write_text("".join(" ".join(rng.choices(_WORDS, k=12)) + ".\n" for _ in range(60)))
        if suite.tuning or suite.preferences:
            records = [
                {"instruction": f"Add {n} and {n + 3}.", "response": str(2 * n + 3)}
                | {"prompt": f"{n} + 3 =", "chosen": f" {n + 3}", "rejected": f" {n - 3}"}
                for n in range(_EXAMPLE_COUNT)
            ]
            self._examples.write_text("".join(json.dumps(record) + "\n" for record in records))
            self._create_base()

    def create_config(self, scenario: Scenario, layout: Layout, root: Path) -> dict[str, Any]:
        """Return the configuration of an attempt whose checkpoints are below `root`."""
        suite = self._suite
        common: dict[str, Any] = {
            "dataParallel": layout.mode.value,
            "parallelism": {"tensor": layout.tp},
            "batch": {"globalSize": suite.global_batch, "microSize": 1},
            "optimizer": {"learningRate": 3e-3},
            "schedule": {"warmupSteps": 2},
            "checkpoint": {
                "path": str(root),
                "memory": {"everySteps": 1 if scenario.memory else 0},
                "durable": {"everySeconds": None, "everySteps": suite.save_every, "keepLast": 2},
            },
            "monitor": {"tensorboard": False, "recordSamples": True},
        }
        if scenario.milestones:
            common["checkpoint"]["milestones"] = {"everyTokens": _MILESTONE_TOKENS}
        if suite.preferences:
            return common | self._create_preferences()
        return common | (self._create_tuning(scenario) if suite.tuning else self._create_pretraining())

    def _create_pretraining(self) -> dict[str, Any]:
        data = {
            "source": str(self._text),
            "sequenceLength": 32,
            "cacheDirectory": str(self._cache),
            "tokenizer": {"vocabSize": _VOCABULARY_SIZE},
        }
        return {"steps": self._suite.steps, "data": data, "model": _MODEL}

    def _create_preferences(self) -> dict[str, Any]:
        data = {
            "source": str(self._examples),
            "format": "Preference",
            "sequenceLength": 32,
            "cacheDirectory": str(self._cache),
        }
        return {
            "steps": self._suite.steps,
            "data": data,
            "model": {"weights": str(self._base)},
            "tuning": {"objective": {"kind": "DPO"}},
            "artifacts": {"kinds": []},
        }

    def _create_tuning(self, scenario: Scenario) -> dict[str, Any]:
        """Return a configuration whose epochs end with an incomplete batch, with validation."""
        data = {
            "source": str(self._examples),
            "format": "Instruction",
            "examples": {"template": {"prompt": "{instruction} =", "completion": " {response}"}},
            "sequenceLength": 48,
            "cacheDirectory": str(self._cache),
            "validation": {"fraction": 0.25, "everySteps": 1000},
        }
        lora = {"rank": 4, "alpha": 8, "dropout": 0.1, "targets": ["*_proj"]}
        return {
            "epochs": _EPOCHS,
            "data": data,
            "model": {"weights": str(self._base)},
            "tuning": {"method": "LoRA", "lora": lora},
            "artifacts": {"precision": "Float32", "atMilestones": scenario.milestones},
            "evaluate": {"enabled": True, "samples": 6, "generation": {"maxNewTokens": 3, "batchSize": 2}},
        }

    def _create_base(self) -> None:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        from trainium_trainer.data.sources.resolve import SourceSpec
        from trainium_trainer.data.tokens.encoding import train_for_texts

        torch.manual_seed(0)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=_VOCABULARY_SIZE,
                hidden_size=_MODEL["hiddenSize"],
                intermediate_size=_MODEL["intermediateSize"],
                num_hidden_layers=_MODEL["numLayers"],
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=128,
                initializer_range=0.2,  # larger than usual, so that different weights give different answers
            )
        )
        model.save_pretrained(self._base)
        self._cache.mkdir()
        tokenizer = train_for_texts([SourceSpec(str(self._text), "text")], _VOCABULARY_SIZE, self._cache)
        (self._base / "tokenizer.json").write_bytes(tokenizer.read_bytes())

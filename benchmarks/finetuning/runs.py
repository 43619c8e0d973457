"""One run of fine-tuning by either trainer on one base model, and what its checkpoints weigh."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from benchmarks.training_speed.runs import Result, peer_result, result_of, run_ranks
from trainium_trainer.checkpoint.format.contents import Contents
from trainium_trainer.checkpoint.root.selection import choose
from trainium_trainer.checkpoint.storage.opening import open_storage
from trainium_trainer.checkpoint.storage.protocol import Retry

if TYPE_CHECKING:
    from collections.abc import Sequence

_PEER = Path(__file__).parents[1] / "training_speed/peer.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What both trainers do, on one process."""

    base: Path
    """A Hugging Face folder."""
    vocabulary: int
    length: int
    samples: int
    """Of a step."""
    steps: int
    rank: int
    alpha: float
    targets: tuple[str, ...]
    """Names of projections; empty: all weights are trained."""

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.samples * self.length


def make_base(folder: Path, model: dict[str, int], length: int) -> Path:
    """A Hugging Face folder with random weights; `model` has the fields of LlamaConfig."""
    import torch  # noqa: PLC0415 - the runs are processes of their own
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    torch.manual_seed(0)
    options: dict[str, Any] = {**model, "max_position_embeddings": length, "tie_word_embeddings": False}
    config = LlamaConfig(**options)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def run_ours(task: Task, folder: Path, text: Path, overrides: Sequence[str] = ()) -> Result:
    """One run of this repository's trainer. Raises RunFailedError."""
    lora = {"rank": task.rank, "alpha": task.alpha, "targets": list(task.targets)}
    config: dict[str, Any] = {
        "steps": task.steps,
        "batch": {"globalSize": task.samples, "microSize": task.samples},
        "data": {
            "source": str(text),
            "sequenceLength": task.length,
            "cacheDirectory": str(text.parent / "cache"),
            "tokenizer": {"vocabSize": task.vocabulary},
        },
        "model": {"weights": str(task.base)},
        "tuning": {"method": "LoRA", "lora": lora} if task.targets else {"method": "Full"},
        "schedule": {"warmupSteps": 0},
        "checkpoint": {"path": str(folder / "run"), "durable": {"everySeconds": None}},
        "artifacts": {"kinds": []},
        "monitor": {"tensorboard": False},
        "device": "Cpu",
    }
    file = folder / "trainer.yaml"
    file.write_text(yaml.safe_dump(config))
    argv = [sys.executable, "-m", "trainium_trainer", "train", "--config", str(file)]
    for override in overrides:
        argv += ["--set", override]
    return result_of(folder, run_ranks(argv, 1, folder, {}))


def run_peer(task: Task, folder: Path, python: str) -> Result:
    """One run of peft and `transformers.Trainer`. Raises RunFailedError."""
    described = {
        "folder": str(folder / "run"),
        "device": "cpu",
        "length": task.length,
        "micro": task.samples,
        "accumulation": 1,
        "steps": task.steps,
        "half": False,
        "sharded": False,
        "recompute": False,
        "compiled": False,
        "model": {"vocab_size": task.vocabulary},
        "weights": str(task.base),
        "lora": {"r": task.rank, "lora_alpha": task.alpha, "target_modules": list(task.targets)},
    }
    if not task.targets:
        del described["lora"]
    ended = run_ranks([python, str(_PEER)], 1, folder, {"TASK": json.dumps(described)})
    return peer_result(folder, ended)


def checkpoint_bytes(folder: Path) -> tuple[int, int]:
    """Bytes of the files of the newest durable checkpoint below a run's folder, and of the numbers in it."""
    root = str(folder / "run")
    storage = open_storage(root)
    chosen = choose(storage, root, None, milestones=False)
    tensors = Contents(storage, chosen, Retry()).tensors.values()
    files = sum(path.stat().st_size for path in (Path(root) / chosen.folder).rglob("*") if path.is_file())
    return files, sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in tensors)

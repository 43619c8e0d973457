"""Run a task with either trainer; measure the seconds of steps and the peak memory."""

from __future__ import annotations

import itertools
import json
import random
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from benchmarks.harness import ranks

if TYPE_CHECKING:
    from collections.abc import Sequence

_TEXT_WORDS = 40_000
WARM_STEPS = 3
"""Number of first steps that are not counted, because they allocate and compile."""
_LORA = {"rank": 16, "alpha": 32.0}
_PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The task of both trainers."""

    ranks: int
    device: str
    model: dict[str, int]
    """Fields of `trainer.model`."""
    sequence_length: int
    micro_batch_size: int
    accumulation: int
    steps: int
    half: bool
    sharded: bool
    recompute: bool
    compiled: bool
    base: Path | None = None
    """Hugging Face folder that is tuned; None: training starts from random weights."""
    lora: bool = False
    """Whether adapters on all projections of `base` are trained, not its weights."""

    @property
    def tokens(self) -> int:
        """Number of tokens of a step."""
        return self.ranks * self.micro_batch_size * self.accumulation * self.sequence_length


@dataclass(frozen=True, slots=True)
class Result:
    """Measurements of a run."""

    seconds: tuple[float, ...]
    """Seconds of the counted steps."""
    host_bytes: int
    """Largest resident set of a rank."""
    device_bytes: int
    """Peak device memory of rank 0; 0 on a CPU."""

    def compute_speed(self, tokens: int) -> float:
        """Return the tokens per second of the median step."""
        return tokens / statistics.median(self.seconds)


def write_text(folder: Path) -> Path:
    """Write a file of random words."""
    rng = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(rng.choices(letters, k=rng.randint(2, 9))) for _ in range(3000)]
    path = folder / "text.txt"
    path.write_text("\n".join(" ".join(rng.choices(words, k=12)) for _ in range(_TEXT_WORDS // 12)) + "\n")
    return path


def write_config(task: Task, folder: Path, text: Path) -> Path:
    """Write the configuration of a run of this repository's trainer into `folder`."""
    config: dict[str, Any] = {
        "steps": task.steps,
        "batch": {
            "globalSize": task.ranks * task.micro_batch_size * task.accumulation,
            "microSize": task.micro_batch_size,
        },
        "data": {
            "source": str(text),
            "sequenceLength": task.sequence_length,
            "cacheDirectory": str(text.parent / "cache"),
            "tokenizer": {} if task.base else {"vocabSize": task.model["vocabSize"]},
        },
        "model": {"weights": str(task.base)} if task.base else {"path": str(_write_shape(task, folder))},
        "schedule": {"warmupSteps": 0},
        "checkpoint": {"durable": {"everySeconds": None}},
        "monitor": {"tensorboard": False},
        "precision": "BFloat16" if task.half else "Float32",
        "dataParallel": "FullySharded" if task.sharded else "Replicated",
        "recompute": "Full" if task.recompute else "None",
        "torchCompile": "Layers" if task.compiled else "None",
        "device": "Cpu" if task.device == "cpu" else "Auto",
    }
    if task.base:
        config |= {"tuning": {}, "artifacts": {"kinds": []}}
    if task.lora:
        config["tuning"] |= {"method": "LoRA", "lora": _LORA | {"targets": _PROJECTIONS}}
    file = folder / "trainer.yaml"
    file.write_text(yaml.safe_dump(config))
    return file


def _write_shape(task: Task, folder: Path) -> Path:
    """Write the `config.json` of the task's model."""
    from transformers import AutoConfig  # noqa: PLC0415 - the runs are separate processes

    config = AutoConfig.for_model(**create_model_options(task))
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    return folder / "config.json"


def run_trainer(task: Task, folder: Path, text: Path, overrides: Sequence[str] = ()) -> Result:
    """Run this repository's trainer. Raises RunFailedError."""
    records, host_bytes = ranks.run_trainer(
        write_config(task, folder, text), overrides, ranks=task.ranks, folder=folder
    )
    seconds = tuple(record["seconds"] for record in records[WARM_STEPS:])
    return Result(seconds, host_bytes, int(records[-1].get("deviceBytes") or 0))


def create_model_options(task: Task) -> dict[str, Any]:
    """Return the fields of `transformers`' configuration."""
    model = task.model
    return {
        "model_type": "llama",
        "vocab_size": model["vocabSize"],
        "hidden_size": model["hiddenSize"],
        "intermediate_size": model["intermediateSize"],
        "num_hidden_layers": model["numLayers"],
        "num_attention_heads": model["numAttentionHeads"],
        "num_key_value_heads": model["numKeyValueHeads"],
        "max_position_embeddings": task.sequence_length,
        "tie_word_embeddings": False,
        # The defaults may exceed the vocabulary.
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
    }


def create_base(task: Task, folder: Path, text: Path) -> Path:
    """Write a Hugging Face folder with random weights of the task's shape and a tokenizer of the text."""
    import torch  # noqa: PLC0415 - the runs are separate processes
    from tokenizers import ByteLevelBPETokenizer  # noqa: PLC0415
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415

    torch.manual_seed(0)
    config = AutoConfig.for_model(**create_model_options(task))
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)  # type: ignore[no-untyped-call]
    tokenizer = ByteLevelBPETokenizer()
    vocabulary = {"vocab_size": task.model["vocabSize"], "special_tokens": ["<|endoftext|>"]}
    tokenizer.train([str(text)], **vocabulary)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def run_peer(task: Task, folder: Path, python: str) -> Result:
    """Run `transformers.Trainer`. Raises RunFailedError."""
    peer_task = asdict(task) | {"folder": str(folder / "run"), "model": create_model_options(task), "base": None}
    if task.lora:
        lora = {"r": _LORA["rank"], "lora_alpha": _LORA["alpha"], "target_modules": _PROJECTIONS}
        peer_task |= {"weights": str(task.base), "lora": lora}
    argv = [python, str(Path(__file__).with_name("peer.py"))]
    return read_peer_result(folder, ranks.run_ranks(argv, task.ranks, folder, {"TASK": json.dumps(peer_task)}))


def read_peer_result(folder: Path, host_bytes: int) -> Result:
    """Read the measurements of a run of the peer in `folder`."""
    record = json.loads((folder / "rank-0.log").read_text().splitlines()[-1])
    ends: list[float] = record["ends"]
    seconds = [end - start for start, end in itertools.pairwise(ends)]
    # The first interval is that of the second step.
    return Result(tuple(seconds[WARM_STEPS - 1 :]), host_bytes, int(record["deviceBytes"]))

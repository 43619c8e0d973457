"""Run a rank of `transformers.Trainer` (with accelerate) on a model of given shape, as the peer of the benchmark.

Run by `benchmarks.training_speed` in an environment that has transformers and accelerate; it imports nothing from
here. The task is a JSON object in the environment variable TASK; rank 0 prints when each step ended as one JSON line.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import torch
import transformers
from torch.utils.data import Dataset


class Samples(Dataset[dict[str, torch.Tensor]]):
    """A data set of random token ids; labels are the ids, which the model shifts."""

    def __init__(self, count: int, length: int, vocabulary: int) -> None:
        self._ids = torch.randint(0, vocabulary, (count, length), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._ids[index], "labels": self._ids[index]}


class StepTimer(transformers.TrainerCallback):
    """Times of the optimizer steps, seconds since the epoch."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Record the time of an optimizer step."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.ends.append(time.time())


def _create_model(task: dict[str, Any]) -> torch.nn.Module:
    """Create the model with random weights or from a folder, with an adapter if one is trained."""
    if "weights" not in task:
        config = transformers.AutoConfig.for_model(**task["model"], use_cache=False)
        model: torch.nn.Module = transformers.AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, attn_implementation="sdpa"
        )
        return model
    base = transformers.LlamaForCausalLM.from_pretrained(
        task["weights"], dtype=torch.float32, attn_implementation="sdpa", use_cache=False
    )
    if "lora" not in task:
        return base
    import peft  # noqa: PLC0415 - only fine-tuning needs it

    return peft.get_peft_model(base, peft.LoraConfig(**task["lora"], task_type="CAUSAL_LM"))


def main() -> None:
    """Train, and print the seconds of the steps."""
    task: dict[str, Any] = json.loads(os.environ["TASK"])
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.set_seed(0)
    model = _create_model(task)
    sharding: dict[str, Any] = {}
    if task["sharded"]:
        sharding = {
            "fsdp": "full_shard auto_wrap",
            "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
        }
    arguments = transformers.TrainingArguments(
        output_dir=task["folder"],
        max_steps=task["steps"],
        per_device_train_batch_size=task["micro_batch_size"],
        gradient_accumulation_steps=task["accumulation"],
        learning_rate=3e-4,
        weight_decay=0.1,
        adam_beta2=0.95,
        max_grad_norm=1.0,
        optim="adamw_torch_fused",
        lr_scheduler_type="cosine",
        bf16=task["half"],
        gradient_checkpointing=task["recompute"],
        torch_compile=task["compiled"],
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=task["device"] == "cpu",
        ddp_backend="gloo" if task["device"] == "cpu" and int(os.environ["WORLD_SIZE"]) > 1 else None,
        ddp_find_unused_parameters=False,
        **sharding,
    )
    clock = StepTimer()
    count = task["steps"] * task["micro_batch_size"] * task["accumulation"] * int(os.environ["WORLD_SIZE"])
    trainer = transformers.Trainer(
        model=model,
        args=arguments,
        train_dataset=Samples(count, task["sequence_length"], task["model"]["vocab_size"]),
        callbacks=[clock],
    )
    trainer.train()
    memory = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    if os.environ["RANK"] == "0":
        print(json.dumps({"ends": clock.ends, "deviceBytes": memory}), flush=True)
    sys.stdout.flush()
    os._exit(0)  # as in the trainer, work after the last step is not measured


if __name__ == "__main__":
    main()

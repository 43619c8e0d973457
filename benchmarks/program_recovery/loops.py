"""Run programs in a worker that do not use TRL, and record the samples of each step in the folder LEDGER.

    python loops.py plain|torchtitan ARGUMENTS...

The loops of docs/program-library.md import their model, their loss and their data set from here.
"""

from __future__ import annotations

import os
import runpy
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, no_type_check

import torch
from torch.utils.data import TensorDataset

import trainium_worker
from trainium_devcluster.demos.recorded_program import Recorder

SAMPLES, BATCH = 1120, 16
_ROW_SECONDS = 0.0125
RANKS = int(os.environ.get("WORLD_SIZE", "1"))
recorder = Recorder(Path(os.environ.get("LEDGER", ".")))
dataset = TensorDataset(torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(1)), torch.arange(SAMPLES))


def record_steps() -> None:
    """Record each step that the program reports."""
    report = trainium_worker.step

    def report_and_record(number: Any, **figures: Any) -> None:
        report(number, **figures)
        recorder.end_step(number)
        if number == figures.get("total_steps"):
            recorder.end_training()

    trainium_worker.step = report_and_record


def build_model() -> torch.nn.Module:
    """Return a small model, the same on each rank."""
    record_steps()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 32), torch.nn.Tanh(), torch.nn.Linear(32, 3))


def compute_mean_loss(model: torch.nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    """Return the mean loss of a micro-batch, and record its samples."""
    rows, numbers = batch
    time.sleep(_ROW_SECONDS * len(numbers))
    loss: torch.Tensor = model(rows).pow(2).mean()
    recorder.add_samples(numbers.tolist())
    recorder.add_loss(loss.item() * len(numbers) * RANKS / BATCH)
    return loss


def reward_variety(completions: list[str], **_: Any) -> list[float]:
    """Return how many distinct words each answer has: a rule as the reward of GRPO."""
    return [float(len(set(completion.split()))) for completion in completions]


def train_plain(arguments: list[str]) -> None:
    """Train by `transformers.Trainer`, without TRL; `recorded_program.py` adds the elastic line."""
    from datasets import load_dataset  # noqa: PLC0415 - each program imports what it needs
    from transformers import (  # noqa: PLC0415 - as above
        AutoModelForCausalLM,
        AutoTokenizer,
        DataCollatorForLanguageModeling,
        HfArgumentParser,
        Trainer,
        TrainingArguments,
    )

    kind: Any = TrainingArguments
    (settings,) = HfArgumentParser(kind).parse_args_into_dataclasses(arguments)
    tokenizer = AutoTokenizer.from_pretrained("/checkpoints/model")
    rows = load_dataset("/checkpoints/short/data", split="train")
    rows = rows.map(lambda row: tokenizer(row["text"]), remove_columns="text")
    model = AutoModelForCausalLM.from_pretrained("/checkpoints/model")
    collate = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    Trainer(model, settings, train_dataset=rows, processing_class=tokenizer, data_collator=collate).train()


@no_type_check
def train_torchtitan(arguments: list[str]) -> None:
    """Train by torchtitan's own program on processors: stand-ins replace what asks for a GPU, and the compiler."""
    import torch.distributed as dist  # noqa: PLC0415 - each program imports what it needs
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives  # noqa: PLC0415 - as above
    from torch.nn.attention import flex_attention  # noqa: PLC0415 - as above

    torch.set_num_threads(1)
    processor, collectives, nothing = torch.cpu, _fsdp_collectives, lambda *_: None
    divide = collectives._get_gradient_divide_factors
    # Gloo has no premultiplied sum, and neither has this device.
    collectives._get_gradient_divide_factors = lambda *given: divide(*given[:3], "mtia", *given[4:])
    torch._utils._get_available_device_type = lambda: "cpu"
    processor.get_device_name, processor.current_device = lambda *_: "cpu", lambda: 0
    processor.get_device_properties = lambda *_: SimpleNamespace(total_memory=1 << 30)
    processor.memory_stats, processor.reset_peak_memory_stats = lambda *_: {}, nothing
    processor.empty_cache = flex_attention._validate_device = nothing
    dist.set_timeout = nothing  # newer than torch 2.13
    torch.compile = lambda model=None, *_, **__: model if model is not None else lambda function: function

    from torchtitan.trainer import Trainer  # noqa: PLC0415 - it asks for the device when it is imported

    from trainium_worker.hooks.torchtitan import report_to_agent  # noqa: PLC0415 - as above

    record_steps()
    train, compute = Trainer.train, Trainer.forward_backward_step
    first = 2 + 500  # after the padding, the end and other entries of the vocabulary

    def train_and_record(self: Any) -> None:
        report_to_agent(self, memory=True)
        train(self)
        recorder.end_training()

    def compute_and_record(self: Any, *, input_dict: Any, labels: Any, global_valid_tokens: Any) -> Any:
        tokens = input_dict["input"]
        recorder.add_samples([int(token) - first for token in tokens[tokens >= first]])
        loss = compute(self, input_dict=input_dict, labels=labels, global_valid_tokens=global_valid_tokens)
        recorder.add_loss(loss.item() * RANKS)  # its sum over the ranks is the loss
        return loss

    Trainer.train, Trainer.forward_backward_step = train_and_record, compute_and_record
    sys.argv[1:] = arguments
    runpy.run_module("torchtitan.train", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    kind, *options = sys.argv[1:]
    {"plain": train_plain, "torchtitan": train_torchtitan}[kind](options)

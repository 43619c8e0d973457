"""Group relative policy optimization (GRPO) by TRL with a rule as its reward; `elastic` is the line that is added."""

# ruff: noqa: INP001 - a user's program, in no package
from __future__ import annotations

import re
from typing import Any

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer, ModelConfig, ScriptArguments, TrlParser, get_peft_config

from trainium_worker.hooks.transformers import elastic


def reward_right_numbers(completions: list[str], answer: list[str], **columns: Any) -> list[float]:  # noqa: ARG001
    """Return 1 for each completion whose last number is that of the reference, else 0."""
    numbers = [
        (find_last_number(text), find_last_number(reference))
        for text, reference in zip(completions, answer, strict=True)
    ]
    return [float(number is not None and number == reference) for number, reference in numbers]


def find_last_number(text: str) -> str | None:
    """Return the last number of a text."""
    numbers = re.findall(r"-?\d+(?:\.\d+)?", text.replace(",", ""))
    return numbers[-1] if numbers else None


if __name__ == "__main__":
    script, arguments, model = TrlParser((ScriptArguments, GRPOConfig, ModelConfig)).parse_args_and_config()
    dataset = load_dataset(script.dataset_name, name=script.dataset_config)[script.dataset_train_split]
    trainer = GRPOTrainer(
        model.model_name_or_path,
        reward_funcs=reward_right_numbers,
        args=arguments,
        train_dataset=dataset.rename_column("question", "prompt"),
        peft_config=get_peft_config(model),
    )
    elastic(trainer).train()
    trainer.save_model()

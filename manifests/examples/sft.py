"""Supervised fine-tuning (SFT) by TRL, as its own sft.py does; `elastic` is the line that is added."""

# ruff: noqa: INP001 - a user's program, in no package
from __future__ import annotations

from datasets import load_dataset
from trl import ModelConfig, ScriptArguments, SFTConfig, SFTTrainer, TrlParser, get_peft_config

from trainium_worker.hooks.transformers import elastic

if __name__ == "__main__":
    script, arguments, model = TrlParser((ScriptArguments, SFTConfig, ModelConfig)).parse_args_and_config()
    trainer = SFTTrainer(
        model.model_name_or_path,
        arguments,
        train_dataset=load_dataset(script.dataset_name, name=script.dataset_config)[script.dataset_train_split],
        peft_config=get_peft_config(model),
    )
    elastic(trainer).train()
    trainer.save_model()

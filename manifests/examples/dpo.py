"""Direct preference optimization (DPO) by TRL, as its own dpo.py does; `elastic` is the line that is added."""

# ruff: noqa: INP001 - a user's program, in no package
from __future__ import annotations

from datasets import load_dataset
from trl import DPOConfig, DPOTrainer, ModelConfig, ScriptArguments, TrlParser, get_peft_config

from trainium_worker.hooks.transformers import elastic

if __name__ == "__main__":
    script, arguments, model = TrlParser((ScriptArguments, DPOConfig, ModelConfig)).parse_args_and_config()
    trainer = DPOTrainer(
        model.model_name_or_path,
        args=arguments,
        train_dataset=load_dataset(script.dataset_name, name=script.dataset_config)[script.dataset_train_split],
        peft_config=get_peft_config(model),
    )
    elastic(trainer).train()
    trainer.save_model()

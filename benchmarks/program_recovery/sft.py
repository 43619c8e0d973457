"""The example `manifests/examples/sft.py` without the elastic line: it resumes as the transformers library can."""

from __future__ import annotations

from datasets import load_dataset
from transformers.trainer_utils import get_last_checkpoint
from trl import ModelConfig, ScriptArguments, SFTConfig, SFTTrainer, TrlParser, get_peft_config

if __name__ == "__main__":
    script, arguments, model = TrlParser((ScriptArguments, SFTConfig, ModelConfig)).parse_args_and_config()
    trainer = SFTTrainer(
        model.model_name_or_path,
        arguments,
        train_dataset=load_dataset(script.dataset_name, name=script.dataset_config)[script.dataset_train_split],
        peft_config=get_peft_config(model),
    )
    newest = get_last_checkpoint(arguments.output_dir)  # type: ignore[no-untyped-call]
    trainer.train(resume_from_checkpoint=newest)
    trainer.save_model()

"""Tune a Llama on pairs with trl's DPOTrainer, as the reference of preference tuning.

Run by `benchmarks.parity` in an environment that has trl; it imports nothing from here. The task is a JSON object in
the environment variable TASK. Pairs have token ids or, with a chat template, messages that trl tokenizes. The losses
of all steps are written to `losses.json` in the task's folder, and the trained parameters to `trained.safetensors`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import peft
import safetensors.torch
import torch
import transformers
from datasets import Dataset
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import SequentialSampler

_PEFT_PREFIXES = ("base_model.model.", ".default", ".base_layer")
"""Prefixes that peft adds to the names of parameters."""


def strip_peft_prefixes(name: str) -> str:
    """Return the name of a parameter without peft's prefixes."""
    for prefix in _PEFT_PREFIXES:
        name = name.replace(prefix, "")
    return name


class RecordingTrainer:
    """A trainer that reads pairs of token ids in order, and records each loss."""

    losses: list[float]
    train_dataset: Any

    def _get_train_sampler(self, train_dataset: Any = None) -> SequentialSampler:
        return SequentialSampler(train_dataset if train_dataset is not None else self.train_dataset)

    def compute_loss(self, *arguments: Any, **options: Any) -> Any:
        """Compute and record the library's loss."""
        loss = super().compute_loss(*arguments, **options)  # type: ignore[misc]
        self.losses.append(float((loss[0] if isinstance(loss, tuple) else loss).detach()))
        return loss


def main() -> None:
    """Train, and write the results."""
    task: dict[str, Any] = json.loads(os.environ["TASK"])
    folder = Path(task["folder"])
    torch.use_deterministic_algorithms(mode=True)
    model = transformers.LlamaForCausalLM.from_pretrained(
        task["weights"], dtype=torch.float32, attn_implementation="sdpa"
    )
    tokenizer_class: Any = transformers.PreTrainedTokenizerFast
    tokenizer = tokenizer_class(tokenizer_file=f"{task['weights']}/tokenizer.json")
    names = {"pad_token": task["end"], "eos_token": task["end"]}
    tokenizer.add_special_tokens(names if task["template"] else names | {"bos_token": task["end"]})
    tokenizer.chat_template = task["template"]
    lora = peft.LoraConfig(**task["lora"], task_type="CAUSAL_LM") if task["lora"] else None
    trainer = _create_dpo_trainer(task, model, tokenizer, lora, _create_arguments(task))
    trainer.losses = []
    if lora is not None:
        _initialize_adapter(trainer.model, safetensors.torch.load_file(task["adapter"]))
    trained = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
    rates = task["rates"]
    trainer.optimizer = torch.optim.AdamW(trained, lr=1.0, **task["optimizer"])
    trainer.lr_scheduler = LambdaLR(trainer.optimizer, lambda step: rates[step] if step < len(rates) else 0.0)
    trainer.train()
    passes = trainer.args.gradient_accumulation_steps
    losses = [sum(trainer.losses[start : start + passes]) / passes for start in range(0, len(trainer.losses), passes)]
    (folder / "losses.json").write_text(json.dumps(losses))
    parameters = {
        strip_peft_prefixes(name): parameter.detach().contiguous()
        for name, parameter in trainer.model.named_parameters()
        if parameter.requires_grad
    }
    safetensors.torch.save_file(parameters, str(folder / "trained.safetensors"))


def _create_arguments(task: dict[str, Any]) -> dict[str, Any]:
    return {
        "output_dir": task["folder"],
        "max_steps": task["steps"],
        "max_grad_norm": task["clipNorm"],
        "beta": task["beta"],
        "max_length": None,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "remove_unused_columns": False,
    }


def _create_dpo_trainer(task: dict[str, Any], model: Any, tokenizer: Any, lora: Any, arguments: dict[str, Any]) -> Any:
    from trl import DPOConfig, DPOTrainer  # noqa: PLC0415 - imports more than the rest

    class Trainer(RecordingTrainer, DPOTrainer):  # type: ignore[misc]
        def _prepare_dataset(self, dataset: Any, *arguments: Any, **options: Any) -> Any:
            if task["template"]:
                return super()._prepare_dataset(dataset, *arguments, **options)
            return dataset  # token ids already

    rows = _read_pairs(task)
    if not task["template"]:
        rows = [
            {
                "prompt_ids": row["chosen"][: row["prompt"]],
                "chosen_ids": row["chosen"][row["prompt"] :],
                "rejected_ids": row["rejected"][row["prompt"] :],
            }
            for row in rows
        ]
    reference = None if lora else transformers.LlamaForCausalLM.from_pretrained(task["weights"], dtype=torch.float32)
    return Trainer(
        model,
        reference,
        args=DPOConfig(per_device_train_batch_size=task["batch"], **arguments),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=lora,
    )


def _read_pairs(task: dict[str, Any]) -> list[dict[str, Any]]:
    """Read the pairs: `chosen` and `rejected` token ids, and the number of tokens of the `prompt` before both.

    With a chat template, the three are lists of messages.
    """
    return [json.loads(line) for line in (Path(task["folder"]) / "pairs.jsonl").read_text().splitlines()]


@torch.no_grad()
def _initialize_adapter(model: Any, initial: dict[str, torch.Tensor]) -> None:
    """Set the adapter to its initial values."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.copy_(initial[strip_peft_prefixes(name)])


if __name__ == "__main__":
    main()

"""Trainers of TRL on tiny models of random weights, whose texts begin with a word that names the sample."""

import copy
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)

SPECIAL = ["<pad>", "<eos>", "<unk>"]
WORDS = [f"word{number}" for number in range(60)]


def build_tokenizer(samples: int) -> PreTrainedTokenizerFast:
    names = [f"sample{number}" for number in range(samples)]
    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *WORDS, *names])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def write_text(number: int, seed: int, words: int) -> str:
    generator = torch.Generator().manual_seed(1000 * seed + number)
    return " ".join(WORDS[int(index)] for index in torch.randint(0, len(WORDS), (words,), generator=generator))


def write_row(kind: str, number: int) -> dict[str, str]:
    start = f"sample{number} {write_text(number, 1, 3 + number % 4)}"
    if kind == "sft":
        return {"text": f"{start} {write_text(number, 2, 5)}"}
    if kind == "grpo":
        return {"prompt": start}
    answers = {"chosen": write_text(number, 3, 4), "rejected": write_text(number, 4, 6)}
    if kind == "reward":
        return {name: f"{start} {answer}" for name, answer in answers.items()}
    return {"prompt": f"{start} ", **answers}


class Ledger:
    """Records the samples of each step: their first words stand in the rows that count."""

    ledger: dict[int, list[int]]

    def training_step(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        numbers: set[int] = set()
        if isinstance(inputs, list):  # prompts, the same for each micro-batch
            numbers = {int(row["prompt"].split()[0].removeprefix("sample")) for row in inputs}
        else:
            labels = inputs.get("labels")
            for row, tokens in enumerate(inputs["input_ids"]):
                if labels is None or (labels[row] != -100).any():
                    first = len(SPECIAL) + len(WORDS)
                    numbers |= {int(token) - first for token in tokens if int(token) >= first}
        step = self.ledger.setdefault(self.state.global_step + 1, [])
        step.extend(sorted(numbers.difference(step)))
        return super().training_step(model, inputs, *args, **kwargs)  # type: ignore[misc]


ANSWERS: dict[int, list[tuple[str, str, float]]] = {}
"""The prompts of each step with their answers and rewards."""


def reward_length(prompts: list[str], completions: list[str], trainer_state: Any, **kwargs: Any) -> list[float]:
    rewards = [float(len(set(completion.split()))) for completion in completions]
    answers = zip(prompts, completions, rewards, strict=True)
    ANSWERS.setdefault(trainer_state.global_step + 1, []).extend(answers)
    return rewards


def build_trainer(kind: str, samples: int, options: dict[str, Any], arguments: dict[str, Any]) -> Any:
    tokenizer = build_tokenizer(samples)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, pad_token_id=0, eos_token_id=1, bos_token_id=1,
        **({"num_labels": 1} if kind == "reward" else {}),
    )  # fmt: skip
    model = LlamaForSequenceClassification(config) if kind == "reward" else LlamaForCausalLM(config)
    if options.get("double"):
        model.double()
    trainer, settings = {
        "sft": (SFTTrainer, SFTConfig), "dpo": (DPOTrainer, DPOConfig), "reward": (RewardTrainer, RewardConfig),
        "grpo": (GRPOTrainer, GRPOConfig),
    }[kind]  # fmt: skip
    more: dict[str, Any] = {}
    if kind == "grpo":
        arguments = {**arguments, "num_generations": 4, "max_completion_length": 6, "beta": 0.0}
        more["reward_funcs"] = reward_length
    if options.get("packing"):
        arguments = {**arguments, "packing": True, "max_length": 24}
    if options.get("lora"):
        import peft

        more["peft_config"] = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=4, lora_dropout=0.1)
    elif kind == "dpo":
        more["ref_model"] = copy.deepcopy(model)
    rows = Dataset.from_list([write_row(kind, number) for number in range(samples)])
    fields = {"_tag_names": [], "answers": ANSWERS}
    return type(f"Ledger{trainer.__name__}", (Ledger, trainer), fields)(
        model=model, args=settings(**arguments), train_dataset=rows, processing_class=tokenizer, **more
    )

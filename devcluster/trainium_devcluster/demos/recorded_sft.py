"""Run sft.py beside this file, and record the samples of each step; `create` writes its model and data.

Each text starts with a word that names its sample, and all such words have the highest tokens. The module runs in a
worker's interpreter, which has TRL.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import trl

SAMPLES = 3200
WORDS = 500
TEXT_WORDS = 48


class RecordedTrainer(trl.SFTTrainer):  # type: ignore[misc]  # TRL is not installed where types are checked
    """The trainer of the script, which writes a line for each micro-batch."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._folder = Path(self.args.output_dir)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._start = [int(os.environ.get(f"TRAINIUM_{name}", "0")) for name in ("GENERATION", "ATTEMPT")]
        self._ledger = (
            self._folder / f"samples-{self.args.process_index}-{'-'.join(map(str, self._start))}.jsonl"
        ).open("w")

    def training_step(self, model: Any, inputs: Any, *arguments: Any, **options: Any) -> Any:
        """Record the samples whose labels count."""
        first = self.processing_class.vocab_size - SAMPLES
        rows = inputs["input_ids"][(inputs["labels"] != -100).any(dim=1)]
        samples = [int(token) - first for token in rows[:, 0]]
        record = {"step": self.state.global_step + 1, "start": self._start, "samples": samples}
        self._ledger.write(json.dumps(record) + "\n")
        self._ledger.flush()
        return super().training_step(model, inputs, *arguments, **options)


def create(folder: Path) -> None:
    """Write a small model with random weights, its tokenizer and a data set."""
    import torch  # noqa: PLC0415 - the script imports it by itself
    from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: PLC0415 - as above
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast  # noqa: PLC0415 - as above

    pad, end = "<pad>", "<eos>"
    names = [pad, end, *(f"word{number}" for number in range(WORDS)), *(f"sample{number}" for number in range(SAMPLES))]
    tokenizer = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token=pad))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, pad_token=pad, eos_token=end
    )
    fast.save_pretrained(folder / "model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(names), hidden_size=64, intermediate_size=176, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=128, pad_token_id=0, eos_token_id=1, bos_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    (folder / "data").mkdir()
    with (folder / "data" / "train.jsonl").open("w") as file:
        for number in range(SAMPLES):
            words = (torch.arange(TEXT_WORDS) * (number % 7 + 1) + number) % WORDS  # a text that can be learned
            text = " ".join([f"sample{number}", *(f"word{int(word)}" for word in words)])
            file.write(json.dumps({"text": text}) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["create"]:
        create(Path(sys.argv[2]))
    else:
        trl.SFTTrainer = RecordedTrainer
        runpy.run_path(str(Path(__file__).with_name("sft.py")), run_name="__main__")

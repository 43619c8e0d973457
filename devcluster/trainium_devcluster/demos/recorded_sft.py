"""Run sft.py beside this file, and record the samples of each step; `create` writes its model and data.

Each text starts with a word that names its sample, and all such words have the highest tokens. The module runs in a
worker's interpreter, which has TRL.
"""

from __future__ import annotations

import json
import runpy
import sys
import time
from pathlib import Path
from typing import Any

import trl
from accelerate.utils import broadcast_object_list
from transformers import TrainerCallback

SAMPLES = 3200
WORDS = 500
TEXT_WORDS = 48


class RecordedTrainer(trl.SFTTrainer):  # type: ignore[misc]  # TRL is not installed where types are checked
    """The trainer of the script, which writes a line for each micro-batch and for the end of each step."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        start = [time.time()]
        broadcast_object_list(start)
        self._start, self._ranks = start[0], self.args.world_size
        folder = Path(self.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        self._ledger = (folder / f"samples-{self.args.process_index}-{self._start}.jsonl").open("w")
        self.add_callback(_Ends(self))

    def training_step(self, model: Any, inputs: Any, *arguments: Any, **options: Any) -> Any:
        """Record the samples whose labels count, and the loss of the micro-batch."""
        first = self.processing_class.vocab_size - SAMPLES
        rows = inputs["input_ids"][(inputs["labels"] != -100).any(dim=1)]
        samples = [int(token) - first for token in rows[:, 0]]
        step = self.state.global_step + 1
        loss = super().training_step(model, inputs, *arguments, **options)
        self.record(step=step, samples=samples, loss=float(loss), ranks=self._ranks)
        return loss

    def record(self, **figures: Any) -> None:
        """Append a line to the ledger of this rank."""
        self._ledger.write(json.dumps({"start": self._start, "time": time.time(), **figures}) + "\n")
        self._ledger.flush()


class _Ends(TrainerCallback):
    """Record the end of each step, and of the training."""

    def __init__(self, trainer: RecordedTrainer) -> None:
        self._trainer = trainer

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Record the end of a step."""
        self._trainer.record(step=self._trainer.state.global_step)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Record the end of the training, unless the job stops it."""
        state = self._trainer.state
        if state.global_step >= state.max_steps:
            self._trainer.record(trainingEnded=True)


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

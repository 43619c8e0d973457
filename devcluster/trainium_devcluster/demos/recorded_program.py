"""Run a program that uses `transformers.Trainer`, and record the samples of each step; `create` writes models and data.

    python recorded_program.py [--elastic] SCRIPT.py|MODULE ARGUMENTS...
    python recorded_program.py create FOLDER

Each text starts with a word that names its sample, and all such words have the highest tokens. `--elastic` adds the
line to programs that do not have it. The module runs in a worker's interpreter, which has the libraries.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

SAMPLES = 3200
WORDS = 500
TEXT_WORDS = 48
DATA_SETS = {
    "data": ("text",),
    "prompts": ("prompt",),
    "pairs": ("chosen", "rejected"),
    "answers": ("prompt", "chosen", "rejected"),
}
"""Folders of data sets, and the fields of their rows."""
_ROWS = {"prompts": 400}


class Recorder:
    """Writes a line for each step of this rank: when it ended, its samples, and its share of the loss.

    Samples are also written before their collectives: if the rank is killed between these and the end of the step, the
    other ranks may have completed the step.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._samples: dict[int, None] = {}
        self._loss = 0.0
        self._file: Any = None
        self._start = 0.0

    def add_samples(self, samples: list[int]) -> None:
        """Add the samples of a micro-batch, before its gradients are reduced. Collective at the first call."""
        self._samples.update(dict.fromkeys(samples))
        self._write(started=samples)

    def add_loss(self, loss: float) -> None:
        """Add the part of a micro-batch of a sum whose mean over the ranks is the loss of the step."""
        self._loss += loss

    def end_step(self, step: int) -> None:
        """Record a step, unless it has been recorded."""
        if not self._samples:
            return
        self._write(
            step=step, samples=list(self._samples), loss=self._loss, ranks=int(os.environ.get("WORLD_SIZE", "1"))
        )
        self._samples, self._loss = {}, 0.0

    def end_training(self) -> None:
        """Record that the last step has ended."""
        self._write(trainingEnded=True)

    def _write(self, **figures: Any) -> None:
        if self._file is None:
            start = [time.time()]
            if dist.is_initialized():
                dist.broadcast_object_list(start)
            self._start = start[0]
            self._folder.mkdir(parents=True, exist_ok=True)
            self._file = (self._folder / f"samples-{os.environ.get('RANK', '0')}-{self._start}.jsonl").open("w")
        self._file.write(json.dumps({"start": self._start, "time": time.time(), **figures}) + "\n")
        self._file.flush()


def record_trainers(*, elastic: bool) -> None:
    """Record the steps of each `transformers.Trainer` in its output folder; `elastic` adds the line."""
    from transformers import Trainer, TrainerCallback  # noqa: PLC0415 - `create` needs no trainer

    class Ends(TrainerCallback):
        """Records the end of each step, and of the training unless the job stops it."""

        def __init__(self, recorder: Recorder) -> None:
            self._recorder = recorder

        def on_step_end(self, *arguments: Any, **_: Any) -> None:
            self._recorder.end_step(arguments[1].global_step)

        def on_train_end(self, *arguments: Any, **_: Any) -> None:
            state = arguments[1]
            if state.global_step >= state.max_steps:
                self._recorder.end_training()

    patched: Any = Trainer
    create_trainer, train, compute_step = patched.__init__, patched.train, patched.training_step

    def create_recorded(self: Any, *arguments: Any, **options: Any) -> None:
        create_trainer(self, *arguments, **options)
        self.recorder = Recorder(Path(self.args.output_dir))
        self.add_callback(Ends(self.recorder))

    def train_elastic(self: Any, *arguments: Any, **options: Any) -> Any:
        kind = type(self)
        importlib.import_module("trainium_worker.hooks.transformers").elastic(self)  # the agent adds it to the path
        return train(self, *arguments, **options) if type(self) is kind else self.train(*arguments, **options)

    def compute_and_record(self: Any, model: Any, inputs: Any, *arguments: Any, **options: Any) -> Any:
        self.recorder.add_samples(_find_samples(inputs, self.processing_class))
        loss = compute_step(self, model, inputs, *arguments, **options)
        self.recorder.add_loss(float(loss))
        return loss

    patched.__init__, patched.training_step = create_recorded, compute_and_record
    if elastic:
        patched.train = train_elastic


def _find_samples(inputs: Any, tokenizer: Any) -> list[int]:
    """Return the samples of the rows whose labels count; of generated answers, those of all prompts."""
    if isinstance(inputs, list):
        return [int(row["prompt"].split()[0].removeprefix("sample")) for row in inputs]
    tokens = inputs["input_ids"]
    if "labels" in inputs:
        tokens = tokens[(inputs["labels"] != -100).any(dim=1)]
    first = len(tokenizer) - SAMPLES
    return [int(token) - first for token in tokens[tokens >= first]]


def create(folder: Path) -> None:
    """Write small models with random weights, their tokenizer and data sets."""
    import torch  # noqa: PLC0415 - the program imports it by itself
    from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: PLC0415 - as above
    from transformers import (  # noqa: PLC0415 - as above
        LlamaConfig,
        LlamaForCausalLM,
        LlamaForSequenceClassification,
        PreTrainedTokenizerFast,
    )

    pad, end = "<pad>", "<eos>"
    names = [pad, end, *(f"word{number}" for number in range(WORDS)), *(f"sample{number}" for number in range(SAMPLES))]
    tokenizer = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token=pad))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, pad_token=pad, eos_token=end, padding_side="left"
    )
    shape: dict[str, Any] = {
        "vocab_size": len(names),
        "hidden_size": 64,
        "intermediate_size": 176,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 128,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 1,
        "num_labels": 1,
    }
    for name, kind in (("model", LlamaForCausalLM), ("classifier", LlamaForSequenceClassification)):
        torch.manual_seed(0)
        kind(LlamaConfig(**shape)).save_pretrained(folder / name)
        fast.save_pretrained(folder / name)
    for name, fields in DATA_SETS.items():
        (folder / name).mkdir()
        with (folder / name / "train.jsonl").open("w") as file:
            for number in range(_ROWS.get(name, SAMPLES)):
                file.write(json.dumps({field: _write_text(field, number, fields) for field in fields}) + "\n")


def _write_text(field: str, number: int, fields: tuple[str, ...]) -> str:
    """Return a text that can be learned; it names its sample, unless a field before it does."""
    factor = number % 7 + 1 + (field == "rejected")
    words = [f"word{(position * factor + number) % WORDS}" for position in range(TEXT_WORDS // len(fields))]
    is_named = field == fields[0] or "prompt" not in fields
    return " ".join([f"sample{number}", *words] if is_named else words)


def main(arguments: list[str]) -> None:
    """Run the command."""
    if arguments[0] == "create":
        create(Path(arguments[1]))
        return
    record_trainers(elastic=arguments[0] == "--elastic")
    program, *sys.argv[1:] = arguments[arguments[0] == "--elastic" :]
    if program.endswith(".py"):
        runpy.run_path(str(Path(__file__).with_name(program)), run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])

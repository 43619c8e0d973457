"""Run the reference of preference tuning: trl's DPOTrainer, by the peer's interpreter.

The trainer computes nothing there. It only provides the order of the pairs, the learning rates, the adapter's initial
values, and the token ids of pairs of texts. Pairs of messages get their tokens from trl.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from benchmarks.harness.ranks import RunFailedError
from benchmarks.parity.preference_peer import strip_peft_prefixes
from benchmarks.parity.reference import build_shape, compute_learning_rate, compute_logits, iterate_micro_batches
from benchmarks.parity.tuned import TuningResult
from benchmarks.parity.tuned_reference import TunedReference, load_base
from trainium_contract.trainer.tuning import TuningMethod
from trainium_trainer.tuning.apply import draw_initial_adapter
from trainium_trainer.tuning.trainable import select_trainable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainium_contract.trainer.config import TrainingConfig
    from trainium_trainer.data.loader import MicroBatch

PEER = Path(__file__).with_name("preference_peer.py")
_SPECIAL_TOKEN = 0
"""Id of the token that the peer, which gets ids only, uses as its special tokens."""


def write_task(config: TrainingConfig, folder: Path) -> dict[str, Any]:
    """Return the task of the peer; write its pairs and the adapter's initial values to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    tuning, optimizer = config.tuning, config.optimizer
    assert tuning.objective is not None
    assert config.model.weights is not None
    rows = [row for batch in iterate_micro_batches(config) for row in _iterate_pairs(batch)]
    template = config.data.examples.chat.template
    if template is not None:
        rows = _find_messages(config, rows)
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task: dict[str, Any] = {
        "folder": str(folder),
        "weights": config.model.weights,
        "end": Tokenizer.from_file(f"{config.model.weights}/tokenizer.json").id_to_token(_SPECIAL_TOKEN),
        "kind": str(tuning.objective.kind),
        "beta": tuning.objective.beta,
        "batch": config.batch.global_size,
        "steps": config.steps,
        "rates": [compute_learning_rate(config, step) for step in range(config.steps)],
        "clipNorm": optimizer.clip_norm,
        "optimizer": {
            "betas": [optimizer.beta1, optimizer.beta2],
            "eps": optimizer.eps,
            "weight_decay": optimizer.weight_decay,
        },
        "template": None if template is None else Path(template).read_text(),
        "lora": None,
    }
    if tuning.method is TuningMethod.LORA:
        trainable = select_trainable(build_shape(config), tuning)
        initial = {
            name: draw_initial_adapter(name, torch.Size(size), config.seed).contiguous()
            for name, size in trainable.sizes.items()
        }
        save_file(initial, folder / "initial.safetensors")
        task["adapter"] = str(folder / "initial.safetensors")
        task["lora"] = {
            "r": tuning.lora.rank,
            "lora_alpha": tuning.lora.alpha,
            "target_modules": list(trainable.adapters),
        }
    return task


def run_preferences(config: TrainingConfig, folder: Path, python: str) -> TuningResult:
    """Train with trl and return the results. Raises RunFailedError."""
    environment = os.environ | {"TASK": json.dumps(write_task(config, folder)), "OMP_NUM_THREADS": "1"}
    output = subprocess.run([python, str(PEER)], env=environment, capture_output=True, text=True, check=False)
    if output.returncode:
        raise RunFailedError(f"trl ended with {output.returncode}: {' / '.join(output.stderr.splitlines()[-3:])}")
    losses: list[float] = json.loads((folder / "losses.json").read_text())
    parameters = load_file(folder / "trained.safetensors")
    model = load_base(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(parameters[strip_peft_prefixes(name)])
    tokens = next(iterate_micro_batches(config)).inputs
    return TuningResult(
        losses=losses,
        parameters=parameters,
        logits=compute_logits(TunedReference(losses, model).merge(), tokens),
        tokens=tokens,
        accuracy=None,
        adapter=None,
    )


def _iterate_pairs(batch: MicroBatch) -> Iterator[dict[str, Any]]:
    """Yield the pairs of a batch: token ids of both answers, and the length of the prompt."""
    assert batch.pairs is not None
    for first in range(0, len(batch.inputs), 2):
        learned = batch.labels[first] != -100
        prompt = max(int(learned.int().argmax()), int(batch.pairs.answers[first])) + 1
        chosen, rejected = (_list_token_ids(batch, row) for row in (first, first + 1))
        yield {"chosen": chosen, "rejected": rejected, "prompt": prompt}


def _find_messages(config: TrainingConfig, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the records of rows of token ids, which are found by the last question in their prompt."""
    tokenizer = Tokenizer.from_file(f"{config.model.weights}/tokenizer.json")
    records = [json.loads(line) for line in Path(str(config.data.source)).read_text().splitlines()]
    by_question = {record["prompt"][-1]["content"]: record for record in records}
    prompts = (tokenizer.decode(row["chosen"][: row["prompt"]], skip_special_tokens=False) for row in rows)
    end = str(tokenizer.id_to_token(_SPECIAL_TOKEN))
    return [by_question[prompt.rpartition("user:\n")[2].partition(end)[0]] for prompt in prompts]


def _list_token_ids(batch: MicroBatch, row: int) -> list[int]:
    last = int((batch.labels[row] != -100).nonzero()[-1])
    return [*batch.inputs[row, : last + 1].tolist(), int(batch.labels[row, last])]

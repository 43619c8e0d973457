"""Compare runs of fine-tuning with a reference run."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from peft import PeftModel

from benchmarks.parity.reference import compute_logits, iterate_micro_batches, load_model
from benchmarks.parity.rows import ADAPTER_TOLERANCE, MERGED_TOLERANCE, TOLERANCE, Row
from benchmarks.parity.trainer_runs import compare_curves, run_trainer
from benchmarks.parity.tuned_reference import TunedReference, compute_loss, tune_reference
from trainium_contract.trainer.tuning import TuningMethod
from trainium_trainer.checkpoint.format.reader import CheckpointReader
from trainium_trainer.checkpoint.root.selection import choose_checkpoint
from trainium_trainer.configuration import config as configuration
from trainium_trainer.data.dataset import open_data
from trainium_trainer.data.loader import iterate_validation_batches
from trainium_trainer.storage import open_storage
from trainium_trainer.storage.protocol import Retry

if TYPE_CHECKING:
    from torch import Tensor, nn

    from trainium_contract.trainer.config import TrainingConfig


@dataclass(frozen=True, slots=True)
class TuningResult:
    """Results of a reference run of fine-tuning."""

    losses: list[float]
    parameters: dict[str, Tensor]
    """Trained parameters by name."""
    logits: Tensor
    """Logits of `tokens` by the tuned model, with the adapter merged by peft."""
    tokens: Tensor
    """Tokens of the first step, [samples, sequence]."""
    accuracy: float | None
    """Fraction of held-out answers whose first token is the most likely one; None without held-out answers."""
    adapter: Path | None
    """Folder of the adapter that peft saved."""


def run_reference(config: TrainingConfig, out: Path) -> TuningResult:
    """Train with the libraries and return the results."""
    run: TunedReference = tune_reference(config, out / "reference")
    adapter: Path | None = None
    if isinstance(run.model, PeftModel):
        adapter = out / "adapter"
        run.model.save_pretrained(str(adapter))
    parameters = {name: value.clone() for name, value in run.list_trained().items()}
    merged = run.merge()
    tokens = next(iterate_micro_batches(config)).inputs
    return TuningResult(
        losses=run.losses,
        parameters=parameters,
        logits=compute_logits(merged, tokens),
        tokens=tokens,
        accuracy=measure_held_out_accuracy(merged, config),
        adapter=adapter,
    )


def compare_row(row: Row, file: Path, expected: TuningResult, folder: Path) -> dict[str, Any]:
    """Run a row in `folder` and compare its curve, its trained parameters and its artifacts.

    Raises RunFailedError.
    """
    started_at = time.monotonic()
    config = configuration.load(file)
    losses = run_trainer(file, row.set_options, ranks=row.ranks, folder=folder)
    artifacts = find_artifact_folders(folder)
    logits = compute_logits(load_model(artifacts["model"]), expected.tokens)
    spread = float(expected.logits.std())
    result = compare_curves(losses, expected.losses) | {
        "trainedParameters": _find_greatest_difference(read_trained_weights(folder), expected.parameters),
        "trainedLogits": float((logits - expected.logits).abs().max()) / spread,
        "seconds": round(time.monotonic() - started_at, 1),
    }
    passed = result["greatestDifference"] <= TOLERANCE and result["trainedParameters"] <= ADAPTER_TOLERANCE
    if config.tuning.method is TuningMethod.LORA:
        assert config.model.weights is not None
        peft_logits = compute_peft_merged_logits(Path(config.model.weights), artifacts["adapter"], expected.tokens)
        result["mergedLogits"] = float((logits - peft_logits).abs().max()) / spread
        passed = passed and result["mergedLogits"] <= MERGED_TOLERANCE
    if expected.accuracy is not None:
        result["accuracy"] = measure_held_out_accuracy(load_model(artifacts["model"]), config)
        passed = passed and result["accuracy"] == expected.accuracy
    return result | {"passed": passed}


def compute_first_loss_difference(file: Path, expected: TuningResult, folder: Path) -> float:
    """Return the relative difference of the first loss with peft's adapter from peft's loss. Raises RunFailedError."""
    config = configuration.load(file)
    assert expected.adapter is not None
    constant = ("schedule.kind=Constant", "schedule.warmupSteps=0", "schedule.decaySteps=null")
    overrides = [f"tuning.lora.adapter={expected.adapter}", "steps=1", *constant]
    (loss,) = run_trainer(file, overrides, ranks=1, folder=folder)
    adapted = PeftModel.from_pretrained(load_model(Path(config.model.weights or "")), str(expected.adapter))
    peft_loss = compute_loss(adapted, next(iterate_micro_batches(config)))
    return abs(loss - peft_loss) / peft_loss


def find_artifact_folders(folder: Path) -> dict[str, Path]:
    """Return the folders of the artifacts below `folder` by name: `model`, and `adapter` if there is one."""
    return {path.name: path for path in (folder / "run" / "artifacts").glob("*/*") if path.is_dir()}


def compute_peft_merged_logits(base: Path, adapter: Path, tokens: Tensor) -> Tensor:
    """Compute the logits of an adapter that peft loads and merges."""
    adapted = PeftModel.from_pretrained(load_model(base), str(adapter))
    return compute_logits(adapted.merge_and_unload(), tokens)


def read_trained_weights(folder: Path) -> dict[str, Tensor]:
    """Return the weights in the newest checkpoint below `folder`, by parameter."""
    root = str(folder / "run")
    storage = open_storage(root)
    reader = CheckpointReader(storage, choose_checkpoint(storage, root, None, milestones=False), Retry())
    names = [name for name in reader.tensors if name.startswith("model.")]
    return {name.removeprefix("model."): reader.read(name) for name in names}


def measure_held_out_accuracy(model: nn.Module, config: TrainingConfig) -> float | None:
    """Return the fraction of held-out examples whose first answer token is the model's most likely one."""
    data = open_data(config.data, config.batch.global_size)
    if data.validation is None:
        return None
    correct = total = 0
    for batch in iterate_validation_batches(data.validation, dp_rank=0, dp_size=1, micro_size=16):
        has_answer = (batch.labels != -100).any(1)
        positions = (batch.labels != -100).int().argmax(1)[has_answer]
        rows = torch.arange(len(has_answer))[has_answer]
        predictions = compute_logits(model, batch.inputs).argmax(-1)
        correct += int((predictions[rows, positions] == batch.labels[rows, positions]).sum())
        total += len(rows)
    return correct / total


def _find_greatest_difference(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert actual.keys() == expected.keys()
    return max(float((actual[name] - value).abs().max()) for name, value in expected.items())

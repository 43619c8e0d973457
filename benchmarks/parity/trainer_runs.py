"""Run the trainer as users do (one process per rank, a YAML file, `--set`), and read its results."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from safetensors.torch import load_file

from benchmarks.ranks import run_ranks
from trainium_contract.trainer.artifacts import ArtifactPrecision
from trainium_devcluster.jobs.metrics import read_steps
from trainium_trainer.artifacts.export import export
from trainium_trainer.models.llama import Llama

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from trainium_contract.models.shape import ModelShape


def run_trainer(config: Path, overrides: Sequence[str], *, ranks: int, folder: Path) -> list[float]:
    """Train with `ranks` processes below `folder` and return the loss of every step. Raises RunFailedError."""
    folder.mkdir(parents=True)
    argv = [sys.executable, "-m", "trainium_trainer", "train", "--config", str(config)]
    for override in (*overrides, f"checkpoint.path={folder / 'run'}"):
        argv += ["--set", override]
    run_ranks(argv, ranks, folder)
    return [record["loss"] for record in read_steps(folder / "run" / "metrics.jsonl").values() if "loss" in record]


def compare_curves(losses: list[float], reference: list[float]) -> dict[str, Any]:
    """Return the fields of a result that describe its curve."""
    differences = [abs(loss - expected) / expected for loss, expected in zip(losses, reference, strict=True)]
    greatest = max(differences)
    return {
        "loss": losses[-1],
        "greatestDifference": greatest,
        "step": differences.index(greatest) + 1,
    }


def export_newest(folder: Path, shape: ModelShape) -> tuple[Path, Llama]:
    """Export the newest checkpoint as a Hugging Face folder, and load it as a model of the trainer."""
    export(str(folder / "run"), folder / "exported", precision=ArtifactPrecision.FLOAT32)
    model = Llama(shape)
    model.load_state_dict(load_file(folder / "exported" / "model.safetensors"), strict=not shape.tie_embeddings)
    return folder / "exported", model

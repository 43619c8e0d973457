"""Run the trainer, and read its results."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from safetensors.torch import load_file

from benchmarks.harness import ranks as harness_ranks
from trainium_contract.trainer.artifacts import ArtifactPrecision
from trainium_trainer.artifacts.export import export
from trainium_trainer.models.llama import Llama

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from trainium_contract.models.shape import ModelShape


def run_trainer(config: Path, overrides: Sequence[str], *, ranks: int, folder: Path) -> list[float]:
    """Train with `ranks` processes below `folder` and return the loss of every step. Raises RunFailedError."""
    folder.mkdir(parents=True)
    records, _ = harness_ranks.run_trainer(config, overrides, ranks=ranks, folder=folder)
    return [record["loss"] for record in records]


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

"""Read the artifacts of a run, compare them with those of another run, and find incomplete ones."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from safetensors.torch import load_file

from trainium_contract.trainer.artifacts import ArtifactKind
from trainium_trainer.artifacts.manifest import (
    CARD_NAME,
    LAST_NAMES,
    MANIFEST_NAME,
    UNFINISHED,
    ArtifactFile,
    ArtifactManifest,
)

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

FOLDERS = {"adapter": ArtifactKind.ADAPTER, "model": ArtifactKind.MODEL}
EVALUATION, EVALUATION_TABLE = "evaluation.json", "evaluation.md"
_EVALUATION_FIELDS = ("examples", "answerTokens", "figures", "answers")
"""Fields of an evaluation that are compared; the others contain paths."""


@dataclass(frozen=True, slots=True)
class ArtifactSnapshot:
    """The artifacts of a step and their evaluation."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    """Tensors by artifact and name."""
    files: dict[str, str] = field(default_factory=dict)
    """SHA-256 of every file except cards, manifests and evaluations, by path."""
    evaluation: dict[str, Any] = field(default_factory=dict)
    """Results of the evaluation."""


def read_artifacts(step: Path) -> ArtifactSnapshot:
    """Read the folder of a step. Raises OSError, ValueError."""
    tensors: dict[str, Tensor] = {}
    for file in step.rglob("*.safetensors"):
        tensors |= {f"{file.parent.name}/{name}": tensor for name, tensor in load_file(file).items()}
    files = {
        str(path.relative_to(step)): sha256(path.read_bytes()).hexdigest()
        for path in step.rglob("*")
        if path.is_file() and path.name not in (CARD_NAME, MANIFEST_NAME, EVALUATION, EVALUATION_TABLE)
    }
    result = json.loads((step / EVALUATION).read_text())
    return ArtifactSnapshot(tensors, files, {name: result.get(name) for name in _EVALUATION_FIELDS})


def compare_artifacts(actual: ArtifactSnapshot, expected: ArtifactSnapshot, tolerance: float = 0.0) -> list[str]:
    """Return the differences to the artifacts of an undisturbed run; `tolerance` is a relative tolerance."""
    deviations = []
    if actual.tensors.keys() != expected.tensors.keys():
        deviations.append(f"other tensors: {sorted(actual.tensors.keys() ^ expected.tensors.keys())}")
    for name in actual.tensors.keys() & expected.tensors.keys():
        tensor, reference = actual.tensors[name], expected.tensors[name]
        distance = float((tensor - reference).norm() / reference.norm()) if tensor.shape == reference.shape else 1.0
        if tensor.dtype != reference.dtype or (distance > tolerance if tolerance else not tensor.equal(reference)):
            deviations.append(f"{name} differs by {distance:.2g}")
    actual_files, expected_files = _list_files_without_tensors(actual), _list_files_without_tensors(expected)
    if actual_files.keys() != expected_files.keys():
        deviations.append(f"other files: {sorted(actual_files.keys() ^ expected_files.keys())}")
    # The number of ranks that started to write determines the number of tensor files; all else is identical.
    same_files = not tolerance and actual.files.keys() == expected.files.keys()
    for name, digest in sorted((actual.files if same_files else actual_files).items()):
        if expected.files.get(name, digest) != digest:
            deviations.append(f"{name} does not have the same bytes")
    return deviations + _compare_figures(actual.evaluation, expected.evaluation, tolerance)


def _list_files_without_tensors(artifacts: ArtifactSnapshot) -> dict[str, str]:
    """Return the files that are independent of the division of tensors."""
    return {name: digest for name, digest in artifacts.files.items() if ".safetensors" not in name}


def _compare_figures(actual: dict[str, Any], expected: dict[str, Any], tolerance: float) -> list[str]:
    if not tolerance:
        return [] if actual == expected else [f"the evaluation found {actual['figures']}, not {expected['figures']}"]
    for figure, reference in zip(actual["figures"], expected["figures"], strict=True):
        for column in ("before", "after"):
            if abs(figure[column] - reference[column]) > tolerance * abs(reference[column]):
                return [f"{figure['name']} {column} is {figure[column]}, not {reference[column]}"]
    return []


def find_complete_artifacts(step: Path) -> dict[str, ArtifactManifest]:
    """Return the artifacts that look complete, by folder. Raises ValueError for an invalid manifest."""
    manifests = {}
    for name, kind in FOLDERS.items():
        folder = step / name
        if (folder / LAST_NAMES[kind]).exists():
            manifests[name] = ArtifactManifest.model_validate_json((folder / MANIFEST_NAME).read_bytes())
    return manifests


def find_incomplete(step: Path) -> list[str]:
    """Return a sentence for each damaged file of an artifact or evaluation that looks complete."""
    deviations = []
    try:
        for name, manifest in find_complete_artifacts(step).items():
            for file in manifest.files:
                data = (step / name / file.name).read_bytes()
                if (len(data), sha256(data).hexdigest()) != (file.size, file.digest):
                    deviations.append(f"{name}/{file.name} does not match its manifest")
        if (step / EVALUATION).exists():
            json.loads((step / EVALUATION).read_text())
    except (OSError, ValueError) as error:
        deviations.append(f"looks complete but is not: {error}")
    return deviations


def find_complete_files(step: Path) -> dict[Path, int]:
    """Return the complete data files with their times; a later attempt must not write them again."""
    paths = [
        step / name / file.name for name, manifest in find_complete_artifacts(step).items() for file in manifest.files
    ]
    for receipt in step.glob(f"*/{UNFINISHED}/*.safetensors.json"):
        file = receipt.parent.parent / ArtifactFile.model_validate_json(receipt.read_bytes()).name
        paths.append(file)
    return {path: path.stat().st_mtime_ns for path in paths if path.suffix == ".safetensors"}

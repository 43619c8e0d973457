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
RESULT, RESULT_TABLE = "evaluation.json", "evaluation.md"
_MEASURED = ("examples", "answerTokens", "figures", "answers")
"""Fields of an evaluation that are independent of paths."""


@dataclass(frozen=True, slots=True)
class ArtifactSnapshot:
    """The artifacts of a step and their evaluation."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    """Tensors by artifact and name."""
    files: dict[str, str] = field(default_factory=dict)
    """SHA-256 of every file except cards, manifests and results, by path."""
    measured: dict[str, Any] = field(default_factory=dict)
    """Results of the evaluation."""


def read_artifacts(step: Path) -> ArtifactSnapshot:
    """Read the folder of a step. Raises OSError, ValueError."""
    tensors: dict[str, Tensor] = {}
    for file in step.rglob("*.safetensors"):
        tensors |= {f"{file.parent.name}/{name}": tensor for name, tensor in load_file(file).items()}
    files = {
        str(path.relative_to(step)): sha256(path.read_bytes()).hexdigest()
        for path in step.rglob("*")
        if path.is_file() and path.name not in (CARD_NAME, MANIFEST_NAME, RESULT, RESULT_TABLE)
    }
    result = json.loads((step / RESULT).read_text())
    return ArtifactSnapshot(tensors, files, {name: result.get(name) for name in _MEASURED})


def compare_artifacts(found: ArtifactSnapshot, known: ArtifactSnapshot, tolerance: float = 0.0) -> list[str]:
    """Return the differences to the artifacts of an undisturbed run; `tolerance` is a relative tolerance."""
    deviations = []
    if found.tensors.keys() != known.tensors.keys():
        deviations.append(f"the tensors are others: {sorted(found.tensors.keys() ^ known.tensors.keys())}")
    for name in found.tensors.keys() & known.tensors.keys():
        ours, theirs = found.tensors[name], known.tensors[name]
        distance = float((ours - theirs).norm() / theirs.norm()) if ours.shape == theirs.shape else 1.0
        if ours.dtype != theirs.dtype or (distance > tolerance if tolerance else not ours.equal(theirs)):
            deviations.append(f"{name} is another by {distance:.2g}")
    our_files, their_files = _files_without_tensors(found), _files_without_tensors(known)
    if our_files.keys() != their_files.keys():
        deviations.append(f"the files are others: {sorted(our_files.keys() ^ their_files.keys())}")
    # The number of ranks that started to write determines the number of tensor files; all else is identical.
    alike = not tolerance and found.files.keys() == known.files.keys()
    for name, digest in sorted((found.files if alike else our_files).items()):
        if known.files.get(name, digest) != digest:
            deviations.append(f"{name} is not the same to the byte")
    return deviations + _figures_differ(found.measured, known.measured, tolerance)


def _files_without_tensors(artifacts: ArtifactSnapshot) -> dict[str, str]:
    """Return the files that are independent of the division of tensors."""
    return {name: digest for name, digest in artifacts.files.items() if ".safetensors" not in name}


def _figures_differ(found: dict[str, Any], known: dict[str, Any], tolerance: float) -> list[str]:
    if not tolerance:
        return [] if found == known else [f"the evaluation found {found['figures']}, not {known['figures']}"]
    for ours, theirs in zip(found["figures"], known["figures"], strict=True):
        for column in ("before", "after"):
            if abs(ours[column] - theirs[column]) > tolerance * abs(theirs[column]):
                return [f"{ours['name']} {column} is {ours[column]}, not {theirs[column]}"]
    return []


def complete_artifacts(step: Path) -> dict[str, ArtifactManifest]:
    """Return the artifacts that look complete, by folder. Raises ValueError for an invalid manifest."""
    found = {}
    for name, kind in FOLDERS.items():
        folder = step / name
        if (folder / LAST_NAMES[kind]).exists():
            found[name] = ArtifactManifest.model_validate_json((folder / MANIFEST_NAME).read_bytes())
    return found


def find_incomplete(step: Path) -> list[str]:
    """Return a sentence for each damaged file of an artifact or evaluation that looks complete."""
    deviations = []
    try:
        for name, manifest in complete_artifacts(step).items():
            for file in manifest.files:
                data = (step / name / file.name).read_bytes()
                if (len(data), sha256(data).hexdigest()) != (file.size, file.digest):
                    deviations.append(f"{name}/{file.name} does not match its manifest")
        if (step / RESULT).exists():
            json.loads((step / RESULT).read_text())
    except (OSError, ValueError) as error:
        deviations.append(f"looks complete and is not: {error}")
    return deviations


def complete_files(step: Path) -> dict[Path, int]:
    """Return the complete data files with their times; a later start must not write them again."""
    names = [step / name / file.name for name, manifest in complete_artifacts(step).items() for file in manifest.files]
    for receipt in step.glob(f"*/{UNFINISHED}/*.safetensors.json"):
        file = receipt.parent.parent / ArtifactFile.model_validate_json(receipt.read_bytes()).name
        names.append(file)
    return {path: path.stat().st_mtime_ns for path in names if path.suffix == ".safetensors"}

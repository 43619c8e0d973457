"""Compare the result of a trial with that of an undisturbed run."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from safetensors.torch import load_file

from benchmarks.proof import artifact_checks
from benchmarks.proof.kill_points import ARTIFACTS
from trainium_contract.status.results import read_results
from trainium_contract.wire.checkpoint_manifest import folder_name
from trainium_devcluster.jobs.metrics import read_samples
from trainium_trainer.artifacts.manifest import UNFINISHED
from trainium_trainer.checkpoint.format.reader import CheckpointReader
from trainium_trainer.checkpoint.root.survey import survey, verify
from trainium_trainer.models.state_dict import WEIGHT, format_state_name
from trainium_trainer.storage.posix import PosixStorage
from trainium_trainer.storage.protocol import Retry
from trainium_trainer.weights.adapter import from_tensor

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.proof.suites import Suite

_LOSS_TOLERANCE = 1e-5
"""Allowed relative difference of losses across sizes, whose sums have another order."""
_WEIGHT_TOLERANCE = 1e-4
"""Allowed relative difference of trained weights across sizes."""


@dataclass(slots=True)
class AttemptResult:
    """Result of an attempt."""

    layout: str
    point: str
    """Point of the kill; empty for an attempt without a kill."""
    killed: bool
    completed: int
    """Newest step that a rank completed."""
    resumed: int
    """Step that the attempt resumed from."""
    committed: int
    """Newest committed step at its end; -1 for none."""


@dataclass(slots=True)
class StepsLost:
    """Steps lost by a kill."""

    point: str
    steps: int


@dataclass(slots=True)
class TrialResult:
    """Result of a trial."""

    seed: int
    scenario: str
    lost: list[StepsLost] = field(default_factory=list)
    attempts: list[AttemptResult] = field(default_factory=list)
    deviations: list[str] = field(default_factory=list)
    waited: int = 0
    """Number of ranks that waited a minute for a killed one and were then terminated, as by an agent."""

    @property
    def killed(self) -> int:
        """Number of ranks that were killed at their point."""
        return sum(attempt.killed for attempt in self.attempts)


@dataclass(frozen=True, slots=True)
class Reference:
    """Result of an undisturbed run."""

    losses: dict[int, float]
    samples: dict[int, list[int]]
    """Sorted samples by step."""
    artifacts: artifact_checks.ArtifactSnapshot

    @staticmethod
    def read(root: Path, suite: Suite) -> Reference:
        """Read the run below `root`; raise ValueError if it has no masked samples."""
        samples = read_samples(root)
        if suite.tuning and (problem := find_epoch_error(samples, suite)):
            raise ValueError(f"the undisturbed run: {problem}")
        artifacts = (
            artifact_checks.read_artifacts(find_artifacts_folder(root, suite))
            if suite.tuning
            else artifact_checks.ArtifactSnapshot()
        )
        return Reference(dict(read_curve(root)), samples, artifacts)


def check_steps_lost(
    before: AttemptResult, after: AttemptResult, point: str, result: TrialResult, *, allowed: int
) -> None:
    """Check the steps lost by the kill of `before`; `after` may have been killed before it resumed."""
    if after.resumed < 0 or not before.killed:
        return
    lost = before.completed - after.resumed
    result.lost.append(StepsLost(point, lost))
    if lost > allowed:
        result.deviations.append(
            f"{lost} steps lost, {allowed} allowed: {before.completed} completed, {before.committed} committed, "
            f"resumed from {after.resumed}"
        )


def check_result(root: Path, result: TrialResult, reference: Reference, suite: Suite, *, exact: bool) -> None:
    """Check curve, samples, checkpoints and artifacts; `exact` if all steps ran at one size."""
    curve = read_curve(root)
    if [step for step, _ in curve] != list(range(1, suite.steps + 1)):
        result.deviations.append(f"metrics.jsonl has the steps {[step for step, _ in curve]}")
    for step, loss in curve:
        expected = reference.losses.get(step, float("nan"))
        if not abs(loss - expected) <= (0.0 if exact else _LOSS_TOLERANCE * abs(expected)):
            result.deviations.append(f"loss of step {step} is {loss}, in an undisturbed run {expected}")
            break
    if read_samples(root) != reference.samples:
        result.deviations.append("not every sample was seen exactly once, in its step")
    storage = PosixStorage(root)
    checkpoints = survey(storage)
    damaged = [*checkpoints.damaged, *(item.folder for item in checkpoints.committed if verify(storage, item, Retry()))]
    if damaged:
        result.deviations.append(f"committed checkpoints are damaged: {damaged}")
    if suite.tuning:
        folder = find_artifacts_folder(root, suite)
        result.deviations += artifact_checks.find_incomplete(folder)
        try:
            artifacts = artifact_checks.read_artifacts(folder)
        except (OSError, ValueError) as error:
            result.deviations.append(f"the artifacts cannot be read: {error}")
        else:
            result.deviations += artifact_checks.compare_artifacts(
                artifacts, reference.artifacts, 0.0 if exact else _WEIGHT_TOLERANCE
            )


def check_milestones(root: Path, result: TrialResult) -> None:
    """Check that each milestone has artifacts of its weights."""
    storage = PosixStorage(root)
    for milestone in survey(storage).milestones:
        step = root / ARTIFACTS / folder_name(milestone.step)
        if artifact_checks.find_complete_artifacts(step).keys() != artifact_checks.FOLDERS.keys() or list(
            step.glob(f"*/{UNFINISHED}")
        ):
            result.deviations.append(f"the artifacts of the milestone of step {milestone.step} are not complete")
            continue
        reader = CheckpointReader(storage, milestone, Retry())
        for name, tensor in load_file(step / "adapter" / "adapter_model.safetensors").items():
            if not tensor.equal(reader.read(format_state_name(WEIGHT, from_tensor(name)))):
                result.deviations.append(f"{name} of milestone {milestone.step} is not that of its checkpoint")


def check_reported(root: Path, progress: Path, result: TrialResult, suite: Suite) -> None:
    """Check the artifacts and the evaluation that the first rank reported to its agent."""
    results = read_results(progress)
    manifests = artifact_checks.find_complete_artifacts(find_artifacts_folder(root, suite)).values()
    reported = {artifact.digest for artifact in results.artifacts if artifact.step == suite.steps}
    if reported != {manifest.digest for manifest in manifests} or not results.evaluation:
        result.deviations.append(f"the agent received the results {results}")


def find_artifacts_folder(root: Path, suite: Suite) -> Path:
    """Return the folder of the artifacts of the last step."""
    return root / ARTIFACTS / folder_name(suite.steps)


def read_curve(root: Path) -> list[tuple[int, float]]:
    """Return the loss of each line by step."""
    lines = (root / "metrics.jsonl").read_text().splitlines()
    return [(record["step"], record["loss"]) for record in map(json.loads, lines)]


def find_epoch_error(samples: dict[int, list[int]], suite: Suite) -> str | None:
    """Return an error if an epoch does not contain every example exactly once, else None."""
    examples = {sample for step in samples.values() for sample in step}
    size = len(examples)
    steps = -(-size // suite.global_batch)
    if size % suite.global_batch == 0:
        return f"{size} examples fill their batches: nothing is masked"
    for first in range(1, suite.steps + 1, steps):
        epoch = [sample for step in range(first, first + steps) for sample in samples.get(step, [])]
        if len(epoch) != size or set(epoch) != examples:
            return f"steps {first} to {first + steps - 1} have {len(epoch)} samples of {size}"
    return None

"""Holds what a trial left to what an undisturbed run leaves."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from safetensors.torch import load_file

from benchmarks.proof import leavings
from benchmarks.proof.strike_after import ARTIFACTS
from trainium_contract.wire.checkpoint_manifest import folder_name
from trainium_trainer.artifacts.manifest import UNFINISHED
from trainium_trainer.artifacts.peft_format import parameter_name
from trainium_trainer.checkpoint.format.contents import Contents
from trainium_trainer.checkpoint.root.survey import survey, verify
from trainium_trainer.checkpoint.storage.posix import PosixStorage
from trainium_trainer.checkpoint.storage.protocol import Retry
from trainium_trainer.models.state_dict import StateKind, state_name
from trainium_trainer.monitor.progress import read_results

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.proof.families import Suite

_CLOSE = 1e-5
"""Relative difference of losses at different sizes; sums are taken in another order."""
_CLOSE_WEIGHTS = 1e-4
"""The same of what was trained."""


@dataclass(slots=True)
class Played:
    """What became of one life."""

    layout: str
    point: str
    """Where it was to be struck; empty for a life that was to end by itself."""
    struck: bool
    completed: int
    """Newest step that any rank had completed."""
    resumed: int
    """Step that it went on from."""
    committed: int
    """Newest step committed when it ended; -1 for none."""


@dataclass(slots=True)
class Lost:
    """What one kill cost."""

    point: str
    steps: int


@dataclass(slots=True)
class Verdict:
    """The outcome of one trial."""

    seed: int
    family: str
    lost: list[Lost] = field(default_factory=list)
    lives: list[Played] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    waited: int = 0
    """Ranks that did not notice in a minute that another one was dead, and were ended, as their agent ends them."""

    @property
    def struck(self) -> int:
        """Ranks that died where they should."""
        return sum(life.struck for life in self.lives)


@dataclass(frozen=True, slots=True)
class Reference:
    """What a run leaves that nobody disturbs."""

    losses: dict[int, float]
    samples: dict[int, list[int]]
    """By step, sorted."""
    left: leavings.Leavings

    @staticmethod
    def read(root: Path, suite: Suite) -> Reference:
        """Of the run below `root`. Raises ValueError where the proof itself would prove nothing."""
        samples = samples_of(root)
        if suite.tunes and (problem := not_once_an_epoch(samples, suite)):
            raise ValueError(f"the undisturbed run: {problem}")
        left = leavings.read(artifacts_of(root, suite)) if suite.tunes else leavings.Leavings()
        return Reference(dict(curve_of(root)), samples, left)


def judge_loss(before: Played, after: Played, point: str, verdict: Verdict, *, allowed: int) -> None:
    """What the kill cost that ended `before`; `after` may have been killed before it knew its step."""
    if after.resumed < 0 or not before.struck:
        return
    lost = before.completed - after.resumed
    verdict.lost.append(Lost(point, lost))
    if lost > allowed:
        verdict.wrong.append(
            f"{lost} steps lost, {allowed} allowed: {before.completed} completed, {before.committed} committed, "
            f"resumed from {after.resumed}"
        )


def judge_end(root: Path, verdict: Verdict, reference: Reference, suite: Suite, *, exact: bool) -> None:
    """The curve, the samples, the checkpoints and what was left behind; `exact` where all steps were at one size."""
    curve = curve_of(root)
    if [step for step, _ in curve] != list(range(1, suite.steps + 1)):
        verdict.wrong.append(f"metrics.jsonl has the steps {[step for step, _ in curve]}")
    for step, loss in curve:
        known = reference.losses.get(step, float("nan"))
        if not abs(loss - known) <= (0.0 if exact else _CLOSE * abs(known)):
            verdict.wrong.append(f"loss of step {step} is {loss}, in an undisturbed run {known}")
            break
    if samples_of(root) != reference.samples:
        verdict.wrong.append("not every sample was seen exactly once, in its step")
    storage = PosixStorage(root)
    found = survey(storage)
    broken = [*found.damaged, *(item.folder for item in found.committed if verify(storage, item, Retry()))]
    if broken:
        verdict.wrong.append(f"committed checkpoints are not whole: {broken}")
    if suite.tunes:
        folder = artifacts_of(root, suite)
        verdict.wrong += leavings.half_written(folder)
        try:
            left = leavings.read(folder)
        except (OSError, ValueError) as error:
            verdict.wrong.append(f"what was left behind cannot be read: {error}")
        else:
            verdict.wrong += leavings.differences(left, reference.left, 0.0 if exact else _CLOSE_WEIGHTS)


def judge_milestones(root: Path, verdict: Verdict) -> None:
    """Each milestone has its artifacts, with its own numbers."""
    storage = PosixStorage(root)
    for milestone in survey(storage).milestones:
        step = root / ARTIFACTS / folder_name(milestone.step)
        if leavings.complete(step).keys() != leavings.FOLDERS.keys() or list(step.glob(f"*/{UNFINISHED}")):
            verdict.wrong.append(f"the artifacts of the milestone of step {milestone.step} are not complete")
            continue
        contents = Contents(storage, milestone, Retry())
        for name, tensor in load_file(step / "adapter" / "adapter_model.safetensors").items():
            if not tensor.equal(contents.read(state_name(StateKind.WEIGHT, parameter_name(name)))):
                verdict.wrong.append(f"{name} of milestone {milestone.step} is not that of its checkpoint")


def judge_told(root: Path, progress: Path, verdict: Verdict, suite: Suite) -> None:
    """What the first rank of the last life told its agent of artifacts and evaluation."""
    told = read_results(progress)
    known = {manifest.digest for manifest in leavings.complete(artifacts_of(root, suite)).values()}
    if {each.digest for each in told.artifacts if each.step == suite.steps} != known or not told.evaluation:
        verdict.wrong.append(f"the agent was told of {told}")


def artifacts_of(root: Path, suite: Suite) -> Path:
    """Where the artifacts of the last step are."""
    return root / ARTIFACTS / folder_name(suite.steps)


def curve_of(root: Path) -> list[tuple[int, float]]:
    """Step and loss of each line."""
    lines = (root / "metrics.jsonl").read_text().splitlines()
    return [(record["step"], record["loss"]) for record in map(json.loads, lines)]


def samples_of(root: Path) -> dict[int, list[int]]:
    """All samples of each step, sorted: a sample that was seen twice is there twice."""
    found: dict[int, list[int]] = {}
    for path in root.glob("samples-*.jsonl"):
        for record in map(json.loads, path.read_text().splitlines()):
            found.setdefault(record["step"], []).extend(record["samples"])
    return {step: sorted(samples) for step, samples in sorted(found.items())}


def not_once_an_epoch(samples: dict[int, list[int]], suite: Suite) -> str | None:
    """What is wrong when not every example is seen once in every epoch, the last batch of each filled up."""
    seen = [one for step in sorted(samples) for one in samples[step]]
    size = len(set(seen))
    steps = -(-size // suite.global_batch)
    if size % suite.global_batch == 0:
        return f"{size} examples fill their batches: nothing is masked"
    for first in range(1, suite.steps + 1, steps):
        epoch = [one for step in range(first, first + steps) for one in samples.get(step, [])]
        if len(epoch) != size or set(epoch) != set(seen):
            return f"steps {first} to {first + steps - 1} have {len(epoch)} samples of {size}"
    return None
